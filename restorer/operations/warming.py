"""Reads snapshots into the page cache while this host has nothing to start and memory that nobody uses.

What to read is :mod:`policies.warming`'s to say; this owns the looks at memory and files, and the one thread that reads: with the
least priority for processor and disk that there is, stopped at its next block when something is to be started. Each snapshot is
read once after the end of a job, so that a kernel that takes its memory back is not fought.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from policies import reading, warming
from policies.manifest import Manifest
from policies.warming import Memory, Warmable
from policies.wire import SnapshotSummary
from restorer.errors import RestorerError
from restorer.machine import hostfacts
from restorer.machine.host import Host, log
from restorer.system import pagecache
from restorer.system.files import PAGE, data_extents

_BLOCK = 1 << 20
_LOOK_BYTES = 64 << 20
"""After so many bytes it is asked again whether the memory is still free."""
_EVERY_S = 60.0
_SETTLE_S = 2.0
"""Jobs often come in pairs: one replica ends, another starts."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13


class Warmer:
    """One host's.

    Args:
        snapshots: those of this host, as it reports them.
        running: the models of which an engine runs here.
        memory: how much of it nobody needs.
    """

    def __init__(
        self,
        host: Host,
        snapshots: Callable[[], Sequence[SnapshotSummary]],
        running: Callable[[], set[str]],
        memory: Callable[[], Memory] = hostfacts.memory_now,
    ) -> None:
        self._host, self._snapshots, self._running, self._memory = host, snapshots, running, memory
        self._done: set[str] = set()
        self._due, self._stopped = asyncio.Event(), threading.Event()
        self._jobs = 0

    def began(self) -> None:
        """A job begins: whatever is being read is left."""
        self._jobs += 1
        self._stopped.set()

    def ended(self) -> None:
        """A job has ended, which may have made a snapshot, or freed or taken memory."""
        self._jobs -= 1
        self._done.clear()
        self._due.set()

    async def run(self) -> None:
        """A round after each job and each minute, for as long as it is not cancelled."""
        pool = concurrent.futures.ThreadPoolExecutor(1, "warm", initializer=_humble)
        try:
            while True:
                await asyncio.sleep(_SETTLE_S)
                self._due.clear()
                if self._jobs == 0 and self._host.config.restorer.warm.enabled:
                    self._stopped.clear()
                    await asyncio.wrap_future(pool.submit(self._round, self._wanted()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_EVERY_S):
                        await self._due.wait()
        finally:
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _wanted(self) -> list[tuple[SnapshotSummary, bool]]:
        """(the newest usable snapshot, whether an engine of its model runs) of each model of the configuration."""
        usable = [one for one in self._snapshots() if one.fits and one.quarantined is None]
        newest = {one.model: one for one in sorted(usable, key=lambda one: one.created_ms)}
        running = self._running()
        return [(one, one.model in running) for one in newest.values()]

    def _round(self, wanted: Sequence[tuple[SnapshotSummary, bool]]) -> None:
        """Blocks, in the thread that reads."""
        found, files = [], {}
        for summary, running in wanted:
            # One that is removed just now is nothing to be read.
            with contextlib.suppress(OSError, RestorerError):
                manifest = self._host.snapshots.load(summary.id)
                paths, mapped_bytes = self._read_by(manifest)
                cached, size = pagecache.share(paths)
                # What it has mapped lies in the page cache anyway.
                besides = max(0, manifest.needs.memory_bytes - mapped_bytes) if manifest.needs and not running else 0
                found.append(Warmable(summary.id, summary.created_ms, size, cached, besides, running))
                files[summary.id] = paths
        settings = self._host.config.restorer.warm
        planned = warming.plan(found, settings, self._memory(), self._done)
        ours = sum(one.cached for one in found)

        def room(done: int) -> bool:
            return self._memory().room(settings, ours + done) >= 0

        for id, why in planned.left.items():
            log.debug("snapshot %s is not read into the page cache: %s", id, why)
        for id in planned.read:
            begun = time.monotonic()
            count, whole = read(files[id], self._stopped, room)
            ours += count
            log.info("snapshot %s: %d bytes were read into the page cache in %.1f s", id, count, time.monotonic() - begun)
            if not whole:
                break
            self._done.add(id)

    def _read_by(self, manifest: Manifest) -> tuple[list[Path], int]:
        """All that a restore reads of a snapshot and besides: its objects, its weights, what is read ahead; bytes of the last."""
        folder, host = self._host.snapshots.folder(manifest.id), self._host
        paths = [folder / one.path for one in manifest.objects]
        for weights in manifest.gpu.weights if manifest.gpu else ():
            paths += [host.weights.root / weights.digest / part.name for part in weights.parts]
        model = host.config.models.get(manifest.profile.model)
        ahead = reading.ahead(model.restore, manifest.files)[0] if model else ()
        return [*paths, *(Path(file.path) for file in ahead)], sum(file.bytes for file in ahead)


def read(paths: Iterable[Path], stopped: threading.Event, room: Callable[[int], bool]) -> tuple[int, bool]:
    """(bytes read, whether that was all). Only what is not in the page cache yet, and never holes, which take memory there too.

    A file that cannot be read is left to whoever restores it, who says what is wrong with it.

    Args:
        room: asked now and then, with the bytes read so far; when it says no, that is the end.
    """
    count = looked = 0
    with memoryview(bytearray(_BLOCK)) as buffer:
        for path in paths:
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                for at, size in _blocks(file.fileno()):
                    if count - looked >= _LOOK_BYTES:
                        looked = count
                        if not room(count):
                            return count, False
                    if stopped.is_set():
                        return count, False
                    if pagecache.resident(file.fileno(), size, at) < size:
                        count += os.preadv(file.fileno(), [buffer[:size]], at)
    return count, True


def _blocks(fd: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of all data in an open file, whole pages but at its end."""
    for start, end in data_extents(fd, os.fstat(fd).st_size):
        for at in range(start & -PAGE, end, _BLOCK):
            yield at, min(_BLOCK, end - at)


def _humble() -> None:
    """This thread has processor and disk when nobody else wants them."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        # Disks without a scheduler that knows priorities have none: then it is one reader like any other.
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _IDLE)
