"""Memory that several snapshots of a host have, there once on the disk where its file system can: XFS and Btrfs, by reflink.

The kernel is told which runs of two files are equal (FIDEDUPERANGE): it compares them itself, byte by byte, and then has both
files use the same blocks, until somebody writes to one. Neither file changes, nor its times; unlike hard links they stay two
files, each with a mode and a life of its own. XFS frees the blocks that are no longer used at once; Btrfs frees an extent, of up
to 128 MiB, only when nothing of it is used any more. On other file systems, ext4 for one, nothing happens.

Knows snapshots and their chunks. Every function blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from policies.manifest import Manifest
from restorer.errors import SnapshotError
from restorer.storage import chunks
from restorer.storage.chunks import Chunk
from restorer.storage.snapshots import SnapshotStore
from restorer.system.files import PAGE

_FIDEDUPERANGE = 0xC0189436
_ASKED, _ANSWERED = struct.Struct("=QQHHIqQQiI"), struct.Struct("=Qi4x")
"""One range of a source and one of another file; the end of it, as the kernel fills it in: bytes that are shared, status."""
_SOURCES = 16
"""Snapshots that are asked for chunks."""
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV)

Places = dict[bytes, tuple[Path, int]]
"""A chunk's id -> a file and the offset at which it lies there."""


class Sharer:
    """Shares what snapshots that are new here have in common with older ones.

    Args:
        store: what is in it now has had its turn.
    """

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._seen = {manifest.id for manifest in store.list()}

    def round(self) -> dict[str, int]:
        """Id -> bytes that are shared since, of every new snapshot for which that came to something."""
        found = {}
        listed = self._store.list()
        for manifest in listed:
            older = [one for one in listed if one.id in self._seen]
            if manifest.id not in self._seen and (size := share(self._store, manifest, older)):
                found[manifest.id] = size
            self._seen.add(manifest.id)
        self._seen = {manifest.id for manifest in listed}
        return found


def share(store: SnapshotStore, manifest: Manifest, others: Sequence[Manifest]) -> int:
    """Have a snapshot use the blocks of others for chunks that they have too; the bytes for which that was done."""
    folder, shared = store.folder(manifest.id), 0
    with contextlib.suppress(SnapshotError, OSError):
        listed = chunks.of(folder, manifest)
        known = lying(store, others, {chunk.id for pieces in listed.values() for chunk in pieces})
        for name, pieces in listed.items():
            if any(chunk.id in known for chunk in pieces):
                shared += _share_file(folder / name, pieces, known)
    return shared


def lying(store: SnapshotStore, manifests: Sequence[Manifest], wanted: Container[bytes]) -> Places:
    """Where chunks lie in some of a store's snapshots, of which the first few are looked through."""
    found: Places = {}
    for manifest in manifests[:_SOURCES]:
        folder = store.folder(manifest.id)
        with contextlib.suppress(SnapshotError):
            for path, pieces in chunks.of(folder, manifest).items():
                for chunk in pieces:
                    if chunk.id in wanted:
                        found.setdefault(chunk.id, (folder / path, chunk.offset))
    return found


def _share_file(path: Path, pieces: Sequence[Chunk], known: Places) -> int:
    """Raises OSError where the file system cannot, or a file is gone."""
    shared = 0
    with _opened(path) as target:
        for chunk in pieces:
            if (place := known.get(chunk.id)) is not None and chunk.size >= PAGE:
                with _opened(place[0]) as source:
                    shared += _share_run(source, place[1], target, chunk.offset, chunk.size & ~(PAGE - 1))
    return shared


def _share_run(source: int, source_offset: int, target: int, offset: int, size: int) -> int:
    done = 0
    while done < size:
        asked = bytearray(_ASKED.pack(source_offset + done, size - done, 1, 0, 0, target, offset + done, 0, 0, 0))
        fcntl.ioctl(source, _FIDEDUPERANGE, asked)
        count, status = _ANSWERED.unpack_from(asked, _ASKED.size - _ANSWERED.size)
        if -status in _NOT_HERE:
            raise OSError(-status, os.strerror(-status))
        if status != 0 or count == 0:  # they are not equal after all, or cannot be compared: a pity, and nothing more
            break
        done += count
    return done


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)
