"""The probe of this host's speed: what it measures, what is kept of it, and what becomes of its failures."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from policies.floor import Rates
from restorer.errors import ToolFailed, ToolHung
from restorer.machine import floor

FAST = Rates(measured_ms=1, disk=1e15, disk_cached=1e15, cache=1e15, fill=1e15, fill_huge=1e15, spawn_s=1e-9)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root")


async def no_gpu() -> float | None:
    return None


@needs_root
async def test_a_host_is_measured_once_and_remembered(tmp_path: Path) -> None:
    speed = floor.Speed(tmp_path, no_gpu)
    assert speed.rates is None
    first, second = await asyncio.gather(speed.measured(), speed.measured())
    assert first is not None
    assert first is second
    measured = first.model_dump()
    assert all(measured[name] > 1e6 for name in ("disk", "disk_cached", "cache", "fill", "fill_huge"))
    assert 0 < measured["spawn_s"] < 10
    assert floor.Speed(tmp_path, no_gpu).rates == first
    kept = tmp_path / floor.FILE
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [floor.FILE]


@needs_root
async def test_a_busy_moment_does_not_make_a_host_slower(tmp_path: Path) -> None:
    (tmp_path / floor.FILE).write_text(json.dumps({"host": floor._host(), "rates": FAST.model_dump()}))
    best = await floor.measure(tmp_path, pcie=5.0)
    assert (best.disk, best.fill, best.spawn_s, best.pcie) == (1e15, 1e15, 1e-9, 5.0)
    assert best.measured_ms > FAST.measured_ms


@pytest.mark.parametrize("content", ["", "[]", "{", '{"host": [], "rates": {}}'])
def test_what_another_host_measured_or_nobody_can_read_is_not_known(tmp_path: Path, content: str) -> None:
    (tmp_path / floor.FILE).write_text(content)
    assert floor.known(tmp_path) is None
    other = {"host": ["elsewhere", "6.0", 2], "rates": FAST.model_dump()}
    (tmp_path / floor.FILE).write_text(json.dumps(other))
    assert floor.known(tmp_path) is None


async def test_a_probe_that_fails_is_told_once_and_nobody_fails_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(ToolFailed, match="the probe of this host's speed"):
        await floor.measure(gone)
    speed = floor.Speed(gone, no_gpu)
    assert await speed.measured() is None
    assert await speed.measured() is None
    assert caplog.text.count("floors of restores will not be told") == 1


async def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hang"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setattr(floor.sys, "executable", str(script))
    monkeypatch.setattr(floor, "DEADLINE_S", 1.0)
    with pytest.raises(ToolHung, match="did not end within 1 s"):
        await floor.measure(tmp_path)
    assert (tmp_path / "pid").read_text().strip() not in os.listdir("/proc")
