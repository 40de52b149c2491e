"""What a process tree holds that a dump must know of: found before the dump, by reading /proc and nothing else.

Answers with findings that name process, descriptor and remedy. A fatal one means that CRIU would fail, or worse, dump
something that cannot be restored. Processes may live in other namespaces: all is read through their own /proc entries.
A process that ends meanwhile is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from restorer.errors import EngineDied
from restorer.procfs import obstacles
from restorer.procfs.scene import (
    DELETED,
    PROC,
    Descriptor,
    Finding,
    Scene,
    Tree,
    descriptors_of,
    fdinfo,
    fields_of,
    inner_pid,
    inode_of,
    is_named,
    is_regular,
    links,
    mapped,
    names_in,
    once,
    size_of,
    text_of,
    within,
)
from restorer.procfs.sockets import sockets_of

_TTY = re.compile(r"/dev/(?:tty.*|pts/.*|console)(?: \(deleted\))?")
_OVERLAY = " - overlay "
_WRITING = os.O_WRONLY | os.O_RDWR


def tree(root_pid: int, *, proc_root: Path = PROC) -> Tree:
    """The process tree under ``root_pid``.

    Raises:
        EngineDied: there is no such process.
    """
    pids, inner = [], []
    waiting = [root_pid]
    while waiting:
        pid = waiting.pop()
        tasks = names_in(proc_root / str(pid) / "task")
        if tasks:
            pids.append(pid)
        for task in tasks:
            folder = proc_root / str(pid) / "task" / task
            inner.append(inner_pid(folder, int(task)))
            waiting += map(int, text_of(folder / "children").split())
    if not pids:
        raise EngineDied(f"there is no process {root_pid}: the engine has ended")
    return Tree((pids[0], *sorted(pids[1:])), tuple(sorted(inner)))


def numbers(root_pid: int, *, proc_root: Path = PROC) -> dict[int, int]:
    """Number in the tree's own pid namespace -> number in the /proc that was read, of every process of a tree.

    Raises:
        EngineDied: there is no such process.
    """
    found, waiting = {}, [root_pid]
    while waiting:
        # Not by way of the tree, which asks every thread for its number: an engine has hundreds, and waits for this.
        pid = waiting.pop()
        folder = proc_root / str(pid)
        tasks = names_in(folder / "task")
        if tasks:
            found[inner_pid(folder, pid)] = pid
        for task in tasks:
            waiting += map(int, text_of(folder / "task" / task / "children").split())
    if not found:
        raise EngineDied(f"there is no process {root_pid}: the engine has ended")
    return found


def mapped_files(root_pid: int, *, private: Collection[str] = (), proc_root: Path = PROC) -> Sequence[str]:
    """Every regular file that the tree has mapped, runs, or holds open for reading, outside the ``private`` folders.

    These must be there again, unchanged, for a restore. A file open for writing changes by nature and is not among them.

    Raises:
        EngineDied: there is no such process.
    """
    family = tree(root_pid, proc_root=proc_root)
    found = {path for pid in family.pids for path in mapped(pid, proc_root)}
    for one in descriptors_of(family, proc_root):
        if one.link.startswith("/") and not one.flags & _WRITING and is_regular(one.path):
            found.add(one.link)
    return sorted(path for path in found if is_named(path) and not within(path, private))


def examine(
    root_pid: int,
    *,
    private: Collection[str] = (),
    ghost_limit: int = 1 << 20,
    outside_tcp_ok: bool = False,
    contained: bool = False,
    proc_root: Path = PROC,
) -> list[Finding]:
    """Everything found in a tree, fatal findings first.

    Args:
        private: folders whose files travel with the snapshot.
        ghost_limit: CRIU's ``--ghost-limit``: bytes up to which an unlinked open file is put into the images.
        outside_tcp_ok: the dump closes established connections to others (``--tcp-close``), and they may be cut.
        contained: it is a container within its box.

    Raises:
        EngineDied: there is no such process.
    """
    family = tree(root_pid, proc_root=proc_root)
    scene = Scene(
        tree=family,
        proc=proc_root,
        descriptors=list(descriptors_of(family, proc_root)),
        mappings=[(pid, path) for pid in family.pids for path in mapped(pid, proc_root)],
        sockets=sockets_of(proc_root / str(root_pid)),
        private=tuple(private),
        ghost_limit=ghost_limit,
        outside_tcp_ok=outside_tcp_ok,
        contained=contained,
    )
    scene.held = {inode for one in scene.descriptors if one.link.startswith("socket:") and (inode := inode_of(one.link))}
    findings = [finding for check in CHECKS for finding in check(scene)]
    return sorted(findings, key=lambda finding: (finding.severity != "fatal", finding.pid, finding.fd or -1))


def _io_uring(scene: Scene) -> Iterator[Finding]:
    remedy = (
        "CRIU cannot dump a ring: run the engine on the plain asyncio loop, forbid rings to it with a seccomp filter, or set "
        "`sysctl kernel.io_uring_disabled=2` before it starts (UV_USE_IO_URING=0 is enough only before libuv 1.50, uvloop 0.23)"
    )
    for one in scene.descriptors:
        if one.link == "anon_inode:[io_uring]":
            yield Finding("io_uring", "fatal", one.pid, one.fd, "an io_uring is open", remedy)
    for pid, path in scene.mappings:
        if path == "anon_inode:[io_uring]":
            yield Finding("io_uring", "fatal", pid, None, "an io_uring is mapped", remedy)


def _tty(scene: Scene) -> Iterator[Finding]:
    for one in scene.descriptors:
        if _TTY.fullmatch(one.link):
            yield Finding(
                "tty",
                "fatal",
                one.pid,
                one.fd,
                f"the terminal {one.link} is open",
                "start it with stdin from /dev/null and output to a file",
            )


def _inotify(scene: Scene) -> Iterator[Finding]:
    overlays = {
        line.split()[2] for line in text_of(scene.proc / str(scene.tree.pids[0]) / "mountinfo").splitlines() if _OVERLAY in line
    }
    for one in scene.descriptors:
        if one.link in ("anon_inode:inotify", "anon_inode:[fanotify]"):
            found = re.findall(r"sdev:([0-9a-f]+)", fdinfo(scene.proc, one))
            on_overlay = any(f"{int(dev, 16) >> 20}:{int(dev, 16) & 0xFFFFF}" in overlays for dev in found)
            if on_overlay:
                remedy = "CRIU cannot find watched files on overlayfs again: turn the watcher off"
                yield Finding("inotify", "fatal", one.pid, one.fd, "files on overlayfs are being watched", remedy)
            else:
                remedy = "it is restored where the watched files can be opened by handle; turn the watcher off if the dump fails"
                yield Finding("inotify", "note", one.pid, one.fd, "files are being watched", remedy)


def _pidfd(scene: Scene) -> Iterator[Finding]:
    for one in scene.descriptors:
        if one.link.startswith(("anon_inode:[pidfd]", "pidfd:")):
            # -1: the process has ended, or cannot be seen from here.
            target = int(fields_of(fdinfo(scene.proc, one)).get("Pid", "-1"))
            if target > 0 and target not in scene.tree.pids:
                yield Finding(
                    "pidfd",
                    "fatal",
                    one.pid,
                    one.fd,
                    f"process {target}, outside the tree, is held",
                    "start the engine without it",
                )
            else:
                yield Finding("pidfd", "note", one.pid, one.fd, f"process {target} is held", "needs CRIU 4.1 or later")


def _deleted(scene: Scene) -> Iterator[Finding]:
    for one in scene.descriptors:
        if one.link.endswith(DELETED) and is_named(one.link.removesuffix(DELETED)):
            size = size_of(one.path)
            if size > scene.ghost_limit:
                remedy = f"files above {scene.ghost_limit} bytes are not put into the images; let the engine keep it under a name"
                yield Finding("deleted", "fatal", one.pid, one.fd, f"{one.link} holds {size} bytes", remedy)


def _written(scene: Scene) -> Iterator[Finding]:
    for one in scene.descriptors:
        if one.flags & _WRITING and is_named(one.link) and not within(one.link, scene.private) and is_regular(one.path):
            remedy = "if its size changes, no restore is possible: let it write below $HOME or $TMPDIR, or to /dev/null"
            yield Finding("written", "note", one.pid, one.fd, f"{one.link}, which no snapshot holds, is open for writing", remedy)


def _tcp(scene: Scene) -> Iterator[Finding]:
    held = scene.held
    mine = {(one.local, one.remote) for one in scene.sockets.values() if one.inode in held}
    listening = {one.local[1] for one in scene.sockets.values() if one.inode in held and one.state == "LISTEN"}
    for descriptor in once(scene.descriptors):
        one = scene.sockets.get(inode_of(descriptor.link) or 0)
        if one is not None and one.family == "tcp" and one.connected and (one.remote, one.local) not in mine:
            remedy = "close it before the dump: drain its clients, or keep the engine from calling others"
            severity: Literal["fatal", "note"] = "note" if scene.outside_tcp_ok else "fatal"
            yield Finding("tcp_outside", severity, descriptor.pid, descriptor.fd, str(one), remedy)
    for one in scene.sockets.values():
        if one.inode <= 0 and one.connected and one.local[1] in listening and (one.remote, one.local) not in mine:
            remedy = "a client connected and was not accepted yet; drain first"
            yield Finding("tcp_waiting", "fatal", scene.tree.pids[0], None, str(one), remedy)


def _unix(scene: Scene) -> Iterator[Finding]:
    known = [scene.sockets.get(inode_of(one.link) or 0) for one in once(scene.descriptors) if one.link.startswith("socket:")]
    connected = sum(one is not None and one.family == "unix" and one.connected for one in known)
    if connected % 2:
        what = f"{connected} connected unix sockets: at least one has its other end outside the tree"
        yield Finding("unix_outside", "note", scene.tree.pids[0], None, what, "if the dump fails, start the engine without it")


def _pipes(scene: Scene) -> Iterator[Finding]:
    ends: dict[int, list[Descriptor]] = {}
    for one in scene.descriptors:
        if one.link.startswith("pipe:") and (inode := inode_of(one.link)):
            ends.setdefault(inode, []).append(one)
    half = {inode: held for inode, held in ends.items() if len({bool(one.flags & _WRITING) for one in held}) == 1}
    if not half:
        return
    # Only now look at everybody else: an end that nobody holds any more is no harm.
    mine = {one.link for held in half.values() for one in held}
    outside = {
        link
        for pid in names_in(scene.proc)
        if pid.isdigit() and int(pid) not in scene.tree.pids
        for link in links(scene.proc, pid)
    }
    for held in half.values():
        if held[0].link in mine & outside:
            remedy = "start it with output to a file or /dev/null and all other descriptors closed"
            yield Finding("pipe_outside", "fatal", held[0].pid, held[0].fd, f"{held[0].link} leads out of the tree", remedy)


CHECKS = (_io_uring, _tty, _inotify, _pidfd, _deleted, _written, _tcp, _unix, _pipes, *obstacles.CHECKS)
"""What is looked for."""
