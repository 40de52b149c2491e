"""Pid 1 of a box: prepares the namespaces it wakes up in, then reaps. Runs alone, on the standard library.

Started by :mod:`restorer.boxes.box` as ``python -I -S boxinit.py MARK PRIVATE MOUNTPOINT`` under ``unshare``: pid, mount,
ipc, uts and net namespaces are already new, /proc is already this pid namespace's. It

1. mounts an empty /dev/shm, and binds the folder PRIVATE over MOUNTPOINT: the same path in every box, another folder
   behind it, so that clones of one snapshot find "their" files;
2. brings the loopback interface up;
3. prints ``ready`` and waits for children. A zombie keeps its pid busy, and a busy pid makes a restore fail, so every
   orphan is reaped; each end is logged as ``PID STATUS``.

MARK is not read: it makes the box findable in /proc after its restorer has died.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

MS_NOSUID, MS_NODEV, MS_BIND = 2, 4, 4096
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount {kind or source} on {target}: {os.strerror(ctypes.get_errno())}")


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def _reap_for_ever() -> None:
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                print(ended[0], os.waitstatus_to_exitcode(ended[1]), file=sys.stderr, flush=True)
        except ChildProcessError:
            pass


def main() -> None:
    private, mountpoint = sys.argv[2:4]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        _mount(private, mountpoint, "", MS_BIND)
        _raise_loopback()
    except OSError as error:
        sys.exit(error.strerror)
    os.write(1, b"ready\n")
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    _reap_for_ever()


if __name__ == "__main__":
    main()
