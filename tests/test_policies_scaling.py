"""Scaling: how many replicas are wanted, which may be parked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.scaling import parkable, wanted


@pytest.mark.parametrize(
    ("demand", "concurrency", "keep", "max_replicas", "expected"),
    [
        (0, 8, 0, 3, 0),
        (0, 8, 2, 3, 2),
        (1, 8, 0, 3, 1),
        (8, 8, 0, 3, 1),
        (9, 8, 0, 3, 2),
        (50, 8, 0, 1, 1),
        (50, 8, 0, 10, 7),
        (1000, 1, 0, 3, 3),
        (1, 8, 2, 3, 2),
        (-5, 8, 0, 3, 0),
    ],
)
def test_wanted(demand: int, concurrency: int, keep: int, max_replicas: int, expected: int) -> None:
    assert wanted(demand=demand, concurrency=concurrency, keep=keep, max_replicas=max_replicas) == expected


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(0, 8), st.integers(0, 8))
def test_wanted_stays_within_its_bounds_and_never_falls_as_demand_grows(
    demand: int, concurrency: int, keep: int, more: int
) -> None:
    limit = keep + more
    found = wanted(demand=demand, concurrency=concurrency, keep=keep, max_replicas=limit)
    assert keep <= found <= limit
    assert found <= wanted(demand=demand + 1, concurrency=concurrency, keep=keep, max_replicas=limit)
    assert found * concurrency >= demand or found == limit


@pytest.mark.parametrize(
    ("idle_s", "changes", "expected"),
    [
        ({"a": 300.0, "b": 299.9, "c": 500.0}, {}, ["c", "a"]),
        ({"a": 300.0, "b": 300.0}, {}, ["a", "b"]),
        ({"a": 300.0, "b": 300.0}, {"keep": 1}, ["a"]),
        ({"a": 300.0, "b": 0.0}, {"keep": 1}, ["a"]),
        ({"a": 300.0}, {"keep": 1}, []),
        ({"a": 300.0}, {"keep": 5}, []),
        ({"a": 300.0}, {"held": 1}, []),
        ({"a": 300.0}, {"coming": 1}, []),
        ({}, {}, []),
    ],
)
def test_parkable(idle_s: dict[str, float], changes: dict[str, int], expected: list[str]) -> None:
    assert parkable(**{"idle_s": idle_s, "keep": 0, "held": 0, "coming": 0, "idle_park_s": 300.0, **changes}) == expected


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=2), st.floats(0, 1000), max_size=8), st.integers(0, 8))
def test_parking_leaves_what_is_kept_and_what_is_in_use(idle_s: dict[str, float], keep: int) -> None:
    parked = parkable(idle_s=idle_s, keep=keep, held=0, coming=0, idle_park_s=300.0)
    assert len(idle_s) - len(parked) >= min(keep, len(idle_s))
    assert all(idle_s[replica] >= 300.0 for replica in parked)
    assert [idle_s[replica] for replica in parked] == sorted((idle_s[replica] for replica in parked), reverse=True)
