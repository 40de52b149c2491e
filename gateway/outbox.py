"""Bytes on their way out, sent many connections at a time instead of one by one between two judgements.

Whoever is written to wakes up, and waking a process on another CPU costs as much as a third of a request; of those that are
written to right after each other, one wake-up serves all. Knows nothing of what is sent.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.life import Life

_MOST: Final = 64
"""Writes that may wait for each other, each at most what one read has brought; they wait for what has arrived already to be
judged, never for more to arrive: the first of so many waits about a millisecond for the last."""
_FEW: Final = 8
"""With no more requests open than this, the time until a write counts for more than what it costs."""


class Outbox:
    """The fast path's writes of one process. Needs a running event loop."""

    __slots__ = ("_life", "_loop", "_waiting")

    def __init__(self, life: Life) -> None:
        self._life = life
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[asyncio.Transport, bytes]] = []

    def put(self, transport: asyncio.Transport, data: bytes, now: bool = False) -> None:
        """Send it before the loop waits for anything; ``now``: somebody watches for it, so it waits for no other connection's."""
        if now and not any(other is transport for other, _ in self._waiting):
            if not transport.is_closing():
                transport.write(data)
            return
        self._waiting.append((transport, data))
        if now or self._life.open <= _FEW or len(self._waiting) >= _MOST:
            self.send()
        elif len(self._waiting) == 1:
            self._loop.call_soon(self.send)

    def send(self) -> None:
        """Send all now: something else is to be done with one of the connections."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)
