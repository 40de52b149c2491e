"""The snapshots of one host: staged, committed, found, verified, removed.

::

    <root>/<id>/manifest.json   the commit marker, written last; its bytes are canonical and their hash is <id>
    <root>/<id>/chunks          what the objects are made of (:mod:`restorer.chunks`)
    <root>/<id>/images/         what CRIU wrote
    <root>/<id>/scratch/        private folders, as restorer.trees stores them
    <root>/verdicts/<id>.jsonl  what became of its restores; appended to, no part of the snapshot
    <root>/.staging-<random>/   a snapshot being made; locked by its maker, so that a sweep leaves it alone

Invariants: a snapshot must not change once it is committed. A folder without a readable, canonical manifest.json is no
snapshot. A manifest must be durable only after every object it names is. Removal takes the manifest first.

Knows nothing of CRIU, engines or jobs. Every method blocks: async callers use threads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from policies.manifest import FORMATS, Manifest, SnapshotObject, canonical
from restorer import chunks, holds, signatures
from restorer.errors import SnapshotError
from restorer.files import allocated, dig_holes, disk_space, fsync, fsync_tree, write_durable
from restorer.holds import Hold, Users
from restorer.integrity import FOLDERS, MANIFEST, Fault, differences, named, shape, strangers, verify_files
from restorer.stamps import SETTLE_NS, THREADS, Stamps
from restorer.trees import capture_tree, lay_tree
from restorer.verdicts import Verdicts
from restorer.weights import verify_weights

__all__ = ["Fault", "SnapshotStore", "Staging", "capture_tree", "lay_tree", "verify_files", "verify_weights"]

Signer = Callable[[bytes], tuple[str, bytes] | None]
"""A manifest's bytes -> (key id, signature), or None: it is not to be signed. Raises Environment."""
_ID = re.compile(r"[0-9a-f]{16}")
_DIG_FROM = 1 << 20
"""Smaller files are not worth a process that looks for zeros in them."""


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
    """

    def __init__(self, root: Path, stamps: Stamps, sign: Signer = lambda _: None, users: Users = dict) -> None:
        self.root = root
        self.sign = sign
        self._users = users
        self._stamps = stamps
        self._manifests: dict[str, tuple[tuple[int, ...], Manifest]] = {}
        """Those read before, with what their file was then: parsing one takes longer than all else of a match."""
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.verdicts = Verdicts(root / "verdicts", socket.gethostname())

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
            found = _objects(staging.path)
            written = sum(min(size, allocated(staging.path / name)) for name, size in found.items())
            _seal(staging.path, found)
            cutter = chunks.Cutter()
            hashes = self._stamps.sha256_all((staging.path / name for name in found), tap=cutter.tap)
            objects = tuple(_object(staging.path, name, size, hashes[staging.path / name]) for name, size in found.items())
            cut = cutter.finish()
            listed, index = chunks.encode({name: cut[staging.path / name] for name in found})
            manifest = draft.model_copy(
                update={
                    "objects": objects,
                    "bytes": allocated(staging.path),
                    "bytes_written": draft.bytes_written + written + len(listed),
                    "chunks": index,
                }
            )
            write_durable(staging.path / chunks.FILE, listed)
            self._publish(staging, manifest)
        return manifest

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
                :mod:`restorer.stamps` for what that cannot see).
            progress: called from this thread with (bytes done, bytes in all).

        Raises:
            SnapshotError: no such snapshot, or its manifest is not what was committed.
        """
        manifest = snapshot if isinstance(snapshot, Manifest) else self.load(snapshot)
        folder = self.root / manifest.id
        faults = [*strangers(folder, manifest)]
        sound = []
        for item in named(manifest):
            fault = shape(folder, item)
            if fault is not None:
                faults.append(fault)
            elif full or item.path != chunks.FILE:  # no restore reads the list, so none waits for its hash
                sound.append(item)
        if full:
            for item in sound:
                self._stamps.forget(folder / item.path)
        sizes = {folder / item.path: item.bytes for item in sound}
        meter = _Meter(sizes, progress)
        hashes = self._stamps.sha256_all(sizes, progress=meter.done)
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
            staged = path.name.startswith(".staging-")
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if time.time() - path.lstat().st_mtime < older_than_s:
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

    def _publish(self, staging: Staging, manifest: Manifest) -> None:
        target = self.root / manifest.id
        if target.exists():
            # The id is a hash that covers the objects and the time: only a commit that never got its manifest can be there.
            shutil.rmtree(target)
        staging.path.rename(target)
        self._stamps.moved(staging.path, target)
        staging.path, staging.images, staging.scratch = target, target / "images", target / "scratch"
        fsync(self.root)
        data = canonical(manifest)
        signed = self.sign(data)
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


def _objects(folder: Path) -> dict[str, int]:
    """Path within the snapshot -> size, of every file staged, sorted by path."""
    found = {}
    for part in FOLDERS:
        for parent, _, names in os.walk(folder / part):
            for name in names:
                path = Path(parent, name)
                relative, facts = str(path.relative_to(folder)), path.lstat()
                if not stat.S_ISREG(facts.st_mode):
                    raise SnapshotError(f"{relative} is not a regular file, and cannot be part of a snapshot")
                found[relative] = facts.st_size
    return dict(sorted(found.items()))


def _seal(folder: Path, found: dict[str, int]) -> None:
    """Dig holes, take away write permission, make durable, and let the clock move on so that hashes can be remembered."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(dig_holes, (folder / name for name, size in found.items() if size >= _DIG_FROM)))
        for name in found:
            (folder / name).chmod(0o400)
        list(pool.map(fsync, (folder / name for name in found)))
    fsync_tree(folder)
    newest = max((os.lstat(folder / name).st_ctime_ns for name in found), default=0)
    time.sleep(min(max(0, newest + SETTLE_NS + 1_000_000 - time.time_ns()), 2 * SETTLE_NS) / 1e9)


def _object(folder: Path, name: str, size: int, sha256: str | OSError) -> SnapshotObject:
    if isinstance(sha256, OSError):
        raise sha256
    return SnapshotObject(path=name, bytes=size, sha256=sha256, mode=stat.S_IMODE((folder / name).lstat().st_mode))


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
