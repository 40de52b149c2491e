"""The GPU half of a dump and of a restore: asleep, weights apart, frozen; and all of it backwards.

::

    dump      describe, export weights -> sleep -> lock and checkpoint -> (CRIU) -> for the donor: backwards again
    restore   (CRIU; the helper loads the weights meanwhile) -> restore, unlock -> weights back, compared -> wake

Whatever fails, the way back is tried: a donor that cannot serve again is a :class:`EngineDied`, which no caller takes for a
mere missing snapshot. An engine on the CPU passes through here without a step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx

from policies import compat, drivers, reading
from policies.arrival import patience_s
from policies.manifest import Allocation, GpuState, Manifest, Weights
from policies.matching import Rule
from restorer.adapters.engines import HttpEngine
from restorer.boxes.box import Box
from restorer.errors import EngineDied, Environment, RestorerError, SnapshotError
from restorer.gpu.gpus import MARGIN_BYTES, Need, Placement, mapping, memory
from restorer.machine.host import Host
from restorer.operations import delivery
from restorer.operations.delivery import Delivery, awake_bytes, put_back
from restorer.operations.instance import Instance, connect, resurrect
from restorer.procfs import inventory
from restorer.records.stages import Stages
from restorer.storage.arrival import Arrival
from restorer.storage.weights import PART_BYTES

LOCK_S = 30.0
"""For work that is in flight on the GPU; an engine at rest is locked at once."""
_DRIVER_S = 180.0
"""For one step of the driver, which moves gigabytes."""
_SETTLE_S = 15.0


@contextlib.asynccontextmanager
async def asleep(host: Host, donor: Instance, stages: Stages, *, keep: bool) -> AsyncIterator[GpuState | None]:
    """A donor without state on any GPU; yields what a restore must know of it. None: it never had any.

    Args:
        keep: it serves again at the end; otherwise it is left as it is, for its box to be killed.

    Raises:
        SnapshotError, ToolFailed, ToolHung: its state cannot be taken off the GPU; it serves on.
        EngineDied: it does not serve any more.
    """
    if not donor.engine.gpus:
        yield None
        return
    _may_be_captured(host, donor.engine)
    pids = await host.cuda.find(await _pids(donor))
    if not pids:
        raise SnapshotError(
            "no process of the engine uses CUDA, though engine.gpu.count says so; mend its command, or the setting"
        )
    with await asyncio.to_thread(host.weights.busy):
        with stages.timed("export weights") as stage:
            weights = await _export(host, donor)
            stage.bytes = sum(one.bytes for one in weights)
        try:
            yield await _sleep(host, donor, pids, weights, stages)
        finally:
            if keep:
                with stages.timed("wake donor"):
                    await asyncio.shield(_wake_donor(host, donor, pids, weights))


def _may_be_captured(host: Host, engine: HttpEngine) -> None:
    obstacles = [*compat.gpu_obstacles(host.facts.gpu), *drivers.refused(host.facts.gpu, host.config.restorer.drivers)]
    if obstacles:
        raise SnapshotError("the GPU state cannot be captured: " + " | ".join(map(str, obstacles)))
    gpu = engine.model.engine.gpu
    if gpu.count > engine.most_gpus and not gpu.untested:
        raise SnapshotError(
            f"{engine.model.engine.kind} on {gpu.count} GPUs has not been seen to survive a checkpoint (on {engine.most_gpus} it "
            "has); it starts cold; engine.gpu.untested: true tries all the same, and its rehearsal tells"
        )
    linked = host.facts.gpu is not None and host.facts.gpu.topology is not None
    if gpu.count > 1 and not linked and host.config.matching.rule("gpu.topology") is Rule.EQUAL:
        raise SnapshotError(
            "the driver does not tell how this host's GPUs are linked, and a snapshot of an engine on several goes only where "
            "they are linked alike; see what `nvidia-smi topo -m` says, or set matching.rules.gpu.topology: report"
        )


async def revive(
    host: Host,
    box: Box,
    engine: HttpEngine,
    manifest: Manifest,
    folder: Path,
    stages: Stages,
    placement: Placement | None,
    arrival: Arrival | None = None,
) -> Instance:
    """Restore an engine into an empty box, GPU state included; it may be asked afterwards.

    Args:
        arrival: of a snapshot whose weights still come, and then where all else of it is.

    Raises:
        ToolFailed, ToolHung, EngineDied, EngineNotReady, Environment: it failed; the box must be killed.
        SnapshotError: the scratch is unusable, or the weights are not what they were. ArrivalFailed: the rest did not come.
    """
    backend = host.backend(engine.name)
    async with contextlib.AsyncExitStack() as still:
        if arrival is not None:
            # Nothing is renamed before its files are open and its processes are back.
            await still.enter_async_context(arrival.still)
            folder = arrival.folder or folder
        with host.reading(folder) as stages.alone:
            direct = reading.direct(engine.model.restore, host.rates, alone=stages.alone).on
            if manifest.gpu is None or placement is None:
                return await resurrect(backend, box, engine, manifest, folder, stages, direct=direct)
            state = manifest.gpu
            async with delivery.begun(host, box, state, placement, arrival) as coming:
                instance = await resurrect(backend, box, engine, manifest, folder, stages, direct=direct)
                await still.aclose()
                await _awaken(host, instance, state, placement, coming, stages)
            return instance


async def resume(host: Host, instance: Instance, state: GpuState, placement: Placement, stages: Stages) -> None:
    """Undo :func:`rest`, on whatever GPUs it has now; it may be asked afterwards. Raises what :func:`revive` does."""
    async with delivery.begun(host, instance.box, state, placement) as coming:
        await _awaken(host, instance, state, placement, coming, stages)


async def _awaken(
    host: Host, instance: Instance, state: GpuState, placement: Placement, coming: Delivery, stages: Stages
) -> None:
    pids = await _translated(instance, state.pids)
    with stages.timed("restore GPU") as stage:
        assert host.facts.gpu is not None
        stage.bytes = state.state_bytes
        pairs = mapping(state, placement, host.facts.gpu)
        if pairs:
            instance.box.remember(moved=True)
        await host.cuda.thaw(pids, pairs, within_s=_DRIVER_S)
    if coming.arrival is not None:
        with stages.timed("arriving") as stage:
            stage.bytes, stage.tier = max(0, coming.arrival.left), "network"
            await coming.arrival.weights()
    async with connect(instance) as client:
        with stages.timed("weights") as stage:
            await instance.engine.rejoin(client)
            stage.bytes = sum(one.bytes for one in state.weights)
            stage.tier = await put_back(coming, instance.engine, client, state.weights)
        with stages.timed("wake"):
            await instance.engine.wake(client)


def need(host: Host, state: GpuState) -> Need:
    """What a restore wants of GPUs: any, where the driver can put state onto another than its own."""
    fixed = drivers.immovable(host.facts.gpu, host.config.restorer.drivers)
    return Need(awake_bytes(state) + MARGIN_BYTES, state.used, only=bool(fixed))


async def _export(host: Host, donor: Instance) -> tuple[Weights, ...]:
    """The weights of each worker as they lie in the weights store; written only where it has none that are equal."""
    if not donor.engine.apart:
        return ()
    async with connect(donor) as client:
        described = await donor.engine.describe_weights(client)
        known = [await asyncio.to_thread(host.weights.find, allocations) for allocations in described]
        found = [one for one in known if one is not None]
        if len(found) == len(described):
            return tuple(found)
        return await _written(host, donor, client, described)


async def _written(
    host: Host, donor: Instance, client: httpx.AsyncClient, described: Sequence[tuple[Allocation, ...]]
) -> tuple[Weights, ...]:
    folders = [await asyncio.to_thread(host.weights.stage) for _ in described]
    try:
        within_s = patience_s(sum(run.bytes for allocations in described for run in allocations))
        parts = await donor.engine.export_weights(client, folders, PART_BYTES, within_s=within_s)
        return tuple(
            [
                await asyncio.to_thread(host.weights.commit, folder, written, allocations)
                for folder, written, allocations in zip(folders, parts, described, strict=True)
            ]
        )
    finally:
        for folder in folders:
            await asyncio.to_thread(host.weights.discard, folder)


async def _sleep(host: Host, donor: Instance, pids: Sequence[int], weights: tuple[Weights, ...], stages: Stages) -> GpuState:
    used = host.gpus.held(donor.box.id)
    awake = await _free(host, used)
    with stages.timed("sleep"):
        async with connect(donor) as client:
            await donor.engine.sleep(client)
    asleep_free = await _free(host, used)
    taken = sum(int(one["total"]) - int(one["free"]) for uuid, one in (await host.cuda.memory()).items() if uuid in used)
    if taken > (available := memory()[1]):
        raise Environment(f"{taken} bytes of GPU state do not fit into the host's memory, of which {available} bytes are free")
    with stages.timed("freeze GPU") as stage:
        await host.cuda.freeze(pids, lock_s=LOCK_S, within_s=_DRIVER_S)
        frozen = await _free(host, used)
        stage.bytes = max(0, frozen - asleep_free)
    numbers = {outer: inner for inner, outer in (await asyncio.to_thread(inventory.numbers, donor.pid)).items()}
    assert host.facts.gpu is not None
    return GpuState(
        pids=tuple(sorted(numbers[pid] for pid in pids)),
        uuids=tuple(gpu.uuid for gpu in host.facts.gpu.gpus or ()),
        used=used,
        state_bytes=max(0, frozen - asleep_free),
        awake_bytes=max(0, frozen - awake),
        weights=weights,
    )


async def _wake_donor(host: Host, donor: Instance, pids: Sequence[int], weights: Sequence[Weights]) -> None:
    """The way back, from wherever a capture has got to."""
    try:
        await host.cuda.thaw(pids, [], within_s=_DRIVER_S)
        async with connect(donor) as client:
            coming = Delivery(host.cuda, [host.weights.files(one) for one in weights], [], [], [])
            await donor.engine.rejoin(client)
            await put_back(coming, donor.engine, client, weights)
            await donor.engine.wake(client)
    except RestorerError as error:
        raise EngineDied(f"the donor does not serve any more: its GPU state could not be put back: {error}") from error


async def rest(host: Host, instance: Instance, stages: Stages) -> GpuState:
    """Put an engine to sleep and move its GPU state into its memory; its process lives on.

    Raises:
        Environment: the state does not fit into the host's memory. Otherwise as for :func:`asleep`; it is to be ended then.
    """
    _may_be_captured(host, instance.engine)
    pids = await host.cuda.find(await _pids(instance))
    if not pids:
        raise SnapshotError("no process of the engine uses CUDA")
    async with connect(instance) as client:
        await instance.engine.quiesce(client)
    weights = await _export(host, instance)
    return await _sleep(host, instance, pids, weights, stages)


async def settle(instance: Instance) -> None:
    """Let an engine that serves nobody give device memory up before its end; one that cannot is ended all the same."""
    if instance.engine.gpus:
        with contextlib.suppress(RestorerError, TimeoutError):
            async with asyncio.timeout(_SETTLE_S), connect(instance) as client:
                await instance.engine.sleep(client)


async def _pids(instance: Instance) -> tuple[int, ...]:
    return (await asyncio.to_thread(inventory.tree, instance.pid)).pids


async def _translated(instance: Instance, inner: Sequence[int]) -> list[int]:
    """The host's numbers of processes of a box."""
    numbers = instance.numbers
    if not all(pid in numbers for pid in inner):
        numbers = await asyncio.to_thread(inventory.numbers, instance.pid)
    missing = [pid for pid in inner if pid not in numbers]
    if missing:
        raise EngineDied(f"of the restored engine the processes {missing} are gone, which use the GPU")
    return [numbers[pid] for pid in inner]


async def _free(host: Host, uuids: Sequence[str]) -> int:
    memory = await host.cuda.memory()
    return sum(int(memory[uuid]["free"]) for uuid in uuids if uuid in memory)
