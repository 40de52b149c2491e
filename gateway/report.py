"""What this gateway tells the others about itself, and what they told.

A report goes out every second and at once when a count turns to or from zero or a replica's record changed: a drain
waits for it. Counts are read in the moment of writing. Knows nothing of what others do with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gateway import logs
from gateway.errors import StoreUnavailable
from gateway.ledger import Ledger
from gateway.registry import Registry
from gateway.store import Store
from policies.replica import State
from policies.wire import GatewayReport, Held, ModelLoad

PERIOD_S = 1.0
_CALM_S = 0.02
"""Edges within this time share one report, so that a busy replica does not mean a busy store."""


class Place(NamedTuple):
    """Where a request waits. Each gateway has a queue of its own, and slots of its own for those in it: there is no place
    among all that wait."""

    request: Held
    gateway: str
    of: int
    """Requests that wait there for the same model."""


class Reporter:
    """One per gateway process."""

    def __init__(self, id: str, *, store: Store, ledger: Ledger, registry: Registry) -> None:
        self.id = id
        self.draining = False
        self._store = store
        self._ledger = ledger
        self._registry = registry
        self._peers: Mapping[str, GatewayReport] = {}
        self._edge = asyncio.Event()
        self._writing = asyncio.Lock()
        self.waiting: Callable[[], Sequence[Held]] = lambda: ()
        """Some of the requests that are held here."""
        self.knocked: Callable[[], Mapping[str, bool]] = dict
        """incarnation -> whether it can be connected to from here, where its host does not say how it is."""

    @property
    def gateways(self) -> int:
        """Live gateway workers, this one included."""
        return 1 + len(self._peers)

    def demand(self, model: str) -> int:
        """Live requests for the model over all gateways."""
        return self._ledger.load(model).demand + sum(
            report.models[model].demand for report in self._peers.values() if model in report.models
        )

    def unserved(self, model: str) -> int:
        """Live requests for the model that a replica may be started for; 0 unless there are some on this gateway.

        What is in flight on a replica that drains is served to its end there, and is in no need of another. What is known of
        other gateways is up to a second old, so that none speaks for the others alone.
        """
        draining = [one.incarnation for one in self._registry.replicas() if one.model == model and one.state is State.DRAINING]
        if self._ledger.load(model).demand <= sum(map(self._ledger.inflight, draining)):
            return 0
        inflight = self.inflight() if draining else {}
        return self.demand(model) - sum(inflight.get(incarnation, 0) for incarnation in draining)

    def arrivals(self, model: str) -> int:
        """Requests for the model ever accepted, over all live gateways; a change means activity even if demand is 0."""
        return self._ledger.load(model).arrivals + sum(
            report.models[model].arrivals for report in self._peers.values() if model in report.models
        )

    def inflight(self) -> Mapping[str, int]:
        """incarnation -> requests in flight over all gateways."""
        total = dict(self._ledger.replicas())
        for report in self._peers.values():
            for incarnation, count in report.replicas.items():
                total[incarnation] = total.get(incarnation, 0) + count
        return total

    def load(self, model: str) -> ModelLoad:
        """Requests for the model over all gateways."""
        loads = [report.models[model] for report in self._peers.values() if model in report.models]
        loads.append(self._ledger.load(model))
        return ModelLoad(
            held=sum(load.held for load in loads),
            inflight=sum(load.inflight for load in loads),
            rejected=sum(load.rejected for load in loads),
            arrivals=sum(load.arrivals for load in loads),
        )

    def held(self) -> Sequence[Place]:
        """Some of the requests that are held, over all gateways; who has waited longest first."""
        own = [Place(one, self.id, self._ledger.held(one.model)) for one in self.waiting()]
        others = [
            Place(one, report.id, report.models[one.model].held if one.model in report.models else 0)
            for report in self._peers.values()
            for one in report.waiting
        ]
        return sorted((*own, *others), key=lambda place: -place.request.waited_s)

    def kick(self) -> None:
        """Something changed that somebody may wait for."""
        self._edge.set()

    async def publish(self, *, edge: bool = True) -> None:
        """Write the report as things stand now.

        Raises:
            StoreUnavailable: nothing was written.
        """
        async with self._writing:
            suspicions = self._registry.take_suspicions()
            report = GatewayReport(
                id=self.id,
                seq=self._registry.seq,
                models=self._ledger.loads(),
                replicas=self._ledger.replicas(),
                draining=self.draining,
                waiting=tuple(self.waiting()),
                knocked=self.knocked(),
            )
            try:
                await self._store.report(report, suspicions, edge=edge)
            except BaseException:
                self._registry.put_back(suspicions)
                raise

    async def look(self) -> None:
        """Read what the other gateways report."""
        reports = await self._store.reports()
        self._peers = {id: report for id, report in reports.items() if id != self.id}

    async def run(self) -> None:
        """Report until cancelled; a lost store is tried again each period."""
        edge, clock, looked_at = False, asyncio.get_running_loop().time, float("-inf")
        while True:
            try:
                await self.publish(edge=edge)
                # Edges may come without a pause: what the others say is looked at once a period all the same.
                if clock() >= looked_at + PERIOD_S:
                    looked_at = clock()
                    await self.look()
            except StoreUnavailable as error:
                logs.warning("report not written", reason=str(error))
                await asyncio.sleep(PERIOD_S)
            else:
                await asyncio.sleep(_CALM_S)
            edge = await self._due()

    async def leave(self) -> None:
        """Take the report back: this gateway has no request left."""
        with contextlib.suppress(StoreUnavailable):
            await self._store.withdraw(self.id)

    async def _due(self) -> bool:
        """Wait for the next report; True when an edge asks for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S):
                await self._edge.wait()
        edge = self._edge.is_set()
        self._edge.clear()
        return edge
