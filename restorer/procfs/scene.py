"""A process tree as /proc shows it, read once for all questions about it. Parsing only; what is odd is for others to say.

Processes may live in other namespaces: all is read through their own entries. What ends meanwhile is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from restorer.procfs.sockets import Socket

PROC = Path("/proc")
_ANONYMOUS = re.compile(r"(?:anon_inode:|pipe:|socket:|/memfd:|pidfd:|mnt:|net:|/dev/zero|/SYSV|\[)")
DELETED = " (deleted)"
_INODE = re.compile(r"(?:socket|pipe):\[(\d+)\]")


class Finding(NamedTuple):
    """One thing worth knowing before a dump."""

    code: str
    severity: Literal["fatal", "note"]
    pid: int
    """As numbered by the /proc that was read."""
    fd: int | None
    what: str
    remedy: str

    def __str__(self) -> str:
        where = f"pid {self.pid}" if self.fd is None else f"pid {self.pid}, fd {self.fd}"
        return f"{self.code} ({where}): {self.what}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Tree:
    """A process and all its descendants."""

    pids: tuple[int, ...]
    """As numbered by the /proc that was read; the root first."""
    inner: tuple[int, ...]
    """Every pid and tid as numbered in the tree's own pid namespace, sorted: what a restore will occupy."""


class Descriptor(NamedTuple):
    """One open file of one process."""

    pid: int
    fd: int
    link: str
    """What /proc says it is."""
    flags: int
    path: Path
    """The magic link itself, to ask the open file for its facts."""


@dataclass(slots=True)
class Scene:
    """Everything read once, for all checks."""

    tree: Tree
    proc: Path
    descriptors: list[Descriptor]
    mappings: list[tuple[int, str]]
    sockets: dict[int, Socket]
    private: tuple[str, ...]
    ghost_limit: int
    outside_tcp_ok: bool
    contained: bool = False
    """The tree is a container within its box: it has a mount and a pid namespace of its own, which its tool restores."""
    held: set[int] = field(default_factory=set)
    """Inodes of sockets that the tree holds."""


def once(descriptors: Iterable[Descriptor]) -> Iterable[Descriptor]:
    """One descriptor for each thing held: forks share them."""
    return {one.link: one for one in descriptors}.values()


def descriptors_of(family: Tree, proc: Path) -> Iterator[Descriptor]:
    for pid in family.pids:
        for fd in names_in(proc / str(pid) / "fd"):
            path = proc / str(pid) / "fd" / fd
            try:
                one = Descriptor(pid, int(fd), os.readlink(path), 0, path)
            except OSError:
                continue
            flags = fields_of(fdinfo(proc, one)).get("flags", "0")
            yield one._replace(flags=int(flags, 8))


def links(proc: Path, pid: str) -> Iterator[str]:
    for fd in names_in(proc / pid / "fd"):
        try:
            yield os.readlink(proc / pid / "fd" / fd)
        except OSError:
            continue


def mapped(pid: int, proc: Path) -> Iterator[str]:
    """What a process has mapped, by name, its program included."""
    with contextlib.suppress(OSError):
        yield os.readlink(proc / str(pid) / "exe")
    seen = set()
    for line in text_of(proc / str(pid) / "maps").split("\n"):
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5] not in seen:
            seen.add(parts[5])
            # The kernel escapes only a newline.
            yield parts[5].replace("\\012", "\n")


def drivers_of(proc: Path) -> dict[int, str]:
    """Major number -> whose character devices have it."""
    listed = text_of(proc / "devices").partition("Block devices:")[0]
    found = (line.split() for line in listed.splitlines())
    return {int(words[0]): words[1] for words in found if len(words) == 2 and words[0].isdigit()}


def is_named(path: str) -> bool:
    """A file with a name, as far as /proc can tell: no socket, memory file, or file that was unlinked."""
    return path.startswith("/") and not _ANONYMOUS.match(path) and not path.endswith(DELETED)


def within(path: str, folders: Collection[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def inode_of(link: str) -> int | None:
    found = _INODE.fullmatch(link)
    return int(found[1]) if found else None


def inner_pid(task: Path, outer: int) -> int:
    numbers = fields_of(text_of(task / "status")).get("NSpid", "").split()
    return int(numbers[-1]) if numbers else outer


def fdinfo(proc: Path, one: Descriptor) -> str:
    return text_of(proc / str(one.pid) / "fdinfo" / str(one.fd))


def fields_of(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.split("\n"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
