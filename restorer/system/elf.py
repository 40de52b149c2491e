"""What a linker named an ELF file: its build-id, which people know a library's build by. Knows nothing of snapshots."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

_NOTE, _BUILD_ID = 4, 3
_MOST_SEGMENTS = 256
_MOST_NOTES = 1 << 16


def build_id(path: Path) -> str | None:
    """The build-id in hex; None: the file has none, or is no little-endian ELF file. Blocks."""
    with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
        head = file.read(64)
        if head[:4] != b"\x7fELF" or head[5] != 1:
            return None
        wide = head[4] == 2
        table = struct.unpack_from("<Q", head, 32)[0] if wide else struct.unpack_from("<L", head, 28)[0]
        size, count = struct.unpack_from("<HH", head, 54 if wide else 42)
        for index in range(min(count, _MOST_SEGMENTS)):
            row = os.pread(file.fileno(), size, table + index * size)
            kind = struct.unpack_from("<L", row)[0]
            start, length = struct.unpack_from("<Q16xQ", row, 8) if wide else struct.unpack_from("<L8xL", row, 4)
            if kind == _NOTE and (found := _named(os.pread(file.fileno(), min(length, _MOST_NOTES), start))):
                return found
    return None


def _named(notes: bytes) -> str | None:
    at = 0
    while at + 12 <= len(notes):
        owner, size, kind = struct.unpack_from("<LLL", notes, at)
        content = at + 12 + _padded(owner)
        if kind == _BUILD_ID and notes[at + 12 : at + 12 + owner] == b"GNU\0":
            return notes[content : content + size].hex()
        at = content + _padded(size)
    return None


def _padded(length: int) -> int:
    return length + 3 & ~3
