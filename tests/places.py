"""What one installation keeps on its disk, for tests that copy snapshots between two."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from test_restorer_snapshots import draft

from policies.manifest import Manifest
from restorer.remotes import pulling, transfer
from restorer.remotes.catalog import Catalog
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.stamps import Stamps
from restorer.storage.weights import WeightsStore


class Place:
    """What one installation keeps."""

    def __init__(self, folder: Path) -> None:
        self.stamps = Stamps(folder / "stamps.json")
        self.snapshots = SnapshotStore(folder / "snapshots", self.stamps)
        self.weights = WeightsStore(folder / "weights", self.stamps)

    def made(self, *, seed: int = 0, pages: int = 12, shift: int = 0, created_ms: int = 1, **more: object) -> Manifest:
        """A snapshot with some MiB of memory, moved by some pages, holes between, and small files."""
        with self.snapshots.stage() as staging:
            memory = random.Random(seed).randbytes(pages << 20)
            own = random.Random(created_ms + 1000).randbytes((shift + 1) * 4096)
            (staging.images / "pages-1.img").write_bytes(own + memory[: pages << 19] + bytes(8 << 20) + memory[pages << 19 :])
            for name in ("core-1000.img", "inventory.img"):
                (staging.images / name).write_bytes(f"{name} {created_ms}".encode())
            (staging.images / "empty.img").write_bytes(b"")
            (staging.scratch / "0").mkdir()
            (staging.scratch / "0" / "tree.json").write_text("[]")
            return self.snapshots.commit(staging, draft(**{"created_ms": created_ms, "secrets": (), **more}))

    async def push(self, catalog: Catalog, manifest: Manifest, **more: bool) -> transfer.Moved:
        return await transfer.push(catalog, self.snapshots, self.weights, manifest, **more)

    async def pull(self, catalog: Catalog, id: str, **more: Any) -> transfer.Moved:
        copy = await catalog.find(id)
        manifest = await catalog.manifest(copy)
        return await pulling.pull(catalog, self.snapshots, self.weights, manifest, copy, **more)
