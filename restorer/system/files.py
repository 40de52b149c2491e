"""Files on disk: durable writes, hashes, holes. Knows nothing of snapshots; blocking, so async callers use threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from restorer.errors import Environment, ToolFailed, ToolHung

PAGE = 4096
HOLE_BYTES = 64 << 10
"""Longer runs of zeros are as good as holes."""
_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)
_LIBC = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2
_SLOW_DISK = 20_000_000
"""Bytes a second that the slowest disk reads which anybody keeps snapshots on."""


_TIED = ("setpriv", "--pdeathsig", "KILL")
"""Before a tool: it ends with the thread that has started it, which waits for it."""


@contextlib.contextmanager
def disk_space(doing: str, folder: Path, need: int = 0) -> Iterator[None]:
    """Turn "no space left" and "quota exceeded" into :class:`Environment`, saying what was being done and how to go on.

    Args:
        need: bytes that the whole step takes, if known.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(OSError):
            folder = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(folder).free
        wanted = f"free at least {need - free} bytes" if need > free else "free some space"
        raise Environment(
            f"disk full while {doing}: {free} bytes are left at {folder}; {wanted}, or move state_dir to a larger disk"
        ) from error


def write_durable(path: Path, data: bytes, mode: int = 0o400) -> None:
    """Write a whole file so that after a crash it is either there in full or not at all.

    Temporary file in the same folder, write, fsync, rename, fsync of the folder.

    Raises:
        OSError: the file could not be written; nothing is left behind and an older file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def begin_writing(fd: int, offset: int, size: int) -> None:
    """Have a part of an open file written to its disk from now on, so that there is little to wait for when it is synced.

    Nothing is lost where that cannot be done: it is written later then.
    """
    _LIBC.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def fsync(path: Path) -> None:
    """Make one file's or one folder's content durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(root: Path) -> None:
    """Make every regular file and folder under ``root`` durable, deepest first, ``root`` last."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            path = Path(folder, name)
            if stat.S_ISREG(path.lstat().st_mode):
                fsync(path)
        fsync(Path(folder))


def hash_file(path: Path, *, sparse: bool = False) -> str:
    """SHA-256 (hex) of a regular file's content; holes count as the zeros they read as, but are not read.

    Args:
        sparse: leave out long runs of zeros, as :class:`SparseHash` does; they cost nothing then, however long they are.

    Raises:
        OSError: it cannot be read, is not a regular file, is a symlink, or shrank meanwhile.
    """
    # Non-blocking, so that a FIFO in a file's place is refused rather than waited for.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return hash_fd(fd, sparse=sparse)
    finally:
        os.close(fd)


def hash_fd(fd: int, tap: Callable[[int, memoryview], None] | None = None, *, sparse: bool = False) -> str:
    """:func:`hash_file` of an open file; moves its position. ``tap`` is told what :func:`read_data` finds."""
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    digest = SparseHash() if sparse else _PlainHash()
    for at, piece in read_data(fd, facts.st_size):
        digest.feed(at, piece)
        if tap is not None:
            tap(at, piece)
    return digest.finish(facts.st_size)


class _PlainHash:
    """SHA-256 of content in which what is left out is zeros."""

    def __init__(self) -> None:
        self._digest, self._done = hashlib.sha256(), 0

    def feed(self, offset: int, data: memoryview) -> None:
        _zeros(self._digest, offset - self._done)
        self._digest.update(data)
        self._done = offset + len(data)

    def finish(self, size: int) -> str:
        _zeros(self._digest, size - self._done)
        return self._digest.hexdigest()


class SparseHash:
    """SHA-256 of the runs of a file's content, followed by where they lie and by its size, each in 8 bytes, little-endian.

    A run begins and ends with a page of 4 KiB that is not zero; up to 64 KiB of zeros within one are part of it. So it depends on
    the content alone, however a file system lays holes.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._runs: list[int] = []
        self._end = 0

    def feed(self, offset: int, data: memoryview) -> None:
        """Take the bytes at ``offset``, a multiple of 4096; what is left out between two calls is zeros."""
        at = 0
        for zero in zero_pages(data):
            self._extend(offset + at, data[at:zero])
            at = zero + PAGE
        self._extend(offset + at, data[at:])

    def finish(self, size: int) -> str:
        """The hash (hex) of a file of so many bytes."""
        places = [*self._runs, *([self._end] if self._runs else []), size]
        self._digest.update(b"".join(place.to_bytes(8, "little") for place in places))
        return self._digest.hexdigest()

    def _extend(self, offset: int, data: memoryview) -> None:
        if not data:
            return
        gap = offset - self._end
        if not self._runs:
            self._runs.append(offset)
        elif gap > HOLE_BYTES:
            self._runs += (self._end, offset)
        else:
            self._digest.update(_ZEROS[:gap])
        self._digest.update(data)
        self._end = offset + len(data)


def zero_pages(data: memoryview) -> Iterator[int]:
    """Offsets of the pages of ``data`` that are all zeros, in order; the last may be short. One word tells most that are not."""
    whole = len(data) & ~(PAGE - 1)
    if whole:
        for page, word in enumerate(data[:whole].cast("Q")[256::512]):
            if not word and data[page * PAGE : page * PAGE + PAGE] == _ZEROS[:PAGE]:
                yield page * PAGE
    if len(data) > whole and data[whole:] == _ZEROS[: len(data) - whole]:
        yield whole


def read_data(fd: int, size: int) -> Iterator[tuple[int, memoryview]]:
    """(offset, content) of all data of an open file of ``size`` bytes, in order, in whole pages of 4 KiB but for the last; holes
    are left out. The content is valid until the next is asked for.

    Raises:
        OSError: it cannot be read, or shrank meanwhile.
    """
    buffer = memoryview(bytearray(min(_CHUNK, max(size, 1))))
    for start, end in _whole_pages(data_extents(fd, size), size):
        for at in range(start, end, len(buffer)):
            piece, filled = buffer[: end - at], 0
            while filled < len(piece):
                count = os.preadv(fd, [piece[filled:]], at + filled)
                if count == 0:
                    raise OSError(errno.EIO, f"shrank from {size} to {at + filled} bytes while it was read")
                filled += count
            yield at, piece


def _whole_pages(extents: Iterator[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Extents widened to pages, where a file system's blocks are smaller; those that then touch may come apart."""
    done = 0
    for start, end in extents:
        first, last = max(start & -4096, done), min(-(-end // 4096) * 4096, size)
        if first < last:
            yield first, last
            done = last


def data_extents(fd: int, size: int, at: int = 0) -> Iterator[tuple[int, int]]:
    """(start, end) of every run of data in an open file of ``size`` bytes, from ``at`` on; what lies between is holes."""
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start < at:
            yield start, at


def allocated(path: Path) -> int:
    """Bytes that a file, or all files under a folder, take on disk."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        return path.lstat().st_blocks * 512
    return sum(Path(folder, name).lstat().st_blocks * 512 for folder, _, names in os.walk(path) for name in names)


def dig_holes(path: Path, *, patience_s: float = 30.0) -> int:
    """Turn runs of zeros into holes, by util-linux's ``fallocate``; the content reads the same. Returns bytes freed.

    A file system without holes frees nothing, and that is all: it costs space, never correctness. A donor stands still
    meanwhile, so it has ``patience_s``, and besides as long as its bytes take on a slow disk. However this process ends, the
    kernel ends the tool with it.

    Raises:
        Environment: there is no ``fallocate``, or no ``setpriv``.
        ToolFailed, ToolHung: it failed, or took longer than that.
    """
    before = allocated(path)
    timeout_s = patience_s + before / _SLOW_DISK
    argv = [*_TIED, "fallocate", "--dig-holes", str(path)]
    if shutil.which("fallocate") is None:
        raise Environment("fallocate is missing; install util-linux")
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except FileNotFoundError:
        raise Environment("setpriv is missing; install util-linux") from None
    except subprocess.TimeoutExpired:
        raise ToolHung(f"fallocate --dig-holes {path} did not end within {timeout_s:g} s and was killed") from None
    if done.returncode != 0 and "not supported" not in done.stderr:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        raise ToolFailed("fallocate", done.returncode, done.stderr)
    return max(0, before - allocated(path))


def copy_sparse(source: int, target: int) -> int:
    """Copy one open file into another, empty one; holes stay holes. Returns the bytes of data copied."""
    size, copied = os.fstat(source).st_size, 0
    for start, end in data_extents(source, size):
        os.lseek(target, start, os.SEEK_SET)
        at = start
        while at < end:
            count = os.sendfile(target, source, at, end - at)
            if count == 0:
                raise OSError(errno.EIO, f"shrank from {size} to {at} bytes while it was copied")
            at += count
            copied += count
    os.ftruncate(target, size)
    return copied


def _zeros(digest: hashlib._Hash, count: int) -> None:
    while count > 0:
        digest.update(_ZEROS if count >= _CHUNK else _ZEROS[:count])
        count -= _CHUNK
