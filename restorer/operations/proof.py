"""An engine out of a folder that has repeated its donor's answers: what a restore and a rehearsal have in common.

Knows nothing of jobs, records, or what becomes of the engine afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from policies.manifest import Exchange, Manifest
from restorer.adapters import canary
from restorer.adapters.engines import HttpEngine
from restorer.boxes.box import Box
from restorer.checkpoint.prefetch import Touched
from restorer.errors import CanaryDiffers, EngineDied, EngineNotReady, SnapshotError
from restorer.gpu.gpus import Placement
from restorer.machine.host import Host
from restorer.operations import accounts, gpustate
from restorer.operations.instance import Instance, connect, last_words
from restorer.records.stages import Stages
from restorer.storage.arrival import Arrival


async def revived(
    host: Host,
    box: Box,
    engine: HttpEngine,
    manifest: Manifest,
    folder: Path,
    stages: Stages,
    placement: Placement | None,
    up: Callable[[], Awaitable[object]],
    touched: Touched | None = None,
    arrival: Arrival | None = None,
) -> Instance:
    """Restore what is in ``folder`` into an empty box and compare its answers with its donor's.

    Args:
        folder: where ``images`` and ``scratch`` are.
        up: called between the two.
        touched: what is read beside it, of which the canary's time is told.
        arrival: of a snapshot whose weights still come; it says where all else is.

    Raises:
        CanaryDiffers: it answers otherwise. Otherwise as :func:`restorer.operations.gpustate.revive`; the box must be ended.
    """
    try:
        instance = await gpustate.revive(host, box, engine, manifest, folder, stages, placement, arrival)
        await up()
        await proved(host, instance, manifest.canary, stages, touched)
    except (EngineDied, EngineNotReady) as error:
        # Before the box goes, and its log with it.
        error.log = last_words(box)
        if (verdict := error.verdict).certain:
            raise SnapshotError(f"what was restored is broken: {error}; its log ends: {verdict.evidence}") from error
        raise
    return instance


async def proved(
    host: Host, instance: Instance, exchanges: Sequence[Exchange], stages: Stages, touched: Touched | None = None
) -> None:
    """It repeats the donor's answers; raises CanaryDiffers otherwise."""
    with accounts.compared(host.tally, instance.engine.name), stages.timed("canary") as stage:
        if touched is not None:
            stage.of(touched.cached, touched.bytes)
        async with connect(instance) as client:
            verdict = await canary.check(client, instance.engine, exchanges)
        if not verdict.equal:
            raise CanaryDiffers(f"the restored engine does not repeat its donor's answers: {verdict.difference}")
