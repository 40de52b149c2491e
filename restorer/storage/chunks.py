"""What objects are made of: the list of their chunks, by which copies elsewhere are stored and fetched, and snapshots compared.

A chunk is a run of whole 4 KiB pages that begins and ends with one that is not zero; what lies between chunks are holes, and
read as zeros. Where a chunk ends is decided by the content of its last page alone, so the same memory is cut the same way
wherever it lies in a file: a dump of the same engine with another setting has its pages at other offsets, and of chunks on a
fixed grid hardly one is equal (docs/benchmarks.md has both measured). The list depends on the content only, never on how a file
system lays holes.

Chunks are named by BLAKE3: beside the SHA-256 that an object has anyway it costs a third of the time, and both are computed
while the bytes are read once. Knows nothing of where snapshots or copies are kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from policies.manifest import ChunkIndex, Manifest
from restorer.errors import SnapshotError
from restorer.system.files import HOLE_BYTES, PAGE, read_data

FILE = "chunks"
"""Name of the list in a snapshot's folder."""
MIN_BYTES, AVERAGE_BYTES, MAX_BYTES = 256 << 10, 1 << 20, 4 << 20
_BOUNDARY = (1 << 64) // (AVERAGE_BYTES // PAGE)
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ZEROS = bytes(HOLE_BYTES)
_FORMAT = 1


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One run of an object's bytes."""

    offset: int
    size: int
    id: bytes
    """BLAKE3 of the content, 32 bytes."""

    @property
    def name(self) -> str:
        """The id in hex."""
        return self.id.hex()


class _Listed(msgspec.Struct, frozen=True, array_like=True):
    path: str
    chunks: tuple[Chunk, ...]


class _List(msgspec.Struct, frozen=True, array_like=True):
    format: int
    objects: tuple[_Listed, ...]


Chunks = Mapping[str, Sequence[Chunk]]
"""Path of each object -> its chunks, by offset."""


class Chunker:
    """Cuts one file into chunks, while it is read from front to back."""

    def __init__(self) -> None:
        self._found: list[Chunk] = []
        self._hash: blake3 | None = None
        self._start = self._end = 0

    def feed(self, offset: int, data: memoryview) -> None:
        """Take the bytes at ``offset``, a multiple of 4096; what is left out between two calls is zeros."""
        at = 0
        for mark, zero in _marks(data):
            self._extend(offset + at, data[at : mark if zero else mark + PAGE])
            at = mark + PAGE
            if not zero and self._end - self._start >= MIN_BYTES:
                self._close()
        self._extend(offset + at, data[at:])

    def finish(self) -> tuple[Chunk, ...]:
        """Every chunk of the file."""
        self._close()
        return tuple(self._found)

    def _extend(self, offset: int, data: memoryview) -> None:
        if not data:
            return
        gap = offset - self._end
        if self._hash is not None and (gap > HOLE_BYTES or offset + PAGE - self._start > MAX_BYTES):
            self._close()
        if self._hash is not None:
            self._hash.update(_ZEROS[:gap])
            self._end = offset
        while data:
            if self._hash is None:
                self._hash, self._start, self._end = blake3(), offset, offset
            piece = data[: MAX_BYTES - (self._end - self._start)]
            self._hash.update(piece)
            self._end += len(piece)
            offset, data = self._end, data[len(piece) :]
            if self._end - self._start >= MAX_BYTES:
                self._close()

    def _close(self) -> None:
        if self._hash is not None:
            self._found.append(Chunk(self._start, self._end - self._start, self._hash.digest()))
            self._hash = None


def _marks(data: memoryview) -> Iterator[tuple[int, bool]]:
    """(offset of a page, whether it is zero), for each page of ``data`` that is zero or may end a chunk.

    Eight words of a page say which it is, so that nearly all pages cost a fraction of a microsecond.
    """
    whole = len(data) & ~(PAGE - 1)
    if whole:
        words = data[:whole].cast("Q")
        for page, (a, b, c, d) in enumerate(zip(words[::512], words[129::512], words[258::512], words[387::512], strict=True)):
            if not (a or b or c or d):
                at = page * PAGE
                if data[at : at + PAGE] == _ZEROS[:PAGE]:
                    yield at, True
            elif ((a ^ b * 3 ^ c * 5 ^ d * 7) * _MIX) & _MASK < _BOUNDARY:
                yield page * PAGE, False
    if len(data) > whole and data[whole:] == _ZEROS[: len(data) - whole]:
        yield whole, True


class Cutter:
    """Cuts many files into chunks while something else reads them."""

    def __init__(self) -> None:
        self._chunkers: dict[Path, Chunker] = {}

    def tap(self, path: Path) -> Callable[[int, memoryview], None]:
        """What a reader of ``path`` tells of each run of bytes. A second call for a path begins it anew."""
        chunker = self._chunkers[path] = Chunker()
        return chunker.feed

    def finish(self) -> dict[Path, tuple[Chunk, ...]]:
        """The chunks of every file that was read."""
        return {path: chunker.finish() for path, chunker in self._chunkers.items()}


def cut(folder: Path, names: Sequence[str]) -> dict[str, tuple[Chunk, ...]]:
    """The chunks of files that have no list: read once more. Blocks."""
    cutter = Cutter()
    for name in names:
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            tap = cutter.tap(folder / name)
            for at, piece in read_data(fd, os.fstat(fd).st_size):
                tap(at, piece)
        finally:
            os.close(fd)
    found = cutter.finish()
    return {name: found[folder / name] for name in names}


def encode(chunks: Chunks) -> tuple[bytes, ChunkIndex]:
    """(the list as it is stored, what a manifest says of it)."""
    listed = tuple(_Listed(path, tuple(chunks[path])) for path in sorted(chunks))
    data = msgspec.msgpack.encode(_List(_FORMAT, listed))
    return data, index(data, sum(len(one.chunks) for one in listed))


def index(data: bytes, count: int) -> ChunkIndex:
    """What a manifest says of a stored list."""
    return ChunkIndex(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), count=count)


def decode(data: bytes, sizes: Mapping[str, int], said: ChunkIndex | None = None) -> dict[str, tuple[Chunk, ...]]:
    """A stored list, if it fits the objects that it is of.

    Args:
        sizes: path -> bytes, of every object.
        said: what the manifest says of the list.

    Raises:
        SnapshotError: it is not the one that the manifest names, or not a list of these objects' chunks.
    """
    try:
        found = msgspec.msgpack.decode(data, type=_List)
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"the list of chunks cannot be read: {error}") from None
    chunks = {one.path: one.chunks for one in found.objects}
    if said is not None and index(data, sum(map(len, chunks.values()))) != said:
        raise SnapshotError("the list of chunks is not the one that the manifest names")
    if found.format != _FORMAT or chunks.keys() != sizes.keys():
        raise SnapshotError("the list of chunks is not one of these objects")
    for path, pieces in chunks.items():
        at = 0
        for chunk in pieces:
            if chunk.offset < at or not 0 < chunk.size <= MAX_BYTES or len(chunk.id) != 32:
                raise SnapshotError(f"the list of chunks of {path} is not in order at byte {chunk.offset}")
            at = chunk.offset + chunk.size
        if at > sizes[path]:
            raise SnapshotError(f"the list of chunks of {path} ends at {at}, behind its {sizes[path]} bytes")
    return chunks


def of(folder: Path, manifest: Manifest) -> dict[str, tuple[Chunk, ...]]:
    """The chunks of a committed snapshot.

    Raises:
        SnapshotError: it has no list, or not the one that its manifest names.
    """
    if manifest.chunks is None:
        raise SnapshotError(
            f"snapshot {manifest.id} was made by a version of Rewake that listed no chunks; it can be restored, but not compared "
            "or copied: make another with `rewake snapshot create`"
        )
    try:
        data = (folder / FILE).read_bytes()
    except OSError as error:
        raise SnapshotError(f"{folder / FILE}: {error.strerror}; verify the snapshot") from None
    return decode(data, {item.path: item.bytes for item in manifest.objects}, manifest.chunks)
