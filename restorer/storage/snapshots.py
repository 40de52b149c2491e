"""The snapshots of one host: staged, committed, found, verified, removed.

::

    <root>/<id>/manifest.json   the commit marker, written last; its bytes are canonical and their hash is <id>
    <root>/<id>/chunks          what the objects are made of (:mod:`restorer.storage.chunks`)
    <root>/<id>/images/         what CRIU wrote
    <root>/<id>/scratch/        private folders, as restorer.storage.trees stores them
    <root>/verdicts/<id>.jsonl  what became of its restores; appended to, no part of the snapshot
    <root>/.staging-<random>/   a snapshot being made; locked by its maker, so that a sweep leaves it alone

Invariants: a snapshot must not change once it is committed. A folder without a readable, canonical manifest.json is no
snapshot. A manifest must be durable only after every object it names is. Removal takes the manifest first.

Knows nothing of CRIU, engines or jobs. Every method blocks: async callers use threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from policies.manifest import FORMATS, Manifest, canonical
from restorer.coordination.verdicts import Verdicts
from restorer.errors import SnapshotError
from restorer.storage import chunks, holds, objects, signatures
from restorer.storage.holds import Hold, Users
from restorer.storage.integrity import MANIFEST, Fault, differences, is_sparse, listing, shape, strangers, verify_files
from restorer.storage.partial import KEPT_S, PREFIX, Partial
from restorer.storage.stamps import SETTLE_NS, Stamps
from restorer.storage.trees import capture_tree, lay_tree
from restorer.storage.weights import verify_weights
from restorer.system.files import allocated, disk_space, fsync, write_durable

__all__ = ["Fault", "SnapshotStore", "Staging", "capture_tree", "lay_tree", "verify_files", "verify_weights"]

Signer = Callable[[bytes], tuple[str, bytes] | None]
"""A manifest's bytes -> (key id, signature), or None: it is not to be signed. Raises Environment."""
_ID = re.compile(r"[0-9a-f]{16}")


class Staging:
    """A snapshot being made. As a context manager it removes itself at the end, unless it was committed."""

    def __init__(self, root: Path, name: str = "") -> None:
        self.path = root / (name or self.fresh_name())
        self.images = self.path / "images"
        self.scratch = self.path / "scratch"
        self.committed = False
        self._lock = -1
        try:
            with disk_space("making room for a snapshot", root):
                self.path.mkdir(mode=0o700)
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self.images.mkdir(mode=0o700)
                self.scratch.mkdir(mode=0o700)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def fresh_name() -> str:
        """A name for :meth:`SnapshotStore.stage`, so that it can be noted before the folder is there."""
        return f".staging-{secrets.token_hex(6)}"

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove it, unless it was committed. Idempotent."""
        if not self.committed:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class SnapshotStore:
    """The snapshots under one folder.

    Args:
        root: made if missing, private to the running user.
        stamps: what is known to be unchanged, so that :meth:`verify` need not read it again.
        sign: the signature of a manifest's bytes, if what is committed is to be signed.
        users: what runs from which snapshot; none of these is removed.
        host: its name among others; empty: its hostname.
    """

    def __init__(self, root: Path, stamps: Stamps, sign: Signer = lambda _: None, users: Users = dict, host: str = "") -> None:
        self.root = root
        self.sign = sign
        self._users = users
        self._stamps = stamps
        self._manifests: dict[str, tuple[tuple[int, ...], Manifest]] = {}
        """Those read before, with what their file was then: parsing one takes longer than all else of a match."""
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.verdicts = Verdicts(root / "verdicts", host or socket.gethostname())

    def stage(self, name: str = "") -> Staging:
        """A new, empty staging folder on the store's file system, with a name from :meth:`Staging.fresh_name`."""
        return Staging(self.root, name)

    def commit(self, staging: Staging, draft: Manifest) -> Manifest:
        """Make what is staged a snapshot: dig holes, make it read-only, durable, hash it, name it; the manifest last.

        Args:
            draft: the manifest without what is known only now: ``objects``, ``chunks`` and ``bytes`` are replaced, and
                ``bytes_written`` is increased by what of that was handed to the file system.

        Raises:
            Environment: the disk is full. SnapshotError: something staged cannot be an object.
        """
        with disk_space("committing a snapshot", self.root):
            found = objects.found(staging.path)
            written = sum(min(size, allocated(staging.path / name)) for name, size in found.items())
            objects.seal(staging.path, found)
            cutter = chunks.Cutter()
            hashes = self._stamps.sha256_all((staging.path / name for name in found), tap=cutter.tap, sparse=True)
            described = tuple(
                objects.described(staging.path, name, size, hashes[staging.path / name]) for name, size in found.items()
            )
            cut = cutter.finish()
            listed, index = chunks.encode({name: cut[staging.path / name] for name in found})
            manifest = draft.model_copy(
                update={
                    "objects": described,
                    "bytes": allocated(staging.path),
                    "bytes_written": draft.bytes_written + written + len(listed),
                    "chunks": index,
                }
            )
            write_durable(staging.path / chunks.FILE, listed)
            self._publish(staging, manifest)
        return manifest

    def settle(self, partial: Partial, manifest: Manifest, listed: bytes) -> None:
        """Make what was pulled read-only and durable, as :meth:`commit` does, and compare every byte with its manifest.

        Args:
            listed: the list of chunks.

        Raises:
            Environment: the disk is full. SnapshotError: something is not what the manifest says.
        """
        items = manifest.objects
        with disk_space("committing a pulled snapshot", self.root):
            write_durable(partial.path / chunks.FILE, listed)
            objects.seal(partial.path, {item.path: item.bytes for item in items}, {item.path: item.mode for item in items})
            faults = [*strangers(partial.path, manifest), *filter(None, (listing(partial.path, manifest, full=True),))]
            faults += [fault for item in items if (fault := shape(partial.path, item)) is not None]
            if not faults:
                wanted = {str(partial.path / item.path): (item.path, item.sha256) for item in items}
                found = self._stamps.sha256_all(map(Path, wanted), sparse=is_sparse(manifest))
                faults += differences(wanted, found)
            if faults:
                raise SnapshotError(f"what was pulled is not snapshot {manifest.id}: " + "; ".join(map(str, faults[:5])))

    def publish(self, partial: Partial, manifest: Manifest) -> None:
        """Make what was settled a snapshot, once all else that it names is here. Raises Environment: the disk is full."""
        with disk_space("committing a pulled snapshot", self.root):
            self._publish(partial, manifest, sign=False)

    def list(self) -> Sequence[Manifest]:
        """Every snapshot, newest first."""
        found = []
        for id in self._ids():
            with contextlib.suppress(SnapshotError):
                found.append(self._read(id))
        return sorted(found, key=lambda manifest: (-manifest.created_ms, manifest.id))

    def load(self, id: str) -> Manifest:
        """The manifest of a snapshot, by its id or by a prefix that only one has.

        Raises:
            SnapshotError: there is none, there are several, or its manifest is not what was committed.
        """
        if _ID.fullmatch(id):
            return self._read(id)
        fits = [found for found in self._ids() if id and found.startswith(id)]
        if len(fits) != 1:
            what = f"{id!r} could be {', '.join(fits)}" if fits else f"there is no snapshot {id!r} in {self.root}"
            raise SnapshotError(f"{what}; `rewake snapshot ls` lists them")
        return self._read(fits[0])

    def folder(self, id: str) -> Path:
        """Where a snapshot's ``images`` and ``scratch`` are."""
        return self.root / id

    def verify(
        self, snapshot: str | Manifest, *, full: bool, progress: Callable[[int, int], None] | None = None
    ) -> Sequence[Fault]:
        """Every fault of a snapshot; empty when it is as it was committed.

        Args:
            snapshot: its id; or its manifest, which is believed.
            full: read every byte. Otherwise files unchanged since they were last hashed are believed (see
                :mod:`restorer.storage.stamps` for what that cannot see).
            progress: called from this thread with (bytes done, bytes in all).

        Raises:
            SnapshotError: no such snapshot, or its manifest is not what was committed.
        """
        manifest = snapshot if isinstance(snapshot, Manifest) else self.load(snapshot)
        folder = self.root / manifest.id
        faults = [*strangers(folder, manifest), *filter(None, (listing(folder, manifest, full=full),))]
        sound = []
        for item in manifest.objects:
            fault = shape(folder, item)
            if fault is None:
                sound.append(item)
            else:
                faults.append(fault)
        if full:
            for item in sound:
                self._stamps.forget(folder / item.path)
        sizes = {folder / item.path: item.bytes for item in sound}
        meter = _Meter(sizes, progress)
        hashes = self._stamps.sha256_all(sizes, progress=meter.done, sparse=is_sparse(manifest))
        faults += differences({str(folder / item.path): (item.path, item.sha256) for item in sound}, hashes)
        return faults

    def use(self, id: str) -> Hold:
        """The right to use a snapshot: until it is closed, nobody removes it. Blocks for moments.

        Raises:
            InUse: it is being made or removed. Environment: it is gone.
        """
        return holds.use(self.root / id)

    def remove(self, id: str) -> None:
        """Remove a snapshot: its manifest first, so that a crash half-way leaves none. Its verdicts stay.

        Raises:
            SnapshotError: there is none with exactly this id. InUse: somebody uses it, who is named.
        """
        folder = self.root / id
        if not _ID.fullmatch(id) or not folder.is_dir():
            raise SnapshotError(f"there is no snapshot {id!r} in {self.root}; `rewake snapshot ls` lists them")
        with holds.alone(folder, self._users):
            (folder / MANIFEST).unlink(missing_ok=True)
            fsync(folder)
            shutil.rmtree(folder)

    def sweep(self, *, older_than_s: float = 3600.0) -> Sequence[str]:
        """Remove what a crash left behind: staging folders nobody makes any more, and folders without a manifest.

        A folder whose manifest has a format of a later version is not ours to judge, and stays.

        Args:
            older_than_s: 0 when the restorer starts: nothing but its own staging can be in use, and that is locked.

        Returns:
            The names removed.
        """
        removed = []
        for path in sorted(self.root.iterdir()):
            staged = path.name.startswith((".staging-", PREFIX))
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                # What a pull has got stays a while, for the next one to go on with.
                least_s = KEPT_S if path.name.startswith(PREFIX) else older_than_s
                if time.time() - path.lstat().st_mtime < least_s:
                    continue
                if (staged or (_ID.fullmatch(path.name) and self._is_debris(path))) and not _is_locked(path):
                    (path / MANIFEST).unlink(missing_ok=True)
                    shutil.rmtree(path)
                    removed.append(path.name)
        return removed

    def _ids(self) -> Iterator[str]:
        return (name for name in sorted(os.listdir(self.root)) if _ID.fullmatch(name))

    def _read(self, id: str) -> Manifest:
        path = self.root / id / MANIFEST
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                facts = os.fstat(file.fileno())
                mark = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
                known = self._manifests.get(id)
                if known is not None and known[0] == mark:
                    return known[1]
                data = file.read()
            manifest = Manifest.model_validate_json(data)
        except FileNotFoundError:
            raise SnapshotError(f"there is no snapshot {id!r} in {self.root}; `rewake snapshot ls` lists them") from None
        except (OSError, ValidationError) as error:
            raise SnapshotError(f"{path} is not a readable manifest: {str(error).splitlines()[0]}; remove the snapshot") from None
        if canonical(manifest) != data or manifest.id != id:
            raise SnapshotError(f"{path}: expected a manifest that hashes to {id}, found {manifest.id}: it was edited; remove it")
        if facts.st_ctime_ns + SETTLE_NS < time.time_ns():
            self._manifests[id] = mark, manifest
        return manifest

    def _publish(self, staging: Staging | Partial, manifest: Manifest, *, sign: bool = True) -> None:
        target = self.root / manifest.id
        if target.exists():
            # The id is a hash that covers the objects and the time: only a commit that never got its manifest can be there.
            shutil.rmtree(target)
        staging.path.rename(target)
        self._stamps.moved(staging.path, target)
        staging.path, staging.images, staging.scratch = target, target / "images", target / "scratch"
        fsync(self.root)
        data = canonical(manifest)
        signed = self.sign(data) if sign else None
        if signed is not None:
            signatures.write(target, *signed)
        write_durable(target / MANIFEST, data)
        staging.committed = True

    def _is_debris(self, path: Path) -> bool:
        try:
            self._read(path.name)
        except SnapshotError:
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
                return bool(json.loads((path / MANIFEST).read_bytes()).get("format") in {None, *FORMATS})
            return True
        return False


class _Meter:
    """Adds up finished files for a progress callback."""

    def __init__(self, sizes: dict[Path, int], report: Callable[[int, int], None] | None) -> None:
        self._sizes, self._report, self._done, self._total = sizes, report, 0, sum(sizes.values())

    def done(self, path: Path) -> None:
        self._done += self._sizes[path]
        if self._report is not None:
            self._report(self._done, self._total)


def _is_locked(path: Path) -> bool:
    """Somebody, this process included, holds the staging folder that this was or is."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
