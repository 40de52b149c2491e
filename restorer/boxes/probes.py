"""Questions to this machine, each really tried where trying is harmless: :mod:`restorer.checks.doctor` asks them together.

A probe takes what it needs as arguments, leaves nothing behind, and returns a :class:`Finding`; it raises only what its
caller turns into one (OSError, TimeoutError). Knows nothing of the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from policies import fair
from restorer.boxes import seal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of this host."""

    name: str
    ok: Verdict
    """``warn``: it works, with a limit that ``remedy`` lifts; ``fail``: something that the configuration asks for cannot work."""
    found: str
    remedy: str = ""


MINIMUM_CRIU = (4, 2)
MINIMUM_RUNC = (1, 1)
MINIMUM_KERNEL = (5, 11)
MINIMUM_NVIDIA = 570
_GIB = 1 << 30
_TOOL_S = 15.0
_WRITE_BYTES = 64 << 20
_CAPABILITIES = {
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_CHROOT": 18,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_TIME": 25,
}
_OWN_LINK = re.compile(r"rw[0-9a-f]{8}")
_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_NAMESPACES = ("--pid", "--mount", "--net", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc", "--")
CHECK = ("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "--")
"""What `criu check` runs under: a /proc of its own, as in a box. That of a container cannot be written, which says nothing."""
_ROOT = "run it as root on the host itself, or in a privileged container"


async def tool(*argv: str, within: float = _TOOL_S) -> tuple[int, str]:
    """Exit status of a program and what it printed. It and all it started are killed when the time is up.

    Raises:
        OSError: it cannot be started. TimeoutError: it did not end in time.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(within):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace").strip()


def capabilities() -> Finding:
    """The rights that namespaces, veth pairs and CRIU take."""
    missing = lacking(_CAPABILITIES)
    who = f"uid {os.geteuid()}"
    if missing:
        return Finding("capabilities", "fail", f"{who} without {', '.join(missing)}", _ROOT)
    return Finding("capabilities", "ok", f"{who} with {', '.join(_CAPABILITIES)}")


def lacking(wanted: Mapping[str, int]) -> list[str]:
    """Which of these capabilities (name -> bit) this process does not have."""
    held = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    return [name for name, bit in wanted.items() if not held >> bit & 1]


def kernel() -> Finding:
    """New enough for what the restorer uses of it."""
    release = platform.release()
    found = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if found < MINIMUM_KERNEL:
        return Finding("kernel", "fail", f"{release} ({platform.machine()})", "boot Linux 5.11 or later")
    return Finding("kernel", "ok", f"{release} ({platform.machine()})")


async def criu(binary: str) -> Finding:
    """CRIU is there, is new enough, and says that this kernel lets it work."""
    install = "install CRIU 4.2 or later (deploy/install/criu.sh) and name it in restorer.criu; without it, starts are cold"
    found = await _program("criu", binary, r"Version: ", MINIMUM_CRIU, install)
    if isinstance(found, Finding):
        return found
    rc, said = await tool(*CHECK, found.path, "check")
    if rc:
        return Finding("criu", "fail", f"{found}: criu check says: {_brief(said)}", _ROOT)
    return Finding("criu", "ok", f"{found}; criu check: {_brief(said)}")


async def runc(binary: str) -> Finding:
    """runc is there, is new enough, and can keep engines from io_uring."""
    install = "install runc 1.1 or later (deploy/install/runc.sh) and name it in restorer.runc, or use engine.backend: criu"
    found = await _program("runc", binary, r"runc version ", MINIMUM_RUNC, install)
    if isinstance(found, Finding):
        return found
    if "libseccomp" not in found.said:
        return Finding("runc", "fail", f"{found} was built without seccomp", install)
    return Finding("runc", "ok", str(found))


class _Program(NamedTuple):
    path: str
    version: str
    said: str
    """All that it says of its version."""

    def __str__(self) -> str:
        return f"{self.path} {self.version}"


async def _program(name: str, binary: str, before: str, minimum: tuple[int, int], install: str) -> _Program | Finding:
    """A program that says its version behind ``before``; what is wrong, if it is missing, does not run, or is too old."""
    path = shutil.which(binary)
    if path is None:
        return Finding(name, "fail", f"{binary} not found", install)
    _, said = await tool(path, "--version")
    match = re.search(before + r"((\d+)\.(\d+)\S*)", said)
    if match is None:
        return Finding(name, "fail", f"{path} does not run: {_brief(said)}", install)
    if (int(match[2]), int(match[3])) < minimum:
        return Finding(name, "fail", f"{path} is {match[1]}", install)
    return _Program(path, match[1], said)


def tools(names: Sequence[str] = ("unshare", "nsenter", "setpriv", "setsid", "mount", "ip")) -> Finding:
    """The programs of util-linux and iproute2 that the restorer calls."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        return Finding("tools", "fail", f"not on PATH: {', '.join(missing)}", "install util-linux and iproute2")
    return Finding("tools", "ok", ", ".join(names))


async def namespaces() -> Finding:
    """A replica's namespaces can be made."""
    rc, said = await tool("unshare", *_NAMESPACES, "true")
    if rc:
        return Finding("namespaces", "fail", _brief(said), _ROOT)
    return Finding("namespaces", "ok", "pid, mount, net, ipc and uts namespaces can be made")


async def veth() -> Finding:
    """A veth pair can be made (tried in a fresh network namespace, so that the host sees nothing)."""
    script = "ip link add rw0 type veth peer name rw1 && ip addr add 192.0.2.1/30 dev rw0 && ip link set rw0 up"
    rc, said = await tool("unshare", "--net", "--", "sh", "-c", script)
    if rc:
        return Finding("veth", "fail", _brief(said), f"load the kernel module veth; {_ROOT}")
    return Finding("veth", "ok", "a veth pair can be made and given an address")


async def ns_last_pid() -> Finding:
    """Pids can be chosen, which a restore takes."""
    script = "echo 1000 > /proc/sys/kernel/ns_last_pid"
    rc, said = await tool("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "--", "sh", "-c", script)
    if rc:
        return Finding("ns_last_pid", "fail", _brief(said), f"use a kernel with CONFIG_CHECKPOINT_RESTORE; {_ROOT}")
    return Finding("ns_last_pid", "ok", "writable in a fresh pid namespace")


async def network(cidr: str) -> Finding:
    """The replicas' network is not one that this host talks to. Links of our own replicas do not count."""
    rc, said = await tool("ip", "-json", "-4", "route", "show", "table", "all")
    if rc:
        return Finding("network", "fail", _brief(said), "install iproute2")
    if clashes := _clashes(said, cidr, attached=False):
        return Finding("network", "fail", f"{cidr} overlaps {', '.join(clashes)}", "set restorer.network to an unused network")
    return Finding("network", "ok", f"{cidr} overlaps no route")


async def attached(cidr: str) -> str:
    """Which networks that this host is itself attached to overlap this one: replicas there would cut it off. Or nothing."""
    rc, said = await tool("ip", "-json", "-4", "route", "show", "table", "all")
    return "" if rc else ", ".join(_clashes(said, cidr, attached=True))


def _clashes(routes: str, cidr: str, *, attached: bool) -> list[str]:
    wanted = ipaddress.ip_network(cidr)
    return [
        f"{route['dst']} (dev {route.get('dev', 'none')})"
        for route in json.loads(routes or "[]")
        if route.get("dst", "default") != "default"
        # The kernel's own routes are those of our addresses; others, such as a tunnel's, may be as wide as they like.
        and (not attached or route.get("protocol") == "kernel")
        and not _OWN_LINK.fullmatch(route.get("dev", ""))
        and ipaddress.ip_network(route["dst"], strict=False).overlaps(wanted)
    ]


async def io_uring() -> Finding:
    """Engines can be kept from it: one that has a ring open cannot be captured."""
    rc, said = await tool(sys.executable, "-I", "-S", seal.__file__, shutil.which("true") or "/bin/true")
    if rc:
        return Finding("io_uring", "fail", _brief(said), "use a kernel with CONFIG_SECCOMP_FILTER, in a container that allows it")
    return Finding("io_uring", "ok", "a seccomp filter keeps engines from it")


def userfaultfd() -> Finding:
    """Memory can be filled on demand."""
    number = _USERFAULTFD.get(platform.machine())
    if number is None:
        return Finding("userfaultfd", "warn", f"not tried on {platform.machine()}", "lazy restores may not work here")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(ctypes.c_long(number), ctypes.c_int(os.O_CLOEXEC))
    if fd < 0:
        found = os.strerror(ctypes.get_errno())
        return Finding("userfaultfd", "warn", found, "lazy restores need root and CONFIG_USERFAULTFD; full ones work")
    os.close(fd)
    return Finding("userfaultfd", "ok", "available")


def huge_pages() -> Finding:
    """`always` can make restores several times slower or faster: it depends on the host."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except FileNotFoundError:
        return Finding("huge pages", "ok", "this kernel has no transparent huge pages")
    mode = text.partition("[")[2].partition("]")[0]
    if mode == "always":
        remedy = "measure a restore with `madvise` too: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("huge pages", "warn", "transparent_hugepage is always: restores may be slower", remedy)
    return Finding("huge pages", "ok", f"transparent_hugepage is {mode}")


def data_path() -> Finding:
    """Whether what each request runs through is native code."""
    if not fair.__file__.endswith(".py"):
        return Finding("data path", "ok", "compiled")
    found = "interpreted: compiled, a request costs half as much there"
    return Finding("data path", "warn", found, "install it with `deploy/install/host.sh --compiler`")


def cgroups() -> Finding:
    """Which cgroup hierarchy there is; every kind will do."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return Finding("cgroups", "ok", "v2")
    if (root / "unified").exists():
        return Finding("cgroups", "ok", "v1 and v2 (hybrid)")
    if any(root.glob("*/tasks")):
        return Finding("cgroups", "ok", "v1")
    return Finding("cgroups", "warn", "none mounted at /sys/fs/cgroup", "mount cgroup2 there: engines are accounted for by it")


def memory() -> Finding:
    """What engines can have."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    found = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    if available < 2 * _GIB:
        return Finding("memory", "warn", found, "free some: an engine and its snapshot's pages want gigabytes")
    return Finding("memory", "ok", found)


async def gpu(version_file: Path = Path("/proc/driver/nvidia/version")) -> Finding:
    """An NVIDIA driver, if there is one."""
    try:
        text = await asyncio.to_thread(version_file.read_text)
    except FileNotFoundError:
        return Finding("gpu", "ok", "none: engines run on the CPU")
    version = re.search(r"\s(\d+)\.\d+(\.\d+)?\s", text)
    if version is None or int(version[1]) < MINIMUM_NVIDIA:
        found = f"NVIDIA driver {version[0].strip() if version else 'of unknown version'}"
        return Finding("gpu", "warn", found, f"install driver {MINIMUM_NVIDIA} or later; GPU engines start cold until then")
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Finding("gpu", "warn", f"NVIDIA driver {version[0].strip()}, no nvidia-smi", "install the driver's utilities")
    rc, said = await tool(smi, "--query-gpu=name,memory.total", "--format=csv,noheader")
    if rc:
        return Finding("gpu", "fail", f"nvidia-smi: {_brief(said)}", "the driver does not answer; see dmesg")
    return Finding("gpu", "ok", f"driver {version[0].strip()}; {'; '.join(said.splitlines())}")


def disk(state_dir: Path) -> Finding:
    """Room and speed where snapshots will lie."""
    place = next(p for p in (state_dir, *state_dir.parents) if p.is_dir())
    free = shutil.disk_usage(place).free
    kind = file_system(place)
    rate = _write_rate(place) if free > 4 * _WRITE_BYTES else 0.0
    found = f"{place} ({kind}): {free / _GIB:.1f} GiB free, writes {rate / 1e6:.0f} MB/s"
    if free < _GIB:
        return Finding("disk", "fail", found, "free some space or set state_dir to a larger disk: a snapshot takes gigabytes")
    if kind in ("tmpfs", "ramfs"):
        return Finding("disk", "warn", found, "set state_dir to a disk: there, snapshots take memory and are lost at reboot")
    if free < 10 * _GIB:
        return Finding("disk", "warn", found, "that is room for few snapshots; set state_dir to a larger disk")
    return Finding("disk", "ok", found)


def punch_hole(state_dir: Path) -> Finding:
    """Zero pages can be given back to the disk."""
    place = next(p for p in (state_dir, *state_dir.parents) if p.is_dir())
    if _punches(place):
        return Finding("punch hole", "ok", f"{place} gives space back")
    remedy = "snapshots keep their zero pages and are larger; set state_dir to ext4, XFS or btrfs"
    return Finding("punch hole", "warn", f"{place} cannot punch holes", remedy)


def _write_rate(place: Path) -> float:
    block = os.urandom(1 << 20)
    began = time.monotonic()
    with tempfile.TemporaryFile(dir=place) as file:
        for _ in range(_WRITE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return _WRITE_BYTES / (time.monotonic() - began)


def _punches(place: Path) -> bool:
    size, libc = 1 << 20, ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(b"x" * size)
        file.flush()
        os.fsync(file.fileno())
        before = os.fstat(file.fileno()).st_blocks
        failed = libc.fallocate(file.fileno(), _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(size))
        return not failed and os.fstat(file.fileno()).st_blocks < before


def file_system(place: Path) -> str:
    """Type of the file system that ``place`` lies on, as /proc/self/mountinfo has it."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        if place.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def _brief(text: str) -> str:
    """The last line that says something, for a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing said"
