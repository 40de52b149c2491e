"""Removes from a remote what it need not keep: copies that its retention lets go, and what no copy is made of.

Mark and sweep. Marked is what any manifest names, that of a copy which was removed a moment ago included, so that whoever
pulls that can end. What is younger than the grace stays anyway: a push that was cut off is gone on with. While somebody
pushes nothing is swept, and a sweep ends when somebody begins to (:mod:`restorer.remotes.leases`). Nor is anything swept
while a manifest or a list cannot be read, since it may name any of it. A crash leaves whole copies, and rubbish for the next
sweep.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from policies.manifest import Manifest
from policies.retention import Kept, RemoteRetention, Removal, plan
from restorer.errors import RestorerError, SnapshotError
from restorer.remotes import leases
from restorer.remotes.catalog import MANIFEST, REMOVED, Catalog, Copy
from restorer.remotes.leases import Lease
from restorer.remotes.remote import Held
from restorer.storage import chunks

_BATCH = 256
"""Objects that are removed between two looks for pushes."""


@dataclass(slots=True)
class Swept:
    """What one round did, or would do."""

    removed: tuple[Removal, ...] = ()
    """Copies that retention let go."""
    objects: int = 0
    """Objects that nothing named."""
    bytes: int = 0
    """What they took there."""
    left: str = ""
    """Why something that may be rubbish was left; empty: nothing was."""


@dataclass(slots=True)
class _Folder:
    """What lies where a snapshot is or was."""

    copy: Copy
    objects: dict[str, Held] = field(default_factory=dict)
    """By their names in it."""
    manifest: Manifest | None = None
    """What still names its parts."""


async def collect(catalog: Catalog, rules: RemoteRetention, *, dry: bool = False) -> Swept:
    """One round.

    Args:
        dry: remove nothing, and say what would go.

    Raises:
        RemoteFailed: the remote did not do what it was asked; another round goes on where this one ended.
    """
    await catalog.check()
    if dry:
        return await _Round(catalog, rules, time.time_ns() // 1_000_000, None).run()
    async with leases.sweeping(catalog) as lease:
        pushes = await lease.others("push")
        return await _Round(catalog, rules, lease.now_ms, lease, pushes).run()


class _Round:
    def __init__(
        self, catalog: Catalog, rules: RemoteRetention, now_ms: int, lease: Lease | None, pushes: Sequence[str] = ()
    ) -> None:
        self.catalog, self.remote, self.rules, self.now_ms, self.lease = catalog, catalog.remote, rules, now_ms, lease
        self.done = Swept(left=_busy(pushes))

    async def run(self) -> Swept:
        folders = await self._survey()
        await self._retain([folder for folder in folders if MANIFEST in folder.objects and folder.manifest is not None])
        if not self.done.left:
            try:
                named = await self._named([folder.manifest for folder in folders if folder.manifest is not None])
            except SnapshotError as error:
                self.done.left = f"what it names is not known: {error}"
            else:
                await self._sweep(self._debris(folders))
                for loose in await self._weights(folders):
                    await self._sweep(loose)
                # What names chunks must be gone for good before they are.
                await self.remote.settle()
                await self._chunks(named)
            if self.lease is not None:
                await self.remote.each(self.lease.dead, self.remote.remove)
        return self.done

    async def _survey(self) -> list[_Folder]:
        """Everything under ``snapshots``, with the manifests that count."""
        found: dict[str, _Folder] = {}
        async for one in self.remote.list("snapshots"):
            parts = one.path.split("/")
            if len(parts) >= 4:
                path = "/".join(parts[:3])
                folder = found.setdefault(path, _Folder(Copy(parts[2], path, one.modified_ms)))
                folder.objects["/".join(parts[3:])] = one

        async def read(folder: _Folder) -> None:
            name = MANIFEST if MANIFEST in folder.objects else REMOVED
            mark = folder.objects.get(name)
            if mark is None or (name == REMOVED and not self._young(mark)):
                return
            folder.copy = folder.copy._replace(pushed_ms=mark.modified_ms)
            try:
                folder.manifest = await self.catalog.manifest(folder.copy, name)
            except RestorerError as error:
                self.done.left = self.done.left or f"what it names is not known: {error}"

        await self.remote.each(found.values(), read)
        return list(found.values())

    async def _retain(self, folders: Sequence[_Folder]) -> None:
        kept = {folder.copy.id: _kept(folder.copy, folder.manifest) for folder in folders if folder.manifest is not None}
        self.done.removed = tuple(plan(list(kept.values()), self.rules, self.now_ms))
        copies = {folder.copy.id: folder for folder in folders}
        for removal in self.done.removed:
            folder = copies[removal.id]
            if self.lease is not None:
                await self.catalog.withdraw(folder.copy)
            if self.rules.grace_s == 0:
                folder.manifest = None
            folder.objects.pop(MANIFEST)

    async def _named(self, manifests: Iterable[Manifest]) -> set[bytes]:
        """The names of all chunks that something is made of."""
        named: set[bytes] = set()
        sets: dict[str, None] = {}

        def mark(data: bytes, sizes: Mapping[str, int]) -> None:
            for pieces in chunks.decode(data, sizes).values():
                named.update(_name(self.catalog.chunk_path(chunk.name)) for chunk in pieces)

        async def read(manifest: Manifest) -> None:
            if manifest.chunks is not None:
                data = await self.catalog.listed(self._copy(manifest), manifest.chunks)
                await asyncio.to_thread(mark, data, {item.path: item.bytes for item in manifest.objects})
            sets.update(dict.fromkeys(one.digest for one in (manifest.gpu.weights if manifest.gpu else ())))

        async def read_weights(digest: str) -> None:
            if (found := await self.catalog.weights(digest)) is not None:
                await asyncio.to_thread(mark, found[1], {part.name: part.bytes for part in found[0].parts})

        await self.remote.each(list(manifests), read)
        await self.remote.each(list(sets), read_weights)
        return named

    def _copy(self, manifest: Manifest) -> Copy:
        return Copy(manifest.id, self.catalog.folder(manifest), 0)

    def _debris(self, folders: Iterable[_Folder]) -> list[Held]:
        """What lies in folders of no snapshots, and words of removals that nobody needs any more."""
        found: list[Held] = []
        for folder in folders:
            if folder.manifest is None and not any(map(self._young, folder.objects.values())):
                found += folder.objects.values()
            elif MANIFEST in folder.objects and REMOVED in folder.objects and not self._young(folder.objects[REMOVED]):
                found.append(folder.objects[REMOVED])
        return found

    async def _weights(self, folders: Iterable[_Folder]) -> tuple[list[Held], list[Held]]:
        """The weights sets that no snapshot names: (what says that they are there, what goes after that)."""
        manifests = [folder.manifest for folder in folders if folder.manifest is not None]
        named = {
            self.catalog.weights_folder(one.digest) for manifest in manifests if manifest.gpu for one in manifest.gpu.weights
        }
        sets: dict[str, list[Held]] = {}
        async for one in self.remote.list("weights"):
            sets.setdefault(one.path.rpartition("/")[0], []).append(one)
        loose = [held for path, held in sets.items() if path not in named and not any(map(self._young, held))]
        marks = [one for held in loose for one in held if one.path.endswith("/index")]
        return marks, [one for held in loose for one in held if one not in marks]

    async def _chunks(self, named: set[bytes]) -> None:
        batch: list[Held] = []
        async for one in self.remote.list("chunks"):
            if _name(one.path) not in named and not self._young(one):
                batch.append(one)
            if len(batch) == _BATCH:
                await self._sweep(batch)
                batch = []
        await self._sweep(batch)

    async def _sweep(self, rubbish: Sequence[Held]) -> None:
        """Remove objects, unless somebody has begun to push by now."""
        for start in range(0, len(rubbish), _BATCH):
            batch = rubbish[start : start + _BATCH]
            if self.lease is not None:
                if not self.done.left:
                    self.done.left = _busy(await self.lease.others("push"))
                if self.done.left:
                    return
                self.lease.hold()
                await self.remote.each([one.path for one in batch], self.remote.remove)
            self.done.objects += len(batch)
            self.done.bytes += sum(one.bytes for one in batch)

    def _young(self, one: Held) -> bool:
        return self.now_ms - one.modified_ms < self.rules.grace_s * 1000


def _kept(copy: Copy, manifest: Manifest) -> Kept:
    return Kept(
        id=copy.id,
        model=manifest.profile.model,
        profile=manifest.profile.digest,
        created_ms=manifest.created_ms,
        since_ms=copy.pushed_ms,
        bytes=manifest.bytes,
        usable=True,
        weights={one.digest: one.bytes for one in manifest.gpu.weights} if manifest.gpu else {},
    )


def _name(path: str) -> bytes:
    """A chunk's name out of its path, as few bytes as there may be millions; nobody's: empty."""
    try:
        return bytes.fromhex(path.rpartition("/")[2])
    except ValueError:
        return b""


def _busy(pushes: Sequence[str]) -> str:
    return f"{' and '.join(pushes)} just now" if pushes else ""
