"""Which tier files would be read from: how much of them the page cache holds. Linux' mincore(2), through ctypes."""

from __future__ import annotations

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


def tier(paths: Iterable[Path]) -> str:
    """``page cache`` when at least 95 % of the files' data is in it, ``disk`` when at most 5 % is, else ``mixed``.

    Holes are read from nowhere: a file counts with what it takes on disk.
    """
    present = pages = 0
    for path in paths:
        facts = path.stat()
        vector = _resident(path, facts.st_size)
        data = -(-min(facts.st_blocks * 512, facts.st_size) // mmap.PAGESIZE) if vector else 0
        present += min(vector.translate(_LOWEST).count(1), data)
        pages += data
    share = present / pages if pages else 1.0
    return "page cache" if share >= 0.95 else "disk" if share <= 0.05 else "mixed"


def _resident(path: Path, size: int) -> bytes:
    """One byte a page; its lowest bit says that the page is in memory. Empty when the kernel does not tell."""
    if size == 0:
        return b""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == _FAILED:
        return b""
    vector = ctypes.create_string_buffer((size + mmap.PAGESIZE - 1) // mmap.PAGESIZE)
    told = _LIBC.mincore(address, size, vector)
    _LIBC.munmap(address, size)
    return vector.raw if told == 0 else b""
