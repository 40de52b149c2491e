"""What is done with a request's facts when it has ended: counted, logged, traced. Many at a time, since one by one costs twice.

By itself each of these steps is microseconds; in the midst of other work its code and data are out of the processor's caches each
time. So requests that have ended wait for each other, for a moment. Knows nothing of what the steps are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway import logs
from gateway.trail import Trail

GATHER_S = 0.05
"""None waits longer."""
BATCH = 64
"""Nor for more than this: the loop has other work to do."""


class Epilogue:
    """The requests of one gateway process that have ended a moment ago. Needs a running event loop.

    Args:
        steps: what is done with those that ended together, in this order; one that fails keeps no other from being taken.
    """

    def __init__(self, *steps: Callable[[Sequence[Trail]], None]) -> None:
        self._steps = steps
        self._loop = asyncio.get_running_loop()
        self._ended: list[Trail] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, trail: Trail) -> None:
        """It has ended, and changes no more."""
        self._ended.append(trail)
        if self._timer is None:
            self._timer = self._loop.call_later(GATHER_S, self.settle)
        elif len(self._ended) >= BATCH:
            self.settle()

    def settle(self) -> None:
        """Do with all of them what is to be done, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        if not ended:
            return
        for step in self._steps:
            try:
                step(ended)
            except Exception as error:
                logs.error("bug", error, requests=len(ended))
