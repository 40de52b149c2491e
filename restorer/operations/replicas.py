"""The replicas running on this host: watched, drained, parked when idle, stopped; found again after a restart.

Owns every record in ADMITTED or DRAINING of this host. A replica's end is noticed by its pidfd, not by polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies import scaling, schedule
from policies.journal import Trail
from policies.replica import RUNNING, Event, Replica, State, advance
from policies.wire import GatewayReport
from restorer.adapters.engines import adapter
from restorer.boxes.box import Box
from restorer.errors import Cancelled, LeaseLost, RestorerError, StoreUnavailable
from restorer.machine.host import Host, News, log
from restorer.operations import gpustate, undo
from restorer.operations.instance import Instance, last_words
from restorer.operations.suspended import Suspended
from restorer.procfs.processes import watch

_DRAIN_POLL_S = 0.5
_VACATE_S = 30.0
"""A box that is being removed is gone well within this; a large GPU's memory takes seconds."""


def local_time() -> schedule.Moment:
    """What the clock on the wall says."""
    now = time.localtime()
    return schedule.Moment(now.tm_wday, now.tm_hour * 60 + now.tm_min)


@dataclass(slots=True)
class Running:
    """One admitted replica."""

    instance: Instance
    record: Replica
    active_at: float
    """Monotonic time of its last sign of use."""
    seen: dict[str, int] = field(default_factory=dict)
    """gateway -> arrivals for its model, as last seen: a request shorter than two looks is not missed."""
    stopping: bool = False
    outranked: bool = False
    """A later fence has written its record."""
    reported: bool = True
    """Its record is in the store; False while a write is owed to a store that was away."""


class Replicas:
    """All of them. Methods are called from one event loop."""

    def __init__(self, host: Host, local: Callable[[], schedule.Moment] = local_time) -> None:
        self._host = host
        self._local = local
        self._gone = News()
        self._running: dict[str, Running] = {}
        self.suspended = Suspended(host)
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._absent_before: set[str] = set()
        """Incarnations that the last :meth:`repeat_records` found in the store but not here."""

    def __len__(self) -> int:
        return len(self._running)

    def adopt(self, instance: Instance, record: Replica) -> None:
        """Take over an engine whose record is ADMITTED (or DRAINING) in the store."""
        running = Running(instance, record, time.monotonic())
        self._running[record.id] = running
        self._task(self._watch(running))

    def admitted(self) -> dict[str, Running]:
        """Incarnation -> replica, of those that may get traffic."""
        return {one.record.incarnation: one for one in self._running.values() if one.record.state is State.ADMITTED}

    async def fail(self, incarnation: str, reason: str) -> None:
        """End a replica that is of no use any more; nothing when it is not admitted (any more)."""
        running = self.admitted().get(incarnation)
        if running is None or running.stopping:
            return
        log.error("replica %s (%s): %s", running.record.id, incarnation, reason)
        await asyncio.shield(self._end(running, Event.FAIL, reason))

    async def vacated(self, model: str) -> None:
        """Wait until the engines that had this model's place in its group are gone, with all that they held of the machine.

        The store gives a place away when its last record is over; the engine behind that may take a moment longer.

        Raises:
            Cancelled: the place is another's, against the store's word: it forgot, or the group was changed meanwhile.
        """
        name = self._host.model(model).group
        group = None if name is None else self._host.config.groups.get(name)
        if name is None or group is None:
            return
        deadline = time.monotonic() + _VACATE_S
        while len(mates := self._mates(model, name)) >= group.members:
            left = deadline - time.monotonic()
            if left <= 0 or not all(one.stopping for one in self._running.values() if one.record.model in mates):
                raise Cancelled(f"the place of {model} in group {name} is taken by {', '.join(sorted(mates))}")
            await self._gone.wait(left)

    def _mates(self, model: str, group: str) -> set[str]:
        """Other models of the group that have an engine here."""
        here = {one.record.model for one in self._running.values()} - {model}
        return {name for name in here if self._host.model(name).group == group}

    async def reconcile(self) -> Sequence[Trail]:
        """At start: adopt what an earlier restorer left admitted, undo and kill what it left half-made, mend the records.

        Returns:
            The attempts that had been under way.
        """
        self._host.boxes.doors.on_lost = self._door_lost
        records, left = await self._host.jobs.replicas(), []
        for box in await self._host.boxes.survivors():
            record = self._adoptable(box, records)
            pid = None if record is None else box.host_pid(int(box.facts["inner_pid"]))
            if record is None or pid is None:
                left.append(box)
                continue
            engine = adapter(record.model, self._host.model(record.model))
            self._host.gpus.adopt(box.id, box.facts.get("gpus", ()))
            record = await self._reached(box, record)
            self.adopt(Instance(box, engine, int(box.facts["inner_pid"]), pid), record)
            log.info("replica %s (%s) was found running", record.id, record.incarnation)
        trails = await undo.reconcile(self._host, self.kept())
        for box in left:
            # Spares, and replicas that may not go on: no journal speaks of them.
            if self._host.boxes.known(box.id) is not None:
                log.warning("box %s was left behind; it is removed", box.id)
                await self._host.discard(box)
        for record in self._absent(records):
            await self._bury(record, "its engine was gone when the restorer started")
        for running in self._running.values():
            await self._write(running)
        return trails

    async def _reached(self, box: Box, record: Replica) -> Replica:
        """The record of a box that is adopted, as it is reached from other hosts now."""
        door = await self._host.boxes.doors.adopt(box, record.port)
        if door == record.door:
            return record
        changed = record.model_copy(update={"door": door, "place": self._host.place})
        box.remember(record=changed.model_dump(mode="json"))
        return changed

    def _door_lost(self, box: str, reason: str) -> None:
        """Gateways of other hosts know this replica by a door that is gone for good."""
        for one in self._running.values():
            if one.instance.box.id == box:
                self._task(self.fail(one.record.incarnation, reason))

    def kept(self) -> dict[str, str]:
        """id of the box of each replica -> why it goes on."""
        return {one.instance.box.id: f"replica {one.record.id} runs in it" for one in self._running.values()}

    def _adoptable(self, box: Box, records: dict[str, Replica]) -> Replica | None:
        """The record of a surviving box that may go on: admitted on disk, and not denied by the store."""
        if "record" not in box.facts:
            return None
        remembered = Replica.model_validate(box.facts["record"])
        known = records.get(remembered.id)
        if remembered.model not in self._host.config.models:
            return None
        if known is None:
            # The store lost its memory; this host has not.
            return remembered
        return known if known.incarnation == remembered.incarnation and known.state in RUNNING else None

    async def stop(self, replica: str, incarnation: str, *, reason: str, drain_s: float | None = None) -> None:
        """Drain a replica and stop it. Returns when it is gone, or at once when this incarnation is not here.

        No request is lost: it is killed when every gateway has seen the DRAINING record and has nothing in flight on
        it, or at the drain's deadline.
        """
        running = self._running.get(replica)
        if running is None or running.record.incarnation != incarnation:
            return
        if running.stopping:
            while self._running.get(replica) is running:
                await self._host.news.wait(_DRAIN_POLL_S)
            return
        running.stopping = True
        try:
            await self._drain(running, reason, drain_s)
        except BaseException:
            # Given up half-way (the lease was lost): the next one to ask goes on from here.
            running.stopping = False
            raise
        await asyncio.shield(self._end(running, Event.STOP, reason))

    async def _drain(self, running: Running, reason: str, drain_s: float | None) -> None:
        if running.record.state is State.ADMITTED:
            running.record = _moved(running.record, Event.DRAIN, reason)
            running.instance.box.remember(record=running.record.model_dump(mode="json"))
        limit = self._host.model(running.record.model).drain_s if drain_s is None else drain_s
        deadline = time.monotonic() + limit
        seq = await self._write(running)
        while (left := deadline - time.monotonic()) > 0 and running.record.id in self._running and not running.outranked:
            if seq and _drained(await self._reports(), running.record.incarnation, seq):
                break
            await self._host.news.wait(min(left, _DRAIN_POLL_S))

    async def park_idle(self) -> None:
        """Stop what has been idle for long enough; called about every second."""
        reports = await self._reports()
        now = time.monotonic()
        by_model: dict[str, list[Running]] = {}
        for running in self._running.values():
            _note_use(running, reports, now)
            by_model.setdefault(running.record.model, []).append(running)
        for name, group in by_model.items():
            if name not in self._host.config.models:
                self._retire(group)
                continue
            policy = self._host.model(name)
            keep = max(policy.keep, schedule.kept(policy.schedule, self._local()))
            admitted = {one.record.id: now - one.active_at for one in group if one.record.state is State.ADMITTED}
            if not any(idle_s >= policy.idle_park_s for idle_s in admitted.values()):
                continue
            held = sum(report.models[name].held for report in reports if name in report.models)
            coming = await self._host.jobs.starting(name)
            away = await self._admitted_elsewhere(name)
            here = max(0, keep - away)
            for id in scaling.parkable(idle_s=admitted, keep=here, held=held, coming=coming, idle_park_s=policy.idle_park_s):
                reason = f"parked after {policy.idle_park_s:g} s without a request"
                self._task(self._park(self._running[id], keep, reason))

    async def _admitted_elsewhere(self, model: str) -> int:
        records = (await self._host.jobs.replicas()).values()
        return sum(one.model == model and one.state is State.ADMITTED and one.host != self._host.name for one in records)

    async def _park(self, running: Running, keep: int, reason: str) -> None:
        """Stop an idle one, unless what is kept would be too few: other hosts park too, so the store has the last word."""
        if running.stopping:
            return
        record = _moved(running.record, Event.DRAIN, reason)
        if await self._host.jobs.park(record, keep) is None:
            return
        if not running.stopping:
            running.record = record
            running.instance.box.remember(record=record.model_dump(mode="json"))
        await self.stop(record.id, record.incarnation, reason=reason)

    def _retire(self, group: list[Running]) -> None:
        """A reload has taken the model out of the configuration."""
        for one in group:
            if not one.stopping:
                self._task(self.stop(one.record.id, one.record.incarnation, reason="the configuration has this model no more"))

    async def repeat_records(self) -> None:
        """Mend what the store missed while it was away, or forgot: records of what runs here, and of what no longer does."""
        known = await self._host.jobs.replicas()
        for running in list(self._running.values()):
            record = known.get(running.record.id)
            if record is not None and record.fence > running.record.fence:
                self._outrank(running, record)
            elif not running.reported or record is None:
                await self._write(running)
        absent = {record.incarnation: record for record in self._absent(known)}
        # Twice in a row: one that was admitted a moment ago is in the store before it is here.
        for incarnation in absent.keys() & self._absent_before:
            await self._bury(absent[incarnation], "its engine has ended")
        self._absent_before = set(absent)

    def _outrank(self, running: Running, record: Replica) -> None:
        """This host was given up for lost, and its replica's place is another's or nobody's: it must not serve on beside that.

        Gateways have let go of it already; there is nobody to drain it for.
        """
        running.outranked = True
        if not running.stopping:
            running.stopping = True
            why = record.reason or f"{record.host} has it now"
            log.error(
                "replica %s (%s) was given up meanwhile; its engine is ended: %s", record.id, running.record.incarnation, why
            )
            self._task(self._remove(running))

    def _absent(self, records: dict[str, Replica]) -> list[Replica]:
        """Records of this host that say that an engine runs, and none does."""
        mine = [record for record in records.values() if record.host == self._host.name and record.state in RUNNING]
        return [record for record in mine if record.id not in self._running]

    async def _bury(self, record: Replica, reason: str) -> None:
        log.error("replica %s (%s): %s", record.id, record.incarnation, reason)
        with contextlib.suppress(LeaseLost):
            await self._host.jobs.write(_moved(record, Event.FAIL, reason))

    async def stop_all(self, *, reason: str, drain_s: float) -> None:
        """Stop every replica; for the restorer's own end."""
        self._ending = True
        stops = [
            self.stop(one.record.id, one.record.incarnation, reason=reason, drain_s=drain_s) for one in self._running.values()
        ]
        await asyncio.gather(*stops)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.suspended.clear()

    async def _watch(self, running: Running) -> None:
        try:
            async with watch(running.instance.pid) as ended:
                await ended
        except ProcessLookupError:
            pass
        if not running.stopping:
            log.error("replica %s (%s) ended by itself", running.record.id, running.record.incarnation)
            # Its folder goes with the box, so the record keeps what may explain it.
            await self._end(running, Event.FAIL, f"the engine ended by itself; its log ends: {last_words(running.instance.box)}")

    async def _end(self, running: Running, event: Event, reason: str) -> None:
        running.stopping = True
        record = _moved(running.record, event, reason)
        # Told first: gateways must not learn of it from a network that vanished.
        running.record = record
        await self._write(running)
        await self._remove(running, rest=event is Event.STOP)

    async def _remove(self, running: Running, *, rest: bool = False) -> None:
        """End its engine, or let it rest; it is none of the replicas any more."""
        try:
            if not (rest and await self._put_to_rest(running)):
                await asyncio.shield(self._host.discard(running.instance.box))
        finally:
            # Also when it cannot be killed: who waits for its end must not wait for ever.
            if self._running.get(running.record.id) is running:
                del self._running[running.record.id]
            self._gone.tell()

    async def _put_to_rest(self, running: Running) -> bool:
        """Suspend an engine that is stopped, where that is wanted; otherwise let it give its device memory up."""
        model = running.record.model
        if not running.instance.engine.gpus and not running.instance.engine.sleeps:
            return False
        if not self._ending and await self.suspended.suspend(model, running.instance):
            return True
        await gpustate.settle(running.instance)
        return False

    async def _write(self, running: Running) -> int:
        """Write the record; its position, or 0 when the store is away (it is written again later) or has a later one."""
        try:
            seq = await self._host.jobs.write(running.record)
        except StoreUnavailable as error:
            running.reported = False
            log.warning("record of %s not written: %s", running.record.id, error)
            return 0
        except LeaseLost:
            return 0
        running.reported = True
        return seq

    async def _reports(self) -> list[GatewayReport]:
        try:
            return await self._host.jobs.gateways()
        except StoreUnavailable:
            return []

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except RestorerError as error:
        log.error("%s", error)


def _moved(record: Replica, event: Event, reason: str) -> Replica:
    changes = {"state": advance(record.state, event), "reason": reason, "updated_ms": time.time_ns() // 1_000_000, "seq": 0}
    return record.model_copy(update=changes)


def _drained(reports: list[GatewayReport], incarnation: str, seq: int) -> bool:
    return all(report.seq >= seq and not report.replicas.get(incarnation, 0) for report in reports)


def _note_use(running: Running, reports: list[GatewayReport], now: float) -> None:
    arrivals = {report.id: load.arrivals for report in reports if (load := report.models.get(running.record.model))}
    busy = any(report.replicas.get(running.record.incarnation, 0) for report in reports)
    if busy or any(running.seen.get(id) != count for id, count in arrivals.items()):
        running.active_at = now
    running.seen = arrivals
