"""Remembered hashes: which files were verified, and have not been written since.

Hashing gigabytes does not belong between a request and its first token, so a file's SHA-256 is remembered together with
its device, inode, size, mtime and ctime, and believed as long as all five still match. The kernel moves ctime at every
write, truncation, rename-over, chmod or utime, and no system call sets it back, so this detects every change made through
the file system, down to one flipped byte with its mtime put back. It does not detect what changes beneath the file system: a
disk that returns other bits, a block device written directly, a clock set back between two writes; nor stores through a
shared mapping on tmpfs. Only a full verification, which reads everything, finds those.

What is remembered on disk is believed only under its seal: a keyed hash over all of it. Where signatures are demanded, the key
is one of this boot's that only root can read (:func:`boot_key`): whoever can change a disk while this kernel does not watch it
cannot forge one, and after a reboot everything is read again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from restorer.system.files import hash_fd, write_durable

SETTLE_NS = 20_000_000
"""A file written within this many nanoseconds could be written again under the same ctime (which moves in ticks of up to
10 ms), so a hash taken that early is not remembered."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEY_BYTES = 32
THREADS = min(8, os.cpu_count() or 1)
_FIELDS = ("dev", "ino", "size", "mtime_ns", "ctime_ns")
Tap = Callable[[int, memoryview], None]
"""Told the offset and content of what is read of a file, in order; holes are left out."""


class Stamps:
    """The remembered hashes of one host, in one file only its owner can read. Safe to use from many threads.

    Args:
        path: where they are kept. A missing, torn or foreign file, or one that others can write, is the same as none:
            everything is hashed once more.
        key: of the seal; without one it finds damage, not forgery.
        limit: entries kept; the ones longest unused are dropped.
    """

    def __init__(self, path: Path, *, key: bytes = b"", limit: int = 100_000) -> None:
        self._path = path
        self._key = key
        self._limit = limit
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._dirty = False
        self._marks: dict[str, dict[str, Any]] = _load(path, key)
        for torn in path.parent.glob(f".{path.name}.*.tmp"):
            torn.unlink(missing_ok=True)

    def sha256(self, path: Path) -> str:
        """SHA-256 (hex) of a regular file, from memory when it is unchanged. Symlinks are followed anew each time.

        Raises:
            OSError: it cannot be read, is not a regular file, or is being written.
        """
        found = self._sha256(path)
        self.save()
        return found

    def sha256_all(
        self,
        paths: Iterable[Path],
        *,
        progress: Callable[[Path], None] | None = None,
        tap: Callable[[Path], Tap] | None = None,
        sparse: bool = False,
    ) -> dict[Path, str | OSError]:
        """:meth:`sha256` of many files, in parallel; a file that cannot be read has its error for a value.

        Args:
            progress: told each file that is done.
            tap: asked for each file for who is told what is read of it; every file is then read, known or not.
            sparse: hash as :class:`~restorer.system.files.SparseHash` does. What is known of a file is known in one of the two.
        """
        done: dict[Path, str | OSError] = {}
        folders: dict[str, str] = {}
        asked = list(dict.fromkeys(paths))
        for path in asked if tap is None else ():
            # Nearly all are known on the way to a first token, and a thread for each would cost more than asking.
            with contextlib.suppress(OSError):
                found = self._remembered(*_located(path, folders), sparse)
                if found is not None:
                    done[path] = found
                    if progress is not None:
                        progress(path)
        unknown = [path for path in asked if path not in done]
        if unknown:
            with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
                jobs = {pool.submit(self._outcome, path, tap, sparse): path for path in unknown}
                for job in concurrent.futures.as_completed(jobs):
                    done[jobs[job]] = job.result()
                    if progress is not None:
                        progress(jobs[job])
        self.save()
        return {path: done[path] for path in asked}

    def forget(self, path: Path) -> None:
        """Hash this file anew the next time."""
        with self._lock, contextlib.suppress(OSError):
            self._dirty |= self._marks.pop(str(path.resolve()), None) is not None

    def moved(self, old: Path, new: Path) -> None:
        """A folder was renamed: what is known of the files in it is known of them under their new names."""
        before, after = f"{os.path.realpath(old)}/", f"{os.path.realpath(new)}/"
        with self._lock:
            for real in [real for real in self._marks if real.startswith(before)]:
                self._marks[after + real.removeprefix(before)] = self._marks.pop(real)
                self._dirty = True
        self.save()

    def save(self) -> None:
        """Write what is new to disk, atomically. A failure to do so costs a hash later, so it is not an error."""
        with self._saving:
            with self._lock:
                if not self._dirty:
                    return
                marks = json.dumps(self._marks, separators=(",", ":")).encode()
                self._dirty = False
            with contextlib.suppress(OSError):
                write_durable(self._path, _seal(self._key, marks) + b"\n" + marks, 0o600)

    def _outcome(self, path: Path, tap: Callable[[Path], Tap] | None, sparse: bool) -> str | OSError:
        try:
            return self._sha256(path, tap, sparse)
        except OSError as error:
            return error

    def _sha256(self, path: Path, tap: Callable[[Path], Tap] | None = None, sparse: bool = False) -> str:
        real = os.path.realpath(path, strict=True)
        if tap is not None:
            return self._hash(real, tap(path), sparse)
        return self._remembered(real, os.stat(real, follow_symlinks=False), sparse) or self._hash(real, None, sparse)

    def _remembered(self, real: str, found: os.stat_result, sparse: bool) -> str | None:
        facts = _facts(found)
        with self._lock:
            mark = self._marks.pop(real, None)
            if mark is None or mark.get("sparse", False) != sparse or any(mark[field] != facts[field] for field in _FIELDS):
                return None
            self._marks[real] = mark  # now the most recently used
            return str(mark["sha256"])

    def _hash(self, real: str, tap: Tap | None, sparse: bool) -> str:
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            # First, so that a mark never outlives its data in a power cut, and so that a page that somebody has mapped
            # writable is clean: the next store into it faults, and moves ctime.
            _flush(fd)
            begun_ns = time.time_ns()
            before = _facts(os.fstat(fd))
            digest = hash_fd(fd, tap, sparse=sparse)
            if _facts(os.fstat(fd)) != before:
                raise OSError(errno.EBUSY, "was written while it was hashed", real)
        finally:
            os.close(fd)
        if before["ctime_ns"] + SETTLE_NS < begun_ns:
            self._remember(real, {**before, "sha256": digest, **({"sparse": True} if sparse else {})})
        return digest

    def _remember(self, real: str, mark: dict[str, Any]) -> None:
        with self._lock:
            self._marks[real] = mark
            while len(self._marks) > self._limit:
                del self._marks[next(iter(self._marks))]
            self._dirty = True


def _located(path: Path, folders: dict[str, str]) -> tuple[str, os.stat_result]:
    """(the path without symlinks, what lies there). ``folders`` remembers those resolved a moment ago."""
    parent, name = os.path.split(path)
    if parent not in folders:
        folders[parent] = os.path.realpath(parent, strict=True)
    real = os.path.join(folders[parent], name)
    found = os.lstat(real)
    if stat.S_ISLNK(found.st_mode) or name in ("", ".", ".."):
        real = os.path.realpath(path, strict=True)
        found = os.lstat(real)
    return real, found


def _flush(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EINVAL):
            raise


def _facts(found: os.stat_result) -> dict[str, int]:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return {
        "dev": found.st_dev,
        "ino": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def boot_key(folder: Path) -> bytes:
    """A key of this boot, that only the running user can read; made if it is not there. Blocks.

    Args:
        folder: private to the running user; best on a file system that ends with the boot, such as /run.

    Raises:
        OSError: it cannot be read or written.
    """
    path = folder / "stamps.key"
    boot = BOOT_ID.read_bytes().strip()
    key = _private(path)
    if key is None or len(key) != _KEY_BYTES:
        key = secrets.token_bytes(_KEY_BYTES)
        write_durable(path, key, 0o600)
    return hmac.digest(key, boot, hashlib.sha256)


def _seal(key: bytes, marks: bytes) -> bytes:
    return hmac.new(key, marks, hashlib.sha256).hexdigest().encode()


def _private(path: Path) -> bytes | None:
    """The content of a file that nobody else can read or write; None: it is not there, or not such a file."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077:
                return file.read()
    return None


def _load(path: Path, key: bytes) -> dict[str, dict[str, Any]]:
    try:
        seal, _, data = (_private(path) or b"").partition(b"\n")
        marks = json.loads(data) if hmac.compare_digest(seal, _seal(key, data)) else {}
        return {real: mark for real, mark in marks.items() if _is_mark(mark)}
    except (ValueError, TypeError, AttributeError):
        return {}


def _is_mark(mark: object) -> bool:
    return (
        isinstance(mark, dict)
        and all(isinstance(mark.get(field), int) for field in _FIELDS)
        and isinstance(mark.get("sha256"), str)
    )
