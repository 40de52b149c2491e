"""Who pushes to a remote just now, and who sweeps it, so that a push can rely on what it finds there.

A push sends nothing that is there already; a sweep removes what nothing names, which a push under way may be about to name. So
each says that it is there before it looks: it puts an object of its own under ``leases/``, and then lists that folder. Of two
that begin at once at least one sees the other, since what was put is listed by every store that Rewake knows. A sweep that sees
a push ends; a push that sees a sweep waits for that. Whoever died is known by its lease's age, told by the remote's clock alone.

Whoever was stopped so long that its lease may have run out finds that out by this host's clock, and does nothing more
(:meth:`Lease.hold`). Knows remotes and clocks, nothing of snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Literal

from restorer.errors import InUse, RemoteFailed, SnapshotError
from restorer.remotes.catalog import Catalog

Kind = Literal["push", "sweep"]
FOLDER = "leases"
TTL_S = 300.0
"""A lease that was not renewed for so long is nobody's."""
_RENEW_S = 30.0
_MOST_BYTES = 4096
_WAIT_S = 600.0
"""Longer than the lease of a sweep that died; one that lives looks for pushes every few seconds."""
_POLL_S = 1.0


class Lease:
    """One push or sweep, as others see it. See :func:`pushing` and :func:`sweeping`."""

    def __init__(self, catalog: Catalog, kind: Kind, what: str) -> None:
        self._catalog, self._remote = catalog, catalog.remote
        self.path = f"{FOLDER}/{kind}-{secrets.token_hex(8)}"
        self._said = {"host": socket.gethostname(), "pid": os.getpid(), "what": what, "ttl_s": self._ttl_s()}
        self._since = -TTL_S
        self.now_ms = 0
        """The remote's clock when :meth:`others` last looked."""
        self.dead: list[str] = []
        """Leases that had run out then."""

    def _ttl_s(self) -> float:
        # One request may still be under way when the right to it has ended.
        return TTL_S + 2 * self._remote.settings.timeout_s

    async def renew(self) -> None:
        """Say again that we are there. Raises RemoteFailed."""
        since = _clock()
        said = self._catalog.seal.wrap(self.path, json.dumps(self._said).encode())
        await self._remote.put(self.path, said, create=False)
        self._since = since

    def hold(self) -> None:
        """Whether others still count on us; to be asked before each step that relies on it.

        Raises:
            RemoteFailed: we were stopped, or cut off, for so long that they may not.
        """
        if _clock() - self._since > TTL_S:
            raise RemoteFailed(
                f"{self._remote.what}: its lease there could not be renewed for {TTL_S:g} s, so others may have begun meanwhile; "
                "nothing more was done: run it again"
            )

    async def others(self, kind: Kind) -> list[str]:
        """Who else is there, in words. Renews our own lease, by whose time the others' ages are told."""
        await self.renew()
        found = [one async for one in self._remote.list(FOLDER)]
        self.now_ms = max((one.modified_ms for one in found if one.path == self.path), default=time.time_ns() // 1_000_000)
        alive: list[str] = []
        self.dead = []
        for one in found:
            if one.path == self.path:
                continue
            who, ttl_s = await self._read(one.path)
            if self.now_ms - one.modified_ms >= ttl_s * 1000:
                self.dead.append(one.path)
            elif who and one.path.startswith(f"{FOLDER}/{kind}-"):
                alive.append(who)
        return alive

    async def _read(self, path: str) -> tuple[str, float]:
        """(whose lease that is, for how long); nobody's: it has been given back."""
        with contextlib.suppress(SnapshotError, ValueError, KeyError, TypeError):
            blob = await self._remote.get(path, _MOST_BYTES)
            if blob is None:
                return "", 0.0
            said = json.loads(self._catalog.seal.unwrap(path, blob, _MOST_BYTES))
            return f"{said['host']} (pid {said['pid']}), which {said['what']}", float(said["ttl_s"])
        # Somebody's, whatever it says.
        return f"somebody, who left {path}", TTL_S

    async def run(self) -> None:
        """Renew until cancelled. What goes wrong shows when the lease has run out, and not before."""
        while True:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(RemoteFailed):
                await self.renew()


@contextlib.asynccontextmanager
async def pushing(catalog: Catalog, what: str) -> AsyncIterator[Lease]:
    """The right to rely on what is there, for as long as the block lasts. Waits for a sweep to end.

    Raises:
        RemoteFailed: as the name says. InUse: a sweep does not end; says whose.
    """
    async with _leased(catalog, "push", what) as lease:
        deadline = _clock() + _WAIT_S
        while sweeps := await lease.others("sweep"):
            if _clock() > deadline:
                raise InUse(f"{catalog.what} is being swept by {' and '.join(sweeps)}; push again when that has ended")
            await asyncio.sleep(_POLL_S)
        yield lease


@contextlib.asynccontextmanager
async def sweeping(catalog: Catalog) -> AsyncIterator[Lease]:
    """A lease of somebody who removes; whether it may is for the block to ask, by :meth:`Lease.others`."""
    async with _leased(catalog, "sweep", "sweeps it") as lease:
        yield lease


@contextlib.asynccontextmanager
async def _leased(catalog: Catalog, kind: Kind, what: str) -> AsyncIterator[Lease]:
    lease = Lease(catalog, kind, what)
    await lease.renew()
    renewing = asyncio.create_task(lease.run())
    try:
        yield lease
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
        # Credentials that may not remove anything can push all the same: the lease runs out.
        with contextlib.suppress(RemoteFailed):
            await catalog.remote.remove(lease.path)


def _clock() -> float:
    """Seconds, those in which the host slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
