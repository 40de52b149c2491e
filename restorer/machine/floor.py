"""How fast this host is, measured: the rates that :mod:`policies.floor` makes a restore's floor of.

The probe is a process of its own, about two seconds long: what it touches is no memory of the restorer's, and a disk that
hangs ends with its deadline. What it says is kept in ``STATE_DIR/rates.json``, the best of each; ``rewake doctor`` measures
again. Knows nothing of snapshots.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import json
import logging
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import ValidationError

from policies.floor import Rates
from restorer.errors import Environment, RestorerError, ToolFailed, ToolHung
from restorer.system import modules
from restorer.system.files import disk_space, write_durable

log = logging.getLogger("rewake.restorer")

FILE = "rates.json"
DEADLINE_S = 30.0
_BLOCK = 2 << 20
_DISK_BYTES = 96 << 20
_HOT_BYTES = 64 << 20
_MEMORY_BYTES = 192 << 20
_TURNS = 3
_LONGEST_S = 0.12
"""One measurement of one turn ends after this, with what it has moved."""
_READERS = (1, 4)
_SPAWN = ("unshare", "--pid", "--mount", "--ipc", "--uts", "--net", "--fork", "--kill-child", "--mount-proc", "true")
_THREADS = min(16, os.cpu_count() or 1)


class Speed:
    """How fast this host is, as far as is known; measured once, when somebody first needs it.

    Args:
        state_dir: on the disk whose speed counts.
        pcie: asks the driver for bytes a second from pinned memory to the slowest GPU; None: there is none.
    """

    def __init__(self, state_dir: Path, pcie: Callable[[], Awaitable[float | None]]) -> None:
        self._state_dir, self._pcie = state_dir, pcie
        self.rates = known(state_dir)
        """None: not measured yet, or not to be had."""
        self._lock = asyncio.Lock()
        self._tried = False

    async def measured(self) -> Rates | None:
        """The rates, measured now if they are not known; None when that failed, which is logged and not tried again."""
        async with self._lock:
            if self.rates is None and not self._tried:
                self._tried = True
                try:
                    self.rates = await measure(self._state_dir, pcie=await self._pcie())
                except RestorerError as error:
                    log.warning("floors of restores will not be told: %s", error)
        return self.rates


def known(state_dir: Path) -> Rates | None:
    """What was measured before, on this kernel with these processors; None: nothing, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ValidationError):
        record = json.loads((state_dir / FILE).read_bytes())
        if record["host"] == _host():
            return Rates.model_validate(record["rates"])
    return None


async def measure(state_dir: Path, *, pcie: float | None = None) -> Rates:
    """Measure this host, keep the best of this and what was known, and return that.

    Args:
        pcie: bytes a second from pinned memory to the slowest GPU, measured by whoever can ask the driver.

    Raises:
        Environment: the disk is full, or the probe cannot be started. ToolFailed, ToolHung: it did not end well, or in time.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *modules.command("restorer.machine.floor", str(state_dir)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=modules.environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise Environment(f"the probe of this host's speed cannot be started: {error}") from None
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, said = await process.communicate()
    except TimeoutError:
        raise ToolHung(f"the probe of this host's speed did not end within {DEADLINE_S:g} s; see dmesg") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ToolFailed("the probe of this host's speed", process.returncode, said[-1000:].decode(errors="replace"))
    found = Rates.model_validate_json(out).model_copy(update={"pcie": pcie})
    before = known(state_dir)
    best = found if before is None else found.best(before)
    record = {"host": _host(), "rates": best.model_dump(mode="json")}
    with disk_space("writing down how fast this host is", state_dir):
        await asyncio.to_thread(write_durable, state_dir / FILE, json.dumps(record).encode(), 0o600)
    return best


def _host() -> list[object]:
    return [platform.node(), platform.release(), os.cpu_count()]


# ---------------------------------------------------------------- in the probe's own process


def probe(folder: Path) -> Rates:
    """Measure everything with a file in this folder, in turns, so that a busy moment meets no rate alone. Blocks for 2 s."""
    with tempfile.TemporaryFile(dir=folder) as file, contextlib.ExitStack() as kept:
        block = os.urandom(_BLOCK)
        for _ in range(_DISK_BYTES // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        turns = [_turn(file.fileno(), bytearray(block), kept) for _ in range(_TURNS)]
    # A virtual machine has memory that was used a moment ago at once, and any other at a fraction of that; a restore takes more
    # than there is of the first. So the slowest turn counts, and what was measured is not given back for the next to find.
    rates = {name: (max if name.startswith("disk") else min)(turn[name] for turn in turns) for name in turns[0]}
    return Rates(measured_ms=time.time_ns() // 1_000_000, spawn_s=min(_spawned() for _ in range(3)), **rates)


def _turn(fd: int, source: bytearray, kept: contextlib.ExitStack) -> dict[str, float]:
    def copied(_: int, to: memoryview) -> None:
        ctypes.memmove(_address(to), (ctypes.c_char * len(source)).from_buffer(source), len(source))

    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    disk_cached = _rate(1, _DISK_BYTES, lambda at, buffer: os.preadv(fd, [buffer], at))
    for at in range(0, _HOT_BYTES, _BLOCK):
        os.pread(fd, _BLOCK, at)
    cache = _into_fresh_memory(lambda at, to: os.preadv(fd, [to], at % _HOT_BYTES))
    return {
        "disk_cached": disk_cached,
        "cache": cache,
        "disk": max(_disk(fd, readers) for readers in _READERS),
        "fill": _into_fresh_memory(copied),
        "fill_huge": _into_fresh_memory(copied, kept=kept),
    }


def _disk(fd: int, readers: int) -> float:
    """Past the page cache, where the file system can."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    path = f"/proc/self/fd/{fd}"
    with contextlib.suppress(OSError):
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            return _rate(readers, _DISK_BYTES, lambda at, buffer: os.preadv(direct, [buffer], at))
        finally:
            os.close(direct)
    return _rate(readers, _DISK_BYTES, lambda at, buffer: os.preadv(fd, [buffer], at))


def _rate(threads: int, size: int, work: Callable[[int, memoryview], object]) -> float:
    """Bytes a second of work on blocks, each thread with one buffer that it keeps."""
    buffers = [memoryview(mmap.mmap(-1, _BLOCK)) for _ in range(threads)]
    for buffer in buffers:
        buffer[:] = bytes(_BLOCK)
    return _timed(threads, size, lambda number, at: work(at, buffers[number]))


def _into_fresh_memory(work: Callable[[int, memoryview], object], *, kept: contextlib.ExitStack | None = None) -> float:
    """Bytes a second of work on blocks of memory that nobody has touched yet; ``kept``: in huge pages, until that ends."""
    with contextlib.ExitStack() as own:
        fresh = mmap.mmap(-1, _MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = (own if kept is None else kept).enter_context(fresh)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE if kept is None else mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        try:
            return _timed(_THREADS, _MEMORY_BYTES, lambda _, at: _on_part(view, at, work))
        finally:
            view.release()


def _on_part(view: memoryview, at: int, work: Callable[[int, memoryview], object]) -> None:
    with view[at : at + _BLOCK] as part:
        work(at, part)


def _timed(threads: int, size: int, work: Callable[[int, int], object]) -> float:
    """Bytes a second of ``work(thread, offset)`` over all blocks, or as many as the time allows."""
    end = time.perf_counter() + _LONGEST_S

    def share(number: int) -> int:
        done = 0
        for at in range(number * _BLOCK, size - _BLOCK + 1, threads * _BLOCK):
            work(number, at)
            done += _BLOCK
            if time.perf_counter() > end:
                break
        return done

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        done = sum(pool.map(share, range(threads)))
        return done / (time.perf_counter() - begun)


def _address(view: memoryview) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * len(view)).from_buffer(view)


def _spawned() -> float:
    begun = time.perf_counter()
    subprocess.run(_SPAWN, capture_output=True, timeout=DEADLINE_S / 4, check=True)
    return time.perf_counter() - begun


if __name__ == "__main__":
    print(probe(Path(sys.argv[1])).model_dump_json())
