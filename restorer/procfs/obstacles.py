"""What of the kernel's CRIU cannot carry: found in a :class:`Scene`, each with the process and descriptor that has it.

Each check was tried against CRIU 4.2 (`test_restorer_obstacles`): what is fatal here fails there, at the dump or, worse, at the
restore; what passes there is no finding here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from restorer.procfs.scene import Descriptor, Finding, Scene, drivers_of, fields_of, inode_of, names_in, text_of

_CARRIED = ("[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]", "inotify", "[fanotify]", "[pidfd]", "[io_uring]")
"""Nameless things that CRIU carries, or that have a check of their own."""
_REMEDIES = {
    "[userfaultfd]": "run the engine without what makes it (post-copy memory, some garbage collectors)",
    "[perf_event]": "stop the profiler, or run the engine without one",
}
_MEMORY_DEVICES = 1
"""Major number of /dev/null, zero, random and the like, which hold nothing."""
_TERMINALS = (4, 5, 136, 137, 138, 139, 140, 141, 142, 143)
_GPU, _GPU_DRIVERS = ("/dev/nvidia", "/dev/dri/", "/dev/kfd"), ("nvidia", "drm", "kfd")
_GPU_REMEDY = (
    "its GPU state must be taken off first, which is done for engines with engine.gpu.count on an NVIDIA driver; set it, or "
    "run this engine on the CPU"
)
_SOCKETS = ("unix", "tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "packet", "netlink", "icmp", "icmp6")
"""Tables of sockets that CRIU carries."""
_NAMESPACES = ("mnt", "net", "ipc", "uts", "user", "cgroup", "time")


def nameless(scene: Scene) -> Iterator[Finding]:
    """Kernel objects behind a descriptor: userfaultfd, perf events, bpf maps and programs, and whatever is not known."""
    for one in scene.descriptors:
        kind = one.link.removeprefix("anon_inode:")
        if kind != one.link and not kind.startswith(_CARRIED):
            remedy = _REMEDIES.get(kind, "run the engine without it")
            code = "bpf" if kind.startswith(("bpf", "btf")) else kind.strip("[]")
            yield Finding(code, "fatal", one.pid, one.fd, f"CRIU cannot dump {one.link}", remedy)


def secret_memory(scene: Scene) -> Iterator[Finding]:
    for pid, path in scene.mappings:
        if path.startswith("/secretmem"):
            yield Finding(
                "secretmem", "fatal", pid, None, "memory that nobody else can read is mapped", "run it without memfd_secret"
            )


def huge_pages(scene: Scene) -> Iterator[Finding]:
    for pid, path in scene.mappings:
        if path.startswith("/anon_hugepage"):
            remedy = "a host that restores it needs as many free (vm.nr_hugepages)"
            yield Finding("huge_pages", "note", pid, None, "huge pages of a reserved pool are mapped", remedy)


def system_v(scene: Scene) -> Iterator[Finding]:
    for pid, path in scene.mappings:
        if path.startswith("/SYSV"):
            remedy = "let it use POSIX shared memory (/dev/shm), which is part of a snapshot"
            yield Finding("sysv_shm", "fatal", pid, None, "a System V shared memory segment is attached", remedy)


def devices(scene: Scene) -> Iterator[Finding]:
    """Devices by their numbers, since one may have any path: a name of its own, a link, another root's ``/dev``."""
    drivers = drivers_of(scene.proc)
    for one in scene.descriptors:
        if not one.link.startswith("/"):
            continue
        try:
            facts = one.path.stat()
        except OSError:
            facts = None
        major = os.major(facts.st_rdev) if facts and stat.S_ISCHR(facts.st_mode) else -1
        if one.link.startswith(_GPU) or drivers.get(major, "").startswith(_GPU_DRIVERS):
            yield Finding("gpu", "fatal", one.pid, one.fd, f"{one.link} is open", _GPU_REMEDY)
        elif facts and (stat.S_ISBLK(facts.st_mode) or major not in (-1, _MEMORY_DEVICES, *_TERMINALS)):
            remedy = "run the engine without it; only /dev/null and its like can be carried over"
            yield Finding("device", "fatal", one.pid, one.fd, f"the device {one.link} ({_numbers(facts)}) is open", remedy)


def _numbers(facts: os.stat_result) -> str:
    return f"{os.major(facts.st_rdev)}:{os.minor(facts.st_rdev)}"


def sockets(scene: Scene) -> Iterator[Finding]:
    """Sockets of families that CRIU does not know: they are in none of its tables."""
    held = [one for one in scene.descriptors if one.link.startswith("socket:")]
    if not held:
        return
    known = {inode for name in _SOCKETS for inode in _inodes(text_of(scene.proc / str(scene.tree.pids[0]) / "net" / name), name)}
    for one in held:
        protocol = _protocol(one)
        # A socket without an address or a peer is in no table, whatever its family.
        if protocol not in _CARRIED_PROTOCOLS if protocol else inode_of(one.link) not in known and _still_open(one):
            what = f"a socket ({protocol or 'of an unknown family'}) is open that CRIU does not know"
            yield Finding("socket", "fatal", one.pid, one.fd, what, "close it before the dump, or run the engine without it")


def _still_open(one: Descriptor) -> bool:
    """Nobody has closed it since it was found: what is gone is in no table either."""
    try:
        return str(one.path.readlink()) == one.link
    except OSError:
        return False


_CARRIED_PROTOCOLS = (
    "TCP",
    "TCPv6",
    "UDP",
    "UDPv6",
    "UDP-Lite",
    "UNIX",
    "UNIX-STREAM",
    "NETLINK",
    "PACKET",
    "RAW",
    "RAWv6",
    "PING",
    "PINGv6",
)


def _protocol(one: Descriptor) -> str:
    """The family of a socket, by its extended attribute; empty: the kernel does not say."""
    try:
        return os.getxattr(one.path, "system.sockprotoname").rstrip(b"\0").decode()
    except OSError:
        return ""


def _inodes(table: str, name: str) -> Iterator[int]:
    column = {"unix": 6, "packet": 8, "netlink": 9}.get(name, 9)
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > column and fields[column].isdigit():
            yield int(fields[column])


_SHARED = ("mnt", "user", "pid_for_children", "time_for_children")


def namespaces(scene: Scene) -> Iterator[Finding]:
    """A process in another namespace than the tree's root, or one whose children will be; CRIU restores into the box's own."""
    root = scene.tree.pids[0]
    ours = _spaces(scene, root)
    box = _spaces(scene, _parent(scene, root))
    remedy = "run the engine without a sandbox of its own: its box is one already"
    for pid in scene.tree.pids:
        theirs = _spaces(scene, pid)
        for kind in (*_NAMESPACES, "pid", "pid_for_children", "time_for_children"):
            mine = ours.get(kind.removesuffix("_for_children"), "")
            # The root's own may differ from its box's in what CRIU then makes anew; not in these.
            alien = (
                pid == root
                and kind in (*(("mnt", "pid_for_children") if not scene.contained else ()), "user", "time_for_children")
                and box.get(kind, mine) != theirs.get(kind)
            )
            if theirs.get(kind) and mine and (theirs[kind] != mine or alien):
                yield Finding("namespace", "fatal", pid, None, f"it has a {kind} namespace of its own", remedy)


def _spaces(scene: Scene, pid: int) -> dict[str, str]:
    found = {}
    folder = scene.proc / str(pid) / "ns"
    for name in names_in(folder):
        try:
            found[name] = os.readlink(folder / name).partition(":")[2]
        except OSError:
            continue
    return found


def _parent(scene: Scene, pid: int) -> int:
    return int(fields_of(text_of(scene.proc / str(pid) / "status")).get("PPid", "0") or 0)


def tasks(scene: Scene) -> Iterator[Finding]:
    """Processes that cannot be stopped and looked into: traced by somebody, or waiting for a device."""
    for pid in scene.tree.pids:
        for task in names_in(scene.proc / str(pid) / "task"):
            status = fields_of(text_of(scene.proc / str(pid) / "task" / task / "status"))
            tracer = int(status.get("TracerPid", "0") or 0)
            if tracer:
                remedy = "end the debugger or tracer before the dump"
                yield Finding("traced", "fatal", pid, None, f"thread {task} is traced by process {tracer}", remedy)
            if status.get("State", "").startswith("D"):
                what = f"thread {task} waits for a device and cannot be stopped meanwhile"
                yield Finding(
                    "uninterruptible", "note", pid, None, what, "if the dump hangs, look at the disk or driver it waits for"
                )


def mounts(scene: Scene) -> Iterator[Finding]:
    """Files on a file system that the tree has not mounted, such as POSIX message queues; mounts that no restore makes again."""
    mounted: dict[int, set[str]] = {}
    root = scene.tree.pids[0]
    box = _spaces(scene, root if scene.contained else _parent(scene, root)).get("mnt")
    # What came with a process into a mount namespace of its own is of another's: that it has one is said elsewhere.
    apart = {pid for pid in scene.tree.pids if box is not None and _spaces(scene, pid).get("mnt") != box}
    for one in scene.descriptors:
        if one.pid in apart or not one.link.startswith("/") or one.link.startswith(_NOWHERE):
            continue
        known = mounted.setdefault(one.pid, {line.split()[0] for line in _mounts(scene, one.pid)})
        number = fields_of(text_of(scene.proc / str(one.pid) / "fdinfo" / str(one.fd))).get("mnt_id")
        if known and number is not None and number not in known:
            what = f"{one.link} lies on a file system that is not mounted there"
            yield Finding("mount", "fatal", one.pid, one.fd, what, "let it use pipes, sockets or /dev/shm")
    ours = {line.split()[4] for line in text_of(scene.proc / "self" / "mountinfo").splitlines()}
    for point in sorted({line.split()[4] for line in _mounts(scene, root)} - ours if ours else ()):
        if point not in scene.private and point not in ("/proc", KERNDAT):
            yield Finding(
                "mount", "note", root, None, f"{point} is mounted", "it will not be after a restore, if the engine did it"
            )


KERNDAT = "/run/criu.kdat"
"""Shown to CRIU by us (:mod:`restorer.checkpoint.kerndat`), so that a tree that it has restored has it among its mounts."""
_NOWHERE = ("/memfd:", "/SYSV", "/dev/zero", "/secretmem", "/[aio]")
"""What has a name like a file and is none."""


def _mounts(scene: Scene, pid: int) -> list[str]:
    return text_of(scene.proc / str(pid) / "mountinfo").splitlines()


def alarms(scene: Scene) -> Iterator[Finding]:
    for one in scene.descriptors:
        clock = fields_of(text_of(scene.proc / str(one.pid) / "fdinfo" / str(one.fd))).get("clockid")
        if clock is not None and int(clock) in _ALARM_CLOCKS:
            what = "a timer that wakes the machine (CLOCK_*_ALARM) is open"
            yield Finding("timer", "fatal", one.pid, one.fd, what, "let it use CLOCK_MONOTONIC or CLOCK_REALTIME")


_ALARM_CLOCKS = (8, 9)


CHECKS = (nameless, secret_memory, huge_pages, system_v, devices, sockets, namespaces, tasks, mounts, alarms)
"""What is looked for."""
