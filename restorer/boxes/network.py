"""A box's way to the host and back: one veth pair and a /30, made with iproute2. Knows addresses and pids, no boxes."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from policies import reach
from restorer.boxes import probes
from restorer.errors import Environment, ToolHung

_SETUP_S = 20.0


def place() -> str:
    """Where boxes' addresses lead to them from: here."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    return reach.place(boot_id, os.stat("/proc/self/ns/net").st_ino)


class AddressTaken(Environment):
    """An interface or address of this network exists already: another installation uses the same one."""


async def free(cidr: str) -> None:
    """Nothing of the replicas' network is this host's own: addresses there would cut it off from its neighbours.

    Raises:
        Environment: the host is attached to it.
    """
    if clashes := await probes.attached(cidr):
        raise Environment(f"restorer.network is {cidr}, but this host is attached to {clashes}; name a network that nobody uses")


async def join(init_pid: int, host_address: str, address: str) -> None:
    """Give the network namespace of ``init_pid`` a veth pair: ``host_address`` here, ``address`` inside.

    Raises:
        AddressTaken: another installation has it; nothing of its was touched. Environment: it cannot be made here.
    """
    link = name(host_address)
    await _ip(
        [
            f"link add {link} type veth peer name eth0 netns {init_pid}",
            f"addr add {host_address}/30 dev {link}",
            f"link set {link} up",
        ]
    )
    await _ip([f"addr add {address}/30 dev eth0", "link set eth0 up"], enter=init_pid)


async def leave(host_address: str) -> None:
    """Remove the pair, if it has not gone with its namespace already."""
    await _ip([f"link del {name(host_address)}"], check=False)


def name(host_address: str) -> str:
    """Interface name (at most 15 characters), unique per address so that installations on one host do not clash."""
    return f"rw{int(ipaddress.IPv4Address(host_address)):08x}"


async def _ip(commands: Sequence[str], *, enter: int | None = None, check: bool = True) -> None:
    prefix = () if enter is None else ("nsenter", "-t", str(enter), "-n", "--")
    process = await asyncio.create_subprocess_exec(
        *prefix,
        *("ip", "-batch", "-"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_SETUP_S):
            _, err = await process.communicate("\n".join([*commands, ""]).encode())
    except TimeoutError:
        raise ToolHung(f"ip did not end within {_SETUP_S:g} s: {'; '.join(commands)}") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if check and process.returncode != 0 and b"File exists" in err:
        raise AddressTaken(f"ip: {'; '.join(commands)}: {err.decode(errors='replace').strip()}")
    if check and process.returncode != 0:
        raise Environment(f"ip: {err.decode(errors='replace').strip()}; does restorer.network overlap a network of this host?")
