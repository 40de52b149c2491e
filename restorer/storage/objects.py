"""The files that a snapshot is made of, before they are committed: found, made read-only and durable, described.

Knows nothing of where snapshots are kept. Every function blocks.
"""

from __future__ import annotations

import concurrent.futures
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from policies.manifest import SnapshotObject
from restorer.errors import SnapshotError
from restorer.storage.integrity import FOLDERS
from restorer.storage.stamps import SETTLE_NS, THREADS
from restorer.system.files import dig_holes, fsync, fsync_tree

_DIG_FROM = 1 << 20
"""Smaller files are not worth a process that looks for zeros in them."""


def found(folder: Path) -> dict[str, int]:
    """Path within the snapshot -> size, of every file staged, sorted by path."""
    files = {}
    for part in FOLDERS:
        for parent, _, names in os.walk(folder / part):
            for name in names:
                path = Path(parent, name)
                relative, facts = str(path.relative_to(folder)), path.lstat()
                if not stat.S_ISREG(facts.st_mode):
                    raise SnapshotError(f"{relative} is not a regular file, and cannot be part of a snapshot")
                files[relative] = facts.st_size
    return dict(sorted(files.items()))


def seal(folder: Path, sizes: dict[str, int], modes: Mapping[str, int] = MappingProxyType({})) -> None:
    """Dig holes, take away write permission, make durable, and let the clock move on so that hashes can be remembered."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(dig_holes, (folder / name for name, size in sizes.items() if size >= _DIG_FROM)))
        for name in sizes:
            (folder / name).chmod(modes.get(name, 0o400) & 0o500)
        list(pool.map(fsync, (folder / name for name in sizes)))
    fsync_tree(folder)
    newest = max((os.lstat(folder / name).st_ctime_ns for name in sizes), default=0)
    time.sleep(min(max(0, newest + SETTLE_NS + 1_000_000 - time.time_ns()), 2 * SETTLE_NS) / 1e9)


def described(folder: Path, name: str, size: int, sha256: str | OSError) -> SnapshotObject:
    if isinstance(sha256, OSError):
        raise sha256
    return SnapshotObject(path=name, bytes=size, sha256=sha256, mode=stat.S_IMODE((folder / name).lstat().st_mode))
