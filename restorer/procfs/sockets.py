"""The sockets of a network namespace, as /proc/PID/net lists them. Parsing only."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_TCP = {
    1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 4: "FIN_WAIT1", 5: "FIN_WAIT2", 6: "TIME_WAIT",
    7: "CLOSE", 8: "CLOSE_WAIT", 9: "LAST_ACK", 10: "LISTEN", 11: "CLOSING",
}  # fmt: skip
_UNIX_LISTENS = 1 << 16
_UNIX_CONNECTED = 3
_DATAGRAM = 2

Endpoint = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Socket:
    """One line of one table."""

    inode: int
    """Zero or less: the kernel still or already has it, no process does."""
    family: Literal["tcp", "unix"]
    state: str
    local: Endpoint = ("", 0)
    remote: Endpoint = ("", 0)

    @property
    def connected(self) -> bool:
        """It has a peer, or had one and has not been closed on this side."""
        return self.state in ("ESTABLISHED", "SYN_SENT", "CLOSE_WAIT")

    def __str__(self) -> str:
        return f"{self.family} {self.local[0]}:{self.local[1]} -> {self.remote[0]}:{self.remote[1]} {self.state}"


def sockets_of(process: Path) -> dict[int, Socket]:
    """Every TCP and unix socket of a process's network namespace, by inode; those of no process by numbers below zero.

    Args:
        process: its folder in /proc.
    """
    found: dict[int, Socket] = {}
    for table in ("tcp", "tcp6"):
        for fields in _rows(process / "net" / table):
            inode = int(fields[9]) or -len(found) - 1
            found[inode] = Socket(
                inode, "tcp", _TCP.get(int(fields[3], 16), fields[3]), _endpoint(fields[1]), _endpoint(fields[2])
            )
    for fields in _rows(process / "net" / "unix"):
        inode = int(fields[6])
        found[inode] = Socket(inode, "unix", _unix_state(int(fields[3], 16), int(fields[4], 16), int(fields[5], 16)))
    return found


def _unix_state(flags: int, kind: int, state: int) -> str:
    if flags & _UNIX_LISTENS:
        return "LISTEN"
    return "ESTABLISHED" if state == _UNIX_CONNECTED and kind != _DATAGRAM else "OTHER"


def _rows(table: Path) -> Iterator[list[str]]:
    try:
        lines = table.read_text(errors="replace").splitlines()[1:]
    except OSError:
        return
    yield from (line.split() for line in lines)


def _endpoint(text: str) -> Endpoint:
    """``0100007F:1F90`` -> ("127.0.0.1", 8080); addresses are 32-bit words in the host's byte order."""
    address, _, port = text.partition(":")
    raw = bytes.fromhex(address)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    if len(raw) == 4:
        return socket.inet_ntoa(raw), int(port, 16)
    six = ipaddress.IPv6Address(raw)
    # A dual-stack listener shows its IPv4 connections as mapped addresses; their other end does not.
    return str(six.ipv4_mapped or six), int(port, 16)
