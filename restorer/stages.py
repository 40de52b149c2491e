"""The clock of a start: what each step took, how many bytes it moved, and from which tier."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.replica import Stage
from restorer.pagecache import named


@dataclass(slots=True)
class Timed:
    """A stage under way; its owner may say what it moved."""

    name: str
    bytes: int | None = None
    tier: str | None = None
    cached: float | None = None

    def of(self, cached: int, total: int) -> None:
        """It reads so many bytes, of which so many lie in the page cache."""
        self.bytes, self.tier = total, named(cached, total)
        self.cached = round(cached / total, 4) if total else 1.0


@dataclass(slots=True)
class Stages:
    """Finished stages, in order."""

    done: list[Stage] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this clock was made, between stages too."""
        return time.perf_counter() - self.begun

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[Timed]:
        """Time a step; it is recorded even if it fails, since that is when its time is asked for."""
        stage, begun = Timed(name), time.perf_counter()
        try:
            yield stage
        finally:
            seconds = round(time.perf_counter() - begun, 6)
            self.done.append(Stage(name=name, seconds=seconds, bytes=stage.bytes, tier=stage.tier, cached=stage.cached))
