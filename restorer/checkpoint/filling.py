"""Big memory on its way back into a restored tree, by a few threads.

Each reads into a small buffer of its own and writes on with process_vm_writev(2), so that however large a snapshot is, the
restorer stays small. What the page cache does not hold is read past it, where that pays: fresh memory is dear on hosts that
get theirs as they touch it, and this takes it once instead of twice. Knows plans of :mod:`restorer.checkpoint.pages` and
pids, nothing of engines and boxes.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from restorer.checkpoint.pages import Bulk, Run
from restorer.errors import EngineDied, SnapshotError
from restorer.system import buffers, pagecache

BATCH_BYTES = 2 << 20
"""What is read and written at a time, still in the processor's cache when it is written; areas are cut at multiples of it, so
that no two threads meet in one huge page."""
_BATCH_RUNS = 1024
"""Most pieces that one call takes."""
_THREADS = 24
"""Most for one tree: they read from a disk and fill in 1.20 s, on two processors, what sixteen do in 1.23 and eight in 1.27."""
_ROOM = threading.BoundedSemaphore(24)
"""Buffers of all trees that are filled at a time, so that the restorer stays small."""
_PATIENCE_S = 1.0
"""A buffer that was filled before there is anything to put it into is kept for so long: then other trees may want it."""


class _Vec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("count", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.process_vm_writev.restype = ctypes.c_ssize_t
_LIBC.process_vm_writev.argtypes = [
    ctypes.c_int,
    *(ctypes.POINTER(_Vec), ctypes.c_ulong) * 2,
    ctypes.c_ulong,
]


class _Batch(NamedTuple):
    """What one read and one write move."""

    pid: int
    source: _Source
    start: int
    """In the file; with ``span`` the bytes that are read."""
    span: int
    runs: list[Run]


class Filling:
    """The way of big memory back into one restored tree, in two steps, so that the first can be done while CRIU works.

    Each thread reads its first batch in the first step already, since the disk has nothing else to do then.

    Args:
        direct: read what the page cache does not hold past it.
        threads: default: one for each processor, but twenty-four where they wait for a disk, and never more.
    """

    def __init__(self, bulk: Bulk, *, direct: bool, threads: int | None = None) -> None:
        self._bulk, self._direct = bulk, direct
        self._threads = threads or min(_THREADS, os.cpu_count() or 1)
        self._chosen = threads is not None
        self._pool = concurrent.futures.ThreadPoolExecutor(threads or _THREADS, "fill memory")
        self._sources: list[_Source] = []
        self._left: Iterator[_Batch] = iter(())
        """Shared by all threads: whoever is done takes the next, so that the disk is asked in order and never stands still."""
        self._shares: list[concurrent.futures.Future[None]] = []
        self._wanted: set[int] = set()
        self._pids: Mapping[int, int] = {}
        self._there, self._stopped = threading.Event(), threading.Event()

    def prepare(self) -> None:
        """Open everything, decide what is moved in which step, and begin to read. Blocks, but not for what is read.

        Raises:
            SnapshotError: a file cannot be opened, or is shorter than it was.
        """
        batches: list[_Batch] = []
        for process in self._bulk.plan.processes:
            self._sources.append(source := _Source(self._bulk.folder / process.file, direct=self._direct))
            for runs in _batches(itertools.starmap(Run, process.runs)):
                batches.append(source.batch(process.pid, runs))
        if not self._chosen and pagecache.tier([source.path for source in self._sources]) != "page cache":
            self._threads = _THREADS
        self._wanted, self._left = {batch.pid for batch in batches}, iter(batches)
        self._shares += [self._pool.submit(self._share) for _ in range(self._threads)]

    def put_back(self, pids: Mapping[int, int]) -> None:
        """Fill the memory of a tree that has not run yet. Blocks.

        Args:
            pids: number inside the tree's pid namespace -> number here, of every process.

        Raises:
            EngineDied: a process is gone, or lacks memory that it had. SnapshotError: a file ends too early.
        """
        if missing := self._wanted - set(pids):
            raise EngineDied(f"of the restored engine the processes {sorted(missing)} are gone")
        self._pids = pids
        self._there.set()
        try:
            for share in concurrent.futures.as_completed(self._shares):
                share.result()
        finally:
            # Of the other threads' shares nothing is wanted any more when one has failed.
            self.stop()

    def _share(self) -> None:
        """Batch after batch, as long as there are any."""
        batch: _Batch | None = None
        while not self._stopped.is_set():
            with _ROOM, buffers.whole(BATCH_BYTES) as buffer:
                first = ctypes.c_char.from_buffer(buffer)
                try:
                    while not self._stopped.is_set():
                        batch = next(self._left, None) if batch is None else batch
                        if batch is None:
                            return
                        batch.source.read(batch, buffer)
                        if not self._there.wait(_PATIENCE_S):
                            break
                        if not self._stopped.is_set():
                            _write(self._pids[batch.pid], batch, ctypes.addressof(first) - batch.start)
                            batch = None
                finally:
                    # The buffer cannot be closed while something points into it.
                    del first
            self._there.wait()

    def stop(self) -> None:
        """Begin nothing any more: a step under way ends with what it has done. At once; idempotent."""
        self._stopped.set()
        self._there.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Let go of the threads and the files. Blocks; idempotent."""
        self.stop()
        self._pool.shutdown()
        while self._sources:
            self._sources.pop().close()


def _batches(runs: Iterator[Run]) -> Iterator[list[Run]]:
    """What is read, from the first to the last of it, and written at a time."""
    batch: list[Run] = []
    for whole in runs:
        for run in _cut(whole):
            if batch and (run.offset + run.size - batch[0].offset > BATCH_BYTES or len(batch) == _BATCH_RUNS):
                yield batch
                batch = []
            batch.append(run)
    if batch:
        yield batch


def _cut(run: Run) -> Iterator[Run]:
    address, count, offset = run
    while count:
        part = min(count, BATCH_BYTES - address % BATCH_BYTES)
        yield Run(address, part, offset)
        address, count, offset = address + part, count - part, offset + part


def _write(pid: int, batch: _Batch, base: int) -> None:
    """Write one batch into a process; its file would begin at address ``base`` here."""
    pieces = len(batch.runs)
    here, there = (_Vec * pieces)(), (_Vec * pieces)()
    for number, (address, size, offset) in enumerate(batch.runs):
        here[number] = _Vec(base + offset, size)
        there[number] = _Vec(address, size)
    written = _LIBC.process_vm_writev(pid, here, pieces, there, pieces, 0)
    if written != sum(run.size for run in batch.runs):
        said = os.strerror(ctypes.get_errno()) if written < 0 else f"only {written} bytes were written"
        raise EngineDied(f"the memory of process {pid} cannot be filled at {batch.runs[0].address:#x}: {said}")


class _Source:
    """One file of pages, read through the page cache or past it.

    Raises:
        SnapshotError: it cannot be opened.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.path = path
        try:
            self._file = pagecache.Opened(path, direct=direct)
        except OSError as error:
            raise SnapshotError(f"{path} cannot be opened: {error.strerror}; verify the snapshot") from None
        self._size = os.fstat(self._file.fd).st_size

    def close(self) -> None:
        self._file.close()

    def batch(self, pid: int, runs: list[Run]) -> _Batch:
        """Raises SnapshotError when they are not in the file."""
        first, last = runs[0].offset, runs[-1].offset + runs[-1].size
        if last > self._size:
            raise SnapshotError(f"{self.path} is shorter than its plan says; verify the snapshot")
        return _Batch(pid, self, first, last - first, runs)

    def read(self, batch: _Batch, buffer: memoryview) -> None:
        """Fill the beginning of a buffer with a batch's span. Raises SnapshotError when the file ends before."""
        cached, done = self._file.fd, 0
        fd = self._file.direct if self._file.past(batch.span, batch.start) else cached
        while done < batch.span:
            with buffer[done : batch.span] as rest:
                try:
                    count = os.preadv(fd, [rest], batch.start + done)
                except OSError as error:
                    if fd == cached or error.errno != errno.EINVAL:
                        raise SnapshotError(f"{self.path} cannot be read: {error.strerror}; see dmesg") from None
                    # Its blocks are larger than a page.
                    fd = cached
                    continue
            if count == 0:
                raise SnapshotError(f"{self.path} is shorter than its plan says; verify the snapshot")
            done += count
