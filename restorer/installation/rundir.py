"""The run folder and its neighbours: who owns them, who may enter, the admin token, the lock of ``rewake up``.

Owns every permission bit outside the restorer's own files. Knows nothing of processes beyond their pids, and nothing of
what the gateway or the restorer put into their subfolders.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ValidationError

from restorer.errors import Environment

TOKEN = "admin-token"
_LOCK = "up.lock"
_ADDRESS = "up.json"


@dataclass(frozen=True, slots=True)
class Account:
    """A user that a process can become."""

    name: str
    uid: int
    gid: int


def account(user: str) -> Account | None:
    """The account that the gateway and the embedded store run as; None for this process's own, when it is not root.

    Raises:
        Environment: there is no such account, or it is root.
    """
    if os.geteuid() != 0:
        return None
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        raise Environment(f"gateway.user: there is no account {user!r}; create it, or name another") from None
    if found.pw_uid == 0:
        raise Environment(f"gateway.user: {user!r} is root; name an account without rights, such as nobody")
    return Account(user, found.pw_uid, found.pw_gid)


def folder(path: Path, mode: int, *, setting: str, owner: Account | None = None) -> Path:
    """Make a folder, or take over one that is ours, with exactly this mode and owner.

    Args:
        setting: the setting to change if the place is wrong, for the message.

    Raises:
        Environment: it cannot be made, is no folder, or belongs to somebody else.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise Environment(f"{path} is not a folder but a link or a file; remove it, or set {setting} to another place")
        uid, gid = (owner.uid, owner.gid) if owner else (os.geteuid(), os.getegid())
        if found.st_uid not in (uid, os.geteuid()):
            raise Environment(f"{path} belongs to uid {found.st_uid}; remove it, or set {setting} to a folder of your own")
        if (found.st_uid, found.st_gid) != (uid, gid) and os.geteuid() == 0:
            os.chown(path, uid, gid, follow_symlinks=False)
        if stat.S_IMODE(found.st_mode) != mode:
            path.chmod(mode)
    except OSError as error:
        hint = "run as root, or " if os.geteuid() != 0 and isinstance(error, PermissionError) else ""
        raise Environment(f"cannot use {path}: {error.strerror}; {hint}set {setting} to a folder that you may write") from None
    return path


def closed_to(path: Path, who: Account) -> Path | None:
    """The first folder on the way to and including ``path`` that ``who`` may not pass through, if any."""
    for place in (*reversed(path.parents), path):
        with contextlib.suppress(FileNotFoundError):
            found = place.stat()
            bit = stat.S_IXUSR if found.st_uid == who.uid else stat.S_IXGRP if found.st_gid == who.gid else stat.S_IXOTH
            if not found.st_mode & bit:
                return place
    return None


def admin_token(run_dir: Path) -> Path:
    """The file with the admin token, readable by us alone. One that others could have read or written is replaced.

    Raises:
        Environment: the file cannot be written.
    """
    path = run_dir / TOKEN
    try:
        if _trusted(path):
            return path
        temporary = run_dir / f".{TOKEN}.{secrets.token_hex(6)}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(f"{secrets.token_urlsafe(32)}\n")
        temporary.replace(path)
    except OSError as error:
        raise Environment(f"{path}: cannot keep the admin token there: {error.strerror}; set run_dir to another folder") from None
    return path


def _trusted(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    private = stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_uid == os.geteuid()
    return private and len(path.read_text(errors="replace").strip()) >= 32


@dataclass(slots=True)
class Lock:
    """The right to be the one ``rewake up`` of a run folder, and the pids of its children, for a successor to find."""

    fd: int
    left: Mapping[str, int] = field(default_factory=dict)
    """Children of an earlier ``rewake up`` that was killed, and that still run: name -> pid."""

    def remember(self, children: Mapping[str, int]) -> None:
        """Write down which children run now."""
        alive = {name: (pid, started) for name, pid in children.items() if (started := _started(pid))}
        data = _Holder(pid=os.getpid(), children=alive).model_dump_json().encode()
        os.pwrite(self.fd, data, 0)
        os.ftruncate(self.fd, len(data))


@contextlib.contextmanager
def lock(run_dir: Path) -> Iterator[Lock]:
    """Be the one ``rewake up`` on ``run_dir``; the kernel gives the lock back however this process ends.

    Raises:
        Environment: another one has it.
    """
    path = run_dir / _LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Environment(f"{path}: {error.strerror}; remove it, or set run_dir to another folder") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _written(fd).pid
            raise Environment(f"`rewake up` already runs on {run_dir} (pid {holder}); stop it, or set another run_dir") from None
        children = _written(fd).children
        held = Lock(fd, {name: pid for name, (pid, started) in children.items() if _started(pid) == started})
        held.remember(held.left)
        yield held
    finally:
        os.close(fd)


class Address(BaseModel):
    """Where the gateways of a `rewake up` are reached, whatever the configuration file says by now."""

    url: str
    certificate: str | None = None
    """The file of the one that they show; None: no TLS."""
    run_dir: str


def announce(at: Address, state_dir: Path) -> None:
    """Write the address where commands look for it: also in the state folder, for one whose run folder was changed meanwhile.

    Raises:
        Environment: it cannot be written.
    """
    for path in (Path(at.run_dir) / _ADDRESS, state_dir / _ADDRESS):
        try:
            temporary = path.with_suffix(".new")
            temporary.write_text(at.model_dump_json())
            temporary.replace(path)
        except OSError as error:
            raise Environment(f"{path}: {error.strerror}; set run_dir and state_dir to folders that you may write") from None


def address(run_dir: Path, state_dir: Path) -> Address | None:
    """Of the `rewake up` that runs now with one of these folders; None: none does, or it is not ours to know."""
    for folder in (run_dir, state_dir):
        with contextlib.suppress(OSError, ValidationError):
            path = folder / _ADDRESS
            # The admin token is sent there.
            if path.lstat().st_uid in (0, os.geteuid()):
                found = Address.model_validate_json(path.read_bytes())
                if _held(Path(found.run_dir) / _LOCK):
                    return found
    return None


def _held(lock: Path) -> bool:
    """A `rewake up` has it; one that has ended, or was killed, has left its files but not its lock."""
    fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class _Holder(BaseModel):
    """The content of the lock file."""

    pid: int = 0
    children: dict[str, tuple[int, int]] = {}
    """name -> pid, and when it started."""


def _written(fd: int) -> _Holder:
    try:
        return _Holder.model_validate_json(os.pread(fd, 1 << 16, 0))
    except ValidationError:  # new, or cut short by a crash
        return _Holder()


def _started(pid: int) -> int:
    """When the process began, in clock ticks after boot, so that a reused pid is not taken for it; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
