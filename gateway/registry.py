"""This gateway's view of the replicas: what the records last said, and what it saw itself.

A view only: :mod:`gateway.link` feeds it from the store, and when the store is lost it keeps what it knows. It never
writes a record; a replica that fails (:mod:`policies.health`) gets nothing from here for a while, and the suspicion is
passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from gateway import whereabouts
from policies.health import TRUSTED, Health, Outcome, judge
from policies.replica import COMING, RUNNING, Replica, State
from policies.wire import Failure

AMNESIA_S = 30.0
"""How long a record that the store has lost stays in the view."""
_OK: Final = Outcome.OK
MAX_SUSPICIONS = 256
"""Suspicions kept until they can be passed on; the oldest is dropped first."""


class Registry:
    """Replicas, failures and suspects. Used within one event loop.

    Args:
        models: the configured models; records of others are listed but get no traffic.
    """

    def __init__(self, models: Iterable[str]) -> None:
        self._models = frozenset(models)
        self._health: dict[str, Health] = {}
        self._probation: set[str] = set()
        """On trial: one request at a time."""
        self._tried: set[str] = set()
        """Those of them that have one."""
        self._records: dict[str, Replica] = {}
        self._available: dict[str, Sequence[Replica]] = {}
        self._failures: dict[str, Failure] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._suspects: dict[str, asyncio.TimerHandle] = {}
        self._suspicions: dict[str, str] = {}
        self._keep_until = 0.0
        self.seq = 0
        """Every replica write up to this one is known."""
        self.on_change: list[Callable[[str], None]] = []
        """Called with the model after anything about it changed."""
        self.on_record: list[Callable[[Replica | None, Replica], None]] = []
        """Called with the record before and after each write that became known."""
        self.on_eject: Callable[[Replica, float, str], None] = lambda replica, pause_s, reason: None
        """Called when a replica gets no more requests for so many seconds, and why."""

    def know(self, models: Iterable[str]) -> None:
        """These are the models now; replicas of others get no traffic."""
        before, self._models = self._models, frozenset(models)
        for model in before - self._models:
            self._available.pop(model, None)
        for model in before ^ self._models:
            self._changed(model)

    def replicas(self) -> Sequence[Replica]:
        """All records, of every state and model."""
        return sorted(self._records.values(), key=lambda replica: replica.id)

    def available(self, model: str) -> Sequence[Replica]:
        """ADMITTED, within reach and not suspect: the only replicas that get traffic."""
        return self._available.get(model, ())

    def count(self, model: str, states: Iterable[State]) -> int:
        wanted = frozenset(states)
        return sum(1 for replica in self._records.values() if replica.model == model and replica.state in wanted)

    def failure(self, model: str) -> Failure | None:
        """Why no replica of the model can come, for as long as that is certain."""
        return self._failures.get(model)

    def standing(self, model: str) -> tuple[Failure, float] | None:
        """That failure, and for how many more seconds it stands."""
        failure, expiry = self.failure(model), self._expiries.get(model)
        if failure is None or expiry is None:
            return None
        return failure, max(0.0, expiry.when() - asyncio.get_running_loop().time())

    def incarnations(self) -> frozenset[str]:
        """Those whose engines may hold clients' requests."""
        return frozenset(replica.incarnation for replica in self._records.values() if replica.state in RUNNING)

    def state(self, model: str) -> str:
        """One word for people: ready, failed, the state of the furthest replica on its way, or cold."""
        records = [replica for replica in self._records.values() if replica.model == model]
        if any(replica.state is State.ADMITTED for replica in records):
            return "ready"
        coming = [replica for replica in records if replica.state in COMING]
        if coming:
            order = list(State)
            return str(max(coming, key=lambda replica: order.index(replica.state)).state)
        return "cold" if self.failure(model) is None else "failed"

    def apply(self, replica: Replica) -> bool:
        """Take in one record that was pushed. False: writes before it are missing, everything must be read again."""
        whole = replica.seq <= self.seq + 1
        if self._newer(replica):
            self._put(replica)
            if whole:
                self.seq = max(self.seq, replica.seq)
            self._changed(replica.model)
        return whole

    def load(self, seq: int, replicas: Mapping[str, Replica], *, first: bool = False) -> None:
        """Take in all records as they were at ``seq``; what was pushed since then stays.

        ``first``: nothing has been pushed since this connection to the store was made. A lower ``seq`` than before then
        means a store that has lost its memory: any record it has is newer than ours, and one that it lacks is kept for a
        while, because the replica's restorer is about to write it again and streams run through it.
        """
        now = asyncio.get_running_loop().time()
        if first and seq < self.seq:
            self.seq = seq
            self._records = {id: known.model_copy(update={"seq": 0}) for id, known in self._records.items()}
            self._keep_until = now + AMNESIA_S
        changed = set()
        for replica in replicas.values():
            if self._newer(replica):
                self._put(replica)
                changed.add(replica.model)
        for id, known in list(self._records.items()):
            if id not in replicas and known.seq <= seq and now >= self._keep_until:
                del self._records[id]
                self._forget(known.incarnation)
                changed.add(known.model)
        self.seq = max(self.seq, seq)
        for model in changed:
            self._changed(model)

    def load_failure(self, model: str, failure: Failure | None, ttl_s: float) -> None:
        """Take in why a model cannot come, or that nothing stands against it."""
        before = self._failures.get(model)
        expiry = self._expiries.pop(model, None)
        if expiry is not None:
            expiry.cancel()
        if failure is None:
            self._failures.pop(model, None)
        else:
            self._failures[model] = failure
            self._expiries[model] = asyncio.get_running_loop().call_later(ttl_s, self.load_failure, model, None, 0.0)
        if before != failure:
            self._changed(model)

    def outcome(self, replica: Replica, outcome: Outcome, reason: str = "") -> None:
        """What became of a request to this replica; ``reason`` for people, when it failed."""
        if outcome is _OK and not self._health:
            return  # as nearly always: all are trusted, and this one deserves it
        incarnation = replica.incarnation
        before, known = self._health.get(incarnation, TRUSTED), self._records.get(replica.id)
        if (before is TRUSTED and outcome is Outcome.OK) or known is None or known.incarnation != incarnation:
            return
        now = asyncio.get_running_loop().time()
        others = [other for other in self._available.get(replica.model, ()) if other.incarnation != incarnation]
        judgement = judge(before, outcome, now, alone=not others)
        if judgement.suspect:
            self._pass_on(incarnation, reason)
        self._remember(replica, judgement.health, now)
        if before.until != judgement.health.until:
            if judgement.health.until is not None:
                self.on_eject(replica, judgement.health.until - now, reason)
            self._changed(replica.model)

    def dispatch(self, replica: Replica) -> bool:
        """A request is sent there. True: the replica is on trial, and gets no other until :meth:`end_trial`."""
        if not self._probation or replica.incarnation not in self._probation:
            return False
        self._tried.add(replica.incarnation)
        self._select(replica.model)
        return True

    def end_trial(self, replica: Replica) -> None:
        """The request that tried it has ended; if that said nothing, another one may try."""
        self._tried.discard(replica.incarnation)
        self._select(replica.model)

    def take_suspicions(self) -> Mapping[str, str]:
        """incarnation -> reason of what was suspected since the last call, to be passed on."""
        taken, self._suspicions = self._suspicions, {}
        return taken

    def put_back(self, suspicions: Mapping[str, str]) -> None:
        """They could not be passed on; keep them for the next time."""
        self._suspicions = {**suspicions, **self._suspicions}

    def close(self) -> None:
        for timer in (*self._expiries.values(), *self._suspects.values()):
            timer.cancel()

    def _newer(self, replica: Replica) -> bool:
        known = self._records.get(replica.id)
        return known is None or replica.seq > known.seq

    def _put(self, replica: Replica) -> None:
        before = self._records.get(replica.id)
        self._records[replica.id] = replica
        if before is not None and before.incarnation != replica.incarnation:
            self._forget(before.incarnation)
        for listener in self.on_record:
            listener(before, replica)

    def _remember(self, replica: Replica, health: Health, now: float) -> None:
        incarnation = replica.incarnation
        if health.until is None or health.until != self._health.get(incarnation, TRUSTED).until:
            self._forget(incarnation)
        if health is TRUSTED:
            return
        self._health[incarnation] = health
        if health.ejected(now) and incarnation not in self._suspects:
            assert health.until is not None
            timer = asyncio.get_running_loop().call_later(health.until - now, self._try, replica)
            self._suspects[incarnation] = timer

    def _try(self, replica: Replica) -> None:
        """The pause is over."""
        self._suspects.pop(replica.incarnation, None)
        self._probation.add(replica.incarnation)
        self._changed(replica.model)

    def _forget(self, incarnation: str) -> None:
        timer = self._suspects.pop(incarnation, None)
        if timer is not None:
            timer.cancel()
        self._health.pop(incarnation, None)
        self._probation.discard(incarnation)

    def _pass_on(self, incarnation: str, reason: str) -> None:
        self._suspicions[incarnation] = reason
        while len(self._suspicions) > MAX_SUSPICIONS:
            del self._suspicions[next(iter(self._suspicions))]

    def _select(self, model: str) -> None:
        self._available[model] = tuple(
            replica
            for replica in self._records.values()
            if replica.model == model
            and replica.state is State.ADMITTED
            and self._trusted(replica.incarnation)
            and whereabouts.way(replica) is not None
        )

    def _trusted(self, incarnation: str) -> bool:
        return incarnation not in self._suspects and not (incarnation in self._probation and incarnation in self._tried)

    def _changed(self, model: str) -> None:
        if model not in self._models:
            return
        self._select(model)
        for listener in self.on_change:
            listener(model)
