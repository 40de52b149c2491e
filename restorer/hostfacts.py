"""What this machine is, as far as a snapshot cares. Reads /proc, asks the CPU and CRIU; decides nothing.

A fact that cannot be read is None, which :mod:`policies.compat` treats as a mismatch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from policies.manifest import HostFacts
from restorer.files import hash_file

NVIDIA = Path("/proc/driver/nvidia/version")
"""There as long as the NVIDIA driver is; what it says of itself is asked through :mod:`restorer.cuda`."""
_CRIU_S = 10.0
_VERSION = re.compile(r"^Version:\s*(\S+)", re.MULTILINE)
_XSAVE_SIZE = bytes.fromhex(
    "53"  # push rbx, which belongs to the caller
    "b80d000000"  # mov eax, 0xd: the leaf of extended state
    "31c9"  # xor ecx, ecx: its sub-leaf for what the kernel has enabled
    "0fa2"  # cpuid
    "89d8"  # mov eax, ebx: the size
    "5b"  # pop rbx
    "c3"  # ret
)


def probe(criu: Path | None, proc_root: Path = Path("/proc"), xsave_size: Callable[[], int] | None = None) -> HostFacts:
    """The facts of this host. Blocks for about as long as ``criu --version`` takes.

    Args:
        criu: the CRIU binary; None when there is none here.
        proc_root: where to read instead of /proc.
        xsave_size: how to ask the CPU for the size of its extended state, in bytes; may raise OSError.
    """
    cpus = _cpus(proc_root)
    arch = _line(proc_root / "sys/kernel/arch") or os.uname().machine
    flags = _flags(cpus)
    return HostFacts(
        hostname=_line(proc_root / "sys/kernel/hostname") or os.uname().nodename,
        arch=arch,
        kernel=_line(proc_root / "sys/kernel/osrelease"),
        cpu_model=next((cpu["model name"] for cpu in cpus if "model name" in cpu), None),
        cpu_flags=flags,
        xsave_size=_extended_state(arch, flags, xsave_size or ask_xsave_size),
        criu_version=None if criu is None else _criu_version(criu),
        criu_sha256=None if criu is None else _criu_sha256(criu),
        page_size=os.sysconf("SC_PAGE_SIZE"),
    )


def ask_xsave_size() -> int:
    """Bytes of the extended state that the kernel has enabled: CPUID leaf 0xD, EBX, asked of the CPU we run on.

    No file has this number, so thirteen bytes of machine code are mapped from a memory file, never writable and executable
    at once, and called.

    Raises:
        OSError: this process may not map executable memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.memfd_create("cpuid")
    try:
        os.write(fd, _XSAVE_SIZE)
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
    finally:
        os.close(fd)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "cannot map executable memory")
    try:
        return int(ctypes.CFUNCTYPE(ctypes.c_uint32)(address)())
    finally:
        libc.munmap(address, mmap.PAGESIZE)


def _extended_state(arch: str, flags: tuple[str, ...] | None, ask: Callable[[], int]) -> int | None:
    if arch != "x86_64":
        return 0
    if flags is None:
        return None
    if "xsave" not in flags:
        return 0
    with contextlib.suppress(OSError):
        return ask()
    return None


def _line(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip() or None
    return None


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


def _criu_version(criu: Path) -> str | None:
    try:
        done = subprocess.run(
            [criu, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CRIU_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    found = _VERSION.search(done.stdout)
    return found[1] if found and done.returncode == 0 else None


def _criu_sha256(criu: Path) -> str | None:
    with contextlib.suppress(OSError):
        return hash_file(criu.resolve(strict=True))
    return None
