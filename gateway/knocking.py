"""Knocks at replicas whose hosts do not report, so that nobody is given up whom a gateway still reaches.

A restorer that is gone says nothing of its engines: they may serve on, or be gone with their host. Only gateways can tell, and
one of them may be cut off alone; so each says what it found, and what follows is decided where all of that is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway import logs, whereabouts
from gateway.errors import StoreUnavailable
from gateway.registry import Registry
from gateway.store import Store
from policies.health import Outcome
from policies.replica import RUNNING, Replica

PERIOD_S = 1.0
_WITHIN_S = 2.0
_AT_ONCE = 32


class Knocker:
    """One per gateway process; :meth:`run` is its life."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._few = asyncio.Semaphore(_AT_ONCE)
        self.found: Mapping[str, bool] = {}
        """incarnation -> whether it could be connected to, of each whose host did not report at the last look."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.look()
            except StoreUnavailable:
                # Who reports is not known then. Nobody hears of it either.
                self.found = {}
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Knock at each that is in doubt.

        Raises:
            StoreUnavailable: nobody was knocked at.
        """
        running = [one for one in self._registry.replicas() if one.state in RUNNING]
        silent = await self._store.silent() if running else set()
        doubtful = [one for one in running if one.host in silent]
        answers = await asyncio.gather(*(self._knock(one) for one in doubtful))
        found = {one.incarnation: answer for one, answer in zip(doubtful, answers, strict=True)}
        for one in doubtful:
            if not found[one.incarnation]:
                # Whoever is sent there would wait for nothing.
                self._registry.outcome(one, Outcome.DEAD, f"host {one.host} does not report, and it cannot be connected to")
            if found[one.incarnation] != self.found.get(one.incarnation):
                said = "answers" if found[one.incarnation] else "cannot be connected to"
                logs.warning(f"its host does not report; it {said}", replica=one.id, incarnation=one.incarnation, host=one.host)
        self.found = found

    async def _knock(self, replica: Replica) -> bool:
        way = whereabouts.way(replica)
        if way is None:
            return False
        try:
            async with self._few, asyncio.timeout(_WITHIN_S):
                _, writer = await asyncio.open_connection(way.address, way.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True
