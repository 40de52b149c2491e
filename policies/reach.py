"""How a gateway reaches a replica: at its box's own address from the same host, through its door from any other, or not at all.

A box's address leads to it from the network namespace alone that its restorer is in. Where two processes are is compared as
places: a boot of a kernel, and a network namespace of it. Pure: who reads them is not known here.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.replica import Replica


class Way(NamedTuple):
    """Where to connect."""

    address: str
    port: int
    far: bool
    """Over a network that may fail, to a host that may vanish without a word."""


def place(boot_id: str, namespace: int) -> str:
    """A place, by the kernel's boot id and the inode of a network namespace."""
    return f"{boot_id.strip()}/{namespace}"


def door(address: str, port: int) -> str:
    """A door as records say it, and URLs; an IPv6 address is put into brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def way(replica: Replica, here: str) -> Way | None:
    """How a gateway that is ``here`` reaches a replica; None: it cannot.

    A record without a place is of a version whose gateways were all on their replicas' hosts.
    """
    if replica.place in ("", here):
        return Way(replica.address, replica.port, far=False)
    if not replica.door:
        return None
    address, _, port = replica.door.rpartition(":")
    return Way(address.strip("[]"), int(port), far=True)


def barred(replica: Replica, here: str) -> str:
    """Why a gateway that is ``here`` cannot reach a replica, and how to mend that; empty: it can."""
    if way(replica, here) is not None:
        return ""
    return f"it is on {replica.host}, and has no door there: set restorer.expose on that host, or use a gateway on it"
