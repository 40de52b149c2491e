"""Balancing: never over a limit, the least loaded, two at random, and what belongs together stays together."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.balance import BALANCES, Balance, Candidate, choose


def pick(balance: Balance, *candidates: Candidate, affinity: str = "", draw: float = 0.0) -> str | None:
    chosen = choose(balance, candidates, affinity=affinity, draw=draw)
    return None if chosen is None else chosen.incarnation


def even(count: int, inflight: int = 0, limit: int = 100) -> list[Candidate]:
    return [Candidate(f"r{n}", inflight, limit) for n in range(count)]


def test_every_name_of_the_configuration_has_its_policy() -> None:
    assert set(BALANCES) == set(get_args(Balance))


def test_least_outstanding_takes_the_least_loaded_and_ties_are_settled() -> None:
    loads = [Candidate("c", 2, 4), Candidate("b", 1, 4), Candidate("a", 1, 4), Candidate("d", 0, 0)]
    assert pick("least_outstanding", *loads) == "a"
    assert pick("least_outstanding", *loads[::-1]) == "a"
    assert pick("least_outstanding", Candidate("small", 1, 2), Candidate("large", 2, 8)) == "large"


def test_power_of_two_takes_the_less_loaded_of_each_pair() -> None:
    candidates = [Candidate("a", 5, 9), Candidate("b", 1, 9), Candidate("c", 3, 9)]
    drawn = Counter(pick("power_of_two", *candidates, draw=n / 600) for n in range(600))
    assert drawn == {"b": 400, "c": 200}
    assert pick("power_of_two", *candidates, draw=0.999999999999999999) is not None


@pytest.mark.parametrize("balance", ["session", "prefix"])
def test_affinity_stays_and_only_the_lost_replicas_keys_move(balance: Balance) -> None:
    replicas, keys = even(5), [f"key{n}" for n in range(500)]
    before = {key: pick(balance, *replicas, affinity=key) for key in keys}
    assert all(count > 50 for count in Counter(before.values()).values())
    after = {key: pick(balance, *replicas[1:], affinity=key) for key in keys}
    assert {key for key in keys if before[key] != after[key]} == {key for key in keys if before[key] == "r0"}
    assert len({after[key] for key in keys if before[key] == "r0"}) == 4


def test_a_hot_key_spills_before_its_replica_drowns() -> None:
    home = pick("session", *even(4), affinity="hot")
    loads = {candidate.incarnation: 0 for candidate in even(4)}
    for _ in range(40):
        chosen = pick("session", *(Candidate(name, count, 100) for name, count in loads.items()), affinity="hot")
        assert chosen is not None
        loads[chosen] += 1
    assert max(loads.values()) <= 14
    assert loads[home or ""] == max(loads.values())
    # With nothing else on them, the next one goes home.
    assert pick("session", *even(4), affinity="hot") == home


def test_a_full_home_is_not_waited_for() -> None:
    home = pick("session", *even(3), affinity="k")
    full = [Candidate(c.incarnation, 1, 1) if c.incarnation == home else c for c in even(3)]
    assert pick("session", *full, affinity="k") not in (home, None)


def test_requests_without_a_key_go_to_the_least_loaded() -> None:
    assert pick("session", Candidate("a", 2, 9), Candidate("b", 0, 9)) == "b"


candidates = st.lists(st.builds(Candidate, st.uuids().map(str), inflight=st.integers(0, 4), limit=st.integers(0, 4)), max_size=5)


@settings(deadline=None)
@given(st.sampled_from(get_args(Balance)), candidates, st.text(max_size=3), st.floats(0, 1, exclude_max=True))
def test_a_free_replica_is_found_if_there_is_one_and_no_limit_is_passed(
    balance: Balance, seen: list[Candidate], affinity: str, draw: float
) -> None:
    chosen = choose(balance, seen, affinity=affinity, draw=draw)
    assert (chosen is not None) == any(candidate.free for candidate in seen)
    assert chosen is None or (chosen.free and chosen in seen)
