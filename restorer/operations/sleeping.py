"""Engines that are kept asleep by their own API: no snapshot, the same process all along, proved anew each time it wakes.

There is no donor but the engine itself: what it answered when it had just started is what it must repeat. Whose answers are not
stable, or whose settings have changed since it was started, is ended like any other engine rather than put to sleep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.manifest import Allocation, Exchange
from restorer.adapters import canary
from restorer.errors import CanaryDiffers, SnapshotError
from restorer.gpu.gpus import Need, Placement
from restorer.machine.host import Host
from restorer.operations.instance import Instance, connect
from restorer.records.stages import Stages

_VOW = "vow"
"""What of a box's facts its engine has to repeat."""


@dataclass(frozen=True, slots=True)
class Nap:
    """An engine asleep by its own doing, and what it takes to wake and to prove it."""

    exchanges: tuple[Exchange, ...]
    wants: Need
    weights: Sequence[tuple[Allocation, ...]]
    """As they were, where they are read anew; empty: they were kept, or the engine cannot tell."""

    start: ClassVar[str] = "woken"

    def need(self, host: Host) -> Need:
        return self.wants

    async def wake(self, host: Host, instance: Instance, placement: Placement | None, stages: Stages) -> None:
        """Wake it. Raises CanaryDiffers when its weights are not what they were, EngineNotReady when it does not wake."""
        level = instance.engine.model.engine.sleep.level
        async with connect(instance) as client:
            with stages.timed("wake"):
                await instance.engine.rouse(client, level)
            if self.weights:
                with stages.timed("weights"):
                    found = await instance.engine.describe_weights(client)
                if found != list(self.weights):
                    raise CanaryDiffers("the weights that were read again are not what they were before it slept")


async def vow(instance: Instance, profile: str, stages: Stages) -> None:
    """Note with its box what an engine that has just started answers, and with which settings it was started.

    Args:
        profile: the digest of its settings.

    Raises:
        SnapshotError: it is not stable, so that it can never be kept asleep.
    """
    with stages.timed("record canary"):
        async with connect(instance) as client:
            await instance.engine.quiesce(client)
            exchanges, _ = await canary.record(client, instance.engine)
    recorded = [exchange.model_dump(mode="json") for exchange in exchanges]
    instance.box.remember(**{_VOW: {"profile": profile, "exchanges": recorded}})


async def doze(host: Host, instance: Instance, profile: str) -> Nap:
    """Put an engine that serves nobody to sleep; it is to be ended if this fails.

    Raises:
        SnapshotError: it was started with other settings, was never stable, or cannot sleep.
        EngineNotReady, EngineDied: it failed.
    """
    noted = instance.box.facts.get(_VOW)
    if noted is None:
        raise SnapshotError("what it has to repeat was never recorded")
    if noted["profile"] != profile:
        raise SnapshotError("its settings have changed since it was started")
    engine, level = instance.engine, instance.engine.model.engine.sleep.level
    used = host.gpus.held(instance.box.id) if engine.gpus else ()
    before = await _free(host, used)
    async with connect(instance) as client:
        weights = await engine.describe_weights(client) if level == 2 and engine.tells_weights else []
        await engine.doze(client, level)
    given_back = max(0, await _free(host, used) - before)
    exchanges = tuple(Exchange.model_validate(one) for one in noted["exchanges"])
    return Nap(exchanges, Need(given_back // max(1, len(used)), used, only=True), weights)


async def _free(host: Host, uuids: Sequence[str]) -> int:
    if not uuids:
        return 0
    found = await host.cuda.memory()
    return sum(int(found[uuid]["free"]) for uuid in uuids if uuid in found)
