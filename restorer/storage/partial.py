"""A set of files that is coming, piece by piece, in any order, over any number of runs.

Its folder has a name that says what is coming, so that the next run finds what this one got. What is there is known by its
content alone: nothing is noted, so nothing can be wrong after a crash. Locked by who fills it. Knows files and offsets, not what
they are of, nor where they come from. Every method blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from restorer.errors import Environment
from restorer.system.files import PAGE, begin_writing, data_extents, disk_space

PREFIX = ".pull-"
KEPT_S = 24 * 3600.0
"""How long what has come waits for the next run, before a sweep takes it."""
_ZERO = bytes(PAGE)


class Busy(Environment):
    """Another process fills it just now."""


class Partial:
    """Files of known sizes, made as one large hole each.

    As a context manager it is unlocked at the end, and stays for the next run, unless it was committed or dropped.

    Args:
        root: the folder that it is made in, on the file system of what it is to become.
        name: what is coming.
        sizes: path -> bytes of each file.

    Raises:
        Busy: another process fills it. Environment: the disk is full.
    """

    def __init__(self, root: Path, name: str, sizes: Mapping[str, int]) -> None:
        self.path = root / f"{PREFIX}{name}"
        self.images, self.scratch = self.path / "images", self.path / "scratch"
        self.committed = False
        self._lock = self._locked()
        try:
            with disk_space("making room for a pull", root):
                self._lay(sizes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unlock it. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def drop(self) -> None:
        """Remove it: what it holds is of no use."""
        shutil.rmtree(self.path, ignore_errors=True)

    def read(self, path: str, offset: int, size: int) -> bytes | None:
        """What lies there; None: a hole, into which nothing has been written."""
        fd = self._open(path, os.O_RDONLY)
        try:
            if next(data_extents(fd, offset + size, offset), None) is None:
                return None
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Put a piece in its place. Its zero pages stay holes where nothing lies yet."""
        with disk_space("pulling a snapshot", self.path, len(data)):
            fd = self._open(path, os.O_WRONLY)
            try:
                fresh = next(data_extents(fd, offset + len(data), offset), None) is None
                for start, end in _filled(data) if fresh else ((0, len(data)),):
                    _pwrite(fd, memoryview(data)[start:end], offset + start)
                # A host with much memory would begin only when all has come, and whoever waits would wait for the disk.
                begin_writing(fd, offset, len(data))
            finally:
                os.close(fd)

    def copy(self, source: Path, at: int, path: str, offset: int, size: int) -> None:
        """Put a piece of another file in its place: shared on disk where the file system can, copied otherwise."""
        with disk_space("copying what is here already", self.path, size):
            reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                writer = self._open(path, os.O_WRONLY)
                try:
                    done = 0
                    while done < size:
                        count = os.copy_file_range(reader, writer, size - done, at + done, offset + done)
                        if count == 0:
                            raise OSError(errno.EIO, "ended early", str(source))
                        done += count
                finally:
                    os.close(writer)
            finally:
                os.close(reader)

    def _open(self, path: str, flags: int) -> int:
        return os.open(self.path / path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _locked(self) -> int:
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == self.path.lstat().st_ino:
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise Busy(f"{self.path} is being filled by another process; wait for it") from None
            except FileNotFoundError:
                pass  # committed or swept by somebody else a moment ago
            os.close(fd)

    def _lay(self, sizes: Mapping[str, int]) -> None:
        wanted = {path: size for path, size in sizes.items() if ".." not in path.split("/") and not path.startswith("/")}
        for parent, folders, names in os.walk(self.path, topdown=False):
            for name in (*names, *(name for name in folders if Path(parent, name).is_symlink())):
                if str(Path(parent, name).relative_to(self.path)) not in wanted:
                    Path(parent, name).unlink()
        for path, size in wanted.items():
            target = self.path / path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise Environment(f"{target} is in the way of a pull; remove it")
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, size)
            finally:
                os.close(fd)


def _filled(data: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of pages that are not zero."""
    begun: int | None = None
    for at in range(0, len(data), PAGE):
        piece = data[at : at + PAGE]
        if piece == _ZERO[: len(piece)]:
            if begun is not None:
                yield begun, at
            begun = None
        elif begun is None:
            begun = at
    if begun is not None:
        yield begun, len(data)


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
