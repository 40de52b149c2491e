"""Who uses a snapshot, so that nobody removes it meanwhile: a lock on its folder.

The kernel gives it back however a process ends. Users share it; whoever removes has it alone, and never waits for it. Who makes
a snapshot has it alone until it is committed. A replica that runs needs its snapshot's name longer than any call lasts, through
restarts of the restorer: its box's state file says it. Every function blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from restorer.errors import Environment, InUse
from restorer.procfs.processes import start_time

Users = Callable[[], Mapping[str, str]]
"""Snapshot id -> what runs from it."""
_WAIT_S = 2.0
_POLL_S = 0.02
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Hold:
    """The right to use a folder until :meth:`close`; a context manager."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give it back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def use(folder: Path, *, wait_s: float = _WAIT_S) -> Hold:
    """Use a folder together with others.

    Args:
        wait_s: how long to wait for somebody who has just made it.

    Raises:
        InUse: somebody has it alone, who is named. Environment: it is gone.
    """
    deadline = time.monotonic() + wait_s
    fd = _open(folder)
    try:
        while not _locked(fd, fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise InUse(f"{folder} is being made or removed by {_names(folder)}; try again when that has ended")
            time.sleep(_POLL_S)
        if not _is_at(fd, folder):
            raise Environment(f"{folder} was removed just now; try again")
    except BaseException:
        os.close(fd)
        raise
    return Hold(fd)


@contextlib.contextmanager
def alone(folder: Path, users: Mapping[str, str] | Users = dict) -> Iterator[None]:
    """Have a folder alone, to remove it.

    Args:
        users: what runs from it, by the folder's name; asked once the lock is held.

    Raises:
        InUse: somebody uses it, who is named. Environment: it is gone.
    """
    fd = _open(folder)
    try:
        if not _locked(fd, fcntl.LOCK_EX):
            raise InUse(f"{folder.name} is used by {_names(folder)}; try again when that has ended")
        running = users() if callable(users) else users
        if folder.name in running:
            raise InUse(f"{folder.name} is used by {running[folder.name]}; drain that first")
        yield
    finally:
        os.close(fd)


def is_held(folder: Path) -> bool:
    """Somebody, this process included, uses it or has it alone."""
    fd = _open(folder)
    try:
        return not _locked(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def holders(folder: Path) -> list[tuple[int, str]]:
    """(pid, its command line) of every process that holds the lock of a folder, as far as the kernel tells."""
    facts = folder.stat()
    exact: list[int] = []
    alike: list[int] = []
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" in fields or fields[1] != "FLOCK":  # an arrow: one that waits
            continue
        major, minor, inode = fields[5].split(":")
        if int(inode) == facts.st_ino and int(fields[4]) > 0:
            here = (int(major, 16), int(minor, 16)) == (os.major(facts.st_dev), os.minor(facts.st_dev))
            (exact if here else alike).append(int(fields[4]))
    # Some file systems show another device number there than in stat.
    return [(pid, _command(pid)) for pid in dict.fromkeys(exact or alike)]


def users_of(run_dir: Path) -> dict[str, str]:
    """Snapshot id -> the replica or box that was restored from it and lives, by the boxes' state files."""
    found = {}
    for file in sorted((run_dir / "boxes").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = json.loads(file.read_text())
            facts = record["facts"]
            alive = start_time(int(record["init_pid"]))
            if alive is None or alive != facts.get("init_start_time"):
                continue
            replica = facts.get("record") or {}
            snapshot = facts.get("snapshot") or replica.get("snapshot")
            if snapshot:
                who = f"replica {replica['id']}" if replica.get("id") else "an engine that is started or suspended"
                found[str(snapshot)] = f"{who} (box {record['id']})"
    return found


def _open(folder: Path) -> int:
    try:
        return os.open(folder, _FLAGS)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise Environment(f"{folder} is not there, or no folder; `rewake snapshot ls` lists what is") from None
        raise


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), folder.lstat())
    return False


def _names(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, IndexError):
        found = holders(folder)
        if found:
            return " and ".join(f"pid {pid} ({command})" for pid, command in found)
    return "another process"


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words[:120] or Path(f"/proc/{pid}/comm").read_text().strip()
    return "ended"
