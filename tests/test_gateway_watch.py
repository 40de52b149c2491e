"""The timer over one answer, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.watch import Watch

pytestmark = pytest.mark.looptime


def watched(idle_s: float, total_s: float | None = None) -> tuple[Watch, list[float]]:
    loop, fired = asyncio.get_running_loop(), []
    watch = Watch(loop, idle_s=idle_s, total_s=total_s, on_expiry=lambda: fired.append(loop.time()))
    return watch, fired


async def test_it_fires_once_when_nothing_has_moved_for_so_long():
    watch, fired = watched(10)
    for _ in range(5):
        await asyncio.sleep(9)
        watch.moved()
    assert fired == []
    await asyncio.sleep(100)
    assert fired == [pytest.approx(55, abs=0.1)]
    assert watch.expired == "idle"


async def test_it_fires_at_the_total_however_much_moves():
    watch, fired = watched(10, 25)
    for _ in range(10):
        await asyncio.sleep(5)
        watch.moved()
    assert fired == [pytest.approx(25, abs=0.1)]
    assert watch.expired == "total"


async def test_stopped_it_never_fires():
    watch, fired = watched(10, 25)
    await asyncio.sleep(9)
    watch.stop()
    watch.stop()
    await asyncio.sleep(100)
    assert (fired, watch.expired) == ([], None)
