"""How fast this host is, measured: the rates that :mod:`policies.floor` makes a restore's floor of.

The probe is a process of its own, about five seconds long: what it touches is no memory of the restorer's, and a disk that
hangs ends with its deadline. What it says is kept in ``STATE_DIR/rates.json``, the best of each; ``rewake doctor`` measures
again. Knows nothing of snapshots: the disk is read by whatever big file of the folder there is.
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
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import ValidationError

from policies.floor import Rates
from restorer.errors import Environment, RestorerError, ToolFailed, ToolHung
from restorer.system import buffers, modules, pagecache
from restorer.system.files import data_extents, disk_space, write_durable

log = logging.getLogger("rewake.restorer")

FILE = "rates.json"
_HOW = 3
"""What was measured in another way before is not known."""
DEADLINE_S = 30.0
_BLOCK = 2 << 20
_DISK_BYTES = 96 << 20
_HOT_BYTES = 64 << 20
_MEMORY_BYTES = 192 << 20
_TURNS = 3
_LONGEST_S = 0.12
"""One measurement of one turn ends after this, with what it has moved."""
_SLICE_S, _SLICES = 0.3, 3
"""The disk is read by each number of readers in turns, without a pause: after one it gives more for a moment than it gives on."""
_SAMPLE_BYTES = 512 << 20
"""Files with less data are not worth being read in place of one that was written a moment ago."""
_ENDLESS = 1 << 62
_READERS, _CACHED_READERS = (1, 4), (1, 2)
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
    return [platform.node(), platform.release(), os.cpu_count(), _HOW]


# ---------------------------------------------------------------- in the probe's own process


def probe(folder: Path) -> Rates:
    """Measure everything with files of this folder, in turns, so that a busy moment meets no rate alone. Blocks for 5 s."""
    with contextlib.ExitStack() as kept:
        file = kept.enter_context(tempfile.TemporaryFile(dir=folder))
        block = os.urandom(_BLOCK)
        for _ in range(_DISK_BYTES // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if (found := sample(folder)) is not None:
            kept.callback(os.close, found)
        disk = kept.enter_context(_Disk(file.fileno() if found is None else found))
        disk.read_on()
        turns = [_turn(file.fileno(), bytearray(block), kept) for _ in range(_TURNS)]
        # A virtual machine has memory that was used a moment ago at once, and any other at a fraction of that; a restore takes
        # more than there is of the first. So the slowest turn counts, and what was measured is not given back for the next.
        memory = {name: min(turn[name] for turn in turns) for name in turns[0]}
        spawn_s = min(_spawned() for _ in range(3))
        return Rates(measured_ms=time.time_ns() // 1_000_000, spawn_s=spawn_s, **disk.rates, **memory)


def sample(folder: Path) -> int | None:
    """The file on this folder's disk with the most data of which the page cache holds nothing, open; None: there is no big one.

    What was written a moment ago lies in caches behind the disk: it is no measure of what has lain there for days.
    """
    device, sizes = folder.stat().st_dev, {}
    for here, _, names in os.walk(folder):
        for path in (os.path.join(here, name) for name in names):
            with contextlib.suppress(OSError):
                facts = os.lstat(path)
                data = min(facts.st_blocks * 512, facts.st_size)
                if stat.S_ISREG(facts.st_mode) and facts.st_dev == device and data >= _SAMPLE_BYTES:
                    sizes[path] = data
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if pagecache.resident(fd, os.fstat(fd).st_size) == 0:
                return fd
            os.close(fd)
    return None


def _turn(fd: int, source: bytearray, kept: contextlib.ExitStack) -> dict[str, float]:
    def copied(_: int, to: memoryview) -> None:
        ctypes.memmove(_address(to), (ctypes.c_char * len(source)).from_buffer(source), len(source))

    for at in range(0, _HOT_BYTES, _BLOCK):
        os.pread(fd, _BLOCK, at)
    cache = _into_fresh_memory(lambda at, to: os.preadv(fd, [to], at % _HOT_BYTES))
    return {"cache": cache, "fill": _into_fresh_memory(copied), "fill_huge": _into_fresh_memory(copied, kept=kept)}


class _Disk:
    """A file's data, read on and on: past the page cache, where the file system can, and through it.

    A restore reads for seconds, and what a disk gives in one moment is not what it gives: so it is read without a pause for as
    long as a restore of some gigabytes, and the mean counts.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._direct = fd, -1
        with contextlib.suppress(OSError):
            self._direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        runs = data_extents(fd, os.fstat(fd).st_size)
        self._blocks = [at for start, end in runs for at in range(start, end - _BLOCK + 1, _BLOCK)]
        self._done = 0
        self._past: dict[int, list[float]] = {readers: [] for readers in _READERS}
        self._through: dict[int, list[float]] = {readers: [] for readers in _CACHED_READERS}

    def __enter__(self) -> _Disk:
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct >= 0:
            os.close(self._direct)

    def read_on(self) -> None:
        """All ways in turns, none of them first alone."""
        for _ in range(_SLICES):
            for readers, rates in self._past.items():
                rates.append(self._read(readers, self._fd if self._direct < 0 else self._direct))
            for readers, rates in self._through.items():
                rates.append(self._read(readers, self._fd))

    def _read(self, readers: int, fd: int) -> float:
        """Bytes a second, for a moment, from where it was read to; what the page cache would have of it is put out of it."""
        first, blocks = self._done, self._blocks

        def read(at: int, buffer: memoryview) -> None:
            self._done += 1
            os.preadv(fd, [buffer], blocks[(first + at // _BLOCK) % len(blocks)])

        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            # Past the page cache a small file can be read again and again.
            return _rate(readers, _ENDLESS if fd == self._direct else len(blocks) * _BLOCK, read, _SLICE_S)
        finally:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def rates(self) -> dict[str, float]:
        """Past the page cache and through it, each with as many readers as are fastest; bytes a second."""
        ways = {"disk": self._past, "disk_cached": self._through}
        return {name: max(map(statistics.fmean, way.values())) for name, way in ways.items()}


def _rate(threads: int, size: int, work: Callable[[int, memoryview], object], longest_s: float = _LONGEST_S) -> float:
    """Bytes a second of work on blocks, each thread with one buffer that it keeps."""
    with contextlib.ExitStack() as kept:
        into = [kept.enter_context(buffers.whole(_BLOCK)) for _ in range(threads)]
        for buffer in into:
            buffer[:] = bytes(_BLOCK)
        return _timed(threads, size, lambda number, at: work(at, into[number]), longest_s)


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


def _timed(threads: int, size: int, work: Callable[[int, int], object], longest_s: float = _LONGEST_S) -> float:
    """Bytes a second of ``work(thread, offset)`` over all blocks, or as many as the time allows."""
    end = time.perf_counter() + longest_s

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
