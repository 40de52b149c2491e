"""Who goes next: a bounded queue per model in front of the replicas' slots.

A slot is held from the grant until the response body has ended. Grants happen inside the waiting room, synchronously,
in arrival order, exactly as many as there are free slots: nothing polls and nobody is woken in vain. A waiter that has
left is never granted and counts nowhere. Knows nothing of HTTP; ``policies.admission`` decides, this module obeys.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from gateway.current import Current
from gateway.ledger import Ledger
from policies.admission import Candidate, Reject, Room, Send, View, Wait, decide
from policies.replica import Replica
from policies.wire import Failure

_PROMISES = frozenset(("model_loading", "cold_start_timeout"))
"""Refusals after which the client comes back for the very replica that is on its way: they stay demand for a while."""


class Fleet(Protocol):
    """The replicas as this gateway sees them."""

    def available(self, model: str) -> Sequence[Replica]:
        """ADMITTED and not suspect."""

    def failure(self, model: str) -> Failure | None: ...


class Capacity(Protocol):
    """How many requests this gateway may have on a replica."""

    def limit(self, replica: Replica) -> int: ...


class Refused(Exception):
    """The request may neither go nor wait."""

    def __init__(self, reject: Reject) -> None:
        super().__init__(reject.code)
        self.reject = reject


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's claim to a place; used again when its replica turned out to be unreachable."""

    model: str
    size: int
    """Bytes of the body."""
    deadline: float
    """Loop time after which it may not be held any more."""
    turns: int = 0
    """Slots it has had. After the first it returns to the head of the queue: its turn had come already."""
    waited_s: float = 0.0
    """Time spent held, over all turns."""


@dataclass(slots=True, eq=False)
class _Waiter:
    ticket: Ticket
    granted: asyncio.Future[Replica]


class Waitroom:
    """The queues of one gateway process."""

    def __init__(self, current: Current, *, fleet: Fleet, capacity: Capacity, ledger: Ledger) -> None:
        self._current = current
        self._fleet = fleet
        self._capacity = capacity
        self._ledger = ledger
        self._queues: defaultdict[str, OrderedDict[int, _Waiter]] = defaultdict(OrderedDict)
        self._draining = False

    def slot(self, ticket: Ticket) -> Slot:
        """``async with slot(ticket) as replica``: waits for a replica and keeps the slot until the block ends.

        Raises:
            Refused: on entry, when the request may neither go nor wait (any longer).
        """
        return Slot(self, ticket)

    def drain(self) -> None:
        """Refuse all waiters, and from now on everyone who would have to wait."""
        self._draining = True
        for model in list(self._queues):
            self.pump(model)

    def pump(self, model: str) -> None:
        """Serve the head of the queue for as long as something can be decided about it. Call after any change."""
        queue = self._queues.get(model)
        while queue:
            key, waiter = next(iter(queue.items()))
            if waiter.granted.done():
                self._remove(key, waiter)
                continue
            verdict = decide(self._view(waiter.ticket, waiting=True, overdue=False))
            if isinstance(verdict, Wait):
                return
            self._settle(key, waiter, verdict)

    async def enter(self, ticket: Ticket) -> Replica:
        """Wait for a slot. The caller owes one :meth:`leave` for every replica it gets."""
        loop = asyncio.get_running_loop()
        self.pump(ticket.model)
        verdict = decide(self._view(ticket, waiting=False, overdue=loop.time() >= ticket.deadline))
        ticket.turns += 1
        if isinstance(verdict, Send):
            self._ledger.begin(ticket.model, verdict.incarnation)
            return self._chosen(ticket.model, verdict.incarnation)
        if isinstance(verdict, Reject):
            raise self._refused(ticket, verdict)
        return await self._wait(ticket, loop)

    def leave(self, ticket: Ticket, replica: Replica) -> None:
        """Give the slot back; the next in line gets it at once."""
        self._ledger.end(ticket.model, replica.incarnation)
        self.pump(ticket.model)

    async def _wait(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> Replica:
        waiter = _Waiter(ticket, loop.create_future())
        key, since = id(waiter), loop.time()
        queue = self._queues[ticket.model]
        queue[key] = waiter
        if ticket.turns > 1:
            queue.move_to_end(key, last=False)
        self._ledger.hold(ticket.model, ticket.size)
        timer = loop.call_at(ticket.deadline, self._expire, key, waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.leave(ticket, waiter.granted.result())
            raise
        finally:
            timer.cancel()
            ticket.waited_s += loop.time() - since
            self._remove(key, waiter)

    def _expire(self, key: int, waiter: _Waiter) -> None:
        if not waiter.granted.done():
            verdict = decide(self._view(waiter.ticket, waiting=True, overdue=True))
            assert not isinstance(verdict, Wait), "an overdue request must not wait"
            self._settle(key, waiter, verdict)

    def _settle(self, key: int, waiter: _Waiter, verdict: Send | Reject) -> None:
        """The counts move before the waiter's task runs: the next decision already sees them."""
        ticket = waiter.ticket
        if isinstance(verdict, Reject):
            refused = self._refused(ticket, verdict)
            self._remove(key, waiter)
            waiter.granted.set_exception(refused)
            return
        del self._queues[ticket.model][key]
        self._ledger.grant(ticket.model, ticket.size, verdict.incarnation)
        waiter.granted.set_result(self._chosen(ticket.model, verdict.incarnation))

    def _remove(self, key: int, waiter: _Waiter) -> None:
        """Out of the queue and out of the counts; nothing if it has left before."""
        if self._queues[waiter.ticket.model].pop(key, None) is not None:
            self._ledger.unhold(waiter.ticket.model, waiter.ticket.size)

    def _refused(self, ticket: Ticket, reject: Reject) -> Refused:
        if reject.code in _PROMISES:
            self._ledger.turn_away(ticket.model)
        return Refused(reject)

    def _chosen(self, model: str, incarnation: str) -> Replica:
        return next(replica for replica in self._fleet.available(model) if replica.incarnation == incarnation)

    def _view(self, ticket: Ticket, *, waiting: bool, overdue: bool) -> View:
        model = self._current.config.models[ticket.model]
        ledger, failure, whole = self._ledger, self._fleet.failure(ticket.model), self._current.config.gateway.hold
        return View(
            candidates=[
                Candidate(replica.incarnation, ledger.inflight(replica.incarnation), self._capacity.limit(replica))
                for replica in self._fleet.available(ticket.model)
            ],
            rooms=(
                Room(ledger.held(ticket.model), ledger.held_bytes(ticket.model), model.hold.max_requests, model.hold.max_bytes),
                Room(ledger.total_held, ledger.total_bytes, whole.max_requests, whole.max_bytes),
            ),
            size=ticket.size,
            waiting=waiting,
            overdue=overdue,
            on_cold=model.on_cold,
            failure=None if failure is None else failure.detail,
            draining=self._draining,
        )


class Slot:
    """The context manager of :meth:`Waitroom.slot`; left exactly once, whatever happens inside."""

    __slots__ = ("_replica", "_room", "_ticket")

    def __init__(self, room: Waitroom, ticket: Ticket) -> None:
        self._room = room
        self._ticket = ticket

    async def __aenter__(self) -> Replica:
        self._replica = await self._room.enter(self._ticket)
        return self._replica

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._room.leave(self._ticket, self._replica)
