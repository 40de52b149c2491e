"""What a remote holds of snapshots, and under which names.

::

    rewake.json                                  what this is, and with which key it is encrypted; written once
    chunks/<aa>/<name>                           runs of objects, by their content (:mod:`restorer.storage.chunks`)
    snapshots/<model>/<id>/chunks                the list of a snapshot's chunks
    snapshots/<model>/<id>/signatures/<key>.sig
    snapshots/<model>/<id>/manifest              the commit marker, put last, and only if there is none
    snapshots/<model>/<id>/removed               in its place after a removal, for as long as the content is kept
    weights/<digest>/chunks, index               a weights set; the index is its commit marker
    leases/                                      who pushes and who sweeps just now (:mod:`restorer.remotes.leases`)

All but rewake.json is wrapped by :mod:`restorer.remotes.sealing`. Invariants: a manifest must be put only after everything
that it names, and everything named must be durable then; what has no manifest is no snapshot; an object is never changed; a
manifest must be gone, and that durable, before anything that it names is removed.

Knows names and wrapping; what is copied when is decided by :mod:`restorer.remotes.transfer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from policies.manifest import ChunkIndex, Manifest, Weights, canonical
from policies.storage import Remote as Settings
from policies.storage import Storage
from restorer.errors import Environment, RemoteFailed, SnapshotError
from restorer.remotes.remote import Remote
from restorer.remotes.sealing import Seal, load_key
from restorer.storage import signatures
from restorer.storage.chunks import Chunk
from restorer.storage.weights import digest_of

_MARK, _FORMAT = "rewake.json", 1
_MANIFEST = re.compile(r"snapshots/([0-9a-f]{16})/([0-9a-f]{16})/manifest")
_MANIFEST_BYTES, _LIST_BYTES, _SIGNATURE_BYTES, _SIGNATURES = 64 << 20, 256 << 20, 4096, 32
MANIFEST, REMOVED = "manifest", "removed"
_HEAD_BYTES = 64
"""More than wrapping ever adds."""


class Copy(NamedTuple):
    """A snapshot that a remote has."""

    id: str
    folder: str
    pushed_ms: int


class Catalog:
    """A remote, as a place of snapshots.

    Args:
        remote: an open store.
        seal: how everything there is wrapped.
    """

    def __init__(self, remote: Remote, seal: Seal) -> None:
        self.remote, self.seal = remote, seal
        self.what = remote.what
        self._known = False

    async def check(self, *, claim: bool = False) -> None:
        """Whether this is a place of ours, with our key.

        Args:
            claim: make it one if it is none yet.

        Raises:
            RemoteFailed: it is wrapped with another key, by a later version, or is none.
        """
        if self._known:
            return
        found = await self.remote.get(_MARK, 4096)
        if found is None and claim:
            mine = json.dumps({"format": _FORMAT, "key": self.seal.fingerprint}).encode()
            found = mine if await self.remote.put(_MARK, mine) else await self.remote.get(_MARK, 4096)
        if found is not None:
            self._judge(found)
            self._known = True

    def _judge(self, found: bytes) -> None:
        try:
            said = json.loads(found)
            format, key = said["format"], said["key"]
        except (ValueError, KeyError, TypeError):
            raise RemoteFailed(f"{self.what}: {_MARK} is not Rewake's; name an empty folder of the bucket in its url") from None
        if format != _FORMAT:
            raise RemoteFailed(
                f"{self.what} is of format {format}, which another version of Rewake has written; upgrade this one"
            )
        if key != self.seal.fingerprint:
            theirs = f"encrypted with key {key}" if key else "not encrypted"
            ours = f"holds key {self.seal.fingerprint}" if self.seal.fingerprint else "is not set"
            raise RemoteFailed(
                f"{self.what} is {theirs}, but storage.remotes.{self.remote.name}.key_file {ours}; use the key that it was made "
                "with, or another url"
            )

    # ------------------------------------------------------------ chunks

    async def has_chunk(self, id: str) -> bool:
        """Whether a chunk is there."""
        return await self.remote.has(self.chunk_path(id))

    async def put_chunk(self, id: str, data: bytes, *, create: bool) -> int:
        """Store a chunk; the bytes that this took there, 0 if it was there already (and ``create``)."""
        path = self.chunk_path(id)
        blob = await asyncio.to_thread(self.seal.wrap, path, data)
        return len(blob) if await self.remote.put(path, blob, create=create) else 0

    async def get_chunk(self, chunk: Chunk) -> tuple[bytes, int]:
        """(its content, not yet compared with its name; the bytes that came).

        Raises:
            SnapshotError: it is not there, or damaged, or of another key.
        """
        path = self.chunk_path(chunk.name)
        blob = await self._got(path, chunk.size + _HEAD_BYTES)
        return await asyncio.to_thread(self._open, path, blob, chunk.size), len(blob)

    # ------------------------------------------------------------ snapshots

    async def list(self, model: str | None = None) -> list[Copy]:
        """Every whole snapshot, newest first; of one model, or all."""
        await self.check()
        folder = "snapshots" if model is None else f"snapshots/{self._model(model)}"
        found = []
        async for one in self.remote.list(folder):
            if match := _MANIFEST.fullmatch(one.path):
                found.append(Copy(match[2], one.path.rpartition("/")[0], one.modified_ms))
        return sorted(found, key=lambda copy: (-copy.pushed_ms, copy.id))

    async def find(self, id: str) -> Copy:
        """The snapshot of this id, or of the only one that begins so.

        Raises:
            SnapshotError: there is none, or there are several.
        """
        fits = [copy for copy in await self.list() if id and copy.id.startswith(id)]
        if len(fits) != 1:
            what = f"{id!r} could be {', '.join(copy.id for copy in fits)}" if fits else f"there is no snapshot {id!r}"
            raise SnapshotError(f"{what} in {self.what}; `rewake snapshot ls --remote {self.remote.name}` lists them")
        return fits[0]

    async def manifest(self, copy: Copy, name: str = MANIFEST) -> Manifest:
        """A snapshot's manifest.

        Args:
            name: :data:`REMOVED`: that of one that was removed.

        Raises:
            SnapshotError: it is damaged, or not that of this id.
        """
        path = f"{copy.folder}/{name}"
        data = self._open(path, await self._got(path, _MANIFEST_BYTES), _MANIFEST_BYTES)
        try:
            manifest = Manifest.model_validate_json(data)
        except ValidationError as error:
            raise SnapshotError(f"{self.what}: {path} cannot be read: {str(error).splitlines()[0]}") from None
        if canonical(manifest) != data or manifest.id != copy.id:
            raise SnapshotError(f"{self.what}: {path} is not the manifest of {copy.id}: it was changed")
        return manifest

    async def listed(self, copy: Copy, said: ChunkIndex) -> bytes:
        """The list of a snapshot's chunks, compared with what the manifest says."""
        path = f"{copy.folder}/chunks"
        data = self._open(path, await self._got(path, said.bytes + _HEAD_BYTES), said.bytes)
        if hashlib.sha256(data).hexdigest() != said.sha256:
            raise SnapshotError(f"{self.what}: {path} is not the list that the manifest names: it was changed")
        return data

    async def signatures(self, copy: Copy) -> dict[str, bytes]:
        """Key id -> signature, for each of a snapshot's."""
        found: dict[str, bytes] = {}
        async for one in self.remote.list(f"{copy.folder}/signatures"):
            match = signatures.NAME.fullmatch(one.path.rpartition("/")[2])
            if match and len(found) < _SIGNATURES:
                blob = await self._got(one.path, _SIGNATURE_BYTES)
                found[match[1]] = self._open(one.path, blob, _SIGNATURE_BYTES)
        return found

    async def publish(self, manifest: Manifest, listed: bytes, signed: Mapping[str, bytes], *, create: bool = True) -> bool:
        """Put what lies beside a manifest, make all that was put durable, and put the manifest.

        Returns:
            Whether it was put; it was there already if not, and ``create``.
        """
        folder = self.folder(manifest)
        for name, data in {"chunks": listed, **{f"signatures/{key}.sig": data for key, data in signed.items()}}.items():
            path = f"{folder}/{name}"
            # Not only if there is none: a push that was cut off may have been of a damaged list.
            await self.remote.put(path, await asyncio.to_thread(self.seal.wrap, path, data), create=False)
        await self.remote.settle()
        path = f"{folder}/{MANIFEST}"
        made = await self.remote.put(path, self.seal.wrap(path, canonical(manifest)), create=create)
        await self.remote.settle()
        return made

    async def has(self, manifest: Manifest) -> bool:
        """Whether this snapshot is there whole."""
        return await self.remote.has(f"{self.folder(manifest)}/{MANIFEST}")

    async def withdraw(self, copy: Copy) -> None:
        """Make a snapshot none any more. What it is made of stays for who pulls it just now, until a sweep after a while.

        One whose manifest is damaged leaves no word of what it named, and so nothing stays for its sake.
        """
        with contextlib.suppress(SnapshotError):
            path = f"{copy.folder}/{REMOVED}"
            manifest = await self.manifest(copy)
            await self.remote.put(path, self.seal.wrap(path, canonical(manifest)), create=False)
            await self.remote.settle()
        await self.remote.remove(f"{copy.folder}/{MANIFEST}")
        await self.remote.settle()

    # ------------------------------------------------------------ weights

    async def weights(self, digest: str) -> tuple[Weights, bytes] | None:
        """(a weights set, the list of its parts' chunks); None: it is not there."""
        path = self.weights_folder(digest)
        blob = await self.remote.get(f"{path}/index", _MANIFEST_BYTES)
        if blob is None:
            return None
        try:
            weights = Weights.model_validate_json(self._open(f"{path}/index", blob, _MANIFEST_BYTES))
        except ValidationError as error:
            raise SnapshotError(f"{self.what}: {path}/index cannot be read: {str(error).splitlines()[0]}") from None
        if digest != weights.digest or digest != digest_of(weights.parts, weights.allocations):
            raise SnapshotError(f"{self.what}: {path}/index is not that of the set {digest}: it was changed")
        return weights, self._open(f"{path}/chunks", await self._got(f"{path}/chunks", _LIST_BYTES), _LIST_BYTES)

    async def publish_weights(self, weights: Weights, listed: bytes) -> None:
        """Put the list of a set's chunks, make all that was put durable, and put its index."""
        path = self.weights_folder(weights.digest)
        await self.remote.put(f"{path}/chunks", self.seal.wrap(f"{path}/chunks", listed), create=False)
        await self.remote.settle()
        await self.remote.put(f"{path}/index", self.seal.wrap(f"{path}/index", canonical(weights)), create=False)

    # ------------------------------------------------------------ names

    def folder(self, manifest: Manifest) -> str:
        """Where a snapshot lies."""
        return f"snapshots/{self._model(manifest.profile.model)}/{manifest.id}"

    def weights_folder(self, digest: str) -> str:
        """Where a weights set lies."""
        return f"weights/{self.seal.name('weights', digest)}"

    def chunk_path(self, id: str) -> str:
        """Where a chunk lies."""
        name = self.seal.name("chunk", id)
        return f"chunks/{name[:2]}/{name}"

    def _model(self, model: str) -> str:
        return self.seal.name("model", hashlib.sha256(model.encode()).hexdigest())[:16]

    def _open(self, path: str, blob: bytes, most: int) -> bytes:
        try:
            return self.seal.unwrap(path, blob, most)
        except SnapshotError as error:
            raise SnapshotError(
                f"{self.what}: {error}; push the snapshot anew with --overwrite from a host that has it"
            ) from None

    async def _got(self, path: str, most: int) -> bytes:
        blob = await self.remote.get(path, most)
        if blob is None:
            raise SnapshotError(
                f"{self.what}: {path} is missing; push the snapshot anew with --overwrite from a host that has it"
            )
        return blob


def open_catalog(name: str, settings: Settings) -> Catalog:
    """The catalog of a remote. Asks nothing of it yet; blocks for the key's file.

    Raises:
        Environment: its settings or its key cannot be used.
    """
    key = None if settings.key_file is None else load_key(Path(settings.key_file))
    return Catalog(Remote(name, settings), Seal(key, settings.zstd))


def chosen(storage: Storage, name: str | None) -> Catalog:
    """The remote of this name; None: the one that starts pull from, or else the only one there is.

    Raises:
        Environment: it is not in the configuration, it is not clear which, or it cannot be used.
    """
    known = ", ".join(storage.remotes) or "none"
    only = next(iter(storage.remotes)) if len(storage.remotes) == 1 else None
    meant = name or storage.pull or only
    if meant is None:
        what = "several remotes: name one" if storage.remotes else "no remotes: add one under storage.remotes"
        raise Environment(f"the configuration has {what} (known: {known})")
    if meant not in storage.remotes:
        raise Environment(f"the configuration has no remote {meant!r} (known: {known})")
    return open_catalog(meant, storage.remotes[meant])
