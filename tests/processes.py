"""What tests ask about processes and files of others; blocking, and quick."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path


def alive(pid: int) -> bool:
    """It runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def uid_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def owned(path: Path) -> tuple[int, int]:
    """Permission bits and owner."""
    return mode(path), path.lstat().st_uid


def tcp_listeners(pid: int) -> set[str]:
    """The listening TCP sockets of one process."""
    listening = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        listening |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return listening & {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}


def spawn(*argv: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, cwd=cwd, stdout=subprocess.DEVNULL)


def opened_up(folder: Path) -> Path:
    """Let other accounts pass through a temporary folder: all of its parents that are this account's alone."""
    for place in (folder, *folder.parents):
        if place.stat().st_mode & 0o005 != 0o005:
            place.chmod(0o755)
    return folder
