"""Asks for replicas when demand, a schedule or the configuration wants more than there are or are coming.

Woken by edges of demand and by changes of the fleet, and once a second for what no edge tells. How many are wanted is
:mod:`policies.scaling`'s, who makes room in a group :mod:`policies.groups`'; that two askers get one operation, and that a
group is never overfull, is the store's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway import logs
from gateway.current import Current
from gateway.errors import StoreUnavailable
from gateway.operations import Crowded, Operations, Outcome
from gateway.registry import Registry
from gateway.report import Reporter
from policies import groups, schedule
from policies.replica import COMING, State
from policies.scaling import wanted
from policies.wire import Reason

PERIOD_S = 1.0
_CALM_S = 0.01
"""The least between two looks: where one request follows the other, demand comes and goes with each."""


@dataclass(slots=True)
class _Use:
    """When a model was last in use, as far as this gateway has seen."""

    active_at: float
    arrivals: int


def local_time() -> schedule.Moment:
    """What the clock on the wall says."""
    now = time.localtime()
    return schedule.Moment(now.tm_wday, now.tm_hour * 60 + now.tm_min)


class Scaler:
    """One per gateway process.

    Args:
        cost_s: what it usually takes to start a model; None: never measured.
        local: the local time, for schedules.
    """

    def __init__(
        self,
        current: Current,
        *,
        registry: Registry,
        reporter: Reporter,
        operations: Operations,
        cost_s: Callable[[str], float | None] = lambda model: None,
        local: Callable[[], schedule.Moment] = local_time,
    ) -> None:
        self._current = current
        self._registry = registry
        self._reporter = reporter
        self._operations = operations
        self._cost_s = cost_s
        self._local = local
        self._poked: set[str] = set()
        self._wake = asyncio.Event()
        self._looked_at = 0.0
        self._uses: dict[str, _Use] = {}
        self._preloaded: set[str] = set()
        self._places: dict[str, tuple[float, float]] = {}
        self.on_trigger: Callable[[str, Outcome], None] = lambda model, outcome: None
        """Called with the model and what its request for replicas led to."""
        self.trace: Callable[[str], str] = lambda model: ""
        """The ``traceparent`` of an operation that is about to be asked for."""

    def place_s(self, model: str) -> float:
        """Seconds until a model that found its group full may be expected to have a place; 0 for any other."""
        asked_at, wait_s = self._places.get(model, (0.0, 0.0))
        return max(0.0, asked_at + wait_s - asyncio.get_running_loop().time())

    def poke(self, model: str) -> None:
        """Something about this model changed; look at it now."""
        self._poked.add(model)
        self._wake.set()

    def poke_mates(self, model: str) -> None:
        """A replica of this model changed: a place in its group may be free for another."""
        spec = self._current.config.models.get(model)
        if spec is not None and spec.group is not None:
            self._poked.update(name for name, other in self._current.config.models.items() if other.group == spec.group)
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
            else:
                await asyncio.sleep(_CALM_S)

    async def _due(self) -> list[str]:
        """The models to look at: those poked, or all when a second has passed since that was last done."""
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._looked_at + PERIOD_S - clock())):
                await self._wake.wait()
        poked, models = self._poked, self._current.config.models
        self._poked = set()
        self._wake.clear()
        if clock() < self._looked_at + PERIOD_S:
            return sorted(poked & models.keys())
        self._looked_at = clock()
        for model in models:
            self._note_use(model)
        return list(models)

    async def _consider(self, model: str) -> None:
        spec = self._current.config.models.get(model)
        if spec is not None and spec.preload and model not in self._preloaded:
            await self._preload(model)
        if self._missing(model) is None:
            return
        # Whoever takes the job looks at the reports to see whether anybody still wants it.
        await self._reporter.publish()
        missing = self._missing(model)
        if missing is None:
            return
        target, reason = missing
        try:
            yields, trace = not self._reporter.unserved(model), self.trace(model)
            outcome = await self._operations.scale_up(model, target, reason, yields=yields, trace=trace)
        except Crowded as crowded:
            await self._make_room(model, crowded)
            return
        self._places.pop(model, None)
        if outcome is not None:
            self.on_trigger(model, outcome)

    async def _preload(self, model: str) -> None:
        """Ask for the one that the installation starts with. Every gateway does so; the store counts the first alone."""
        if self._registry.failure(model) is not None:
            return
        try:
            outcome = await self._operations.preload(model)
        except Crowded as crowded:
            logs.warning("model not preloaded", model=model, reason=str(crowded))
            outcome = None
        self._preloaded.add(model)
        if outcome is not None:
            self.on_trigger(model, outcome)

    def _missing(self, model: str) -> tuple[int, Reason] | None:
        """How many replicas to ask for, and why; None when there are enough or none may be asked for.

        A gateway that drains still asks for those that it holds.
        """
        if model not in self._current.config.models or self._registry.failure(model) is not None:
            return None
        target, reason = self._wish(model)
        enough = target <= self._registry.count(model, {State.ADMITTED, *COMING})
        return None if enough else (target, reason)

    def _wish(self, model: str) -> tuple[int, Reason]:
        spec = self._current.config.models[model]
        # Each gateway speaks for its own: what is known of the others is up to a second old, and asking on the strength of it
        # would start what a restorer, who knows better, cancels at once, again and again.
        demand, warm = self._reporter.unserved(model), self._warm(model)
        target = wanted(demand=demand, concurrency=spec.concurrency, keep=warm, max_replicas=spec.max_replicas)
        if target > warm:
            return target, "demand"
        return target, "keep" if target <= spec.keep else "schedule"

    def _warm(self, model: str) -> int:
        """Replicas to have now, whether or not anybody asks."""
        spec = self._current.config.models[model]
        return max(spec.keep, schedule.kept(spec.schedule, self._local()))

    async def _make_room(self, model: str, crowded: Crowded) -> None:
        """Its group is full: see whether somebody has to go for it. It is asked for again by then, and once a second."""
        # A reload may have come meanwhile: only what is still configured is judged.
        config = self._current.config
        name = config.models[model].group if model in config.models else None
        if name is None or all(waiter.model != model for waiter in crowded.queue):
            return
        members = [
            groups.Member(
                seated.model,
                seated.serving_s,
                self._quiet_s(seated.model),
                leaving=seated.leaving,
                pinned=config.models[seated.model].pinned,
                kept=self._warm(seated.model) > 0,
                cost_s=self._cost_s(seated.model) or 0.0,
            )
            for seated in crowded.seated
            if seated.model in config.models
        ]
        queue = [
            groups.Waiter(waiter.model, waiter.waited_s, waiter.yields, self._cost_s(waiter.model) or 0.0)
            for waiter in crowded.queue
        ]
        place_s = groups.wait_s(config.groups[name], model, members, queue)
        self._places[model] = (asyncio.get_running_loop().time(), place_s)
        verdict = groups.decide(config.groups[name], model, members, queue)
        if isinstance(verdict, groups.Displace):
            outcome = await self._operations.displace(
                verdict.victim, asker=model, min_tenure_s=config.groups[name].min_tenure_s, detail=verdict.reason
            )
            if outcome is not None:
                logs.info("model displaced", model=verdict.victim, reason=verdict.reason, operation=outcome.operation.id)

    def _note_use(self, model: str) -> _Use:
        now = asyncio.get_running_loop().time()
        demand, arrivals = self._reporter.demand(model), self._reporter.arrivals(model)
        use = self._uses.setdefault(model, _Use(now, arrivals))
        if demand or arrivals != use.arrivals:
            use.active_at = now
        use.arrivals = arrivals
        return use

    def _quiet_s(self, model: str) -> float:
        """Seconds since it was last in use. A gateway that has just come knows nothing of before."""
        return asyncio.get_running_loop().time() - self._note_use(model).active_at
