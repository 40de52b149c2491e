"""Control groups that a tool makes for what runs in a box: let go of when frozen, removed when empty. Knows names alone.

Whatever hierarchies the host has mounted (v1, v2, both): a group of one name may be in each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from restorer.errors import Environment

ROOT = Path("/sys/fs/cgroup")
PARENT = "rewake"
"""All groups of ours are below this one."""
_REMOVE_S = 2.0
_GATHER_S = 5.0
_MEMBERS = "cgroup.procs"
_POLL_S = 0.02


def name(id: str) -> str:
    """The group of a box."""
    return f"{PARENT}/{id}"


def folders(group: str, root: Path = ROOT) -> Iterator[Path]:
    """Where a group is, in each hierarchy that has it."""
    for hierarchy in (root, *(path for path in root.iterdir() if path.is_dir())) if root.is_dir() else ():
        if (folder := hierarchy / group).is_dir():
            yield folder


def thaw(group: str, root: Path = ROOT) -> None:
    """Let what is in a group run: a tool that was killed may have left it frozen, and what is frozen cannot even be killed."""
    for folder in folders(group, root):
        for file, running in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            if (folder / file).exists():
                with contextlib.suppress(OSError):
                    (folder / file).write_text(running)


def gather(group: str, pids: Callable[[], Iterable[int]], root: Path = ROOT) -> None:
    """Put processes into a group, in each hierarchy that has it, until all of them are there: a restore may leave them elsewhere.

    Args:
        pids: whom, asked again each time: they may multiply meanwhile.

    Raises:
        Environment: some are still elsewhere at the deadline.
    """
    homes, deadline = list(folders(group, root)), time.monotonic() + _GATHER_S
    while strangers := [(home, pid) for pid in pids() for home in homes if pid not in _members(home)]:
        if time.monotonic() > deadline:
            raise Environment(f"processes {sorted({pid for _, pid in strangers})} cannot be put into control group {group}")
        for home, pid in strangers:
            # It may have ended; then nobody asks for it again.
            with contextlib.suppress(ProcessLookupError):
                (home / _MEMBERS).write_text(str(pid))


def _members(folder: Path) -> set[int]:
    return set(map(int, (folder / _MEMBERS).read_text().split()))


async def remove(group: str, root: Path = ROOT) -> None:
    """Remove a group and what it holds, whose processes have ended; and the one above, if it was the last. Idempotent."""
    deadline = time.monotonic() + _REMOVE_S
    # The kernel takes processes out of a group a moment after they have ended, and tells nobody.
    while (left := [one for one in folders(group, root) if not _removed(one)]) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    if not left:
        for folder in folders(group.partition("/")[0], root):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        for child in folder.iterdir():
            if child.is_dir():
                _removed(child)
        folder.rmdir()
    return not folder.exists()
