"""Requests that have ended are counted, logged and traced many at a time; none is forgotten, and none waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from conftest import eventually

from gateway import epilogue
from gateway.epilogue import Epilogue
from gateway.trail import Trail


def trail(number: int) -> Trail:
    return Trail(f"req_{number}", "/v1/completions", 0.0)


def noted(into: list[str]) -> Callable[[Sequence[Trail]], None]:
    """A step that keeps the ids."""
    return lambda some: into.extend(one.id for one in some)


async def test_each_is_done_once_and_in_order_soon() -> None:
    first, second = list[str](), list[str]()
    ended = Epilogue(noted(first), noted(second))
    for number in range(3):
        ended.add(trail(number))
    assert first == []
    await eventually(lambda: first == second == ["req_0", "req_1", "req_2"])
    ended.add(trail(3))
    await eventually(lambda: first == second == ["req_0", "req_1", "req_2", "req_3"])


async def test_many_do_not_wait_for_the_moment_to_pass() -> None:
    seen = list[str]()
    ended = Epilogue(noted(seen))
    for number in range(epilogue.BATCH + 1):
        ended.add(trail(number))
    assert len(seen) == epilogue.BATCH
    ended.settle()
    assert len(seen) == epilogue.BATCH + 1
    await asyncio.sleep(0)


async def test_a_step_that_fails_keeps_no_other_from_being_taken(caplog: pytest.LogCaptureFixture) -> None:
    def count(some: Sequence[Trail]) -> None:
        raise ValueError("a bug")

    logged = list[str]()
    ended = Epilogue(count, noted(logged))
    for number in range(3):
        ended.add(trail(number))
    ended.settle()
    assert logged == ["req_0", "req_1", "req_2"]
    assert "a bug" in caplog.text
