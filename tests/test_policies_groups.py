"""Who has to go when a group is full: single judgements as a table, and long runs that neither thrash nor starve anybody."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.groups import QUIET_S, TURN_COSTS, Displace, Group, Member, Waiter, decide, wait_s

GROUP = Group()
BUSY, QUIET = 0.0, 60.0
TURN = "every member is busy, and in the middle of its turn"


def member(model: str = "a", **changes: Any) -> Member:
    return Member(**{"model": model, "serving_s": 100.0, "quiet_s": QUIET, **changes})


def waiter(model: str = "x", **changes: Any) -> Waiter:
    return Waiter(**{"model": model, "waited_s": 1.0, **changes})


def verdict(*members: Member, asker: Waiter | None = None, group: Group = GROUP, before: tuple[Waiter, ...] = ()) -> str:
    """The victim, or why there is none."""
    asker = asker or waiter()
    found = decide(group, asker.model, members, [*before, asker])
    return f"-{found.victim}" if isinstance(found, Displace) else found.reason


@pytest.mark.parametrize(
    ("members", "changes", "expected"),
    [
        # A quiet member goes at once, but not before its tenure.
        ([member()], {}, "-a"),
        ([member(serving_s=9.9)], {}, "no member has served for long enough"),
        ([member(serving_s=9.9)], {"asker": waiter(waited_s=1000)}, "no member has served for long enough"),
        ([member(quiet_s=QUIET_S - 0.1, cost_s=60.0)], {}, TURN),
        # One on its way in, or already leaving, is nobody's to displace.
        ([member(serving_s=None)], {}, "every other member is on its way in or out, or pinned"),
        ([member(leaving=True)], {}, "a place is about to be free"),
        ([member(leaving=True)], {"before": (waiter("w"),)}, "every other member is on its way in or out, or pinned"),
        ([], {}, "a place is about to be free"),
        ([member("x", leaving=True)], {}, "a place is about to be free"),
        # Pinned: never.
        ([member(pinned=True)], {"asker": waiter(waited_s=1000)}, "every place is pinned"),
        # A busy one's turn is as long as what the swap costs, times four; waiting for max_wait_s ends it.
        ([member(quiet_s=BUSY, serving_s=39.9, cost_s=6.0)], {"asker": waiter(cost_s=4.0)}, TURN),
        ([member(quiet_s=BUSY, serving_s=40.0, cost_s=6.0)], {"asker": waiter(cost_s=4.0)}, "-a"),
        ([member(quiet_s=BUSY, serving_s=10.0, cost_s=99.0)], {"asker": waiter(waited_s=59.9)}, TURN),
        ([member(quiet_s=BUSY, serving_s=10.0, cost_s=99.0)], {"asker": waiter(waited_s=60.0)}, "-a"),
        # Who is only to be kept warm takes from the quiet that need not be kept, and from nobody else.
        ([member()], {"asker": waiter(yields=True)}, "-a"),
        ([member(kept=True)], {"asker": waiter(yields=True, waited_s=1000)}, "every member is in use, or to be kept"),
        ([member(quiet_s=BUSY)], {"asker": waiter(yields=True, waited_s=1000)}, "every member is in use, or to be kept"),
        ([member(kept=True)], {}, "-a"),
    ],
)  # fmt: skip
def test_one_place(members: list[Member], changes: dict[str, Any], expected: str) -> None:
    assert verdict(*members, **changes) == expected


@pytest.mark.parametrize(
    ("members", "changes", "expected"),
    [
        ([member("a", cost_s=9.0), member("b", cost_s=3.0)], {}, "-b"),
        ([member("a", cost_s=1.0, quiet_s=BUSY), member("b", cost_s=9.0)], {}, "-b"),
        ([member("a", kept=True), member("b", cost_s=9.0)], {}, "-b"),
        ([member("a", serving_s=50.0), member("b", serving_s=60.0)], {}, "-b"),
        ([member("a", pinned=True), member("b", cost_s=9.0)], {}, "-b"),
        ([member("a", leaving=True), member("b")], {}, "a place is about to be free"),
        ([member("a", leaving=True), member("b")], {"before": (waiter("w"),)}, "-b"),
        ([member("a")], {}, "a place is about to be free"),
        ([member("a")], {"before": (waiter("w"),)}, "-a"),
        # Waiting for too long ends the turn that is cheapest to begin again.
        (
            [member("a", quiet_s=BUSY, cost_s=90.0), member("b", quiet_s=BUSY, cost_s=80.0)],
            {"asker": waiter(waited_s=60.0)},
            "-b",
        ),
    ],
)
def test_two_places(members: list[Member], changes: dict[str, Any], expected: str) -> None:
    assert verdict(*members, group=Group(members=2), **changes) == expected


@pytest.mark.parametrize(
    ("members", "changes", "expected"),
    [
        ([member()], {}, 0),
        ([member(serving_s=4.0)], {}, 6),
        ([member(leaving=True)], {}, 0),
        ([member(pinned=True)], {}, 0),
        ([member(serving_s=None)], {}, 10),
        # Busy: the rest of its turn, or of what the waiter has to wait at most, whichever ends first.
        ([member(quiet_s=BUSY, serving_s=15.0, cost_s=5.0)], {}, 5),
        ([member(quiet_s=BUSY, serving_s=15.0, cost_s=500.0)], {}, 59),
        ([member(quiet_s=BUSY, serving_s=3.0, cost_s=500.0)], {"asker": waiter(waited_s=58.0)}, 7),
        # Behind others: each of them has its tenure first.
        ([member(serving_s=4.0)], {"before": (waiter("v"), waiter("w"))}, 26),
    ],
)
def test_how_long_a_place_takes(members: list[Member], changes: dict[str, Any], expected: float) -> None:
    asker = changes.get("asker", waiter())
    assert wait_s(GROUP, "x", members, [*changes.get("before", ()), asker]) == expected


def test_nothing_is_said_of_who_does_not_wait() -> None:
    assert wait_s(GROUP, "y", [member()], [waiter()]) == 0


def test_the_reason_is_for_the_record_of_who_went() -> None:
    found = decide(GROUP, "x", [member(quiet_s=BUSY)], [waiter(waited_s=61.4)])
    assert found == Displace("a", "displaced by x: that had waited for 61 s")


# ---------------------------------------------------------------- long runs


@dataclass
class Model:
    """One model of a simulated group. Its start takes ``cost_s``, its last request may take ``drain_s`` to end."""

    cost_s: float
    drain_s: float
    busy: Any
    """second -> is there a request for it?"""
    state: str = "cold"
    since: int = 0
    asked: int | None = None
    used: int = -1000
    waits: list[int] = field(default_factory=list)
    """Seconds from each first request that found it cold to its admission."""
    turns: list[int] = field(default_factory=list)
    starts: int = 0


@dataclass
class Run:
    """What operations.lua and a restorer do with the verdicts, second by second."""

    group: Group
    models: dict[str, Model]
    most: int = 0

    def second(self, now: int) -> None:
        for model in self.models.values():
            if model.state == "starting" and now - model.since >= model.cost_s:
                model.state, model.since = "serving", now
                model.waits.append(now - (now if model.asked is None else model.asked))
                model.asked = None
            elif model.state == "leaving" and now - model.since >= model.drain_s:
                model.state = "cold"
            if model.busy(now):
                model.used = now
                if model.state != "serving" and model.asked is None:
                    model.asked = now
        for name in self.queue():
            self.ask(name, now)
        self.most = max(self.most, sum(model.state != "cold" for model in self.models.values()))

    def queue(self) -> list[str]:
        waiting = [name for name, model in self.models.items() if model.asked is not None and model.state in ("cold", "leaving")]
        return sorted(waiting, key=lambda name: (self.models[name].asked, name))

    def ask(self, name: str, now: int) -> None:
        asker, queue = self.models[name], self.queue()
        others = [model for other, model in self.models.items() if model.state != "cold" and other != name]
        if asker.state == "cold" and queue.index(name) < self.group.members - len(others):
            asker.state, asker.since, asker.starts = "starting", now, asker.starts + 1
            return
        members = [
            Member(
                other,
                float(now - model.since) if model.state == "serving" else None,
                float(now - model.used),
                leaving=model.state == "leaving",
                cost_s=model.cost_s,
            )
            for other, model in self.models.items()
            if model.state != "cold"
        ]
        waiters = [Waiter(other, float(now - _asked(self.models[other])), cost_s=self.models[other].cost_s) for other in queue]
        found = decide(self.group, name, members, waiters)
        if isinstance(found, Displace):
            victim = self.models[found.victim]
            assert victim.state == "serving"
            victim.turns.append(now - victim.since)
            victim.state, victim.since = "leaving", now


def _asked(model: Model) -> int:
    assert model.asked is not None
    return model.asked


def simulate(group: Group, seconds: int, **models: Model) -> Run:
    run = Run(group, models)
    for now in range(seconds):
        run.second(now)
    return run


def always(_: int) -> bool:
    return True


def test_two_models_that_are_always_busy_share_by_turns_and_do_not_thrash() -> None:
    """Turns are long against what a swap costs: at most a fifth of the time is nobody's."""
    group = Group(max_wait_s=600)
    run = simulate(group, 4000, a=Model(5, 1, always), b=Model(5, 1, always))
    swaps = run.models["a"].starts + run.models["b"].starts
    assert run.most == 1
    assert 4000 / (TURN_COSTS * 10 + 8) - 2 < swaps < 4000 / (TURN_COSTS * 10)
    assert min(turn for model in run.models.values() for turn in model.turns) >= TURN_COSTS * 10
    lost = swaps * (5 + 1)
    assert lost < 0.2 * 4000
    assert abs(run.models["a"].starts - run.models["b"].starts) <= 1


def test_a_request_now_and_then_gets_the_place_from_a_flood_in_time() -> None:
    """The flood never pauses, and its model is dear: without max_wait_s its turn would last four minutes."""
    run = simulate(Group(max_wait_s=30), 3000, flood=Model(50, 5, always), rare=Model(10, 0, lambda now: now % 300 == 100))
    rare = run.models["rare"]
    assert len(rare.waits) == 10
    assert max(rare.waits) <= 30 + 5 + 10 + 2
    assert min(run.models["flood"].turns) >= Group().min_tenure_s


def test_pauses_between_one_clients_requests_do_not_cost_the_place() -> None:
    """One client asks, reads, asks again; another model waits: neither is swapped at each pause."""
    run = simulate(
        Group(max_wait_s=600), 2000, chat=Model(4, 1, lambda now: now % 2 == 0), other=Model(4, 1, lambda now: now % 2 == 1)
    )
    assert min(turn for model in run.models.values() for turn in model.turns) >= TURN_COSTS * 8


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 2), st.integers(1, 20), st.integers(10, 90))
def test_whatever_the_load_places_are_kept_and_nobody_starves(seed: int, count: int, places: int, tenure: int, most: int) -> None:
    """Each wait is bounded by the waits of those before it: max_wait_s, or the tenure of who came in last, and a swap each."""
    dice = random.Random(seed)
    group = Group(members=places, min_tenure_s=tenure, max_wait_s=most)

    def load() -> Any:
        on, off = dice.randint(1, 120), dice.choice([0, 3, 40])
        return lambda now: now % (on + off) < on

    models = {f"m{n}": Model(dice.randint(1, 40), dice.randint(0, 10), load()) for n in range(count)}
    run = simulate(group, 800, **models)
    swap = max(model.cost_s for model in models.values()) + max(model.drain_s for model in models.values()) + 3
    bound = most + count * (tenure + swap)
    assert run.most <= places
    assert max(chain([0], *(model.waits for model in models.values()))) <= bound
    assert all(model.asked is None or 800 - model.asked <= bound for model in models.values())
    assert min(chain([tenure], *(model.turns for model in models.values()))) >= tenure
