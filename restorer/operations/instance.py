"""One running engine in its box: started cold, or resurrected from images; and the HTTP connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from policies.manifest import Manifest
from restorer.adapters.engines import HttpEngine
from restorer.boxes.box import Box
from restorer.checkpoint import filling, pages, prefetch
from restorer.checkpoint.backend import Backend
from restorer.errors import EngineDied, EngineNotReady
from restorer.procfs import inventory
from restorer.procfs.processes import proceed, watch
from restorer.records.stages import Stages
from restorer.storage.snapshots import lay_tree
from restorer.system import pagecache

_POLL_S = 0.05
_DYING_S = 0.5
_LOG_TAIL = 1500


@dataclass(frozen=True, slots=True)
class Instance:
    """A running engine. Its incarnation is its box's id."""

    box: Box
    engine: HttpEngine
    inner_pid: int
    pid: int
    """The host's number of its root process."""
    numbers: Mapping[int, int] = field(default_factory=dict)
    """Number inside -> the host's, of its processes when it was restored; empty: look for yourself."""

    @property
    def port(self) -> int:
        return self.engine.model.engine.port


@contextlib.asynccontextmanager
async def connect(instance: Instance) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the engine that keeps no connection, so that none is in the way of a dump; the engine's death ends it.

    Raises:
        EngineDied: from the body, when the engine ended meanwhile; it says what the engine last wrote.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    base = f"http://{instance.box.address}:{instance.port}"
    task = asyncio.current_task()
    assert task is not None
    inside = True
    try:
        async with watch(instance.pid) as ended:
            ended.add_done_callback(lambda _: inside and not task.done() and task.cancel("engine ended"))
            try:
                # Not verify: there is no TLS within a box's link, and reading certificates takes longer than a request.
                async with httpx.AsyncClient(
                    base_url=base, limits=limits, headers={"Connection": "close"}, trust_env=False, verify=False
                ) as client:
                    yield client
            except asyncio.CancelledError:
                if not ended.done() or task.uncancel() > 0:
                    raise
                raise _died(instance) from None
            except EngineNotReady as error:
                # Its connections break a moment before a dying process has ended.
                inside = False
                await asyncio.wait([ended], timeout=_DYING_S)
                if ended.done():
                    raise _died(instance) from error
                raise
            finally:
                # A callback that is scheduled but has not run must not cancel what comes after.
                inside = False
    except ProcessLookupError:
        raise _died(instance) from None


async def ignite(backend: Backend, box: Box, engine: HttpEngine, visible: Sequence[int] = ()) -> tuple[Instance, float]:
    """Start an engine cold, wait until it is ready, warm it. Returns it and the seconds from exec to its first token.

    Args:
        visible: the GPUs that it may see.

    Raises:
        EngineDied: it ended by itself. EngineNotReady: it was not ready in time.
    """
    begun = time.perf_counter()
    inner = await backend.launch(box, engine, visible)
    pid = box.host_pid(inner)
    if pid is None:
        raise EngineDied(f"the engine ended at once; its log ends: {last_words(box)}")
    instance = Instance(box, engine, inner, pid)
    timeout_s = engine.model.engine.ready_timeout_s
    async with connect(instance) as client:
        try:
            async with asyncio.timeout(timeout_s):
                while not await engine.ready(client):  # noqa: ASYNC110 - an engine can only be asked
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineNotReady(f"the engine was not ready within {timeout_s:g} s; its log ends: {last_words(box)}") from None
        await engine.warm(client)
    return instance, time.perf_counter() - begun


async def resurrect(
    backend: Backend, box: Box, engine: HttpEngine, manifest: Manifest, folder: Path, stages: Stages, *, direct: bool
) -> Instance:
    """Restore the engine whose images and scratch are in ``folder`` into an empty box.

    Args:
        direct: read big memory that the page cache does not hold past it.

    Raises:
        ToolFailed, ToolHung: the tool failed. EngineDied: the tree is gone again. SnapshotError: the scratch is unusable.
    """
    for name in manifest.scratch:
        if name != "/dev/shm":
            await box.appear_at(Path(name))
    images = folder / "images"
    bulk = await asyncio.to_thread(pages.taken_out, images)
    bulky = bulk.paths if bulk else ()
    # Before anything is read: afterwards it is in the page cache.
    filled_from = await asyncio.to_thread(pagecache.share, bulky)
    targets = {"/dev/shm": box.root / "dev/shm", str(box.mountpoint): box.private}
    with stages.timed("lay scratch") as stage:
        stage.bytes = 0
        for number, name in enumerate(manifest.scratch):
            stage.bytes += await asyncio.to_thread(lay_tree, folder / "scratch" / str(number), targets[name])
    rest = [path for path in images.iterdir() if path not in bulky]
    read_from = await asyncio.to_thread(prefetch.begun, rest, manifest.files, engine.model.restore)
    async with _filling(bulk, direct) as (filler, prepared):
        with stages.timed("restore processes") as stage:
            stage.of(*read_from)
            await backend.restore(box, engine, images, (*manifest.criu_options, *(("--leave-stopped",) if bulk else ())))
        numbers: Mapping[int, int] = {}
        pid = box.host_pid(manifest.root_pid)
        if pid is None:
            raise EngineDied(f"the restored engine ended at once; its log ends: {last_words(box)}")
        if bulk is not None and filler is not None:
            with stages.timed("fill memory") as filled:
                filled.of(*filled_from)
                filled.bytes = bulk.bytes
                await prepared
                numbers = await asyncio.to_thread(inventory.numbers, pid)
                await asyncio.to_thread(filler.put_back, numbers)
                # From here, since a tool that enters the box first takes as long as a tenth of all this.
                proceed(numbers.values())
    return Instance(box, engine, manifest.root_pid, pid, numbers)


@contextlib.asynccontextmanager
async def _filling(bulk: pages.Bulk | None, direct: bool) -> AsyncIterator[tuple[filling.Filling | None, asyncio.Future[None]]]:
    """What puts big memory back, and the first step of it under way; nothing of it is left when this ends."""
    if bulk is None:
        yield None, asyncio.get_running_loop().create_future()
        return
    filler = filling.Filling(bulk, direct=direct)
    preparing = asyncio.create_task(asyncio.to_thread(filler.prepare))
    try:
        yield filler, preparing
    finally:
        filler.stop()
        await asyncio.shield(asyncio.gather(preparing, return_exceptions=True))
        await asyncio.shield(asyncio.to_thread(filler.close))


def _died(instance: Instance) -> EngineDied:
    return EngineDied(f"the engine ended by itself; its log ends: {last_words(instance.box)}")


def last_words(box: Box) -> str:
    """The end of the engine's log: what it said before it ended."""
    try:
        return box.log.read_text(errors="replace")[-_LOG_TAIL:].strip() or "(empty)"
    except OSError:
        return "(no log)"
