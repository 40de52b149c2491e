"""Which tier files would be read from: how much of them the page cache holds. Linux' cachestat(2), or mincore(2), by ctypes.

Takes no memory to speak of, however large the files are.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_FAILED = ctypes.c_void_p(-1).value
_LOWEST = bytes(byte & 1 for byte in range(256))
_CACHESTAT = 451
"""The same on every architecture; Linux 6.5 and later have it."""
_WINDOW_BYTES = 1 << 30
"""What mincore(2) is asked for at a time: a byte for each page."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Found(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


class Opened:
    """A file that can be read through the page cache, and past it where its file system knows how.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str | Path, *, direct: bool) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags)
        self.direct = -1
        """Another descriptor, which reads past the page cache; -1: there is none."""
        if direct:
            # Some file systems, such as those in memory, know no other way than through the page cache.
            with contextlib.suppress(OSError):
                self.direct = os.open(path, flags | os.O_DIRECT)

    def close(self) -> None:
        for fd in {self.fd, self.direct} - {-1}:
            os.close(fd)

    def past(self, size: int, offset: int) -> bool:
        """These bytes are better read past the page cache: it can be done, and less than half of them are there."""
        return self.direct >= 0 and resident(self.fd, size, offset) < size // 2


def evict(paths: Iterable[Path]) -> None:
    """Put files out of the page cache, as far as the kernel lets them go: what runs programs may keep a little of theirs.

    Raises:
        OSError: one cannot be read.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def share(paths: Iterable[Path]) -> tuple[int, int]:
    """(bytes in the page cache, bytes) of all files together.

    Holes are read from nowhere: a file counts with what it takes on disk. What the kernel does not tell counts as not there.

    Raises:
        OSError: a file cannot be opened.
    """
    cached = total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            data = min(facts.st_blocks * 512, facts.st_size)
            cached += min(resident(fd, facts.st_size), data) if data else 0
            total += data
        finally:
            os.close(fd)
    return cached, total


def named(cached: int, total: int) -> str:
    """``page cache`` when at least 95 % of the bytes are in it, ``disk`` when at most 5 % are, else ``mixed``."""
    part = cached / total if total else 1.0
    return "page cache" if part >= 0.95 else "disk" if part <= 0.05 else "mixed"


def tier(paths: Iterable[Path]) -> str:
    """:func:`named`, of :func:`share`."""
    return named(*share(paths))


def resident(fd: int, size: int, offset: int = 0) -> int:
    """Bytes of a part of an open file, both ends at a page, that the page cache holds; 0 when the kernel does not tell."""
    found = _Found()
    asked = _LIBC.syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, size)), ctypes.byref(found), 0)
    if asked == 0:
        return int(found.cache) * mmap.PAGESIZE
    windows = range(offset, offset + size, _WINDOW_BYTES)
    return sum(_by_mincore(fd, at, min(_WINDOW_BYTES, offset + size - at)) for at in windows)


def _by_mincore(fd: int, offset: int, size: int) -> int:
    address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _FAILED:
        return 0
    vector = ctypes.create_string_buffer((size + mmap.PAGESIZE - 1) // mmap.PAGESIZE)
    told = _LIBC.mincore(address, size, vector)
    _LIBC.munmap(address, size)
    return vector.raw.translate(_LOWEST).count(1) * mmap.PAGESIZE if told == 0 else 0
