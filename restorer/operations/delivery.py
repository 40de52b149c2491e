"""How weights come to an engine: loaded by the helper beside all else, or read by the engine itself.

The helper reads them into device memory of its own while an engine's processes are restored, each part as soon as it is here and
verified, and hands that memory on. Where it cannot, the engine reads the files, which takes longer. What an engine says of its
weights afterwards is compared here. Knows nothing of what else a restore does.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from policies.arrival import patience_s
from policies.manifest import GpuState, Weights
from restorer.adapters.engines import HttpEngine
from restorer.boxes.box import Box
from restorer.errors import CanaryDiffers, EngineNotReady, RestorerError
from restorer.gpu.cuda import Cuda
from restorer.gpu.gpus import MARGIN_BYTES, Placement, memory
from restorer.machine.host import Host, log
from restorer.storage.arrival import Arrival
from restorer.system import pagecache

_READERS = 8


def awake_bytes(state: GpuState) -> int:
    return state.awake_bytes // max(1, len(state.used))


@dataclass(slots=True)
class Delivery:
    """How weights come to an engine: from the helper's device memory, or else read by the engine itself."""

    cuda: Cuda
    files: list[list[tuple[Path, int]]]
    sockets: list[Path]
    """As the engine sees them; empty: it reads the files."""
    names: list[str]
    loads: list[asyncio.Task[object]]
    roomy: bool = False
    """The engine fits beside what the helper holds, so that nobody need wait until that is free."""
    arrival: Arrival | None = None
    """Of weights that still come."""

    async def sources(self) -> tuple[list[dict[str, object]], str]:
        """(what to ask of each worker, from where the bytes come); waits until they are there."""
        if self.loads:
            results = await asyncio.gather(*self.loads, return_exceptions=True)
            faults = [result for result in results if isinstance(result, BaseException)]
            if not faults:
                return [{"socket": str(path)} for path in self.sockets], "device memory"
            if not isinstance(faults[0], RestorerError):
                raise faults[0]
            log.warning("the engine reads its weights itself, which takes longer: %s", faults[0])
            await self.end()
        if self.arrival is not None:
            await self.arrival.all()
        tier = await asyncio.to_thread(pagecache.tier, [path for files in self.files for path, _ in files])
        return [{"files": [[str(path), count] for path, count in files]} for files in self.files], tier

    async def end(self) -> None:
        """Free what the helper holds. Idempotent."""
        for load in self.loads:
            load.cancel()
        await asyncio.gather(*self.loads, return_exceptions=True)
        names, self.names, self.loads = self.names, [], []
        for name in names:
            try:
                await self.cuda.drop(name)
            except RestorerError as error:
                log.warning("device memory of load %s may be held until the GPU helper ends: %s", name, error)


@contextlib.asynccontextmanager
async def begun(
    host: Host, box: Box, state: GpuState, placement: Placement, arrival: Arrival | None = None
) -> AsyncIterator[Delivery]:
    """Begin to load weights while everything else is restored; ends with nothing left in device memory."""
    files = [host.weights.files(weights) for weights in state.weights]
    delivery = Delivery(host.cuda, files, [], [], [], arrival=arrival)
    largest = max((weights.bytes for weights in state.weights), default=0)
    # Twice for a moment: in the helper, and in the engine.
    twice = state.state_bytes // max(1, len(state.used)) + 2 * largest + MARGIN_BYTES
    # On another GPU than its donor's, an engine cannot map what lies there: driver 580 answers CUDA_ERROR_NOT_INITIALIZED.
    at_home = placement.uuids == state.used and not box.facts.get("moved")
    try:
        if files and at_home and twice <= placement.free_bytes and len(files) == len(placement.uuids):
            delivery.roomy = awake_bytes(state) + largest + 2 * MARGIN_BYTES <= placement.free_bytes
            for rank, (uuid, weights) in enumerate(zip(placement.uuids, state.weights, strict=True)):
                await _begin(host, delivery, box, f"weights-{rank}.sock", uuid, weights, sum(one.bytes for one in state.weights))
        yield delivery
    except BaseException:
        await asyncio.shield(delivery.end())
        raise
    # Freeing takes a moment that nobody has to wait for; a lease asks for free memory, not for its turn.
    host.gpus.later(delivery.end())


async def _begin(host: Host, delivery: Delivery, box: Box, socket: str, uuid: str, weights: Weights, total: int) -> None:
    """Begin to load one set; if it still comes, return when its files are open: they may be renamed then.

    Args:
        total: bytes of all sets that are loaded at once.
    """
    place = None if delivery.arrival is None else delivery.arrival.place(weights)
    arrival = None if place is None else delivery.arrival
    name = f"{box.id}-{socket}-{secrets.token_hex(4)}"
    delivery.names.append(name)
    delivery.sockets.append(box.mountpoint / socket)
    opening = asyncio.create_task(
        host.cuda.load(
            *(name, uuid, host.weights.files(weights, place), box.private / socket),
            threads=_READERS,
            # Read past it is what it could not keep for the next start.
            direct=total > memory()[1] // 2,
            late=arrival is not None,
        )
    )
    within_s = patience_s(total) + (0.0 if arrival is None else host.config.storage.pull_timeout_s)
    delivery.loads.append(asyncio.create_task(_loaded(host.cuda, opening, name, weights, arrival, within_s)))
    if arrival is not None:
        await asyncio.wait({opening})


async def _loaded(
    cuda: Cuda, opening: asyncio.Task[None], name: str, weights: Weights, arrival: Arrival | None, within_s: float
) -> None:
    """All of a set in device memory; of one that still comes each part as soon as it is here."""

    async def hand(arrival: Arrival, number: int) -> None:
        await arrival.part(weights.digest, weights.parts[number].name)
        await cuda.arrived(name, number)

    await opening
    try:
        async with asyncio.TaskGroup() as group:
            if arrival is not None:
                for number in range(len(weights.parts)):
                    group.create_task(hand(arrival, number))
            await cuda.loaded(name, within_s=within_s)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def put_back(delivery: Delivery, engine: HttpEngine, client: httpx.AsyncClient, weights: Sequence[Weights]) -> str | None:
    """Put weights back and compare their fingerprints; the tier they came from."""
    if not weights:
        return None
    within_s = patience_s(sum(one.bytes for one in weights))
    sources, tier = await delivery.sources()
    try:
        found = await engine.import_weights(client, sources, within_s=within_s)
    except EngineNotReady as error:
        if not delivery.loads:
            raise
        log.warning("the engine cannot take its weights from device memory, and reads them itself, which takes longer: %s", error)
        await delivery.end()
        sources, tier = await delivery.sources()
        found = await engine.import_weights(client, sources, within_s=within_s)
    if not delivery.roomy:
        await delivery.end()
    wanted = [tuple(run.fingerprint for run in one.allocations) for one in weights]
    for rank, (expected, got) in enumerate(zip(wanted, found, strict=True)):
        wrong = [number for number, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]]
        if wrong or len(expected) != len(got):
            raise CanaryDiffers(
                f"weights of worker {rank} are not what they were: {len(wrong)} of {len(expected)} allocations differ, the first "
                f"is number {wrong[0] if wrong else len(got)}"
            )
    return tier
