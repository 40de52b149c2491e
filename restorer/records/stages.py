"""The steps of a start or a capture: each is journaled before it is taken, told to whoever watches, and timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from policies.journal import Undo
from policies.replica import Stage
from restorer.records.journal import Journal
from restorer.system.pagecache import named


@dataclass(slots=True, eq=False)
class Timed:
    """A stage under way; its owner may say what it moved."""

    name: str
    bytes: int | None = None
    tier: str | None = None
    cached: float | None = None

    begun: float = field(default_factory=time.perf_counter)
    begun_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    def of(self, cached: int, total: int) -> None:
        """It reads so many bytes, of which so many lie in the page cache."""
        self.bytes, self.tier = total, named(cached, total)
        self.cached = round(cached / total, 4) if total else 1.0

    def record(self) -> Stage:
        """As it stands now."""
        seconds = round(time.perf_counter() - self.begun, 6)
        return Stage(
            name=self.name, seconds=seconds, bytes=self.bytes, tier=self.tier, cached=self.cached, begun_ms=self.begun_ms
        )


@dataclass(slots=True)
class Stages:
    """Finished stages, in the order of their ends, and those under way."""

    tell: Callable[[], None] = lambda: None
    """Called when a stage begins and when one ends; must not block or raise."""
    journal: Journal | None = None
    """Where each is written ahead; None: what is done leaves nothing that a crash could leave behind."""
    within: str = ""
    """The stage that these are a part of, as their names in the journal begin."""
    done: list[Stage] = field(default_factory=list)
    open: list[Timed] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    alone: bool = True
    """Nobody else was restoring the same when this did."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since this clock was made, between stages too."""
        return time.perf_counter() - self.begun

    @contextlib.contextmanager
    def timed(self, name: str, undo: Undo | None = None) -> Iterator[Timed]:
        """Journal and time a step; its time is recorded even if it fails, since that is when it is asked for.

        Raises:
            Environment: it cannot be journaled, and must not be taken.
        """
        stage = Timed(name)
        number = None if self.journal is None else self.journal.step(self.within + name, undo)
        self.open.append(stage)
        self.tell()
        try:
            yield stage
        except BaseException as error:
            self._ended(stage)
            if self.journal is not None and number is not None:
                self.journal.failed(number, self.done[-1].seconds, error)
            raise
        self._ended(stage)
        if self.journal is not None and number is not None:
            self.journal.done(number, self.done[-1].seconds, bytes=stage.bytes, tier=stage.tier)

    def parts(self, name: str) -> Stages:
        """For the steps within one step: journaled like all others, but no stages of their own."""
        return Stages(journal=self.journal, within=f"{self.within}{name}: ")

    async def durable(self) -> None:
        """Wait until all that was journaled is on the disk: before a step whose effect outlives the machine's death."""
        if self.journal is not None:
            await self.journal.durable()

    def _ended(self, stage: Timed) -> None:
        self.open.remove(stage)
        self.done.append(stage.record())
        self.tell()
