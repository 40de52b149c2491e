"""Which snapshots are read into the page cache."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from policies.warming import Memory, Warmable, Warming, plan

GB = 10**9
SETTINGS = Warming(keep_free=0.25)


def one(id: str, created_ms: int = 0, **more: Any) -> Warmable:
    return Warmable(**{"id": id, "created_ms": created_ms, "bytes": 10 * GB, "cached": 0, "engine_bytes": 0, **more})


def memory(free: int, idle: int = 0) -> Memory:
    return Memory(free=free, idle=idle, total=100 * GB)


def test_of_what_has_room_the_newest_comes_first_and_what_runs_already_last() -> None:
    found = [one("old", 1), one("runs", 9, running=True), one("new", 5)]
    assert plan(found, SETTINGS, memory(100 * GB)).read == ("new", "old", "runs")


def test_a_share_of_the_memory_stays_free() -> None:
    planned = plan([one("a", 3), one("b", 2), one("c", 1)], SETTINGS, memory(47 * GB))
    assert planned.read == ("a", "b")
    assert planned.left == {"c": "10.0 GB and 0.0 GB for its engine do not fit into the 2.0 GB that may be used"}


def test_a_smaller_one_may_fit_where_a_larger_one_does_not() -> None:
    found = [one("large", 2, bytes=90 * GB), one("small", 1)]
    assert plan(found, SETTINGS, memory(50 * GB)).read == ("small",)


def test_its_engine_must_have_room_beside_it() -> None:
    """Else a restore would push out of memory what it is about to read."""
    assert plan([one("a", engine_bytes=16 * GB)], SETTINGS, memory(50 * GB)).read == ()
    assert plan([one("a", engine_bytes=15 * GB)], SETTINGS, memory(50 * GB)).read == ("a",)


def test_what_is_there_is_not_read_and_what_is_there_in_part_needs_the_rest_only() -> None:
    found = [one("whole", cached=10 * GB), one("nearly", cached=95 * GB // 10), one("half", cached=5 * GB)]
    planned = plan(found, SETTINGS, memory(30 * GB))
    assert planned.read == ("half",)
    assert planned.left == dict.fromkeys(("nearly", "whole"), "it is there already")


def test_what_was_read_and_lost_again_is_left_and_takes_no_room() -> None:
    planned = plan([one("lost", 2), one("next", 1)], SETTINGS, memory(36 * GB), done={"lost"})
    assert planned.read == ("next",)
    assert "the kernel has taken the memory back" in planned.left["lost"]


def test_without_free_memory_nothing_is_read() -> None:
    assert plan([one("a"), one("empty", bytes=0)], SETTINGS, memory(0)).read == ()


def test_files_that_hardly_anybody_wants_are_as_good_as_free_but_not_what_was_read_on_purpose() -> None:
    found = [one("a", 2, bytes=40 * GB, cached=40 * GB), one("b", 1, bytes=30 * GB)]
    assert plan(found[1:], SETTINGS, memory(0, idle=55 * GB)).read == ("b",)
    assert plan(found, SETTINGS, memory(0, idle=94 * GB)).read == ()
    assert plan(found, SETTINGS, memory(0, idle=95 * GB)).read == ("b",)
    # What was read on purpose may be among what is wanted, too.
    assert plan(found, SETTINGS, memory(55 * GB, idle=10 * GB)).read == ("b",)


@pytest.mark.parametrize("share", [0.0, 0.04, 0.96, float("nan")])
def test_the_share_that_stays_free_has_bounds(share: float) -> None:
    with pytest.raises(ValidationError):
        Warming(keep_free=share)
