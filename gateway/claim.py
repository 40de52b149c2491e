"""One request's side of the waiting room: what it asks for, what it holds, and why it was refused.

Knows nothing of queues; what is granted, and when, is the room's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from policies.admission import Reject
from policies.fair import Place
from policies.replica import Replica

if TYPE_CHECKING:
    from gateway.waitroom import Waitroom


class Refused(Exception):
    """The request may neither go nor wait."""

    def __init__(self, reject: Reject) -> None:
        super().__init__(reject.code)
        self.reject = reject


class Ticket:
    """What a request asks for.

    Args:
        size: bytes of the body.
        deadline: loop time after which it may not be held any more.
        affinity: what requests that belong on one replica share; empty: nothing.
    """

    turns: int = 0
    """Slots it has had, or asked for."""
    waited_s: float = 0.0
    """Time spent held, over all turns."""

    def __init__(self, model: str, size: int, deadline: float, tenant: str = "", affinity: str = "") -> None:
        self.model = model
        self.size = size
        self.deadline = deadline
        self.tenant = tenant
        self.affinity = affinity


class Claim:
    """A hold on a place or a slot; a context manager, left exactly once and without awaiting."""

    __slots__ = (
        "_room",
        "_waiter",
        "incarnation",
        "on_decided",
        "place",
        "refused",
        "replica",
        "since",
        "ticket",
        "timer",
        "trial",
    )

    def __init__(self, room: Waitroom, ticket: Ticket) -> None:
        self._room = room
        self._waiter: asyncio.Future[None] | None = None
        self.ticket = ticket
        self.replica: Replica | None = None
        """Where the request may be sent, as soon as that is decided."""
        self.incarnation = ""
        """That replica's."""
        self.refused: Refused | None = None
        """Why it may wait no more."""
        self.on_decided: Callable[[], None] | None = None
        """Called once :attr:`replica` or :attr:`refused` is set for a waiter. It runs inside the waiting room: it may
        schedule what follows, not do it."""
        # For the waiting room.
        self.place: Place[Claim] | None = None
        self.since = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.trial = False

    def enter(self) -> None:
        """Ask for a slot or a place; owes one :meth:`leave`. Raises Refused, and owes nothing."""
        self._room.enter(self)

    def leave(self) -> None:
        """Give back what it holds."""
        self._room.leave(self)

    def __enter__(self) -> Claim:
        self.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave()

    @property
    def leaving(self) -> bool:
        """Its client has gone, and its task is about to find out."""
        return self._waiter is not None and self._waiter.cancelled()

    @property
    def position(self) -> int:
        """How many grants until this one, 1 = next; 0 when it does not wait."""
        return self._room.position(self)

    async def granted(self, within_s: float | None = None) -> Replica | None:
        """The replica to send to; None when ``within_s`` seconds have passed and it still waits.

        Raises:
            Refused: it may wait no more.
        """
        if self.replica is None and self.refused is None:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            timer = None if within_s is None else loop.call_later(within_s, _finish, waiter)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        if self.refused is not None:
            raise self.refused
        return self.replica

    def again(self) -> None:
        """The replica could not be reached: give the slot back and return to the head of the queue.

        Raises:
            Refused: it may neither go nor wait any more.
        """
        self._room.release(self)
        self._room.enter(self, returned=True)

    def decided(self) -> None:
        """Tell whoever waits for this claim."""
        if self._waiter is not None:
            _finish(self._waiter)
        if self.on_decided is not None:
            self.on_decided()


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
