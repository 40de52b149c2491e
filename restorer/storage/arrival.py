"""A snapshot on its way to this host, for a restore that begins before all of it is here.

Who pulls tells what is here whole and verified; who restores asks for it, and waits. What is verified lies in folders that move
when the snapshot is published: whoever holds :attr:`Arrival.still` keeps them where they are. When the pull fails, or does not
end in time, everybody who waits is told. Used within one event loop; knows neither remotes nor GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from policies.arrival import Rest, patience_s
from policies.manifest import Manifest, Weights, WeightsPart
from restorer.errors import ArrivalFailed, RestorerError


class Arrival:
    """What is known of it so far."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.folder: Path | None = None
        """Where ``images`` and ``scratch`` lie, every byte of them verified; None: not yet."""
        self.fits = False
        """What it needs of this host besides was compared."""
        self.still = asyncio.Lock()
        self.left = 0
        """Bytes of weights that have not come."""
        self.published = False
        self.early = ""
        """Why a restore did not wait for all of it."""
        self._came, self._began = 0, 0.0
        self._checked, self._checking, self._busy_s, self._since = 0, 0, 0.0, 0.0
        """Bytes that were verified, how much is being so now, seconds that the former took, and since when the latter goes on."""
        self._part = 0
        """Bytes of the largest part."""
        self._places: dict[str, Path] = {}
        self._parts: dict[tuple[str, str], asyncio.Event] = {}
        self._behind = 0
        """Bytes of parts that are not verified."""
        self._ended = asyncio.Event()
        self._fault = ""
        self._task: asyncio.Task[str] | None = None
        self._bound: asyncio.Timeout | None = None

    # ------------------------------------------------------------ for who pulls

    def run(self, pull: Coroutine[Any, Any, str], within_s: float) -> asyncio.Task[str]:
        """Begin the pull, which returns why it came to nothing, empty if it did not.

        Raises (from the task):
            TimeoutError: it did not end in time.
        """
        self._task = asyncio.create_task(self._run(pull, within_s))
        return self._task

    async def _run(self, pull: Coroutine[Any, Any, str], within_s: float) -> str:
        self._fault = "its pull was ended"
        try:
            async with asyncio.timeout(within_s) as self._bound:
                self._fault = await pull
            return self._fault
        except TimeoutError:
            self._fault = "it did not come in time; the next pull goes on with it"
            raise
        except RestorerError as error:
            self._fault = str(error)
            raise
        finally:
            self._ended.set()
            for part in self._parts.values():
                part.set()

    def expects(self, manifest: Manifest, sets: Mapping[Weights, Path], left: int) -> None:
        """Of this snapshot all has come but these weights, each set into a folder; ``left`` bytes of them have to."""
        self.manifest, self.left = manifest, left
        for weights, folder in sets.items():
            self._places[weights.digest] = folder
            self._parts.update({(weights.digest, part.name): asyncio.Event() for part in weights.parts})
            self._behind += weights.bytes
            self._part = max(self._part, *(part.bytes for part in weights.parts))

    def came(self, size: int, *, weights: bool) -> None:
        """So many bytes of content have come over the network."""
        if not self._came:
            self._began = time.monotonic()
        self._came += size
        self.left -= size * weights

    @contextlib.contextmanager
    def checking(self, size: int) -> Iterator[None]:
        """So many bytes are made durable and verified in this block, beside others or alone."""
        if not self._checking:
            self._since = time.monotonic()
        self._checking += 1
        try:
            yield
            now = time.monotonic()
            self._checked, self._busy_s, self._since = self._checked + size, self._busy_s + now - self._since, now
        finally:
            self._checking -= 1

    def whole(self, digest: str, part: WeightsPart) -> None:
        """A part is here, and is what its hash says."""
        self._parts[digest, part.name].set()
        self._behind -= part.bytes

    def publish(self, folder: Path) -> None:
        """All of it is where it belongs; ``folder`` is the snapshot's."""
        self.folder, self.published = folder, True
        self._places = {}

    # ------------------------------------------------------------ for who restores

    @property
    def rest(self) -> Rest:
        """What is still to be done for the weights."""
        now = time.monotonic()
        return Rest(
            left=max(0, self.left),
            came=self._came / max(now - self._began, 1e-3),
            behind=self._behind,
            part=self._part,
            checked=self._checked / max(self._busy_s, 1e-3),
            spent_s=now - self._since if self._checking else 0.0,
        )

    @property
    def usable(self) -> bool:
        """Everything but weights is here, and what it needs of this host too; weights still come."""
        return self.folder is not None and self.fits and bool(self._places)

    @property
    def arriving(self) -> Manifest:
        """Of what comes."""
        assert self.manifest is not None, "of what is usable"
        return self.manifest

    def place(self, weights: Weights) -> Path | None:
        """The folder that a set is coming into; None: it is here, where sets are kept."""
        return self._places.get(weights.digest)

    async def part(self, digest: str, part: str) -> None:
        """Wait for a part; one that is not on its way is here.

        Raises:
            ArrivalFailed: it will not come.
        """
        event = self._parts.get((digest, part))
        if event is not None:
            await event.wait()
            self._sound()

    async def weights(self) -> None:
        """Wait for all parts, as long as a GPU is kept for that. Raises ArrivalFailed."""
        if self._bound is not None and not self._ended.is_set() and not self._bound.expired():
            when, soon = self._bound.when(), asyncio.get_running_loop().time() + patience_s(self._behind)
            self._bound.reschedule(soon if when is None else min(when, soon))
        for digest, name in list(self._parts):
            await self.part(digest, name)

    async def all(self) -> None:
        """Wait until it is published: nothing may be admitted before. Raises ArrivalFailed."""
        await self._ended.wait()
        self._sound()

    async def end(self) -> None:
        """Nobody waits for it any more; what has come stays for the next pull. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            # How it failed is known to who waited.
            await asyncio.gather(self._task, return_exceptions=True)

    def _sound(self) -> None:
        if self._fault and self._ended.is_set() and not self.published:
            raise ArrivalFailed(f"the rest of the snapshot did not come: {self._fault}")
