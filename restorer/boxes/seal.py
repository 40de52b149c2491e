"""Becomes an engine that cannot make io_uring instances. Runs alone, on the standard library.

``python -I -S seal.py ARGV…`` installs a seccomp filter under which io_uring_setup, io_uring_enter and io_uring_register
answer ENOSYS, as on a kernel without them, and executes ARGV. CRIU cannot dump a ring, and libraries make them whatever
their settings say (libuv from 1.50 on does so in spite of UV_USE_IO_URING=0). The filter is part of the snapshot, so a
restored engine is sealed too; the rest of the host is not touched, as ``kernel.io_uring_disabled`` would. Descriptors
beyond stderr are closed: a pipe whose other end is outside could not be restored.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
FIRST, LAST = 425, 427
"""io_uring_setup … io_uring_register; the same numbers on every architecture that has them."""
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
# Classic BPF over struct seccomp_data, whose first field is the system call's number: (code, jump if true, if false, k).
PROGRAM = (
    (0x20, 0, 0, 0),  # load the number
    (0x35, 0, 2, FIRST),  # >= FIRST, or skip two
    (0x25, 1, 0, LAST),  # > LAST: skip one
    (0x06, 0, 0, ERRNO | errno.ENOSYS),
    (0x06, 0, 0, ALLOW),
)


def main() -> None:
    code = b"".join(struct.pack("HBBI", *line) for line in PROGRAM)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(PROGRAM), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)):
        if libc.prctl(*call) != 0:
            sys.exit(f"seal: prctl{call[:1]} failed: {os.strerror(ctypes.get_errno())}")
    os.closerange(3, 1 << 16)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
