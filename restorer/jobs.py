"""The restorer's one door to the shared store: claimed jobs, replica records, what gateways report.

A claim is a lease with a fence. While the lease is held the job is ours; every write carries the fence, and the store
refuses it once a later claim exists, so a restorer that was paused for an hour can do no harm when it wakes up. The
connection, and what becomes of its errors, is :mod:`restorer.store`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.journal import Trail
from policies.manifest import HostFacts
from policies.replica import TERMINAL, Replica
from policies.series import Point
from policies.tasks import PROGRESS_TTL_S, TASK_TTL_S, Progress, Task
from policies.tracing import SPANS_KEPT, Span
from policies.wire import (
    COLD,
    OPERATION_TTL_S,
    REPORT_TTL_MS,
    STAGE_SAMPLES,
    TALLY_TTL_S,
    TRAILS,
    Failure,
    GatewayReport,
    Hint,
    HostReport,
    Job,
    JobKind,
    OperationState,
    StageKey,
    durations,
)
from restorer.errors import LeaseLost
from restorer.store import StoreClient, decoded, translated

_SPANS_TTL_S = 600
_TAKEOVERS = {kind: Point("lease_takeovers", (kind,)).field for kind in JobKind}


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on a job, until the lease ends."""

    job: Job
    fence: int
    attempts: int
    """How often the job was claimed, this time included."""
    queue: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    state: OperationState
    detail: str = ""
    code: int = 0
    snapshot: str = ""
    failure: Failure | None = None
    """Set: the model cannot be started for now, and gateways say so."""
    failure_s: float = 0.0


class JobStore(StoreClient):
    """Calls to one installation's keys, for the restorer of one host.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        namespace: prefix of every key.
        host: name of this host, the owner of its claims.
    """

    def __init__(self, url: str, namespace: str, host: str) -> None:
        super().__init__(url, namespace, Path(__file__).with_name("jobs.lua"))
        self.host = host
        self.on_settled: Callable[[Claim, Outcome, Replica | None], None] = lambda claim, outcome, record: None
        """Called when a job has ended, with its replica's last record if there is one."""
        self._queues = [self.keys.host_jobs(host), self.keys.jobs]

    async def claim(self, lease_s: float, *, stops_only: bool = False) -> Claim | None:
        """The next job that is due, this host's own first (those are stops); None when there is none."""
        keys = {"queues": self._queues[:1] if stops_only else self._queues, "job_key": self.keys.job("")}
        counts = {"tally": self.keys.tally(self.host), "takeovers": _TAKEOVERS}
        found = await self._call("claim", **keys, **counts, owner=self.host, ttl_ms=_ms(lease_s))
        if found is None:
            return None
        return Claim(Job.model_validate_json(found[1]), fence=int(found[2]), attempts=int(found[3]), queue=found[0])

    async def renew(self, claim: Claim, lease_s: float) -> bool:
        """Extend the lease; False when it was lost."""
        return bool(await self._call("renew", **self._held(claim), ttl_ms=_ms(lease_s)))

    async def release(self, claim: Claim, delay_s: float) -> None:
        """Give the job back, due again after ``delay_s`` seconds."""
        await self._call("release", **self._held(claim), delay_ms=_ms(delay_s))

    async def recover(self) -> None:
        """Make every job that an earlier restorer of this host held due at once: it is dead, this one runs in its place."""
        await self._call("recover", queues=self._queues, owner=self.host, job_key=self.keys.job(""))

    async def write(self, record: Replica, claim: Claim | None = None) -> int:
        """Write a replica's record and tell everyone; returns the write's position, which gateways acknowledge.

        Raises:
            LeaseLost: a later fence has written it, or ``claim`` was lost.
        """
        held = {} if claim is None else {"job_key": self.keys.job(""), "job": claim.job.id}
        seq = await self._call("write", replica=record.id, record=_encoded(record), fence=record.fence, **held)
        if not seq:
            raise LeaseLost(f"replica {record.id}: a later claim has written its record")
        return int(seq)

    async def settle(self, claim: Claim, outcome: Outcome, record: Replica | None = None) -> None:
        """End a job, and write its replica's record in the same step.

        Raises:
            LeaseLost: the claim was lost; nothing was written.
        """
        job = claim.job
        written: dict[str, Any] = {}
        if record is not None:
            stages = [(key.field, seconds) for key, seconds in durations(record)]
            written = {"replica": record.id, "record": _encoded(record), "stages": stages, "samples": STAGE_SAMPLES}
        done = await self._call(
            "settle",
            **self._held(claim),
            **written,
            operation_key=self.keys.operation(""),
            active_key=self.keys.active(job.model),
            starts_key=self.keys.starts(job.model),
            slot=job.replica.rpartition("#")[2] if job.kind == "start" else "",
            state=outcome.state,
            detail=outcome.detail,
            code=outcome.code,
            snapshot=outcome.snapshot,
            ttl_s=OPERATION_TTL_S,
            tenure_key=self.keys.tenure(job.model),
            stages_key=self.keys.stages(job.model),
            failure_key=self.keys.failure(job.model),
            failure="" if outcome.failure is None else outcome.failure.model_dump_json(),
            failure_ms=max(1, _ms(outcome.failure_s)),
        )
        if not done:
            raise LeaseLost(f"job {job.id}: another claim of it exists")
        self.on_settled(claim, outcome, record)

    async def tell(self, trail: Trail) -> None:
        """Put an ended attempt at the head of the installation's last ones."""
        pipe = self._client.pipeline(transaction=True)
        pipe.lpush(self.keys.journal, trail.model_dump_json(exclude_none=True))
        pipe.ltrim(self.keys.journal, 0, TRAILS - 1)
        with translated():
            await pipe.execute()

    async def tell_verdicts(self, notes: Mapping[str, str]) -> None:
        """Tell other hosts what became of restores here: snapshot -> its notes, instead of those told before."""
        with translated():
            await self._client.hset(self.keys.verdicts, mapping={f"{id}\t{self.host}": text for id, text in notes.items()})

    async def verdicts(self) -> Mapping[str, str]:
        """Snapshot, tab, host -> what that host has told of it."""
        with translated():
            return dict(await self._client.hgetall(self.keys.verdicts))

    async def replicas(self) -> dict[str, Replica]:
        """Every replica record."""
        with translated():
            records = await self._client.hgetall(self.keys.replicas)
        return {id: record for id, text in records.items() if (record := decoded(Replica, text)) is not None}

    async def gateways(self) -> list[GatewayReport]:
        """What every live gateway says of itself; dead ones are forgotten."""
        with translated():
            ids = sorted(await self._client.smembers(self.keys.gateways))
            texts = await self._client.mget([self.keys.gateway(id) for id in ids]) if ids else []
            gone = [id for id, text in zip(ids, texts, strict=True) if text is None]
            if gone:
                await self._client.srem(self.keys.gateways, *gone)
        return [report for text in texts if text and (report := decoded(GatewayReport, text)) is not None]

    async def starting(self, model: str) -> int:
        """Starts of a model that are not settled."""
        with translated():
            return int(await self._client.hlen(self.keys.starts(model)))

    async def seq(self) -> int:
        """Position of the latest replica write."""
        with translated():
            return int(await self._client.get(self.keys.seq) or 0)

    async def report(
        self, report: HostReport, counted: Mapping[str, float] | None = None, facts: HostFacts | None = None
    ) -> None:
        """Renew this host's report and facts, and add what was counted (:attr:`policies.series.Point.field` -> number)."""
        pipe = self._client.pipeline(transaction=True)
        if facts is not None:
            pipe.set(self.keys.facts(report.host), facts.model_dump_json(), px=REPORT_TTL_MS)
        pipe.set(self.keys.host(report.host), report.model_dump_json(), px=REPORT_TTL_MS)
        pipe.sadd(self.keys.hosts, report.host)
        tally = self.keys.tally(report.host)
        for field, number in (counted or {}).items():
            pipe.hincrbyfloat(tally, field, number)
        pipe.expire(tally, TALLY_TTL_S)
        with translated():
            await pipe.execute()

    async def trace(self, spans: Sequence[Span]) -> None:
        """Leave finished spans for a gateway to export; the oldest go when nobody does."""
        pipe = self._client.pipeline(transaction=True)
        pipe.rpush(self.keys.spans, *(span.model_dump_json() for span in spans))
        pipe.ltrim(self.keys.spans, -SPANS_KEPT, -1)
        pipe.expire(self.keys.spans, _SPANS_TTL_S)
        with translated():
            await pipe.execute()

    async def suspects(self, mine: Collection[str]) -> dict[str, str]:
        """incarnation -> reason of those of ``mine`` that gateways suspect; reading takes them off the list.

        Those that no record speaks of any more go too; another host's stay for its restorer.
        """
        with translated():
            found = await self._client.hgetall(self.keys.suspects)
        if not found:
            return {}
        alive = {record.incarnation for record in (await self.replicas()).values() if record.state not in TERMINAL}
        taken = [incarnation for incarnation in found if incarnation in mine or incarnation not in alive]
        if taken:
            with translated():
                await self._client.hdel(self.keys.suspects, *taken)
        return {incarnation: found[incarnation] for incarnation in taken if incarnation in mine}

    async def forget_stages(self, model: str, origins: Collection[str]) -> None:
        """Remove this host's durations of every origin but these (and cold starts): their snapshots are gone."""
        with translated():
            fields = await self._client.hkeys(self.keys.stages(model))
            kept = {COLD, *origins}
            known = [(field, key) for field in fields if (key := StageKey.of(field)) is not None]
            gone = [field for field, key in known if key.host == self.host and key.origin not in kept]
            if gone:
                await self._client.hdel(self.keys.stages(model), *gone)

    async def begin_anew(self) -> None:
        """Nothing runs here: if no other host works either, the installation starts, and models may be preloaded again.

        A gateway may have been faster: what it has asked for meanwhile is not asked for twice.
        """
        with translated():
            others = [self.keys.host(name) for name in await self._client.smembers(self.keys.hosts) if name != self.host]
            if others and await self._client.exists(*others):
                return
            before = await self._client.smembers(self.keys.preloaded)
            ids = await self._client.zrange(self.keys.jobs, 0, -1)
            texts = [await self._client.hget(self.keys.job(id), "record") for id in ids]
            jobs = [job for text in texts if text and (job := decoded(Job, text)) is not None]
            gone = before - {job.model for job in jobs if job.reason == "preload"}
            if gone:
                await self._client.srem(self.keys.preloaded, *gone)

    async def take_task(self) -> Task | None:
        """The next task for this host; None when there is none. Nobody else gets it."""
        with translated():
            while (id := await self._client.rpop(self.keys.host_tasks(self.host))) is not None:
                text = await self._client.get(self.keys.task(id))
                if text and (task := decoded(Task, text)) is not None:
                    return task
        return None

    async def settle_task(self, task: Task) -> None:
        """A task's answer, for whoever asked."""
        pipe = self._client.pipeline(transaction=True)
        pipe.set(self.keys.task(task.id), task.model_dump_json(), ex=TASK_TTL_S)
        pipe.publish(self.keys.events, Hint(task=task.id).model_dump_json())
        with translated():
            await pipe.execute()

    async def tell_progress(self, progress: Progress) -> None:
        """What goes on here, for who watches."""
        key = self.keys.progress(self.host)
        pipe = self._client.pipeline(transaction=True)
        pipe.hset(key, progress.id, progress.model_dump_json())
        pipe.expire(key, PROGRESS_TTL_S)
        pipe.publish(self.keys.events, Hint(progress=self.host).model_dump_json())
        with translated():
            await pipe.execute()

    async def forget_progress(self, id: str = "") -> None:
        """It is over; without an id: all of this host's."""
        key = self.keys.progress(self.host)
        with translated():
            await (self._client.hdel(key, id) if id else self._client.delete(key))
            await self._client.publish(self.keys.events, Hint(progress=self.host).model_dump_json())

    def _held(self, claim: Claim) -> dict[str, Any]:
        return {"queue": claim.queue, "job_key": self.keys.job(""), "job": claim.job.id, "fence": claim.fence}


def _encoded(record: Replica) -> str:
    """As the store takes it: it fills the position in where there is none."""
    return record.model_copy(update={"seq": 0}).model_dump_json()


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
