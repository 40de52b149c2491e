"""The clock of a start: what each step took, how many bytes it moved, and from which tier."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.replica import Stage


@dataclass(slots=True)
class Timed:
    """A stage under way; its owner may say what it moved."""

    name: str
    bytes: int | None = None
    tier: str | None = None


@dataclass(slots=True)
class Stages:
    """Finished stages, in order."""

    done: list[Stage] = field(default_factory=list)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[Timed]:
        """Time a step; it is recorded even if it fails, since that is when its time is asked for."""
        stage, begun, begun_ms = Timed(name), time.perf_counter(), time.time_ns() // 1_000_000
        try:
            yield stage
        finally:
            seconds = round(time.perf_counter() - begun, 6)
            self.done.append(Stage(name=name, seconds=seconds, bytes=stage.bytes, tier=stage.tier, begun_ms=begun_ms))
