"""CRIU without Rewake's part in it: an engine dumped whole and restored by `criu restore`, for comparison.

In the same namespaces and with the same options, but nothing is verified, taken out of the images, read ahead or asked twice.
With ``lazy`` CRIU leaves pages for later, and its lazy-pages daemon brings them when they are touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from policies.config import Model
from restorer.adapters.engines import HttpEngine, adapter
from restorer.boxes.box import Box, BoxFactory
from restorer.checkpoint.backends import OwnCriu
from restorer.checkpoint.criu import Criu
from restorer.operations.instance import ignite
from restorer.storage.trees import capture_tree, lay_tree

TIMEOUT_S = 300.0
_POLL_S = 0.01


class Plain:
    """One engine's images in one folder."""

    def __init__(self, folder: Path, run_dir: Path, criu: Path, network: str) -> None:
        self.images, self.scratch = folder / "images", folder / "scratch"
        self._criu, self._binary = Criu(criu, TIMEOUT_S), criu
        self._boxes = BoxFactory(run_dir=run_dir, state_dir=folder, network=network, spare=0)
        self._pid = 0

    async def dump(self, name: str, settings: dict[str, Any]) -> None:
        """Start the engine cold, warm it, dump it, end it."""
        self._engine: HttpEngine = adapter(name, Model.model_validate(settings))
        for folder in (self.images, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        async with self._box() as box:
            donor, _ = await ignite(OwnCriu(self._criu, ""), box, self._engine)
            self._pid = donor.inner_pid
            await self._criu.dump(box, donor.inner_pid, self.images, self._engine.dump_options)
            for number, source in enumerate((box.root / "dev/shm", box.private)):
                capture_tree(source, self.scratch / str(number))

    async def restore(self, body: dict[str, Any], *, lazy: bool = False) -> dict[str, float]:
        """Seconds to the engine's life, and to its first token."""
        async with self._box() as box, self._pages(box, lazy):
            begun = time.perf_counter()
            for number, target in enumerate((box.root / "dev/shm", box.private)):
                lay_tree(self.scratch / str(number), target)
            await self._criu.restore(box, self.images, (*self._engine.restore_options, *(["--lazy-pages"] if lazy else [])))
            alive = time.perf_counter()
            url = f"http://{box.address}:{self._engine.model.engine.port}/v1/completions"
            async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
                (await client.post(url, json=body)).raise_for_status()
            return {"restored": alive - begun, "seconds": time.perf_counter() - begun}

    @contextlib.asynccontextmanager
    async def _pages(self, box: Box, lazy: bool) -> AsyncIterator[None]:
        """CRIU's daemon for pages that come later, if wanted; it ends with its box."""
        if not lazy:
            yield
            return
        argv = [str(self._binary), "lazy-pages", "-D", str(self.images), "-W", str(box.work), "-o", "lazy-pages.log"]
        daemon = asyncio.create_task(box.run(argv, timeout_s=TIMEOUT_S))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not (box.work / "lazy-pages.socket").exists():  # noqa: ASYNC110 - it says nothing when it is ready
                    await asyncio.sleep(_POLL_S)
            yield
        finally:
            daemon.cancel()
            await asyncio.gather(daemon, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _box(self) -> AsyncIterator[Box]:
        box = await self._boxes.take()
        try:
            yield box
        finally:
            await asyncio.shield(self._boxes.discard(box))
