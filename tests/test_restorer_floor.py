"""The probe of this host's speed: what it measures, what is kept of it, and what becomes of its failures."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable
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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes files for the probe, in a folder where small ones count; ``cached`` of them are in the page cache."""
    cached: set[int] = set()
    monkeypatch.setattr(floor, "_SAMPLE_BYTES", 8 << 20)
    monkeypatch.setattr(floor.pagecache, "resident", lambda fd, size: size if os.fstat(fd).st_ino in cached else 0)

    def make(name: str, megabytes: int, *, in_cache: bool = False) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(megabytes << 20))
        if in_cache:
            cached.add(path.stat().st_ino)
        return path

    return make


def test_the_disk_is_read_by_the_biggest_file_that_nobody_reads(tmp_path: Path, files: Callable[..., Path]) -> None:
    """What was written a moment ago is in caches behind the disk, and what is in the page cache would be put out of it."""
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(bytes(32 << 20))
    files("small", 4)
    files("cached", 24, in_cache=True)
    (tmp_path / "link").symlink_to(outside)
    with (tmp_path / "holes").open("wb") as holes:
        holes.truncate(1 << 30)
    assert floor.sample(tmp_path) is None
    files("snapshots/big", 12)
    chosen = files("snapshots/bigger", 16)
    fd = floor.sample(tmp_path)
    assert fd is not None
    try:
        assert os.fstat(fd).st_ino == chosen.stat().st_ino
    finally:
        os.close(fd)
        outside.unlink()


def test_the_disk_is_what_it_gives_on_and_not_what_it_gave_once(
    tmp_path: Path, files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means of all turns, with the better number of readers; each reads on where the one before has ended."""
    read: list[int] = []
    rates = iter([9.0, 1.0, 1.0, 0.0, 1.0, 8.0, 3.0, 0.0, 1.0, 2.0, 2.0, 0.0, 1.0, 9.0, 2.0, 4.0])

    def rate(readers: int, size: int, work: Callable[[int, memoryview], object], longest_s: float) -> float:
        for number in range(2):
            work(number * floor._BLOCK, memoryview(bytearray(floor._BLOCK)))
        return next(rates)

    monkeypatch.setattr(floor, "_SLICES", 4)
    monkeypatch.setattr(floor, "_rate", rate)
    monkeypatch.setattr(floor.os, "preadv", lambda fd, to, at: read.append(at // floor._BLOCK))
    with files("big", 10).open("rb") as file, floor._Disk(file.fileno()) as disk:
        disk.read_on()
    assert read == [number % 5 for number in range(32)]
    assert disk.rates == {"disk": 5.0, "disk_cached": 2.0}
