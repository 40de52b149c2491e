"""Big memory, taken out of CRIU's images after a dump and put back by many threads after a restore.

CRIU fills memory with one thread, one process after another, and waits for a page fault at every page. Most of a warm engine
is anonymous memory, so its pages are moved aside::

    images/pages-7.img      what is left to CRIU: stacks, changed pages of files, small areas
    images/bulk-7.img       the pages file as CRIU wrote it; zeros are holes
    images/bulk.json        where each run of it belongs

CRIU then makes the areas empty, leaves the tree stopped, and the runs are written into it with process_vm_writev(2) by as
many threads as there are processors. Only writable private anonymous memory is moved: nothing else can depend on when its
pages come. Knows nothing of engines and boxes.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from restorer import images
from restorer.errors import EngineDied, SnapshotError
from restorer.files import data_extents, dig_holes

PLAN = "bulk.json"
LEAST_BYTES = 1 << 20
"""Smaller areas stay with CRIU."""
BATCH_BYTES = 8 << 20
"""What one call writes; areas are cut at multiples of it, so that no two threads meet in one huge page."""
_BATCH_RUNS = 1024
"""Most pieces that one call takes."""
_GAP_BYTES = 1 << 20
"""A larger hole between two runs ends a batch: its span is made present as a whole."""
_SMALL_HOLE_BYTES = 64 << 10
"""Zeros that are put back all the same: a run more costs more."""
_POPULATE_THREADS = 4
"""Few: CRIU and the loading of weights want the processors meanwhile."""
_PAGE = mmap.PAGESIZE

# Fields of CRIU's messages and their bits: images/mm.proto, images/vma.proto, images/pagemap.proto.
_VMAS = 14
_START, _END, _PROT, _FLAGS, _STATUS, _ADVICE = 1, 2, 5, 6, 7, 9
_PAGES_ID = 1
_ADDRESS, _COUNT_OLD, _PARENT, _KIND, _COUNT = 1, 2, 3, 4, 5
_PRESENT = 1 << 2
_WRITABLE = 0x2
_PRIVATE, _ANONYMOUS, _GROWSDOWN, _HUGETLB = 0x2, 0x20, 0x100, 0x40000
_REGULAR, _ANON_PRIVATE = 1 << 0, 1 << 9
_SPECIAL = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 12 | 1 << 13 | 1 << 15
"""Stack, vsyscall, vdso, vvar, asynchronous I/O ring, shadow stack."""
_HUGEPAGE, _NOHUGEPAGE = 1 << 14, 1 << 15
_POPULATE_READ = 22


class _Run(NamedTuple):
    """Bytes that belong together in memory and in the file."""

    address: int
    size: int
    offset: int


class _Process(msgspec.Struct, frozen=True):
    pid: int
    file: str
    runs: list[tuple[int, int, int]]


class _Plan(msgspec.Struct, frozen=True):
    processes: list[_Process]


class _Vec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("count", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.process_vm_writev.restype = ctypes.c_ssize_t
_LIBC.process_vm_writev.argtypes = [
    ctypes.c_int,
    *(ctypes.POINTER(_Vec), ctypes.c_ulong) * 2,
    ctypes.c_ulong,
]
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Batch(NamedTuple):
    """What one call writes."""

    start: int
    """In the file; with ``span`` the bytes of it that are needed."""
    span: int
    here: ctypes.Array[_Vec]
    there: ctypes.Array[_Vec]
    size: int


@dataclass(frozen=True, slots=True)
class Bulk:
    """What was taken out of one snapshot's images."""

    folder: Path
    plan: _Plan

    @property
    def bytes(self) -> int:
        """Bytes to put back; zeros are not among them."""
        return sum(size for process in self.plan.processes for _, size, _ in process.runs)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files they are read from."""
        return tuple(self.folder / process.file for process in self.plan.processes)


class Filling:
    """The way of big memory back into one restored tree, in two steps, so that the first can be done while CRIU works.

    Args:
        threads: default: one for each processor, at most sixteen.
    """

    def __init__(self, bulk: Bulk, threads: int | None = None) -> None:
        self._bulk = bulk
        self._pool = concurrent.futures.ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1), "fill memory")
        self._sources: list[_Source] = []
        self._batches: list[tuple[int, _Source, _Batch]] = []

    def prepare(self) -> None:
        """Bring everything into this process's reach. Blocks.

        Raises:
            SnapshotError: a file cannot be mapped, or is shorter than it was.
        """
        for process in self._bulk.plan.processes:
            self._sources.append(source := _Source(self._bulk.folder / process.file))
            for runs in _batches(itertools.starmap(_Run, process.runs)):
                self._batches.append((process.pid, source, source.batch(runs)))
        shares = [self._batches[number::_POPULATE_THREADS] for number in range(_POPULATE_THREADS)]
        list(self._pool.map(_populate, shares))

    def put_back(self, pids: Mapping[int, int]) -> None:
        """Fill the memory of a tree that has not run yet. Blocks.

        Args:
            pids: number inside the tree's pid namespace -> number here, of every process.

        Raises:
            EngineDied: a process is gone, or lacks memory that it had.
        """
        missing = {pid for pid, _, _ in self._batches} - set(pids)
        if missing:
            raise EngineDied(f"of the restored engine the processes {sorted(missing)} are gone")
        list(self._pool.map(lambda job: job[1].write(pids[job[0]], job[2]), self._batches))

    def stop(self) -> None:
        """Begin nothing any more: steps under way fail with whatever is left of them. At once; idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Let go of the threads and the files, when no step is under way. Blocks; idempotent."""
        self._pool.shutdown(cancel_futures=True)
        self._batches.clear()
        while self._sources:
            self._sources.pop().close()


def taken_out(folder: Path) -> Bulk | None:
    """What :func:`take_out` moved aside in this folder of images; None: nothing.

    Raises:
        SnapshotError: its plan cannot be read.
    """
    try:
        return Bulk(folder, msgspec.json.decode((folder / PLAN).read_bytes(), type=_Plan))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise SnapshotError(f"{folder / PLAN} cannot be read: {error}; verify the snapshot") from None


def take_out(folder: Path, *, huge: bool) -> int:
    """Move big memory aside in a folder of fresh images. Blocks; returns the bytes moved.

    Args:
        huge: let the kernel use huge pages for it after a restore, where its setting leaves that to programs.

    Raises:
        SnapshotError: the images are not what is known here; they are spoilt. OSError: the disk is full.
    """
    processes = []
    for path in sorted(folder.glob("mm-*.img")):
        process = _moved(folder, int(path.stem.partition("-")[2]), huge)
        if process is not None:
            processes.append(process)
    if not processes:
        return 0
    plan = _Plan(processes)
    (folder / PLAN).write_bytes(msgspec.json.encode(plan))
    return Bulk(folder, plan).bytes


def _moved(folder: Path, pid: int, huge: bool) -> _Process | None:
    """Take one process's big memory out; None when it has none."""
    memory, areas = _areas(images.read(folder / f"mm-{pid}.img"), huge)
    maps = images.read(folder / f"pagemap-{pid}.img")
    number = images.numbers(maps.messages[0])[_PAGES_ID]
    pages, bulk = folder / f"pages-{number}.img", folder / f"bulk-{number}.img"
    kept, left, moved, at = [maps.messages[0]], [], [], 0
    for message in maps.messages[1:]:
        run = _run(message, at)
        if run.offset >= 0:
            at += run.size
        if run.offset >= 0 and any(low <= run.address and run.address + run.size <= high for low, high in areas):
            moved.append(run)
        else:
            kept.append(message)
            if run.offset >= 0:
                left.append(run)
    if not moved:
        return None
    if at != pages.stat().st_size:
        raise SnapshotError(f"{pages} holds {pages.stat().st_size} bytes, and its map {at}; make a new snapshot")
    dig_holes(pages)
    pages.rename(bulk)
    with bulk.open("rb") as source, pages.open("xb") as target:
        pages.chmod(0o600)
        for run in left:
            _copy(source.fileno(), target.fileno(), run)
        runs = list(_merged(_data(source.fileno(), moved)))
    for image, name in ((memory, f"mm-{pid}.img"), (maps._replace(messages=kept), f"pagemap-{pid}.img")):
        (folder / name).unlink()
        image.write(folder / name)
    return _Process(pid, bulk.name, [(run.address, run.size, run.offset) for run in runs])


def _areas(memory: images.Image, huge: bool) -> tuple[images.Image, list[tuple[int, int]]]:
    """(the image with the areas to be moved advised, their bounds; neighbours as one)."""
    found: list[tuple[int, int]] = []
    content = list(images.fields(memory.messages[0]))
    for number, field in enumerate(content):
        if field.number != _VMAS or not isinstance(field.value, bytes):
            continue
        area = images.numbers(field.value)
        if not _movable(area):
            continue
        if found and found[-1][1] == area[_START]:
            found[-1] = (found[-1][0], area[_END])
        else:
            found.append((area[_START], area[_END]))
        advice = area.get(_ADVICE, 0)
        if huge and not advice & _NOHUGEPAGE:
            rest = [one for one in images.fields(field.value) if one.number != _ADVICE]
            after = next((at for at, one in enumerate(rest) if one.number > _ADVICE), len(rest))
            rest.insert(after, images.integer(_ADVICE, advice | _HUGEPAGE))
            content[number] = field._replace(value=images.encoded(rest))
    return memory._replace(messages=[images.encoded(content), *memory.messages[1:]]), found


def _movable(area: Mapping[int, int]) -> bool:
    flags, status = area[_FLAGS], area[_STATUS]
    return bool(
        area[_END] - area[_START] >= LEAST_BYTES
        and area[_PROT] & _WRITABLE
        and flags & _PRIVATE
        and flags & _ANONYMOUS
        and not flags & (_GROWSDOWN | _HUGETLB)
        and status & _REGULAR
        and status & _ANON_PRIVATE
        and not status & _SPECIAL
    )


def _run(message: bytes, at: int) -> _Run:
    """One entry of a map; its offset is negative when its pages are not in the file."""
    entry = images.numbers(message)
    kind = entry.get(_KIND, 0 if entry.get(_PARENT) else _PRESENT)
    return _Run(entry[_ADDRESS], (entry.get(_COUNT) or entry[_COUNT_OLD]) * _PAGE, at if kind & _PRESENT else -1)


def _data(fd: int, runs: Sequence[_Run]) -> Iterator[_Run]:
    """The runs without their holes."""
    extents = data_extents(fd, os.fstat(fd).st_size)
    start, end = next(extents, (0, 0))
    for run in runs:
        stop = run.offset + run.size
        while end and start < stop:
            low, high = max(start, run.offset) & ~(_PAGE - 1), min(end, stop)
            if low < high:
                yield _Run(run.address + low - run.offset, high - low, low)
            if end > stop:
                break
            start, end = next(extents, (0, 0))


def _merged(runs: Iterator[_Run]) -> Iterator[_Run]:
    """The runs, with those that only a small hole parts as one."""
    last: _Run | None = None
    for run in runs:
        if last is not None:
            gap = run.offset - (last.offset + last.size)
            if gap <= _SMALL_HOLE_BYTES and run.address - (last.address + last.size) == gap:
                last = last._replace(size=last.size + gap + run.size)
                continue
            yield last
        last = run
    if last is not None:
        yield last


def _copy(source: int, target: int, run: _Run) -> None:
    offset, left = run.offset, run.size
    while left:
        done = os.sendfile(target, source, offset, left)
        if done == 0:
            raise SnapshotError("a pages file ended while it was copied; make a new snapshot")
        offset, left = offset + done, left - done


def _batches(runs: Iterator[_Run]) -> Iterator[list[_Run]]:
    """What one call writes at a time."""
    batch: list[_Run] = []
    total = 0
    for whole in runs:
        for run in _cut(whole):
            far = batch and run.offset - (batch[-1].offset + batch[-1].size) > _GAP_BYTES
            if batch and (far or total + run.size > BATCH_BYTES or len(batch) == _BATCH_RUNS):
                yield batch
                batch, total = [], 0
            batch.append(run)
            total += run.size
    if batch:
        yield batch


def _cut(run: _Run) -> Iterator[_Run]:
    address, count, offset = run
    while count:
        part = min(count, BATCH_BYTES - address % BATCH_BYTES)
        yield _Run(address, part, offset)
        address, count, offset = address + part, count - part, offset + part


def _populate(share: Sequence[tuple[int, _Source, _Batch]]) -> None:
    for _, source, batch in share:
        source.populate(batch)


class _Source:
    """One file of pages, mapped for reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._size = os.fstat(fd).st_size
            base = _LIBC.mmap(None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if base is None or base == ctypes.c_void_p(-1).value:
            raise SnapshotError(f"{path} cannot be mapped: {os.strerror(ctypes.get_errno())}")
        self._base: int = base

    def close(self) -> None:
        _LIBC.munmap(self._base, self._size)

    def batch(self, runs: Sequence[_Run]) -> _Batch:
        """What one system call takes for these runs."""
        first, last = runs[0].offset, runs[-1].offset + runs[-1].size
        if last > self._size:
            raise SnapshotError(f"{self._path} is shorter than its plan says; verify the snapshot")
        here, there = (_Vec * len(runs))(), (_Vec * len(runs))()
        for number, (address, size, offset) in enumerate(runs):
            here[number] = _Vec(self._base + offset, size)
            there[number] = _Vec(address, size)
        return _Batch(first, last - first, here, there, sum(run.size for run in runs))

    def populate(self, batch: _Batch) -> None:
        """Map a batch's span with one system call instead of a fault at each page; older kernels do without."""
        _LIBC.madvise(self._base + batch.start, batch.span, _POPULATE_READ)

    def write(self, pid: int, batch: _Batch) -> None:
        """Write one batch into a process."""
        pieces = len(batch.here)
        written = _LIBC.process_vm_writev(pid, batch.here, pieces, batch.there, pieces, 0)
        if written != batch.size:
            said = os.strerror(ctypes.get_errno()) if written < 0 else f"{written} of {batch.size} bytes written"
            raise EngineDied(f"the memory of process {pid} cannot be filled at {batch.there[0].base:#x}: {said}")
