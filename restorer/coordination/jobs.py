"""The restorer's one door to the shared store: claimed jobs, replica records, what gateways report.

A claim is a lease with a fence. While the lease is held the job is ours; every write carries the fence, and the store
refuses it once a later claim exists, so a restorer that was paused for an hour can do no harm when it wakes up. The
connection, and what becomes of its errors, is :mod:`restorer.coordination.store`'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.placement import AVOID_S, Rank
from policies.replica import TERMINAL, Event, Replica, advance
from policies.series import Point
from policies.wire import (
    COLD,
    OPERATION_TTL_S,
    STAGE_SAMPLES,
    Failure,
    GatewayReport,
    Job,
    JobKind,
    OperationState,
    StageKey,
    durations,
)
from restorer.coordination.board import Board
from restorer.coordination.store import decoded, translated
from restorer.errors import LeaseLost

_SPANS_TTL_S = 600
Ranking = Mapping[tuple[JobKind, str], Sequence[Rank]]
"""Which hosts may take a job of a kind for a model, the best first."""
_TAKEOVERS = {kind: Point("lease_takeovers", (kind,)).field for kind in JobKind}


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on a job, until the lease ends."""

    job: Job
    fence: int
    attempts: int
    """How often the job was claimed, this time included."""
    queue: str
    avoid: frozenset[str] = frozenset()
    """Hosts where it failed, for their sake."""
    anywhere: bool = True
    """Another host may do it as well."""


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


class JobStore(Board):
    """Calls to one installation's keys, for the restorer of one host.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        namespace: prefix of every key.
        host: name of this host, the owner of its claims.
    """

    def __init__(self, url: str, namespace: str, host: str) -> None:
        super().__init__(url, namespace, host, Path(__file__).with_name("jobs.lua"))
        self.on_settled: Callable[[Claim, Outcome, Replica | None], None] = lambda claim, outcome, record: None
        """Called when a job has ended, with its replica's last record if there is one."""
        self._ending: set[tuple[str, int]] = set()
        """Job and fence of what is being settled, or was."""
        self._queues = [self.keys.host_jobs(host), self.keys.jobs]

    async def claim(
        self,
        lease_s: float,
        *,
        stops_only: bool = False,
        ranking: Ranking | None = None,
        later: Callable[[float], None] = lambda seconds: None,
    ) -> Claim | None:
        """The next job that is due and for this host to take, its own first; None when there is none.

        Args:
            ranking: who may take what of the jobs that are for anyone; None: whoever comes first.
            later: called with the seconds until one that is there will be for this host, when it is left to better ones.
        """
        asked: dict[str, Any] = {"queues": self._queues, "job_key": self.keys.job("")}
        if stops_only:
            asked |= {"queues": self._queues[:1], "kinds": {JobKind.STOP: True}}
        if ranking is not None:
            ranks = {
                f"{kind} {model}": [(rank.host, _ms(rank.lag_s)) for rank in ranks] for (kind, model), ranks in ranking.items()
            }
            asked |= {"ranking": ranks, "shared": self.keys.jobs, "avoid_ms": _ms(AVOID_S)}
        counts = {"tally": self.keys.tally(self.host), "takeovers": _TAKEOVERS}
        found = await self._call("claim", **asked, **counts, owner=self.host, ttl_ms=_ms(lease_s))
        if isinstance(found, int):
            later(found / 1000)
        if not isinstance(found, list):
            return None
        queue, record, fence, attempts, avoid = found
        avoided = frozenset(json.loads(avoid))
        return Claim(Job.model_validate_json(record), int(fence), int(attempts), queue, avoided, queue == self.keys.jobs)

    async def open(self) -> list[tuple[JobKind, str]]:
        """Kind and model of each start and snapshot that is for anyone to take, or being worked on."""
        with translated():
            ids = await self._client.zrange(self.keys.jobs, 0, -1)
            texts = [await self._client.hget(self.keys.job(id), "record") for id in ids]
        jobs = [job for text in texts if text and (job := decoded(Job, text)) is not None]
        return list(dict.fromkeys((job.kind, job.model) for job in jobs))

    async def renew(self, claim: Claim, lease_s: float) -> bool:
        """Extend the lease; False when it was lost.

        Of a job that is being settled the lease is no longer missed: it ends with the job, and whether it was lost before is for
        :meth:`settle` to say. Otherwise what was just admitted would be undone.
        """
        renewed = bool(await self._call("renew", **self._held(claim), ttl_ms=_ms(lease_s)))
        return renewed or (claim.job.id, claim.fence) in self._ending

    def over(self, claim: Claim) -> None:
        """Nobody works on it any more, and nobody renews its lease."""
        self._ending.discard((claim.job.id, claim.fence))

    async def release(self, claim: Claim, delay_s: float, *, avoid: bool = False) -> None:
        """Give the job back, due again after ``delay_s`` seconds; ``avoid``: rather for another host."""
        avoided = {"avoid": self.host} if avoid else {}
        await self._call("release", **self._held(claim), delay_ms=_ms(delay_s), **avoided)

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

    async def park(self, record: Replica, keep: int) -> int | None:
        """As :meth:`write`, unless fewer than ``keep`` others of its model are admitted anywhere; None then."""
        asked: dict[str, Any] = {"replica": record.id, "record": _encoded(record), "fence": record.fence}
        seq = int(await self._call("park", **asked, model=record.model, keep=keep))
        if seq == 0:
            raise LeaseLost(f"replica {record.id}: a later claim has written its record")
        return None if seq < 0 else seq

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
        self._ending.add((job.id, claim.fence))
        done = await self._call(
            "settle",
            **self._held(claim),
            **written,
            operation_key=self.keys.operation(""),
            active_key=self.keys.active(""),
            starts_key=self.keys.starts(""),
            host_jobs_key=self.keys.host_jobs(""),
            owner=self.host,
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
            self.over(claim)
            raise LeaseLost(f"job {job.id}: another claim of it exists")
        self.on_settled(claim, outcome, record)

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

    async def bury(self, host: str, records: Sequence[Replica], detail: str) -> list[str]:
        """Give up what was another host's, which does not report; see the script. Does nothing if it reports again.

        Args:
            records: as they were read, of states that are not over.
            detail: why, for the records and for whoever asked for something there.

        Returns:
            The replicas that were given up.
        """
        keys = self.keys
        now_ms = time.time_ns() // 1_000_000
        given_up = {
            one.id: {
                "model": one.model,
                "incarnation": one.incarnation,
                "fence": one.fence,
                "record": _encoded(
                    one.model_copy(update={"state": advance(one.state, Event.FAIL), "reason": detail, "updated_ms": now_ms})
                ),
            }
            for one in records
        }
        found: list[str] = await self._call(
            "bury",
            host=host,
            host_key=keys.host(""),
            gateways_key=keys.gateways,
            gateway_key=keys.gateway(""),
            queue=keys.host_jobs(host),
            job_key=keys.job(""),
            operation_key=keys.operation(""),
            active_key=keys.active(""),
            starts_key=keys.starts(""),
            ttl_s=OPERATION_TTL_S,
            detail=detail,
            records=given_up,
        )
        return sorted(found)

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
        """Remove this host's durations of every origin but these (and cold starts): their snapshots are gone. So are hosts that
        were forgotten, with all of theirs."""
        with translated():
            hosts = await self._client.smembers(self.keys.hosts)
            fields = await self._client.hkeys(self.keys.stages(model))
            kept = {COLD, *origins}
            known = [(field, key) for field in fields if (key := StageKey.of(field)) is not None]
            mine = [field for field, key in known if key.host == self.host and key.origin not in kept]
            gone = mine + [field for field, key in known if key.host not in hosts and key.host != self.host]
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

    def _held(self, claim: Claim) -> dict[str, Any]:
        return {"queue": claim.queue, "job_key": self.keys.job(""), "job": claim.job.id, "fence": claim.fence}


def _encoded(record: Replica) -> str:
    """As the store takes it: it fills the position in where there is none."""
    return record.model_copy(update={"seq": 0}).model_dump_json()


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
