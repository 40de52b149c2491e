"""What this machine is, as far as a snapshot cares. Reads /proc and /sys, asks the CPU and CRIU; decides nothing.

A fact that cannot be read is None, which :mod:`policies.matching` treats as a mismatch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from policies.manifest import UNLIMITED, HostFacts, HugePool
from policies.warming import Memory
from restorer.system import cpuid
from restorer.system.cpuid import ExtendedState
from restorer.system.files import hash_file

NVIDIA = Path("/proc/driver/nvidia/version")
"""There as long as the NVIDIA driver is; what it says of itself is asked through :mod:`restorer.gpu.cuda`."""
FEATURES = (
    *("can_map_vdso", "clone3_set_tid", "get_rseq_conf", "memfd_hugetlb", "move_mount_set_group", "ns_pid", "openat2"),
    *("overlayfs_maps", "pidfd_store", "seccomp_filters", "tcp_half_closed", "timens"),
)
"""What of CRIU's and the kernel's abilities a restore may need, as ``criu check --feature`` names them."""
_PROC, _SYS = Path("/proc"), Path("/sys")
_CRIU_S = 10.0
_CAP_SYS_RESOURCE = 24
_VERSION = re.compile(r"^Version:\s*(\S+)", re.MULTILINE)


def probe(
    criu: Path | None,
    proc_root: Path = _PROC,
    extended: Callable[[], ExtendedState] | None = None,
    sys_root: Path = _SYS,
) -> HostFacts:
    """The facts of this host. Blocks for as long as CRIU takes to say what it can: some tenths of a second.

    Args:
        criu: the CRIU binary; None when there is none here.
        proc_root: where to read instead of /proc.
        extended: how to ask the CPU for its extended state; may raise OSError.
        sys_root: where to read instead of /sys.
    """
    cpus = _cpus(proc_root)
    arch = _line(proc_root / "sys/kernel/arch") or os.uname().machine
    flags = _flags(cpus)
    state = _extended_state(arch, flags, extended or cpuid.extended_state)
    memory = _memory(proc_root, sys_root)
    facts = HostFacts(
        hostname=_line(proc_root / "sys/kernel/hostname") or os.uname().nodename,
        arch=arch,
        kernel=_line(proc_root / "sys/kernel/osrelease"),
        cpu_model=next((cpu["model name"] for cpu in cpus if "model name" in cpu), None),
        cpu_flags=flags,
        xsave_size=None if state is None else state.size,
        xsave_max=None if state is None else state.most,
        xfeatures=None if state is None else state.features,
        criu_version=None if criu is None else criu_version(criu),
        criu_sha256=None if criu is None else _criu_sha256(criu),
        criu_features=None if criu is None else _criu_features(criu),
        page_size=os.sysconf("SC_PAGE_SIZE"),
        cgroup=_cgroup(sys_root),
        nofile=_limit(proc_root, resource.RLIMIT_NOFILE),
        memlock=_limit(proc_root, resource.RLIMIT_MEMLOCK),
        memory_bytes=memory,
        # A tmpfs without a size has half of the machine's memory.
        shm_bytes=None if memory is None else (_meminfo(proc_root) or 0) // 2,
        time_namespace=(proc_root / "self/ns/time").exists() if (proc_root / "self/ns").is_dir() else None,
    )
    return refreshed(facts, proc_root, sys_root)


def refreshed(facts: HostFacts, proc_root: Path = _PROC, sys_root: Path = _SYS) -> HostFacts:
    """The same facts, with those read anew that change while a machine runs. Cheap."""
    return facts.model_copy(
        update={
            "io_uring": _switch(proc_root, "io_uring_disabled"),
            "ptrace_scope": _switch(proc_root, "yama/ptrace_scope"),
            "pid_max": _number(proc_root / "sys/kernel/pid_max"),
            "hugepages": _pools(sys_root),
        }
    )


def _extended_state(arch: str, flags: tuple[str, ...] | None, ask: Callable[[], ExtendedState]) -> ExtendedState | None:
    if arch != "x86_64":
        return cpuid.NONE
    if flags is None:
        return None
    if "xsave" not in flags:
        return cpuid.NONE
    with contextlib.suppress(OSError):
        return ask()
    return None


def _line(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip() or None
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(ValueError):
        return int(_line(path) or "")
    return None


def _switch(proc_root: Path, name: str) -> int | None:
    """A setting of the kernel; 0 where it has no such setting, None where nothing of the kernel can be read."""
    folder = proc_root / "sys/kernel"
    if not folder.is_dir():
        return None
    return _number(folder / name) if (folder / name).exists() else 0


def _cpus(proc_root: Path) -> list[dict[str, str]]:
    """The processors of /proc/cpuinfo, each as its fields."""
    cpus = []
    for block in (_line(proc_root / "cpuinfo") or "").split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {name.strip(): value.strip() for name, colon, value in pairs if colon}
        if "processor" in fields:
            cpus.append(fields)
    return cpus


def _flags(cpus: list[dict[str, str]]) -> tuple[str, ...] | None:
    """What every processor can: a thread may run on any."""
    sets = [set((cpu.get("flags") or cpu.get("Features") or "").split()) for cpu in cpus]
    common = set.intersection(*sets) if sets else set()
    return tuple(sorted(common)) if common else None


def _cgroup(sys_root: Path) -> str | None:
    root = sys_root / "fs/cgroup"
    if (root / "cgroup.controllers").exists():
        return "v2"
    if (root / "unified").is_dir():
        return "hybrid"
    return "v1" if root.is_dir() and any(root.iterdir()) else None


def _limit(proc_root: Path, which: int) -> int | None:
    """What we can give an engine: anything up to the kernel's own bound with CAP_SYS_RESOURCE, else no more than we have."""
    status = _line(proc_root / "self/status") or ""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if found is None:
        return None
    if int(found[1], 16) >> _CAP_SYS_RESOURCE & 1:
        return _number(proc_root / "sys/fs/nr_open") if which == resource.RLIMIT_NOFILE else UNLIMITED
    hard = resource.getrlimit(which)[1]
    return UNLIMITED if hard == resource.RLIM_INFINITY else hard


def _meminfo(proc_root: Path, name: str = "MemTotal") -> int | None:
    found = re.search(rf"^{re.escape(name)}:\s*(\d+) kB", _line(proc_root / "meminfo") or "", re.MULTILINE)
    return None if found is None else int(found[1]) << 10


def _memory(proc_root: Path, sys_root: Path) -> int | None:
    """The machine's memory, or what the cgroups that we are in leave of it."""
    total = _meminfo(proc_root)
    return None if total is None else min([total, *(group.limit for group in _groups(proc_root, sys_root))])


class _Group(NamedTuple):
    """A cgroup that we are in and that limits memory."""

    limit: int
    folder: Path
    v2: bool


def _groups(proc_root: Path, sys_root: Path) -> Iterator[_Group]:
    for line in (_line(proc_root / "self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            v2 = number == "0"
            root = sys_root / "fs/cgroup" / ("" if v2 else "memory")
            here = root / path.lstrip("/")
            for folder in (here, *here.parents):
                if not folder.is_relative_to(root):
                    break
                limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
                if limit is not None:
                    yield _Group(limit, folder, v2)


def memory_now(proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> Memory:
    """What of this host's memory is used for nothing, or for files that hardly anybody wants."""
    names = ("MemFree", "Inactive(file)", "Mapped", "MemTotal")
    free, inactive, mapped, total = (_meminfo(proc_root, name) or 0 for name in names)
    found = [Memory(free, max(0, inactive - mapped), total)]
    for limit, folder, v2 in _groups(proc_root, sys_root):
        used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes")) or 0
        prefix = "" if v2 else "total_"
        inactive, mapped = (_stat(folder, prefix + name) for name in ("inactive_file", "file_mapped" if v2 else "mapped_file"))
        found.append(Memory(max(0, limit - used), max(0, inactive - mapped), min(limit, total)))
    return min(found, key=lambda one: one.free + one.idle)


def _stat(folder: Path, name: str) -> int:
    """A line of a cgroup's ``memory.stat``; 0: it has none."""
    found = re.search(rf"^{name} (\d+)$", _line(folder / "memory.stat") or "", re.MULTILINE)
    return int(found[1]) if found else 0


def _pools(sys_root: Path) -> tuple[HugePool, ...] | None:
    root = sys_root / "kernel/mm/hugepages"
    if not (sys_root / "kernel/mm").is_dir():
        return None
    found = []
    for folder in sorted(root.glob("hugepages-*kB"), key=lambda one: int(one.name[10:-2])):
        total, free = _number(folder / "nr_hugepages"), _number(folder / "free_hugepages")
        reserved = _number(folder / "resv_hugepages") or 0
        if total is None or free is None:
            return None
        found.append(HugePool(size_kib=int(folder.name[10:-2]), total=total, free=max(0, free - reserved)))
    return tuple(found)


def criu_version(criu: Path) -> str | None:
    """What a CRIU binary says that it is; None: it does not say. Blocks for moments."""
    done = _ask(criu, "--version")
    found = None if done is None else _VERSION.search(done.stdout)
    return found[1] if done is not None and found and done.returncode == 0 else None


def _criu_features(criu: Path) -> tuple[str, ...] | None:
    """None when CRIU cannot be asked; it says no to what it does not know."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda name: _ask(criu, "check", "--feature", name), FEATURES))
    if any(done is None for done in said):
        return None
    return tuple(sorted(name for name, done in zip(FEATURES, said, strict=True) if done is not None and done.returncode == 0))


def _ask(criu: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    argv = [str(criu), *arguments]
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CRIU_S, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None


def _criu_sha256(criu: Path) -> str | None:
    with contextlib.suppress(OSError):
        return hash_file(criu.resolve(strict=True))
    return None
