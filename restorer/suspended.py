"""Engines asleep in the host's memory: their GPU state taken off the GPU, their processes alive, nobody's replica.

A tier between admitted and parked. A replica that is stopped may be kept like this instead of being ended; the next start of its
model resumes it, sooner than from any image, and proves it by the same canary as a restore. To everybody else it has ended: its
record says *stopped*, its GPUs are free, and when it runs again it is another incarnation.

What is kept is bounded: one engine a model, for as long as ``engine.gpu.suspend_s``, as long as the host has memory to spare.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from policies.manifest import GpuState, Profile
from restorer import gpustate, profile
from restorer.box import Box
from restorer.errors import RestorerError
from restorer.gpus import memory
from restorer.host import Host, Match, log
from restorer.instance import Instance
from restorer.stages import Stages

_SPARE = 10
"""At least one part in so many of the host's memory stays free; otherwise the engine that has slept longest is ended."""


@dataclass(frozen=True, slots=True)
class Resting:
    """One suspended engine."""

    instance: Instance
    state: GpuState
    profile: Profile
    since: float
    """Monotonic time."""

    @property
    def box(self) -> Box:
        return self.instance.box

    @property
    def alive(self) -> bool:
        return self.box.alive and self.box.host_pid(self.instance.inner_pid) == self.instance.pid


class Suspended:
    """All of this host. Methods are called from one event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._resting: dict[str, Resting] = {}

    def __len__(self) -> int:
        return len(self._resting)

    async def suspend(self, model: str, instance: Instance) -> bool:
        """Take an engine that serves nobody off its GPUs and keep it. False: it is not to be kept, or could not be.

        It may be half asleep then, and is to be ended.
        """
        if model not in self._host.config.models or not self._host.model(model).engine.gpu.suspend_s or model in self._resting:
            return False
        try:
            wanted = await asyncio.to_thread(profile.resolve, model, self._host.model(model), self._host.stamps)
            state = await gpustate.rest(self._host, instance, Stages())
        except RestorerError as error:
            log.warning("an engine of %s is ended rather than suspended: %s", model, error)
            return False
        # A restorer that finds the box must not take it for a replica.
        instance.box.facts.pop("record", None)
        instance.box.remember(gpus=[])
        self._host.gpus.release(instance.box.id)
        self._resting[model] = Resting(instance, state, wanted, time.monotonic())
        log.info("an engine of %s is suspended: %d bytes of GPU state in memory", model, state.state_bytes)
        return True

    async def take(self, model: str, match: Match) -> Resting | None:
        """The suspended engine of a model, if it is what a start would make now and a canary can prove it. It is the caller's."""
        resting = self._resting.pop(model, None)
        if resting is None:
            return None
        if match.manifest is None or match.profile != resting.profile or not resting.alive:
            await self._host.discard(resting.box)
            return None
        return resting

    def put_back(self, model: str, resting: Resting) -> None:
        """It was not touched."""
        self._resting[model] = resting

    async def expire(self) -> None:
        """End what has slept for too long, or is in the way; called about every second."""
        now = time.monotonic()
        for model, resting in list(self._resting.items()):
            known = self._host.config.models.get(model)
            if known is None or now - resting.since > known.engine.gpu.suspend_s or not resting.alive:
                await self._end(model)
        total, available = memory()
        if self._resting and available < total // _SPARE:
            await self._end(min(self._resting, key=lambda model: self._resting[model].since))

    async def clear(self) -> None:
        """End all."""
        for model in list(self._resting):
            await self._end(model)

    async def _end(self, model: str) -> None:
        resting = self._resting.pop(model)
        log.info("the suspended engine of %s is ended", model)
        await asyncio.shield(self._host.discard(resting.box))
