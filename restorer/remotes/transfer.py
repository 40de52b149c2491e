"""Snapshots to a remote and back: only what is missing there, or here, moves.

Pushed in the order chunks, weights, list, signatures, manifest; pulled in the opposite one, into a folder that the next try
goes on with, and committed as a capture is. Nothing is noted on the way: what is there is known by its content, so a copy can be
cut off anywhere and begun again. What is read here is compared with its hash before it leaves, what arrives before it is used.

Memory is bounded by :data:`_ROOM_BYTES`, whatever is copied. Knows nothing of hosts, jobs or who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from policies.manifest import Manifest, Weights, canonical
from policies.secrets import publishable
from restorer.errors import Environment, SnapshotError
from restorer.remotes import leases
from restorer.remotes.catalog import Catalog, Copy
from restorer.storage import chunks, sharing, signatures
from restorer.storage.chunks import Chunk, Chunks
from restorer.storage.keyring import KeyRing
from restorer.storage.partial import Partial
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.weights import WeightsStore

Report = Callable[[int, int], None]
"""Told (bytes done, bytes in all), of content."""
_ROOM_BYTES = 12 << 20
"""Content that is in memory at a time; wrapping and the network hold as much again, twice."""
_BATCH = 64


@dataclass(slots=True)
class Moved:
    """What a copy took."""

    chunks: int = 0
    """Different ones that the snapshot is made of."""
    bytes: int = 0
    """Their content."""
    chunks_moved: int = 0
    bytes_moved: int = 0
    """What of it passed the network, as it was wrapped."""
    bytes_reused: int = 0
    """Content of those that were there already, or came from other snapshots of this host."""
    seconds: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    def end(self) -> Moved:
        self.seconds = round(time.monotonic() - self._began, 3)
        return self


class _Place(NamedTuple):
    path: str
    offset: int


@dataclass(slots=True)
class _Plan:
    """Each different chunk, and everywhere that it belongs."""

    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    places: dict[bytes, list[_Place]] = field(default_factory=dict)

    @classmethod
    def of(cls, listed: Chunks) -> _Plan:
        plan = cls()
        for path, pieces in listed.items():
            for chunk in pieces:
                plan.chunks.setdefault(chunk.id, chunk)
                plan.places.setdefault(chunk.id, []).append(_Place(path, chunk.offset))
        return plan

    @property
    def bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks.values())


class _Copying:
    """One copy under way: its counts, its bounds."""

    def __init__(self, catalog: Catalog, report: Report) -> None:
        self.catalog, self.moved = catalog, Moved()
        self._report = report
        self._done = 0
        self._room = asyncio.Condition()
        self._taken = 0

    def planned(self, plan: _Plan) -> None:
        self.moved.chunks += len(plan.chunks)
        self.moved.bytes += plan.bytes
        self._report(self._done, self.moved.bytes)

    def done(self, chunk: Chunk, *, sent: int) -> None:
        """One chunk is where it belongs. ``sent``: what of it passed the network."""
        self._done += chunk.size
        if sent:
            self.moved.chunks_moved += 1
            self.moved.bytes_moved += sent
        else:
            self.moved.bytes_reused += chunk.size
        self._report(self._done, self.moved.bytes)

    @contextlib.asynccontextmanager
    async def room(self, size: int) -> AsyncIterator[None]:
        """Memory for so much content; waits until others have given theirs back."""
        async with self._room:
            await self._room.wait_for(lambda: self._taken == 0 or self._taken + size <= _ROOM_BYTES)
            self._taken += size
        try:
            yield
        finally:
            async with self._room:
                self._taken -= size
                self._room.notify_all()


# ---------------------------------------------------------------- push


async def push(
    catalog: Catalog,
    snapshots: SnapshotStore,
    weights: WeightsStore,
    manifest: Manifest,
    *,
    overwrite: bool = False,
    report: Report = lambda _done, _total: None,
) -> Moved:
    """Copy a snapshot, and the weights that it names, to a remote.

    Args:
        overwrite: put everything anew, whether or not it is there: mends a copy that was damaged.

    Raises:
        SnapshotError: something here is not what it was at the commit; nothing of it was put.
        RemoteFailed: the remote did not do what it was asked; push again, and it goes on where it ended.
        Environment: its donor held secrets, and this remote is not encrypted. InUse: it is being removed, or the remote is being
            swept and that does not end.
    """
    if (refusal := publishable(manifest, encrypted=bool(catalog.seal.fingerprint))) is not None:
        raise Environment(f"snapshot {manifest.id} is not pushed to {catalog.what}: {refusal}")
    with await asyncio.to_thread(snapshots.use, manifest.id):
        return await _push(catalog, snapshots, weights, manifest, overwrite, _Copying(catalog, report))


async def _push(
    catalog: Catalog, snapshots: SnapshotStore, weights: WeightsStore, manifest: Manifest, overwrite: bool, copying: _Copying
) -> Moved:
    await catalog.check(claim=True)
    if not overwrite and await catalog.has(manifest):
        plan = _Plan.of(await asyncio.to_thread(chunks.of, snapshots.folder(manifest.id), manifest))
        copying.planned(plan)
        for chunk in plan.chunks.values():
            copying.done(chunk, sent=0)
        return copying.moved.end()
    folder = snapshots.folder(manifest.id)
    listed = await asyncio.to_thread(chunks.of, folder, manifest)
    async with leases.pushing(catalog, f"pushes {manifest.id}") as lease:
        await _put(copying, folder, _Plan.of(listed), overwrite)
        for one in manifest.gpu.weights if manifest.gpu else ():
            await _push_weights(copying, weights, one, overwrite, lease)
        data = await asyncio.to_thread((folder / chunks.FILE).read_bytes)
        signed = await asyncio.to_thread(signatures.read, folder)
        lease.hold()
        await catalog.publish(manifest, data, signed, create=not overwrite)
    return copying.moved.end()


async def _put(copying: _Copying, folder: Path, plan: _Plan, overwrite: bool) -> None:
    copying.planned(plan)

    async def put(chunk: Chunk) -> None:
        if not overwrite and await copying.catalog.has_chunk(chunk.name):
            copying.done(chunk, sent=0)
            return
        place = plan.places[chunk.id][0]
        async with copying.room(chunk.size):
            data = await asyncio.to_thread(_read, folder / place.path, place.offset, chunk)
            sent = await copying.catalog.put_chunk(chunk.name, data, create=not overwrite)
        copying.done(chunk, sent=sent)

    await copying.catalog.remote.each(plan.chunks.values(), put)


async def _push_weights(copying: _Copying, store: WeightsStore, weights: Weights, overwrite: bool, lease: leases.Lease) -> None:
    if not overwrite and await copying.catalog.weights(weights.digest) is not None:
        return
    if faults := await asyncio.to_thread(store.verify, [weights]):
        raise SnapshotError("the weights are not what the manifest names: " + "; ".join(map(str, faults[:5])))
    folder = store.root / weights.digest
    listed = await asyncio.to_thread(chunks.cut, folder, [part.name for part in weights.parts])
    await _put(copying, folder, _Plan.of(listed), overwrite)
    lease.hold()
    await copying.catalog.publish_weights(weights, chunks.encode(listed)[0])


def _read(path: Path, offset: int, chunk: Chunk) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        data = os.pread(fd, chunk.size, offset)
    finally:
        os.close(fd)
    if blake3(data).digest() != chunk.id:
        raise SnapshotError(
            f"{path} is not what it was when the snapshot was made: at byte {offset}, expected chunk {chunk.name[:16]}…; "
            "it was not copied: verify the snapshot"
        )
    return data


# ---------------------------------------------------------------- pull


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
) -> Moved:
    """Bring a snapshot of a remote, and the weights that it names, to this host.

    Args:
        manifest: its manifest, as :meth:`Catalog.manifest` gave it.
        keys: whose signatures are demanded, before anything else is fetched.
        reserve_bytes: what must stay free on the disk.

    Raises:
        SnapshotError: something there is missing or damaged; says what. Nothing was committed.
        Environment: the disk has no room. Busy: another process pulls it. RemoteFailed: as the name says. Whatever it is, what
            has come stays, for the next try to go on with, unless the disk is full.
    """
    copying = _Copying(catalog, report)
    if manifest.chunks is None:
        raise SnapshotError(f"{catalog.what}: snapshot {manifest.id} has no list of chunks: it was not pushed by Rewake")
    signed = await catalog.signatures(copy)
    if keys is not None and not (verdict := keys.judge(canonical(manifest), signed)).allowed:
        raise SnapshotError(f"{catalog.what}: snapshot {manifest.id} is not pulled: {verdict.mismatch or verdict}")
    data = await catalog.listed(copy, manifest.chunks)
    sizes = {item.path: item.bytes for item in manifest.objects}
    plan = _Plan.of(chunks.decode(data, sizes, manifest.chunks))
    # Until the manifest is there, nothing names the weights.
    with await asyncio.to_thread(weights.busy):
        for one in manifest.gpu.weights if manifest.gpu else ():
            await _pull_weights(copying, weights, one, reserve_bytes)
        with Partial(snapshots.root, manifest.id, sizes) as partial:
            sources = await asyncio.to_thread(sharing.lying, snapshots, snapshots.list(), plan.chunks)
            await _fetch(copying, partial, plan, sources, reserve_bytes)
            await asyncio.to_thread(_commit, snapshots, partial, manifest, data, signed)
    return copying.moved.end()


async def _pull_weights(copying: _Copying, store: WeightsStore, weights: Weights, reserve_bytes: int) -> None:
    if not await asyncio.to_thread(store.verify, [weights]):
        return
    found = await copying.catalog.weights(weights.digest)
    if found is None or found[0] != weights:
        raise SnapshotError(f"{copying.catalog.what}: the weights {weights.digest[:16]}… that the snapshot names are missing")
    sizes = {part.name: part.bytes for part in weights.parts}
    plan = _Plan.of(chunks.decode(found[1], sizes))
    with Partial(store.root, weights.digest, sizes) as partial:
        await _fetch(copying, partial, plan, {}, reserve_bytes)
        try:
            await asyncio.to_thread(store.commit, partial.path, weights.parts, weights.allocations)
        except SnapshotError:
            partial.drop()
            raise


async def _fetch(
    copying: _Copying, partial: Partial, plan: _Plan, sources: Mapping[bytes, tuple[Path, int]], reserve_bytes: int
) -> None:
    """Everything of a plan into its places: what is there already, what this host has elsewhere, and the rest from the remote."""
    copying.planned(plan)
    rest: list[Chunk] = []
    for batch in _batches(plan.chunks.values()):
        missing = await asyncio.to_thread(lambda some: [one for one in some if not _placed(partial, plan, one, sources)], batch)
        rest += missing
        for chunk in batch:
            if chunk not in missing:
                copying.done(chunk, sent=0)
    need, free = sum(chunk.size * len(plan.places[chunk.id]) for chunk in rest), shutil.disk_usage(partial.path).free
    if free - need < reserve_bytes:
        raise Environment(
            f"no room for what is pulled: it takes {need} bytes more, {free} are free at {partial.path.parent}, of which "
            f"{reserve_bytes} shall stay so (storage.reserve_bytes); free {need + reserve_bytes - free} bytes"
        )

    async def fetch(chunk: Chunk) -> None:
        async with copying.room(chunk.size):
            data, sent = await copying.catalog.get_chunk(chunk)
            if blake3(data).digest() != chunk.id:
                place = plan.places[chunk.id][0]
                raise SnapshotError(
                    f"{copying.catalog.what}: chunk {chunk.name} of {place.path} at byte {place.offset} is damaged; push the "
                    "snapshot anew with --overwrite from a host that has it"
                )
            for place in plan.places[chunk.id]:
                await asyncio.to_thread(partial.write, place.path, place.offset, data)
        copying.done(chunk, sent=sent)

    try:
        await copying.catalog.remote.each(rest, fetch)
    except Environment as error:
        if isinstance(error.__cause__, OSError):  # the disk is full: what has come must not keep it so
            partial.drop()
        raise


def _batches(all_chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    rest = iter(all_chunks)
    while batch := list(itertools.islice(rest, _BATCH)):
        yield batch


def _placed(partial: Partial, plan: _Plan, chunk: Chunk, sources: Mapping[bytes, tuple[Path, int]]) -> bool:
    """Whether a chunk lies in all its places, now: it came before, or was copied from a file of this host."""

    def there(place: _Place) -> bool:
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


def _commit(snapshots: SnapshotStore, partial: Partial, manifest: Manifest, listed: bytes, signed: Mapping[str, bytes]) -> None:
    try:
        for key, signature in signed.items():
            signatures.write(partial.path, key, signature)
        snapshots.receive(partial, manifest, listed)
    except SnapshotError:
        partial.drop()
        raise
