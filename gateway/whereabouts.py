"""Where this gateway is, and so how it reaches each replica. Reads /proc once; what follows is :mod:`policies.reach`'s to say."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

from gateway import logs
from policies import reach
from policies.reach import Way
from policies.replica import RUNNING, Replica, State

LOST_S = 20
"""The host of a far replica has vanished when it has acknowledged nothing for so long."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 5))


@functools.cache
def here() -> str:
    """The place of this process, in the sense of :mod:`policies.reach`; raises OSError where /proc does not show it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    return reach.place(boot_id, os.stat("/proc/self/ns/net").st_ino)


def way(replica: Replica) -> Way | None:
    """Where this gateway connects to; None: it cannot reach this replica."""
    return reach.way(replica, here())


def barred(replica: Replica) -> str:
    """Why it cannot; empty: it can, or there is nothing to reach."""
    return reach.barred(replica, here()) if replica.state in RUNNING else ""


def note(before: Replica | None, after: Replica) -> None:
    """Say in the log that a replica was admitted that gets no requests from here; called with each write of a record."""
    known = before is not None and (before.incarnation, before.state) == (after.incarnation, after.state)
    if after.state is State.ADMITTED and not known and (why := barred(after)):
        logs.warning("replica cannot be reached from here", replica=after.id, incarnation=after.incarnation, reason=why)


def netloc(way: Way) -> str:
    """As URLs and Host headers say it."""
    return reach.door(way.address, way.port)


def socket_for(way: Way) -> socket.socket:
    """A fresh socket for it, not connected yet. A far one gives up on a host that has vanished without a word."""
    family = socket.AF_INET6 if ":" in way.address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    if way.far:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
        for option, value in _KEEPALIVE:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
