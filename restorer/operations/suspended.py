"""Engines that rest on this host: their GPU state taken off the GPU, or asleep by their own API; alive, and nobody's replica.

A tier between admitted and parked. A replica that is stopped may be kept like this instead of being ended; the next start of its
model resumes it, sooner than from any image, and proves it by the same canary as a restore. To everybody else it has ended: its
record says *stopped*, its GPUs are free, and when it runs again it is another incarnation.

What is kept is bounded: one engine a model, for as long as its settings say, as long as the host has memory to spare. It does not
outlive its restorer: another one that finds it ends it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import ClassVar, Protocol

from policies.manifest import Exchange, GpuState, Profile
from restorer.boxes.box import Box
from restorer.errors import CanaryDiffers, RestorerError, SnapshotError
from restorer.gpu.gpus import Need, Placement, memory
from restorer.machine import profile
from restorer.machine.host import Host, Match, log
from restorer.operations import gpustate, sleeping
from restorer.operations.instance import Instance
from restorer.records.stages import Stages

_SPARE = 10
"""At least one part in so many of the host's memory stays free; otherwise the engine that has slept longest is ended."""


class Rest(Protocol):
    """How an engine rests."""

    @property
    def start(self) -> str:
        """What a replica's record says of it when it runs again."""

    @property
    def exchanges(self) -> tuple[Exchange, ...] | None:
        """What it must repeat then; None: what its snapshot says."""

    def need(self, host: Host) -> Need:
        """What it wants of GPUs then."""

    async def wake(self, host: Host, instance: Instance, placement: Placement | None, stages: Stages) -> None:
        """Wake it, with these GPUs; it may be asked afterwards."""


@dataclass(frozen=True, slots=True)
class OffGpu:
    """Its GPU state is in the host's memory."""

    state: GpuState
    start: ClassVar[str] = "resumed"
    exchanges: ClassVar[None] = None

    def need(self, host: Host) -> Need:
        return gpustate.need(host, self.state)

    async def wake(self, host: Host, instance: Instance, placement: Placement | None, stages: Stages) -> None:
        assert placement is not None
        await gpustate.resume(host, instance, self.state, placement, stages)


@dataclass(frozen=True, slots=True)
class Resting:
    """One engine that rests."""

    instance: Instance
    rest: Rest
    profile: Profile
    since: float
    """Monotonic time."""

    @property
    def box(self) -> Box:
        return self.instance.box

    def exchanges(self, match: Match) -> tuple[Exchange, ...]:
        """What it must repeat: what it was taken with, or else its snapshot."""
        if self.rest.exchanges is not None:
            return self.rest.exchanges
        assert match.manifest is not None
        return match.manifest.canary

    @property
    def alive(self) -> bool:
        return self.box.alive and self.box.host_pid(self.instance.inner_pid) == self.instance.pid


class Suspended:
    """All of this host. Methods are called from one event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._resting: dict[str, Resting] = {}
        self._liars: set[str] = set()
        """Digests of settings."""

    def __len__(self) -> int:
        return len(self._resting)

    def models(self) -> tuple[str, ...]:
        """Those that have an engine that rests."""
        return tuple(self._resting)

    async def suspend(self, model: str, instance: Instance) -> bool:
        """Take an engine that serves nobody off its GPUs and keep it. False: it is not to be kept, or could not be.

        It may be half asleep then, and is to be ended.
        """
        if model not in self._host.config.models or not self._keep_s(model) or model in self._resting:
            return False
        try:
            wanted = await asyncio.to_thread(profile.resolve, model, self._host.model(model), self._host.stamps)
            rest: Rest
            if not self._host.backend(model).can.sleep:
                rest = OffGpu(await gpustate.rest(self._host, instance, Stages()))
            elif wanted.digest not in self._liars:
                rest = await sleeping.doze(self._host, instance, wanted.digest)
            else:
                raise SnapshotError("one with the same settings did not wake as it was")
        except RestorerError as error:
            log.warning("an engine of %s is ended rather than kept: %s", model, error)
            return False
        # A restorer that finds the box must not take it for a replica.
        instance.box.facts.pop("record", None)
        instance.box.remember(gpus=[])
        self._host.gpus.release(instance.box.id)
        # Whoever is still connected must not be when it runs again, as another incarnation.
        await self._host.boxes.doors.renew(instance.box)
        self._resting[model] = Resting(instance, rest, wanted, time.monotonic())
        log.info("an engine of %s rests, to be %s by the next start", model, rest.start)
        return True

    def failed(self, resting: Resting, error: RestorerError) -> None:
        """It did not wake. If it was not what it had been, none with these settings is put to sleep again by this process."""
        if resting.rest.exchanges is not None and isinstance(error, CanaryDiffers):
            self._liars.add(resting.profile.digest)

    def _keep_s(self, model: str) -> float:
        engine = self._host.model(model).engine
        return engine.sleep.keep_s if self._host.backend(model).can.sleep else engine.gpu.suspend_s

    async def take(self, model: str, match: Match) -> Resting | None:
        """The suspended engine of a model, if it is what a start would make now and a canary can prove it. It is the caller's."""
        resting = self._resting.pop(model, None)
        if resting is None:
            return None
        unproved = resting.rest.exchanges is None and match.manifest is None
        if unproved or match.profile != resting.profile or not resting.alive:
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
            if known is None or now - resting.since > self._keep_s(model) or not resting.alive:
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
