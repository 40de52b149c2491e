"""Sets the gauges from the parts' own counts, once a second and at each scrape.

Other workers answer scrapes for this one, from files: what they show of it is at most a second old.
"""

from __future__ import annotations

import asyncio
import time

from gateway.current import Current
from gateway.exchange import Call, Reply
from gateway.ledger import Ledger
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.registry import Registry
from policies.replica import State

PERIOD_S = 1.0


class Gauges:
    """One per gateway process."""

    def __init__(self, current: Current, *, ledger: Ledger, registry: Registry, link: Link, metrics: Metrics) -> None:
        self._current = current
        self._ledger = ledger
        self._registry = registry
        self._link = link
        self._metrics = metrics
        self._arrivals: dict[str, int] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.observe()
            self._observe_expiry()
            await asyncio.sleep(PERIOD_S)

    async def scrape(self, call: Call) -> Reply:
        self.observe()
        return self._metrics.expose()

    def observe(self) -> None:
        ledger, registry = self._ledger, self._registry
        loads = ledger.loads()
        slots = {replica.id: ledger.inflight(replica.incarnation) for replica in registry.replicas()}
        self._metrics.observe(loads, {model: ledger.held_bytes(model) for model in loads}, slots)
        tenants = self._current.config.tenants
        self._metrics.observe_tenants(
            {tenant: ledger.tenant_held(tenant) for tenant in tenants},
            {tenant: ledger.tenant_inflight(tenant) for tenant in tenants},
        )
        self._metrics.store_connected.set(self._link.connected.is_set())

    def _observe_expiry(self) -> None:
        """When each model would be parked if nothing more came."""
        expires = self._metrics.session_expires
        for model, load in self._ledger.loads().items():
            spec = self._current.config.models.get(model)
            if spec is None:
                continue
            if load.arrivals != self._arrivals.get(model, 0) or load.held or load.inflight:
                self._arrivals[model] = load.arrivals
                expires.labels(model).set(time.time() + spec.idle_park_s)
            elif not self._registry.count(model, {State.ADMITTED}):
                expires.labels(model).set(0)
