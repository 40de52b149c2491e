"""Requests that have ended are counted, logged and traced many at a time; none is forgotten, and none waits for long."""

from __future__ import annotations

import asyncio

from conftest import eventually

from gateway import epilogue
from gateway.epilogue import Epilogue
from gateway.trail import Trail


def trail(number: int) -> Trail:
    return Trail(f"req_{number}", "/v1/completions", 0.0)


async def test_each_is_done_once_and_in_order_soon() -> None:
    first, second = list[str](), list[str]()
    ended = Epilogue(lambda one: first.append(one.id), lambda one: second.append(one.id))
    for number in range(3):
        ended.add(trail(number))
    assert first == []
    await eventually(lambda: first == second == ["req_0", "req_1", "req_2"])
    ended.add(trail(3))
    await eventually(lambda: first == second == ["req_0", "req_1", "req_2", "req_3"])


async def test_many_do_not_wait_for_the_moment_to_pass() -> None:
    seen = list[str]()
    ended = Epilogue(lambda one: seen.append(one.id))
    for number in range(epilogue.BATCH + 1):
        ended.add(trail(number))
    assert len(seen) == epilogue.BATCH
    ended.settle()
    assert len(seen) == epilogue.BATCH + 1
    await asyncio.sleep(0)


async def test_a_step_that_fails_for_one_is_done_for_the_others() -> None:
    seen = list[str]()

    def count(one: Trail) -> None:
        if one.id == "req_1":
            raise ValueError("a bug")
        seen.append(one.id)

    logged = list[str]()
    ended = Epilogue(count, lambda one: logged.append(one.id))
    for number in range(3):
        ended.add(trail(number))
    ended.settle()
    assert seen == ["req_0", "req_2"]
    assert logged == ["req_0", "req_1", "req_2"]
