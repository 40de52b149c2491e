"""Sets the gauges from the parts' own counts, once a second and at each scrape.

Other workers answer scrapes for this one, from files: what they show of it is at most a second old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gateway.current import Current
from gateway.errors import NotFound, Unauthorized
from gateway.exchange import Call, Reply
from gateway.hosts import Hosts
from gateway.ledger import Ledger
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.registry import Registry
from gateway.report import Reporter
from gateway.tls import Certificates
from policies.replica import State
from policies.tenancy import key_hash

PERIOD_S = 1.0


class Gauges:
    """One per gateway process.

    Args:
        authorize: raises Unauthorized unless the call is an administrator's.
    """

    def __init__(
        self,
        current: Current,
        ledger: Ledger,
        registry: Registry,
        link: Link,
        reporter: Reporter,
        hosts: Hosts,
        metrics: Metrics,
        authorize: Callable[[Call], None],
        certificates: Certificates | None,
    ) -> None:
        self._current = current
        self._ledger = ledger
        self._registry = registry
        self._link = link
        self._reporter = reporter
        self._hosts = hosts
        self._metrics = metrics
        self._admin = authorize
        self._certificates = certificates
        self._arrivals: dict[str, int] = {}

    async def run(self) -> None:
        """Until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            self.observe()
            self._observe_expiry()
            due = clock() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._metrics.loop_lag.set(max(0.0, clock() - due))

    async def scrape(self, call: Call) -> Reply:
        """All series, at the gateway's address.

        Raises:
            NotFound: metrics have an address of their own. Unauthorized: as :meth:`show`.
        """
        if self._current.config.metrics.at is not None:
            raise NotFound("Metrics have an address of their own here: metrics.address.")
        return await self.show(call)

    async def show(self, call: Call) -> Reply:
        """All series, to whoever may see them.

        Raises:
            Unauthorized: the configuration has keys for it, and the call carries none of them.
        """
        self._authorize(call)
        self.observe()
        if self._link.connected.is_set():
            await self._hosts.look()
        return self._metrics.expose(call.accept, [self._hosts])

    def _authorize(self, call: Call) -> None:
        keys = self._current.config.metrics.keys
        scheme, _, key = (call.authorization or "").partition(" ")
        if not keys or (scheme.lower() == "bearer" and key_hash(key.strip()) in keys):
            return
        try:
            self._admin(call)  # who may do everything may read this too: `rewake support` does
        except Unauthorized:
            raise Unauthorized("Metrics need `Authorization: Bearer KEY`.", headers={"WWW-Authenticate": "Bearer"}) from None

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
        models = self._current.config.models
        self._metrics.bounded(
            {name: spec.hold.max_requests for name, spec in models.items()},
            {name: registry.failure(name) is not None for name in models},
        )
        self._metrics.store_connected.set(self._link.connected.is_set())
        self._metrics.gateways.set(self._reporter.gateways)
        self._metrics.certificate_expires.set(0.0 if self._certificates is None else self._certificates.ends)

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
