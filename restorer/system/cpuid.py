"""What the CPU itself says of its extended state. No file has these numbers, so the CPU is asked by a few bytes of machine code.

x86-64 only; knows nothing of host facts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import NamedTuple

_LEAF = bytes.fromhex(
    "53"  # push rbx, which belongs to the caller
    "b80d000000"  # mov eax, 0xd: the leaf of extended state
    "31c9"  # xor ecx, ecx: its sub-leaf for sizes
    "0fa2"  # cpuid
)
_SIZE = _LEAF + bytes.fromhex("89d85bc3")  # mov eax, ebx: of what the kernel has enabled; pop rbx; ret
_MOST = _LEAF + bytes.fromhex("89c85bc3")  # mov eax, ecx: of all that the CPU has; pop rbx; ret
_ENABLED = bytes.fromhex(
    "31c9"  # xor ecx, ecx: register XCR0
    "0f01d0"  # xgetbv
    "48c1e220"  # shl rdx, 32
    "4809d0"  # or rax, rdx
    "c3"
)


class ExtendedState(NamedTuple):
    """What a context switch saves beside the plain registers."""

    size: int
    """Bytes, of what the kernel has enabled (CPUID leaf 0xD, EBX)."""
    most: int
    """Bytes, of all that the CPU has (ECX)."""
    features: int
    """Mask of what the kernel has enabled (register XCR0)."""


NONE = ExtendedState(0, 0, 0)
"""A CPU without any."""


def extended_state() -> ExtendedState:
    """The extended state of the CPU that we run on, which must have XSAVE.

    The code is mapped from a memory file, never writable and executable at once, and called.

    Raises:
        OSError: this process may not map executable memory.
    """
    return ExtendedState(_call(_SIZE) & 0xFFFFFFFF, _call(_MOST) & 0xFFFFFFFF, _call(_ENABLED))


def _call(code: bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.memfd_create("cpuid")
    try:
        os.write(fd, code)
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
    finally:
        os.close(fd)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "cannot map executable memory")
    try:
        return int(ctypes.CFUNCTYPE(ctypes.c_uint64)(address)())
    finally:
        libc.munmap(address, mmap.PAGESIZE)
