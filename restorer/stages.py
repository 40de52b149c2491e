"""The clock of a start: what each step took, when it began, how many bytes it moved, and from which tier."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from policies.replica import Stage
from restorer.pagecache import named


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
    done: list[Stage] = field(default_factory=list)
    open: list[Timed] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this clock was made, between stages too."""
        return time.perf_counter() - self.begun

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[Timed]:
        """Time a step; it is recorded even if it fails, since that is when its time is asked for."""
        stage = Timed(name)
        self.open.append(stage)
        self.tell()
        try:
            yield stage
        finally:
            self.open.remove(stage)
            self.done.append(stage.record())
            self.tell()
