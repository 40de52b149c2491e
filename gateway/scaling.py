"""Asks for replicas when demand wants more than there are or are coming.

Woken by edges of demand and by changes of the fleet, and once a second for what no edge tells. How many are wanted is
:mod:`policies.scaling`'s; that two askers get one operation is the store's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from gateway import logs
from gateway.current import Current
from gateway.errors import StoreUnavailable
from gateway.operations import Operations, Outcome
from gateway.registry import Registry
from gateway.report import Reporter
from policies.replica import COMING, State
from policies.scaling import wanted
from policies.wire import Reason

PERIOD_S = 1.0


class Scaler:
    """One per gateway process."""

    def __init__(self, current: Current, *, registry: Registry, reporter: Reporter, operations: Operations) -> None:
        self._current = current
        self._registry = registry
        self._reporter = reporter
        self._operations = operations
        self._poked: set[str] = set()
        self._wake = asyncio.Event()
        self.on_trigger: Callable[[str, Outcome], None] = lambda model, outcome: None
        """Called with the model and what its request for replicas led to."""

    def poke(self, model: str) -> None:
        """Something about this model changed; look at it now."""
        self._poked.add(model)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. A lost store is logged and tried again."""
        while True:
            try:
                for model in await self._due():
                    await self._consider(model)
            except StoreUnavailable as error:
                logs.warning("no replicas could be asked for", reason=str(error))
                await asyncio.sleep(PERIOD_S)

    async def _due(self) -> list[str]:
        """The models to look at: those poked, or all when a second has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S):
                await self._wake.wait()
        poked = sorted(self._poked) if self._wake.is_set() else list(self._current.config.models)
        self._poked.clear()
        self._wake.clear()
        return poked

    async def _consider(self, model: str) -> None:
        if self._missing(model) is None:
            return
        # Whoever takes the job looks at the reports to see whether anybody still wants it.
        await self._reporter.publish()
        missing = self._missing(model)
        if missing is not None:
            outcome = await self._operations.scale_up(model, *missing)
            if outcome is not None:
                self.on_trigger(model, outcome)

    def _missing(self, model: str) -> tuple[int, Reason] | None:
        """How many replicas to ask for, and why; None when there are enough or none may be asked for."""
        if self._reporter.draining or self._registry.failure(model) is not None:
            return None
        target, reason = self._wish(model)
        enough = target <= self._registry.count(model, {State.ADMITTED, *COMING})
        return None if enough else (target, reason)

    def _wish(self, model: str) -> tuple[int, Reason]:
        spec = self._current.config.models[model]
        # Each gateway speaks for its own: what is known of the others is up to a second old, and asking on the strength of it
        # would start what a restorer, who knows better, cancels at once, again and again.
        demand = self._reporter.demand(model) if self._reporter.own_demand(model) else 0
        target = wanted(demand=demand, concurrency=spec.concurrency, keep=spec.keep, max_replicas=spec.max_replicas)
        return target, "keep" if target <= spec.keep else "demand"
