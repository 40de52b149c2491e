"""Snapshots out of a remote: only what is missing here moves, and what is here early is told, for who can use it before the rest.

Everything that is not weights comes first, then the parts of the weights, in order. What has come whole is made durable and
compared with its hash beside the rest that still comes, so that at the end there is little left to do: publishing is a few
renames and a manifest, as the end of a capture is. Into folders that the next try goes on with; nothing is noted on the way.

Knows nothing of hosts, jobs or who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from policies.manifest import Manifest, Weights, WeightsPart, canonical
from restorer.errors import Environment, SnapshotError
from restorer.remotes.catalog import Catalog, Copy
from restorer.remotes.transfer import Copying, Moved, Place, Plan, Report
from restorer.storage import chunks, sharing, signatures
from restorer.storage.arrival import Arrival
from restorer.storage.chunks import Chunk
from restorer.storage.keyring import KeyRing
from restorer.storage.partial import Partial
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.weights import WeightsStore

_BATCH = 64
_BEHIND = 4
"""Parts of weights that are being made durable and compared at a time; more come when one of them is done."""


@dataclass(slots=True, eq=False)
class _Coming:
    """One folder of files on its way."""

    partial: Partial
    plan: Plan
    rest: list[Chunk] = field(default_factory=list)
    """What has to be fetched."""

    @property
    def lacking(self) -> Counter[str]:
        """Path -> places in it that are to be filled, of each file that is not here whole."""
        return Counter(place.path for chunk in self.rest for place in self.plan.places[chunk.id])


async def pull(
    catalog: Catalog,
    snapshots: SnapshotStore,
    weights: WeightsStore,
    manifest: Manifest,
    copy: Copy,
    *,
    keys: KeyRing | None = None,
    reserve_bytes: int = 0,
    report: Report = lambda _done, _total: None,
    arrival: Arrival | None = None,
) -> Moved:
    """Bring a snapshot of a remote, and the weights that it names, to this host.

    Args:
        manifest: its manifest, as :meth:`Catalog.manifest` gave it.
        keys: whose signatures are demanded, before anything else is fetched.
        reserve_bytes: what must stay free on the disk.
        arrival: told what is here before all of it is.

    Raises:
        SnapshotError: something there is missing or damaged; says what. Nothing was published.
        Environment: the disk has no room. Busy: another process pulls it. RemoteFailed: as the name says. Whatever it is, what
            has come stays, for the next try to go on with, unless the disk is full.
    """
    copying, arrival = Copying(catalog, report), arrival or Arrival()
    if manifest.chunks is None:
        raise SnapshotError(f"{catalog.what}: snapshot {manifest.id} has no list of chunks: it was not pushed by Rewake")
    signed = await catalog.signatures(copy)
    if keys is not None and not (verdict := keys.judge(canonical(manifest), signed)).allowed:
        raise SnapshotError(f"{catalog.what}: snapshot {manifest.id} is not pulled: {verdict.mismatch or verdict}")
    data = await catalog.listed(copy, manifest.chunks)
    sizes = {item.path: item.bytes for item in manifest.objects}
    plan = Plan.of(chunks.decode(data, sizes, manifest.chunks))
    # Until the manifest is there, nothing names the weights.
    with await asyncio.to_thread(weights.busy), contextlib.ExitStack() as opened:
        # All locks before any byte: who finds one taken has nothing to do over again.
        main = _Coming(opened.enter_context(Partial(snapshots.root, manifest.id, sizes)), plan)
        apart = await _apart(catalog, weights, manifest, opened)
        every = [main, *apart.values()]
        sources = await asyncio.to_thread(sharing.lying, snapshots, snapshots.list(), plan.chunks)
        for coming in every:
            await _lack(copying, coming, sources if coming is main else {})
        _check_room(every, reserve_bytes)
        with _no_full_disk(every):
            await _fetch(copying, main, came=lambda size: arrival.came(size, weights=False))
            arrival.expects(manifest, {one: coming.partial.path for one, coming in apart.items()}, _left(apart.values()))
            async with _together() as group:
                group.create_task(_settle(snapshots, main, manifest, data, signed, arrival))
                for one, coming in apart.items():
                    await _fetch_weights(copying, weights, one, coming, arrival)
            async with arrival.still:
                await asyncio.to_thread(_publish, snapshots, weights, main, apart, manifest)
                arrival.publish(main.partial.path)
    return copying.moved.end()


@contextlib.contextmanager
def _no_full_disk(every: Iterable[_Coming]) -> Iterator[None]:
    """If the disk is full, what has come must not keep it so."""
    try:
        yield
    except Environment as error:
        if isinstance(error.__cause__, OSError):
            for coming in every:
                coming.partial.drop()
        raise


@contextlib.asynccontextmanager
async def _together() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks of which the first failure ends all, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__


async def _apart(
    catalog: Catalog, store: WeightsStore, manifest: Manifest, opened: contextlib.ExitStack
) -> dict[Weights, _Coming]:
    """The weights that are not here."""
    found = {}
    for weights in dict.fromkeys(manifest.gpu.weights if manifest.gpu else ()):
        if await asyncio.to_thread(store.verify, [weights]):
            found[weights] = await _set(catalog, store, weights, opened)
    return found


async def _set(catalog: Catalog, store: WeightsStore, weights: Weights, opened: contextlib.ExitStack) -> _Coming:
    found = await catalog.weights(weights.digest)
    if found is None or found[0] != weights:
        raise SnapshotError(f"{catalog.what}: the weights {weights.digest[:16]}… that the snapshot names are missing")
    sizes = {part.name: part.bytes for part in weights.parts}
    plan = Plan.of(chunks.decode(found[1], sizes))
    return _Coming(opened.enter_context(Partial(store.root, weights.digest, sizes)), plan)


async def _lack(copying: Copying, coming: _Coming, sources: Mapping[bytes, tuple[Path, int]]) -> None:
    """Find what has to be fetched: neither there already, nor elsewhere on this host."""
    partial, plan = coming.partial, coming.plan
    copying.planned(plan)
    for batch in _batches(plan.chunks.values()):
        missing = await asyncio.to_thread(lambda some: [one for one in some if not _placed(partial, plan, one, sources)], batch)
        coming.rest += missing
        for chunk in batch:
            if chunk not in missing:
                copying.done(chunk, sent=0)


def _left(some: Iterable[_Coming]) -> int:
    """Bytes that have to be fetched."""
    return sum(chunk.size for coming in some for chunk in coming.rest)


def _check_room(every: Sequence[_Coming], reserve_bytes: int) -> None:
    need = sum(chunk.size * len(coming.plan.places[chunk.id]) for coming in every for chunk in coming.rest)
    place = every[0].partial.path.parent
    free = shutil.disk_usage(place).free
    if free - need < reserve_bytes:
        raise Environment(
            f"no room for what is pulled: it takes {need} bytes more, {free} are free at {place}, of which "
            f"{reserve_bytes} shall stay so (storage.reserve_bytes); free {need + reserve_bytes - free} bytes"
        )


async def _fetch(
    copying: Copying,
    coming: _Coming,
    *,
    came: Callable[[int], None],
    whole: Callable[[str], None] = lambda _: None,
    free: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Everything that has to be fetched into its places.

    Args:
        came: told the bytes of each piece.
        whole: told each file of which nothing is missing any more.
        free: waited for before each piece.
    """
    lacking, partial, places = coming.lacking, coming.partial, coming.plan.places

    async def fetch(chunk: Chunk) -> None:
        if free is not None:
            await free()
        async with copying.room(chunk.size):
            data, sent = await copying.catalog.get_chunk(chunk)
            if not await asyncio.to_thread(_put, partial, places[chunk.id], chunk, data):
                raise _damaged(copying.catalog, chunk, places[chunk.id][0])
        copying.done(chunk, sent=sent)
        came(chunk.size)
        for place in places[chunk.id]:
            lacking[place.path] -= 1
            if not lacking[place.path]:
                whole(place.path)

    await copying.catalog.remote.each(coming.rest, fetch)


def _put(partial: Partial, places: Iterable[Place], chunk: Chunk, data: bytes) -> bool:
    """Put a chunk into its places, if it is what its name says."""
    if blake3(data).digest() != chunk.id:
        return False
    for place in places:
        partial.write(place.path, place.offset, data)
    return True


def _damaged(catalog: Catalog, chunk: Chunk, place: Place) -> SnapshotError:
    return SnapshotError(
        f"{catalog.what}: chunk {chunk.name} of {place.path} at byte {place.offset} is damaged; push the snapshot anew with "
        "--overwrite from a host that has it"
    )


async def _fetch_weights(copying: Copying, store: WeightsStore, weights: Weights, coming: _Coming, arrival: Arrival) -> None:
    """A set, each part made durable and compared as soon as it is whole."""
    parts = {part.name: part for part in weights.parts}
    turn, checks = asyncio.Semaphore(_BEHIND), set[asyncio.Task[None]]()

    async def check(part: WeightsPart) -> None:
        async with turn:
            with arrival.checking(part.bytes):
                await asyncio.to_thread(store.check, coming.partial.path, part)
        arrival.whole(weights.digest, part)

    async def free() -> None:
        while len(checks) >= _BEHIND:
            await asyncio.wait(checks, return_when=asyncio.FIRST_COMPLETED)

    try:
        async with _together() as group:

            def whole(path: str) -> None:
                checks.add(task := group.create_task(check(parts[path])))
                task.add_done_callback(checks.discard)

            for name in parts.keys() - coming.lacking.keys():
                whole(name)
            await _fetch(copying, coming, came=lambda size: arrival.came(size, weights=True), whole=whole, free=free)
    except SnapshotError:
        coming.partial.drop()
        raise


async def _settle(
    snapshots: SnapshotStore, main: _Coming, manifest: Manifest, listed: bytes, signed: Mapping[str, bytes], arrival: Arrival
) -> None:
    """Everything but the weights is here: make it durable, compare it with the manifest."""

    def settle() -> None:
        try:
            for key, signature in signed.items():
                signatures.write(main.partial.path, key, signature)
            snapshots.settle(main.partial, manifest, listed)
        except SnapshotError:
            main.partial.drop()
            raise

    with arrival.checking(manifest.bytes):
        await asyncio.to_thread(settle)
    arrival.folder = main.partial.path


def _publish(
    snapshots: SnapshotStore,
    weights: WeightsStore,
    main: _Coming,
    apart: Mapping[Weights, _Coming],
    manifest: Manifest,
) -> None:
    for one, coming in apart.items():
        weights.commit(coming.partial.path, one.parts, one.allocations)
    snapshots.publish(main.partial, manifest)


def _batches(all_chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    rest = iter(all_chunks)
    while batch := list(itertools.islice(rest, _BATCH)):
        yield batch


def _placed(partial: Partial, plan: Plan, chunk: Chunk, sources: Mapping[bytes, tuple[Path, int]]) -> bool:
    """Whether a chunk lies in all its places, now: it came before, or was copied from a file of this host."""

    def there(place: Place) -> bool:
        data = partial.read(place.path, place.offset, chunk.size)
        return data is not None and blake3(data).digest() == chunk.id

    missing = [place for place in plan.places[chunk.id] if not there(place)]
    source = sources.get(chunk.id)
    if missing and source is not None:
        with contextlib.suppress(OSError):
            for place in missing:
                partial.copy(*source, place.path, place.offset, chunk.size)
        return all(there(place) for place in missing)
    return not missing
