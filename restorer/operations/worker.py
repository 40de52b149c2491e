"""The restorer's main loop: claim a job, run it under its lease, settle it; in between, keep house.

Shut-down order: stop claiming; cancel what runs (each undoes itself); stop the replicas; kill the spare boxes; leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

from policies import placement
from policies.floor import Rates
from policies.replica import Replica
from policies.tracing import SPANS_KEPT, Span
from policies.wire import REPORT_TTL_MS, HostReport, JobKind, OperationState, SnapshotSummary
from restorer.coordination.jobs import Claim, Outcome, Ranking
from restorer.errors import Cancelled, Environment, RestorerError, StoreUnavailable
from restorer.machine.host import Host, log
from restorer.operations import accounts, collector, pipeline, undo
from restorer.operations.accounts import Held
from restorer.operations.attempt import report
from restorer.operations.replicas import Replicas
from restorer.operations.suspects import Suspects
from restorer.operations.tasks import Tasks
from restorer.operations.warming import Warmer
from restorer.records import spans

_TICK_S = 1.0
_SUMMARY_EVERY = 5
_RECONNECT_S = 0.5
_STOP_DRAIN_S = 2.0
"""At the restorer's own end the gateways have drained already, or are gone."""


class Worker:
    """One host's restorer."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._replicas = Replicas(host)
        self._suspects = Suspects(host, self._replicas)
        self._tasks = Tasks(host)
        self._warmer = Warmer(host, lambda: self._summaries, self._running_models)
        self._jobs: set[asyncio.Task[None]] = set()
        self._held: dict[str, Held] = {}
        self._settled: dict[str, tuple[Outcome, Replica | None]] = {}
        self._spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._starting = 0
        self._due = asyncio.Event()
        self._again: asyncio.TimerHandle | None = None
        self._summaries: tuple[SnapshotSummary, ...] = ()
        self._stale = True
        """A job has ended since the snapshots of this host were last looked through."""
        self._measuring: asyncio.Task[Rates | None] | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set; then undo and stop everything."""
        host = self._host
        host.jobs.on_settled = self._note_end
        host.fleet.mine = self._report_now
        await host.find_gpus()
        await self._prepare()
        work = (
            self._listen(),
            self._keep_house(),
            self._claim_jobs(),
            self._tasks.run(),
            collector.run(host),
            self._warmer.run(),
        )
        loops = [asyncio.create_task(loop) for loop in work]
        waiter = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([waiter, *loops], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waiter}:
                task.result()
        finally:
            waiter.cancel()
            ending: list[asyncio.Task[Any]] = [*loops, *self._jobs, *([self._measuring] if self._measuring else [])]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await self._tasks.close()
            await self._suspects.close()
            await self._replicas.stop_all(reason="the restorer was stopped", drain_s=_STOP_DRAIN_S)
            await host.boxes.close()
            await host.cuda.close()
            await host.jobs.close()

    async def _prepare(self) -> None:
        while True:
            try:
                await self._host.jobs.check_schema()
                await self._be_the_only_one()
                for trail in await self._replicas.reconcile():
                    await report(self._host, trail)
                await self._host.jobs.recover()
                await self._host.progress.clear()
                if not len(self._replicas):
                    await self._host.jobs.begin_anew()
                break
            except StoreUnavailable as error:
                log.warning("waiting for the store: %s", error)
                await asyncio.sleep(_RECONNECT_S)
        for name in await asyncio.to_thread(self._sweep):
            log.warning("%s was removed: no snapshot is made of it, or needs it", name)
        await self._make_ready()

    async def _be_the_only_one(self) -> None:
        """Two restorers of one name would take each other's jobs for their own, and end each other's replicas.

        Raises:
            Environment: there is another. The report of one that this one replaces ends within moments.
        """
        name, place = self._host.name, self._host.place
        deadline = time.monotonic() + 2 * REPORT_TTL_MS / 1000
        while (other := (await self._host.jobs.hosts()).get(name)) is not None and other.place not in ("", place):
            if time.monotonic() > deadline:
                raise Environment(
                    f"another host of this installation goes by the name {name!r}: set restorer.host on one of them"
                )
            await asyncio.sleep(_RECONNECT_S)

    def _sweep(self) -> list[str]:
        """Remove what was left half-made, and weights that no snapshot names any more."""
        snapshots, weights = self._host.snapshots, self._host.weights
        return [*snapshots.sweep(older_than_s=0.0), *collector.sweep_weights(snapshots, weights, 0.0)]

    async def _listen(self) -> None:
        """Turn hints into wake-ups; a lost connection is opened again."""
        while True:
            try:
                async for hint in self._host.jobs.hints():
                    if hint is None or hint.job is not None:
                        self._due.set()
                    if hint is None or hint.task is not None:
                        self._tasks.poke()
                    self._host.news.tell()
            except StoreUnavailable as error:
                log.warning("%s", error)
                await asyncio.sleep(_RECONNECT_S)

    async def _claim_jobs(self) -> None:
        limit = self._host.config.restorer.parallel_starts
        while True:
            await self._due.wait()
            self._due.clear()
            with contextlib.suppress(StoreUnavailable):
                while True:
                    # A drain may take a minute; it must not keep a start waiting, nor wait for one.
                    full = self._starting >= limit
                    lease_s, ranking = self._host.config.restorer.lease_s, None if full else await self._ranking()
                    claim = await self._host.jobs.claim(lease_s, stops_only=full, ranking=ranking, later=self._look_again)
                    if claim is None:
                        break
                    self._begin(claim)

    async def _ranking(self) -> Ranking | None:
        """Who may take which of the jobs that are there; None: there is nobody but this host, which may take all."""
        host = self._host
        if host.fleet.alone and all(placement.named(model, host.name) for model in host.config.models.values()):
            return None
        wanted = await host.jobs.open()
        if not wanted:
            return {}
        # As they are now: by a second's old word a host would start cold what another could have restored.
        await host.fleet.read(host.jobs)
        return host.fleet.ranking(wanted, host.config, list((await host.jobs.replicas()).values()))

    def _look_again(self, in_s: float) -> None:
        """A job is left to another host until then."""
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.get_running_loop().call_later(in_s, self._due.set)

    def _begin(self, claim: Claim) -> None:
        task = asyncio.create_task(self._run_job(claim))
        self._jobs.add(task)
        weight = int(claim.job.kind is not JobKind.STOP)
        self._starting += weight
        self._warmer.began()

        def ended(_: asyncio.Task[None]) -> None:
            self._jobs.discard(task)
            self._starting -= weight
            self._warmer.ended()
            self._stale = True
            self._due.set()

        task.add_done_callback(ended)

    async def _run_job(self, claim: Claim) -> None:
        """One job under its lease. The lease's loss cancels the work, and the work undoes itself."""
        log.info("job %s: %s %s", claim.job.id, claim.job.kind, claim.job.replica or claim.job.model)
        self._held[claim.job.id] = Held(claim.job.kind, time.monotonic())
        begun_ns = time.time_ns()
        work = asyncio.create_task(self._work(claim))
        lease = asyncio.create_task(self._hold(claim))
        try:
            await asyncio.wait([work, lease], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                log.error("job %s: the lease was lost; undoing", claim.job.id)
                self._host.tally.inc("leases_lost", claim.job.kind)
        finally:
            lease.cancel()
            work.cancel()
            results = await asyncio.gather(work, lease, return_exceptions=True)
            self._host.jobs.over(claim)
            self._note(claim, results[0])
            self._held.pop(claim.job.id, None)
            stages, end = self._host.progress.done(claim.job.id), self._settled.pop(claim.job.id, None)
            self._spans.extend(spans.of_job(claim, self._host.name, stages, begun_ns, time.time_ns(), end))
            await self._host.progress.end(claim.job.id)
        await self._make_ready()

    async def _make_ready(self) -> None:
        """What the next starts will want, while nothing is urgent."""
        await self._host.boxes.fill()
        await asyncio.to_thread(self._host.journals.reserve, self._host.config.restorer.parallel_starts)

    def _note_end(self, claim: Claim, outcome: Outcome, record: Replica | None) -> None:
        if claim.job.trace:
            self._settled[claim.job.id] = outcome, record

    def _note(self, claim: Claim, result: BaseException | None) -> None:
        if isinstance(result, RestorerError):
            log.error("job %s: %s", claim.job.id, result)
        elif isinstance(result, Exception):
            log.error("job %s: a bug: %r", claim.job.id, result, exc_info=result)

    async def _work(self, claim: Claim) -> None:
        job = claim.job
        if job.model not in self._host.config.models:
            detail = f"the restorer on {self._host.name} has no model {job.model!r}; give it the gateway's configuration"
            await self._host.jobs.settle(claim, Outcome(OperationState.FAILED, detail, 1))
        elif job.kind is JobKind.START:
            await pipeline.start(self._host, claim, self._replicas)
        elif job.kind is JobKind.SNAPSHOT:
            await self._snapshot(claim)
        else:
            await self._replicas.stop(job.replica, job.incarnation, reason=job.detail or "scaled down")
            await self._host.jobs.settle(claim, Outcome(OperationState.SUCCEEDED))

    async def _snapshot(self, claim: Claim) -> None:
        try:
            await self._replicas.vacated(claim.job.model)
        except Cancelled as error:
            await self._host.jobs.settle(claim, Outcome(OperationState.CANCELLED, str(error), 1))
        else:
            await pipeline.make_snapshot(self._host, claim)

    async def _hold(self, claim: Claim) -> None:
        """Renew the lease; returns when it is lost, or is about to end while the store is away."""
        lease_s = self._host.config.restorer.lease_s
        sure_until = time.monotonic() + lease_s
        while True:
            await asyncio.sleep(lease_s / 4)
            try:
                asked = time.monotonic()
                if not await self._host.jobs.renew(claim, lease_s):
                    return
                sure_until = asked + lease_s
            except StoreUnavailable:
                if time.monotonic() > sure_until - lease_s / 3:
                    return

    async def _keep_house(self) -> None:
        """Every second: the host's report, idle replicas, suspects, records owed to the store."""
        tick, forgotten = 0, None
        while True:
            try:
                if tick % _SUMMARY_EVERY == 0 or self._stale:
                    self._stale = False
                    self._summaries = await asyncio.to_thread(self._host.summaries)
                summaries = self._summaries
                if tick % _SUMMARY_EVERY == 0:
                    await accounts.observe_gpus(self._host)
                    await self._replicas.repeat_records()
                    await undo.reconcile(self._host, self._replicas.kept())
                    await self._host.snapshots.verdicts.exchange(self._host.jobs)
                    if forgotten != (snapshots := {summary.id for summary in summaries}):
                        await self._forget_stages(snapshots)
                        forgotten = snapshots
                await self._report()
                await self._host.fleet.look(self._host.jobs, self._host.config.restorer.lost_after_s)
                await self._replicas.park_idle()
                await self._suspects.look()
                await self._replicas.suspended.expire()
                if summaries and not self._jobs:
                    self._measure()
            except StoreUnavailable as error:
                log.warning("%s", error)
            tick += 1
            await asyncio.sleep(_TICK_S)

    def _running_models(self) -> set[str]:
        return {running.record.model for running in self._replicas.admitted().values()}

    def _measure(self) -> None:
        """How fast this host is, if that is not known: whoever restores next would like to know, and nobody waits for it now."""
        speed = self._host.speed
        if self._measuring is None and speed is not None and speed.rates is None:
            self._measuring = asyncio.create_task(speed.measured())

    def _report_now(self) -> HostReport:
        """This host as it is, its gauges left out."""
        host = self._host
        gpus = [gpu.uuid for gpu in (host.gpus.facts and host.gpus.facts.gpus) or ()]
        return HostReport(
            host=host.name,
            capable=host.criu is not None,
            capability=host.capability,
            snapshots=self._summaries,
            running=len(self._replicas),
            parallel_starts=host.config.restorer.parallel_starts,
            starting=self._starting,
            models=tuple(host.config.models),
            resting=self._replicas.suspended.models(),
            gpus=len(gpus),
            free_gpus=sum(not host.gpus.taken(uuid) for uuid in gpus),
            pulls=host.config.storage.pull is not None,
            obstacles=host.obstacles(),
            place=host.place,
            backends=host.described(),
        )

    async def _report(self) -> None:
        host, held = self._host, list(self._held.values())
        gauges = await asyncio.to_thread(accounts.observe, host, held, len(self._replicas), self._summaries)
        report = self._report_now().model_copy(update={"gauges": gauges})
        counted = host.tally.take()
        try:
            await host.jobs.report(report, counted, await asyncio.to_thread(host.facts_now))
        except BaseException:
            host.tally.put_back(counted)
            raise
        if self._spans:
            finished = [self._spans.popleft() for _ in range(len(self._spans))]
            await host.jobs.trace(finished)

    async def _forget_stages(self, snapshots: set[str]) -> None:
        """How long starts from a snapshot took is of no use when it is gone."""
        for model in list(self._host.config.models):
            await self._host.jobs.forget_stages(model, snapshots)
