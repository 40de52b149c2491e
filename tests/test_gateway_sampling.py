"""A part of all requests is chosen, as if each had been drawn for."""

from __future__ import annotations

import pytest

from gateway.sampling import Sampler


def gaps(part: float, chosen: int) -> list[int]:
    """How many were passed over before each of so many."""
    sampler, found, passed = Sampler(part, seed=1), list[int](), 0
    while len(found) < chosen:
        if sampler.chosen():
            found.append(passed)
            passed = 0
        else:
            passed += 1
    return found


@pytest.mark.parametrize("part", [0.9, 0.25, 0.01])
def test_so_large_a_part_is_chosen(part: float) -> None:
    found = gaps(part, 4000)
    assert len(found) / (sum(found) + len(found)) == pytest.approx(part, rel=0.1)


def test_the_gaps_are_those_of_chance() -> None:
    """Each number of passed over ones is as much rarer than the one before as it has to be."""
    found = gaps(0.25, 20_000)
    for passed in range(5):
        assert found.count(passed) / len(found) == pytest.approx(0.25 * 0.75**passed, rel=0.1)


def test_none_and_all() -> None:
    none, every = Sampler(0.0), Sampler(1.0)
    assert not any(none.chosen() for _ in range(1000))
    assert all(every.chosen() for _ in range(1000))
