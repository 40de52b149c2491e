"""Snapshots to a remote: only what is missing there moves. :mod:`restorer.remotes.pulling` is the way back, counted as this is.

Pushed in the order chunks, weights, list, signatures, manifest. Nothing is noted on the way: what is there is known by its
content, so a copy can be cut off anywhere and begun again. What is read here is compared with its hash before it leaves.

Memory is bounded by :data:`_ROOM_BYTES`, whatever is copied. Knows nothing of hosts, jobs or who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from policies.manifest import Manifest, Weights
from policies.secrets import publishable
from restorer.errors import Environment, SnapshotError
from restorer.remotes import leases
from restorer.remotes.catalog import Catalog
from restorer.storage import chunks, signatures
from restorer.storage.chunks import Chunk, Chunks
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.weights import WeightsStore

Report = Callable[[int, int], None]
"""Told (bytes done, bytes in all), of content."""
_ROOM_BYTES = 12 << 20
"""Content that is in memory at a time; wrapping and the network hold as much again, twice."""


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


class Place(NamedTuple):
    path: str
    offset: int


@dataclass(slots=True)
class Plan:
    """Each different chunk, and everywhere that it belongs."""

    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    places: dict[bytes, list[Place]] = field(default_factory=dict)

    @classmethod
    def of(cls, listed: Chunks) -> Plan:
        plan = cls()
        for path, pieces in listed.items():
            for chunk in pieces:
                plan.chunks.setdefault(chunk.id, chunk)
                plan.places.setdefault(chunk.id, []).append(Place(path, chunk.offset))
        return plan

    @property
    def bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks.values())


class Copying:
    """One copy under way: its counts, its bounds."""

    def __init__(self, catalog: Catalog, report: Report) -> None:
        self.catalog, self.moved = catalog, Moved()
        self._report = report
        self._done = 0
        self._room = asyncio.Condition()
        self._taken = 0

    def planned(self, plan: Plan) -> None:
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
        return await _push(catalog, snapshots, weights, manifest, overwrite, Copying(catalog, report))


async def _push(
    catalog: Catalog, snapshots: SnapshotStore, weights: WeightsStore, manifest: Manifest, overwrite: bool, copying: Copying
) -> Moved:
    await catalog.check(claim=True)
    if not overwrite and await catalog.has(manifest):
        plan = Plan.of(await asyncio.to_thread(chunks.of, snapshots.folder(manifest.id), manifest))
        copying.planned(plan)
        for chunk in plan.chunks.values():
            copying.done(chunk, sent=0)
        return copying.moved.end()
    folder = snapshots.folder(manifest.id)
    listed = await asyncio.to_thread(chunks.of, folder, manifest)
    async with leases.pushing(catalog, f"pushes {manifest.id}") as lease:
        await _put(copying, folder, Plan.of(listed), overwrite)
        for one in manifest.gpu.weights if manifest.gpu else ():
            await _push_weights(copying, weights, one, overwrite, lease)
        data = await asyncio.to_thread((folder / chunks.FILE).read_bytes)
        signed = await asyncio.to_thread(signatures.read, folder)
        lease.hold()
        await catalog.publish(manifest, data, signed, create=not overwrite)
    return copying.moved.end()


async def _put(copying: Copying, folder: Path, plan: Plan, overwrite: bool) -> None:
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


async def _push_weights(copying: Copying, store: WeightsStore, weights: Weights, overwrite: bool, lease: leases.Lease) -> None:
    if not overwrite and await copying.catalog.weights(weights.digest) is not None:
        return
    if faults := await asyncio.to_thread(store.verify, [weights]):
        raise SnapshotError("the weights are not what the manifest names: " + "; ".join(map(str, faults[:5])))
    folder = store.root / weights.digest
    listed = await asyncio.to_thread(chunks.cut, folder, [part.name for part in weights.parts])
    await _put(copying, folder, Plan.of(listed), overwrite)
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
