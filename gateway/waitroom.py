"""Who goes next: a bounded, fair queue per model in front of the replicas' slots.

A slot is held from the grant until the claim's block ends, which is when the response body has ended. Grants happen inside
the waiting room, synchronously, exactly as many as there are free slots: nothing polls and nobody is woken in vain. A
waiter that has left is never granted and counts nowhere. Knows nothing of HTTP; :mod:`policies` decides, this module obeys.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence

from gateway.claim import Claim, Refused, Ticket
from gateway.current import Current
from gateway.ledger import Ledger
from gateway.permits import Permits
from gateway.registry import Registry
from policies.admission import Reject, Room, View, decide
from policies.balance import Candidate, choose
from policies.config import Config
from policies.fair import FairQueue, Share
from policies.replica import Replica
from policies.wire import MAX_WAITING, Held

_PROMISES = frozenset(("model_loading", "cold_start_timeout"))
"""Refusals after which the client comes back for the very replica that is on its way: they stay demand for a while."""


class Waitroom:
    """The queues of one gateway process. Needs a running event loop.

    Args:
        expected: (model, position) -> seconds until the one at that position, 1 = next, would be served; None: unknown.
        draw: a random number in [0, 1).
    """

    def __init__(
        self,
        current: Current,
        *,
        fleet: Registry,
        capacity: Permits,
        ledger: Ledger,
        expected: Callable[[str, int], float | None] = lambda model, position: None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._current = current
        self._fleet = fleet
        self._capacity = capacity
        self._ledger = ledger
        self._expected = expected
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, FairQueue[Claim]] = {}
        self._throttled: dict[str, dict[str, None]] = {}
        """tenant at its limit -> models it waits for, longest first."""
        self._draining = False
        current.on_change.append(self._reloaded)

    def claim(self, ticket: Ticket) -> Claim:
        """``with claim(ticket) as claim``: a slot at once, or a place in the queue; given back when the block ends.

        Raises:
            Refused: on entry, when the request may neither go nor wait.
        """
        return Claim(self, ticket)

    def drain(self) -> None:
        """Refuse all waiters, and from now on everyone who would have to wait."""
        self._draining = True
        self.pump_all()

    def pump_all(self) -> None:
        """Capacity of any kind has changed."""
        for tenant in list(self._throttled):
            self._unblock(tenant)
        for model in list(self._queues):
            self.pump(model)

    def pump(self, model: str) -> None:
        """Grant free slots for as long as there are some, or refuse all if nothing can come. Call after any change."""
        queue = self._queues.get(model)
        if queue is None:
            return
        while (tenant := queue.next_tenant()) is not None:
            if self._at_limit(tenant):
                self._block(tenant, model, queue)
                continue
            candidates = self._candidates(model)
            if not any(candidate.free for candidate in candidates):
                break
            claim = queue.head()
            if claim.leaving:
                self._remove(claim)
            else:
                queue.pop()
                self._grant(claim, candidates)
        if queue:
            verdict = decide(self._view(model, waiting=True))
            if isinstance(verdict, Reject):
                for claim in list(queue):
                    self._refuse(claim, verdict)
        self._tidy(model)

    # What claims call.

    def enter(self, claim: Claim, *, returned: bool = False) -> None:
        ticket = claim.ticket
        ticket.turns += 1
        queue = self._queues.get(ticket.model)
        if queue is not None and queue.ready and any(candidate.free for candidate in self._candidates(ticket.model)):
            # Who came earlier is served earlier.
            self.pump(ticket.model)
            queue = self._queues.get(ticket.model)
        throttled = bool(ticket.tenant) and self._at_limit(ticket.tenant)
        if not throttled and (queue is None or not queue.ready):
            # Nobody is passed over: who waits could not use the slot.
            replica = self._pick(ticket)
            if replica is not None:
                claim.replica, claim.incarnation = replica, replica.incarnation
                self._ledger.begin(ticket.model, claim.incarnation, ticket.tenant)
                claim.trial = self._fleet.dispatch(replica)
                return
        self._wait(claim, throttled=throttled, returned=returned)

    def position(self, claim: Claim) -> int:
        queue = self._queues.get(claim.ticket.model)
        return 0 if queue is None or claim.place is None else queue.position(claim.place)

    def waiting(self) -> Sequence[Held]:
        """Some of those who wait, at most MAX_WAITING, for people to look at."""
        found = itertools.islice((claim for queue in self._queues.values() for claim in queue), MAX_WAITING)
        return [self._shown(claim) for claim in found]

    def _shown(self, claim: Claim) -> Held:
        ticket, position = claim.ticket, self.position(claim)
        eta_s = self._expected(ticket.model, position)
        waited_s = ticket.waited_s + self._loop.time() - claim.since
        return Held(
            model=ticket.model,
            tenant=ticket.tenant,
            position=position,
            waited_s=round(waited_s, 1),
            eta_s=None if eta_s is None else round(eta_s, 1),
        )

    def leave(self, claim: Claim) -> None:
        """Out of the queue, or out of the slot, which the next in line gets at once."""
        if claim.place is not None:
            self._remove(claim)
        elif claim.replica is not None:
            ticket = claim.ticket
            self.release(claim)
            if ticket.model in self._queues:
                self.pump(ticket.model)
            if ticket.tenant in self._throttled:
                self._unblock(ticket.tenant)

    def release(self, claim: Claim) -> None:
        """The slot is free; nobody has it yet."""
        ticket, replica = claim.ticket, claim.replica
        assert replica is not None
        claim.replica = None
        self._ledger.end(ticket.model, claim.incarnation, ticket.tenant)
        if claim.trial:
            claim.trial = False
            self._fleet.end_trial(replica)
        self._capacity.released(claim.incarnation, ticket.tenant)

    def expire(self, claim: Claim) -> None:
        if claim.place is not None:
            ticket = claim.ticket
            verdict = decide(self._view(ticket.model, waiting=True, left_s=0.0, throttled=self._at_limit(ticket.tenant)))
            assert isinstance(verdict, Reject), "an overdue request must not wait"
            self._refuse(claim, verdict)

    # The steps.

    def _wait(self, claim: Claim, *, throttled: bool, returned: bool) -> None:
        ticket, now = claim.ticket, self._loop.time()
        queue = self._queues.get(ticket.model)
        if queue is None:
            queue = self._queues[ticket.model] = FairQueue(self._share)
        place = queue.push(claim, ticket.tenant, returned=returned)
        verdict = decide(
            self._view(
                ticket.model,
                # Who has had a turn had a place before it, and does not lose it to those who came later.
                waiting=returned,
                size=ticket.size,
                left_s=ticket.deadline - now,
                eta_s=self._expected(ticket.model, queue.position(place)),
                throttled=throttled,
                places=self._places(ticket.tenant),
            )
        )
        if isinstance(verdict, Reject):
            queue.remove(place)
            self._tidy(ticket.model)
            raise self._refused(ticket, verdict)
        claim.place, claim.since = place, now
        claim.timer = self._loop.call_at(ticket.deadline, self.expire, claim)
        self._ledger.hold(ticket.model, ticket.size, ticket.tenant)
        if throttled:
            self._block(ticket.tenant, ticket.model, queue)
        self._capacity.wanted()
        if returned:
            self.pump(ticket.model)

    def _grant(self, claim: Claim, candidates: Sequence[Candidate]) -> None:
        """The counts move before the waiter's task runs: the next decision already sees them."""
        ticket = claim.ticket
        chosen = self._choose(ticket, candidates)
        assert chosen is not None, "a grant without a free slot"
        self._stop_waiting(claim)
        self._ledger.grant(ticket.model, ticket.size, chosen.incarnation, ticket.tenant)
        self._give(claim, chosen)
        claim.decided()

    def _give(self, claim: Claim, chosen: Candidate) -> None:
        claim.replica = replica = self._replica(claim.ticket.model, chosen)
        claim.incarnation = chosen.incarnation
        claim.trial = self._fleet.dispatch(replica)

    def _replica(self, model: str, chosen: Candidate) -> Replica:
        for replica in self._fleet.available(model):
            if replica.incarnation == chosen.incarnation:
                return replica
        raise AssertionError("a choice that is no candidate")

    def _refuse(self, claim: Claim, reject: Reject) -> None:
        self._remove(claim)
        claim.refused = self._refused(claim.ticket, reject)
        claim.decided()

    def _remove(self, claim: Claim) -> None:
        """Out of the queue and out of the counts."""
        ticket, place = claim.ticket, claim.place
        assert place is not None
        self._queues[ticket.model].remove(place)
        self._stop_waiting(claim)
        self._ledger.unhold(ticket.model, ticket.size, ticket.tenant)
        self._tidy(ticket.model)

    def _stop_waiting(self, claim: Claim) -> None:
        claim.place = None
        if claim.timer is not None:
            claim.timer.cancel()
            claim.timer = None
        claim.ticket.waited_s += self._loop.time() - claim.since

    def _refused(self, ticket: Ticket, reject: Reject) -> Refused:
        if reject.code in _PROMISES:
            self._ledger.turn_away(ticket.model)
        return Refused(reject)

    def _tidy(self, model: str) -> None:
        if not self._queues.get(model, True):
            del self._queues[model]

    def _block(self, tenant: str, model: str, queue: FairQueue[Claim]) -> None:
        """Others pass this tenant until one of its requests has ended, on whatever model."""
        queue.block(tenant)
        self._throttled.setdefault(tenant, {})[model] = None

    def _unblock(self, tenant: str) -> None:
        for model in self._throttled.pop(tenant, ()):
            queue = self._queues.get(model)
            if queue is not None:
                queue.unblock(tenant)
                self.pump(model)

    def _reloaded(self, before: Config, after: Config) -> None:
        for queue in self._queues.values():
            queue.reshare()
        self.pump_all()

    # What decisions look at.

    def _choose(self, ticket: Ticket, candidates: Sequence[Candidate]) -> Candidate | None:
        if not candidates:
            return None
        spec = self._current.config.models[ticket.model]
        return choose(spec.balance, candidates, affinity=ticket.affinity, draw=self._draw())

    def _pick(self, ticket: Ticket) -> Replica | None:
        """A replica with a free slot, for one that need not wait."""
        replicas = self._fleet.available(ticket.model)
        if len(replicas) != 1:
            chosen = self._choose(ticket, self._candidates(ticket.model))
            return None if chosen is None else self._replica(ticket.model, chosen)
        # There is nothing to choose, which is the common case, and costs a tenth.
        only = replicas[0]
        free = self._ledger.inflight(only.incarnation) < self._capacity.limit(only)
        return only if free and ticket.model in self._current.models else None

    def _candidates(self, model: str) -> list[Candidate]:
        if model not in self._current.config.models:
            return []
        inflight, limit = self._ledger.inflight, self._capacity.limit
        return [
            Candidate(replica.incarnation, inflight(replica.incarnation), limit(replica))
            for replica in self._fleet.available(model)
        ]

    def _at_limit(self, tenant: str) -> bool:
        limit = self._capacity.tenant_limit(tenant) if tenant else None
        return limit is not None and self._ledger.tenant_inflight(tenant) >= limit

    def _places(self, tenant: str) -> int | None:
        places = self._capacity.places(tenant) if tenant else None
        return None if places is None else places - self._ledger.tenant_held(tenant)

    def _share(self, tenant: str) -> Share:
        spec = self._current.config.tenants.get(tenant)
        return Share() if spec is None else Share(spec.weight, spec.priority)

    def _view(
        self,
        model: str,
        *,
        waiting: bool,
        size: int = 0,
        left_s: float = float("inf"),
        eta_s: float | None = None,
        throttled: bool = False,
        places: int | None = None,
    ) -> View:
        spec, whole, ledger = self._current.config.models.get(model), self._current.config.gateway.hold, self._ledger
        failure, room = self._fleet.failure(model), whole if spec is None else spec.hold
        return View(
            replicas=len(self._fleet.available(model)),
            rooms=(
                Room(ledger.held(model), ledger.held_bytes(model), room.max_requests, room.max_bytes),
                Room(ledger.total_held, ledger.total_bytes, whole.max_requests, whole.max_bytes),
            ),
            size=size,
            waiting=waiting,
            left_s=left_s,
            eta_s=eta_s,
            on_cold="hold" if spec is None else spec.on_cold,
            failure=None if failure is None else failure.detail,
            draining=self._draining,
            throttled=throttled,
            places=places,
            gone=spec is None,
        )
