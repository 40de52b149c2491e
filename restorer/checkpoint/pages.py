"""Big memory, taken out of CRIU's images after a dump.

CRIU fills memory with one thread, one process after another, and waits for a page fault at every page. Most of a warm engine
is anonymous memory, so its pages are moved aside::

    images/pages-7.img      what is left to CRIU: stacks, changed pages of files, small areas
    images/bulk-7.img       the pages file as CRIU wrote it; zeros are holes
    images/bulk.json        where each run of it belongs

CRIU then makes the areas empty and leaves the tree stopped, for :mod:`restorer.checkpoint.filling` to put the runs into it.
Only writable private anonymous memory is moved: nothing else can depend on when its pages come. Knows nothing of engines and
boxes.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from restorer.checkpoint import images
from restorer.errors import SnapshotError
from restorer.system.files import data_extents, dig_holes

PLAN = "bulk.json"
LEAST_BYTES = 1 << 20
"""Smaller areas stay with CRIU."""
_SMALL_HOLE_BYTES = 64 << 10
"""Zeros that are put back all the same: a run more costs more."""
_MOST_RUNS = 1 << 16
"""Of one process. Where there would be more, larger holes are put back too: what is kept of a plan in memory is bounded."""
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


class Run(NamedTuple):
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


class Taken(NamedTuple):
    """What :func:`take_out` did."""

    bytes: int
    """Moved aside."""
    dug: int
    """Had been written, and are holes now."""


def take_out(folder: Path, *, huge: bool) -> Taken:
    """Move big memory aside in a folder of fresh images. Blocks.

    Args:
        huge: let the kernel use huge pages for it after a restore, where its setting leaves that to programs.

    Raises:
        SnapshotError: the images are not what is known here; they are spoilt. OSError: the disk is full.
    """
    numbers = [int(path.stem.partition("-")[2]) for path in sorted(folder.glob("mm-*.img"))]
    moved = [found for number in numbers if (found := _moved(folder, number, huge)) is not None]
    if not moved:
        return Taken(0, 0)
    plan = _Plan([process for process, _ in moved])
    (folder / PLAN).write_bytes(msgspec.json.encode(plan))
    return Taken(Bulk(folder, plan).bytes, sum(dug for _, dug in moved))


def _moved(folder: Path, pid: int, huge: bool) -> tuple[_Process, int] | None:
    """Take one process's big memory out, and the bytes of it that became holes; None when it has none."""
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
    dug = dig_holes(pages)
    pages.rename(bulk)
    with bulk.open("rb") as source, pages.open("xb") as target:
        pages.chmod(0o600)
        for run in left:
            _copy(source.fileno(), target.fileno(), run)
        runs = _few(source.fileno(), moved)
    for image, name in ((memory, f"mm-{pid}.img"), (maps._replace(messages=kept), f"pagemap-{pid}.img")):
        (folder / name).unlink()
        image.write(folder / name)
    return _Process(pid, bulk.name, [(run.address, run.size, run.offset) for run in runs]), dug


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


def _run(message: bytes, at: int) -> Run:
    """One entry of a map; its offset is negative when its pages are not in the file."""
    entry = images.numbers(message)
    kind = entry.get(_KIND, 0 if entry.get(_PARENT) else _PRESENT)
    return Run(entry[_ADDRESS], (entry.get(_COUNT) or entry[_COUNT_OLD]) * _PAGE, at if kind & _PRESENT else -1)


def _data(fd: int, runs: Sequence[Run]) -> Iterator[Run]:
    """The runs without their holes."""
    extents = data_extents(fd, os.fstat(fd).st_size)
    start, end = next(extents, (0, 0))
    for run in runs:
        stop = run.offset + run.size
        while end and start < stop:
            low, high = max(start, run.offset) & ~(_PAGE - 1), min(end, stop)
            if low < high:
                yield Run(run.address + low - run.offset, high - low, low)
            if end > stop:
                break
            start, end = next(extents, (0, 0))


def _few(fd: int, moved: Sequence[Run]) -> list[Run]:
    """The runs of data among these, holes between them put back as far as that makes them few enough."""
    hole = _SMALL_HOLE_BYTES
    while True:
        runs = list(itertools.islice(_merged(_data(fd, moved), hole), _MOST_RUNS + 1))
        if len(runs) <= _MOST_RUNS or hole > os.fstat(fd).st_size:
            return list(_merged(_data(fd, moved), hole))
        hole *= 4


def _merged(runs: Iterator[Run], hole: int) -> Iterator[Run]:
    """The runs, with those that only a hole of so many bytes parts as one."""
    last: Run | None = None
    for run in runs:
        if last is not None:
            gap = run.offset - (last.offset + last.size)
            if gap <= hole and run.address - (last.address + last.size) == gap:
                last = last._replace(size=last.size + gap + run.size)
                continue
            yield last
        last = run
    if last is not None:
        yield last


def _copy(source: int, target: int, run: Run) -> None:
    offset, left = run.offset, run.size
    while left:
        done = os.sendfile(target, source, offset, left)
        if done == 0:
            raise SnapshotError("a pages file ended while it was copied; make a new snapshot")
        offset, left = offset + done, left - done
