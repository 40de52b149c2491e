#!/usr/bin/env python3
"""Becomes the Chromium at REWAKE_CHROMIUM, which then cannot watch the host's network. Runs alone, on the standard library.

Chromium fails every request that waits for a connection (ERR_NETWORK_CHANGED) when an address of the host comes or goes, also
those to 127.0.0.1; installations of other tests make and remove interfaces all the time, and no switch of Chromium's makes it
ignore them. Under this seccomp filter netlink sockets answer EAFNOSUPPORT, and Chromium takes the network for one that stays.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SOCKET = {"x86_64": 41, "aarch64": 198}
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def main() -> None:
    # Classic BPF over struct seccomp_data: the system call's number is at 0, its first argument's low half at 16.
    lines = (
        (0x20, 0, 0, 0),
        (0x15, 0, 3, SOCKET[platform.machine()]),  # another call: skip three
        (0x20, 0, 0, 16),
        (0x15, 0, 1, socket.AF_NETLINK),  # another family: skip one
        (0x06, 0, 0, ERRNO | errno.EAFNOSUPPORT),
        (0x06, 0, 0, ALLOW),
    )
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(lines), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)):
        if libc.prctl(*call) != 0:
            sys.exit(f"chromium_apart: prctl{call[:1]} failed: {os.strerror(ctypes.get_errno())}")
    chromium = os.environ["REWAKE_CHROMIUM"]
    os.execv(chromium, [chromium, *sys.argv[1:]])


if __name__ == "__main__":
    main()
