"""A timer over one answer: it may not stand still for too long, nor last too long.

Costs one reading of the clock for each chunk and one timer for the whole answer, and needs no task. Knows nothing of what
it watches: whoever starts it says what to do when time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

Expiry = Literal["idle", "total"]


class Watch:
    """Runs from its making to :meth:`stop`; calls ``on_expiry`` once, or never.

    Args:
        idle_s: the longest time between two calls of :meth:`moved`.
        total_s: the longest time in all; None: as long as it moves.
    """

    __slots__ = ("_idle_s", "_loop", "_moved", "_on_expiry", "_timer", "_until", "expired")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, idle_s: float, total_s: float | None, on_expiry: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._idle_s = idle_s
        self._on_expiry = on_expiry
        self._moved = loop.time()
        self._until = None if total_s is None else self._moved + total_s
        self.expired: Expiry | None = None
        self._timer: asyncio.TimerHandle | None = loop.call_at(self._next(), self._look)

    def moved(self) -> None:
        """Something came or went."""
        self._moved = self._loop.time()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next(self) -> float:
        idle = self._moved + self._idle_s
        return idle if self._until is None else min(idle, self._until)

    def _look(self) -> None:
        now = self._loop.time()
        if self._until is not None and now >= self._until:
            self.expired = "total"
        elif now >= self._moved + self._idle_s:
            self.expired = "idle"
        if self.expired is None:
            self._timer = self._loop.call_at(self._next(), self._look)
            return
        self._timer = None
        self._on_expiry()
