"""The weights that lie apart from snapshots: staged, committed, found again by their content, verified, swept.

::

    <root>/<digest>/part-00000 …  the allocations of one worker, one after another, cut into parts
    <root>/<digest>/index.json    what they are (:class:`policies.manifest.Weights`), written last
    <root>/.staging-<random>/     a set being written

Invariants: a set must not change once it is committed; a folder without index.json is none. A set must be durable before a
manifest names it. Two snapshots whose weights are equal name the same set.

Knows nothing of GPUs or engines. Every method blocks: async callers use threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from policies.manifest import Allocation, Manifest, Weights, WeightsPart, canonical
from restorer.errors import InUse, SnapshotError
from restorer.storage import holds
from restorer.storage.holds import Hold
from restorer.storage.integrity import Fault, differences
from restorer.storage.partial import KEPT_S, PREFIX
from restorer.storage.stamps import SETTLE_NS, Stamps
from restorer.system.files import disk_space, fsync, fsync_tree, write_durable

INDEX = "index.json"
PART_BYTES = 1 << 30
_DIGEST = re.compile(r"[0-9a-f]{64}")
_STAGING = ".staging-"


class WeightsStore:
    """The weights sets under one folder.

    Args:
        root: made if missing, private to the running user.
        stamps: what is known to be unchanged.
    """

    def __init__(self, root: Path, stamps: Stamps) -> None:
        self.root = root
        self._stamps = stamps
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def find(self, allocations: Sequence[Allocation]) -> Weights | None:
        """The set whose content has these fingerprints, if it is here whole."""
        wanted = tuple(allocations)
        return next((found for found in self.sets() if found.allocations == wanted and not self.verify([found])), None)

    def stage(self) -> Path:
        """A new, empty folder to write parts into."""
        path = self.root / f"{_STAGING}{secrets.token_hex(6)}"
        path.mkdir(mode=0o700)
        return path

    def check(self, folder: Path, part: WeightsPart) -> None:
        """Make one part that is whole read-only and durable, and compare it with its hash; :meth:`commit` need not any more.

        Raises:
            SnapshotError: it is not what it should be. Environment: the disk is full.
        """
        path = folder / part.name
        with disk_space("storing weights", folder):
            path.chmod(0o400)
            # Its hash is remembered only if the clock has moved on since.
            time.sleep(2 * SETTLE_NS / 1e9)
            faults = differences({str(path): (part.name, part.sha256)}, self._stamps.sha256_all([path]))
        if faults:
            raise SnapshotError(f"weights that have come are not what their manifest names: {faults[0]}")

    def commit(self, staging: Path, parts: Sequence[WeightsPart], allocations: Sequence[Allocation]) -> Weights:
        """Make what is staged a set: read-only, durable, hashed again here, named by its content; the index last.

        Raises:
            SnapshotError: a part is not what its writer says. Environment: the disk is full.
        """
        with disk_space("storing weights", self.root):
            for part in parts:
                if stat.S_IMODE((staging / part.name).lstat().st_mode) != 0o400:
                    (staging / part.name).chmod(0o400)
            fsync_tree(staging)
            wanted = {str(staging / part.name): (part.name, part.sha256) for part in parts}
            faults = differences(wanted, self._stamps.sha256_all(map(Path, wanted)))
            if faults or sum(part.bytes for part in parts) != sum(run.bytes for run in allocations):
                raise SnapshotError("exported weights are not what the engine says: " + "; ".join(map(str, faults[:3])))
            weights = Weights(digest=digest_of(parts, allocations), parts=tuple(parts), allocations=tuple(allocations))
            target = self.root / weights.digest
            if (target / INDEX).exists():
                shutil.rmtree(staging)
                return weights
            shutil.rmtree(target, ignore_errors=True)
            staging.rename(target)
            self._stamps.moved(staging, target)
            fsync(self.root)
            write_durable(target / INDEX, canonical(weights))
        return weights

    def discard(self, staging: Path) -> None:
        """Remove a folder of :meth:`stage`, if it was not committed."""
        if staging.name.startswith(_STAGING):
            shutil.rmtree(staging, ignore_errors=True)

    def sets(self) -> Sequence[Weights]:
        """Every set that is whole as far as its index says."""
        return [found for digest in self._digests() if (found := self._read(digest)) is not None]

    def files(self, weights: Weights, place: Path | None = None) -> list[tuple[Path, int]]:
        """(path, bytes) of each part, in order; in ``place``, if the set is still on its way there."""
        return [((place or self.root / weights.digest) / part.name, part.bytes) for part in weights.parts]

    def verify(self, sets: Sequence[Weights], *, full: bool = False) -> Sequence[Fault]:
        """Every fault of some sets; files unchanged since they were last hashed are believed, unless ``full``."""
        faults: list[Fault] = []
        wanted: dict[str, tuple[str, str]] = {}
        for weights in sets:
            if self._read(weights.digest) != weights:
                faults.append(Fault(f"weights/{weights.digest}", "the set that the manifest names", "none, or another"))
                continue
            for part in weights.parts:
                path = self.root / weights.digest / part.name
                fault = _shape(path, part)
                if fault is not None:
                    faults.append(fault)
                    continue
                wanted[str(path)] = (f"weights/{weights.digest[:16]}/{part.name}", part.sha256)
                if full:
                    self._stamps.forget(path)
        return faults + differences(wanted, self._stamps.sha256_all(map(Path, wanted)))

    def busy(self) -> Hold:
        """Until it is closed, nothing is swept: hold it from before a set is looked for or made until a manifest names it."""
        return holds.use(self.root)

    def sweep(self, named: Collection[str], *, older_than_s: float = 0.0) -> Sequence[str]:
        """Remove what no manifest names, and what a crash left half-made; nothing while sets are made. The names removed.

        Args:
            named: the digests that manifests name.
            older_than_s: what has changed since stays.
        """
        removed = []
        with contextlib.suppress(InUse), holds.alone(self.root):
            for path in sorted(self.root.iterdir()):
                # What a pull has got waits for the next one to go on with it; a pull holds off sweeps while it lasts.
                stale = path.name.startswith(PREFIX) and time.time() - path.lstat().st_mtime > KEPT_S
                ours = path.name.startswith(_STAGING) or _DIGEST.fullmatch(path.name) or stale
                if ours and path.name not in named and time.time() - path.lstat().st_mtime >= older_than_s:
                    (path / INDEX).unlink(missing_ok=True)
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path.name)
        return removed

    def _digests(self) -> Iterator[str]:
        return (name for name in sorted(os.listdir(self.root)) if _DIGEST.fullmatch(name))

    def _read(self, digest: str) -> Weights | None:
        try:
            data = (self.root / digest / INDEX).read_bytes()
            weights = Weights.model_validate_json(data)
        except (OSError, ValidationError):
            return None
        whole = canonical(weights) == data and digest == weights.digest == digest_of(weights.parts, weights.allocations)
        return weights if whole else None


def verify_weights(manifest: Manifest, state_dir: Path, stamps: Stamps) -> Sequence[Fault]:
    """Read every byte of the weights that a snapshot needs; every fault."""
    sets = manifest.gpu.weights if manifest.gpu else ()
    return WeightsStore(state_dir / "weights", stamps).verify(sets, full=True) if sets else ()


def digest_of(parts: Sequence[WeightsPart], allocations: Sequence[Allocation]) -> str:
    lines = [*(f"{part.bytes} {part.sha256}" for part in parts), *(f"{run.bytes} {run.fingerprint}" for run in allocations)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _shape(path: Path, part: WeightsPart) -> Fault | None:
    if "/" in part.name or part.name in ("", ".", ".."):
        return Fault(part.name, "a file of the set", "a path that leads out of it")
    try:
        facts = path.lstat()
    except OSError as error:
        return Fault(part.name, f"{part.bytes} bytes", error.strerror or str(error))
    if not stat.S_ISREG(facts.st_mode) or facts.st_size != part.bytes:
        return Fault(part.name, f"a file of {part.bytes} bytes", f"{stat.filemode(facts.st_mode)} of {facts.st_size} bytes")
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        return Fault(part.name, "writable by its owner alone", f"owner {facts.st_uid}, {stat.filemode(facts.st_mode)}")
    return None
