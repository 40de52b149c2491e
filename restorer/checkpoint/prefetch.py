"""Files that an engine has mapped, read into the page cache while the engine is restored; and which of them are worth it.

What a file's mapping has touched is read out of /proc of a rehearsed engine. Whether to read ahead is
:mod:`policies.reading`'s to say.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from policies import reading
from policies.manifest import Manifest, MappedFile
from policies.reading import Restore
from restorer.procfs import inventory
from restorer.system import pagecache

_BLOCK = 1 << 20
_READERS = 2
"""More take the disk and the processors from what a restore waits for."""
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ .{4} [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ \d+ *(/.*)?")


@dataclass(frozen=True, slots=True)
class Touched:
    """What of mapped files an engine's canary needs, and how much of that lay in the page cache at the beginning, in bytes."""

    cached: int
    bytes: int


def look(files: Sequence[MappedFile]) -> Touched | None:
    """What of these files a canary needs, and where it lies now; None: nothing. Blocks for microseconds a file."""
    needed = cached = 0.0
    for file in files:
        if file.touched and (found := _share(file.path)) is not None:
            needed += file.touched
            cached += file.touched * found
    return Touched(int(cached), int(needed)) if needed else None


def _share(path: str) -> float | None:
    """None: it cannot be opened, as whoever verifies it will say."""
    with contextlib.suppress(OSError):
        there, total = pagecache.share([Path(path)])
        return there / total if total else 1.0
    return None


def begun(images: Sequence[Path], mapped: Sequence[MappedFile], settings: Restore) -> tuple[int, int]:
    """(bytes in the page cache, bytes) of CRIU's images; what it needs first is on its way into it when this returns.

    CRIU reads one image after another, looks at one mapped file after another, and waits for the disk each time. Big images are
    left to it: their pages would be needed twice at once.
    """
    found = pagecache.share(images)
    if found[0] < found[1]:
        for path in images:
            if (size := path.stat().st_size) < reading.LEAST_BYTES:
                _ask(str(path), size)
    for name, size in reading.first(settings, mapped):
        # Reading ahead is no more than a favour: who needs the file will say what is wrong with it.
        with contextlib.suppress(OSError):
            _ask(name, size)
    return found


def _ask(path: str, size: int) -> None:
    """Have the beginning of a file read into the page cache, by the kernel; waits for nothing. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # One call brings no more than the disk's readahead, whatever it is asked for.
        for at in range(0, size, _BLOCK):
            os.posix_fadvise(fd, at, min(_BLOCK, size - at), os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def beside(mapped: Sequence[MappedFile], settings: Restore) -> AsyncIterator[Touched | None]:
    """Read what is worth it of an engine's mapped files while the body restores it, and not a block longer.

    Yields what of them its canary will need. What cannot be read is left out.
    """
    files, _ = reading.ahead(settings, mapped)
    touched = await asyncio.to_thread(look, mapped)
    stopped = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(_READERS, "prefetch") as pool:
        readers = [pool.submit(_read, files, number, stopped) for number in range(_READERS if files else 0)]
        try:
            yield touched
        finally:
            stopped.set()
            await asyncio.shield(asyncio.gather(*map(asyncio.wrap_future, readers)))


def _read(files: Sequence[MappedFile], number: int, stopped: threading.Event) -> None:
    """One reader's share, block by block; what is there already is passed over."""
    buffer = bytearray(_BLOCK)
    for file in files:
        with contextlib.suppress(OSError):
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for at in range(number * _BLOCK, file.bytes, _READERS * _BLOCK):
                    if stopped.is_set():
                        return
                    if pagecache.resident(fd, _BLOCK, at) < _BLOCK:
                        os.preadv(fd, [buffer], at)
            finally:
                os.close(fd)


def touched(root_pid: int, *, proc_root: Path = Path("/proc")) -> dict[str, int]:
    """Path, as the engine sees it -> bytes that a tree's mappings of it have present; of several processes, the most.

    After a restore a mapping begins empty, so that this is what was touched since. A process that ends meanwhile is left out.
    """
    found: dict[str, int] = {}
    for pid in inventory.numbers(root_pid, proc_root=proc_root).values():
        with contextlib.suppress(OSError):
            for path, size in _present(proc_root / str(pid) / "smaps").items():
                found[path] = max(size, found.get(path, 0))
    return found


def _present(smaps: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    path: str | None = None
    with smaps.open(errors="surrogateescape") as lines:
        for line in lines:
            if line.startswith("Rss:"):
                if path is not None:
                    found[path] = found.get(path, 0) + (int(line.split()[1]) << 10)
            elif head := _MAPPING.fullmatch(line.rstrip("\n")):
                path = head[1]
    return found


def noted(draft: Manifest, found: Mapping[str, int]) -> Manifest:
    """A manifest that says of each mapped file how much of it was touched."""
    files = [
        file.model_copy(update={"touched": min(file.bytes, found.get(file.path, 0)) if found else None}) for file in draft.files
    ]
    return draft.model_copy(update={"files": tuple(files)})
