"""One attempt of a job: its record, its journal and its clock, and how it ends.

Knows nothing of what an attempt does; that is :mod:`restorer.pipeline`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from policies.failures import Verdict
from policies.journal import Outcome, Trail
from policies.manifest import Manifest
from policies.replica import Event, Replica, State, advance
from policies.wire import demand
from restorer import undo
from restorer.engines import adapter
from restorer.errors import Cancelled, Environment
from restorer.host import Host
from restorer.jobs import Claim, StoreUnavailable
from restorer.journal import Journal
from restorer.stages import Stages


class Attempt:
    """One try of a START job: its record, its journal and its clock."""

    def __init__(self, host: Host, claim: Claim, stages: Stages, journal: Journal) -> None:
        self.host, self.claim, self.stages, self.journal = host, claim, stages, journal
        self.began = time.monotonic()
        self.source: Manifest | None = None
        """What it was restored from."""
        model = host.model(claim.job.model)
        self.engine = adapter(claim.job.model, model)
        self.record = Replica(
            id=claim.job.replica,
            model=claim.job.model,
            state=State.QUEUED,
            fence=claim.fence,
            host=host.name,
            port=model.engine.port,
            concurrency=model.concurrency,
        )

    def moved(self, event: Event, **changes: Any) -> Replica:
        """The record after an event, not written yet."""
        state = advance(self.record.state, event)
        stamped = {"state": state, "updated_ms": time.time_ns() // 1_000_000, "stages": tuple(self.stages.done), **changes}
        return self.record.model_copy(update=stamped)

    async def advance(self, event: Event, **changes: Any) -> None:
        """Write the record after an event; raises LeaseLost when the claim is gone."""
        record = self.moved(event, **changes)
        await self.host.jobs.write(record, self.claim)
        self.record = record

    async def amend(self, **changes: Any) -> None:
        """Write the record with changes that are no event; raises LeaseLost when the claim is gone."""
        record = self.record.model_copy(update={"updated_ms": time.time_ns() // 1_000_000, **changes})
        await self.host.jobs.write(record, self.claim)
        self.record = record

    async def still_wanted(self) -> None:
        """The last exit before the point of no return; raises Cancelled when demand asked for this and is gone."""
        if self.claim.job.reason == "demand" and demand(await self.host.jobs.gateways(), self.record.model) == 0:
            raise Cancelled("every client that waited for it has left")


class Ending:
    """How an attempt ends, for its journal."""

    outcome: Outcome = "interrupted"
    """Unless somebody says better: its lease was lost, or its restorer ends."""
    detail: str = ""
    verdict: Verdict | None = None

    def put(self, outcome: Outcome, detail: str = "", verdict: Verdict | None = None) -> None:
        self.outcome, self.detail, self.verdict = outcome, detail, verdict or self.verdict


@contextlib.asynccontextmanager
async def journaled(host: Host, claim: Claim) -> AsyncIterator[tuple[Journal, Stages, Ending]]:
    """The journal of an attempt, closed at its end; what could not be undone keeps it open, for another try."""
    job = claim.job
    what = {"operation": job.operation, "job": job.id, "kind": job.kind.value, "model": job.model, "replica": job.replica}
    journal, ending = host.journals.begin(**what, attempt=claim.attempts, host=host.name), Ending()
    stages = host.progress.stages(job)
    stages.journal = journal
    try:
        yield journal, stages, ending
    finally:
        await asyncio.shield(_closed(host, journal, ending))


async def _closed(host: Host, journal: Journal, ending: Ending) -> None:
    done = ending.outcome == "succeeded" or await undo.unwind(host, journal)
    trail = await host.journals.end(journal, ending.outcome if done else None, ending.detail, ending.verdict)
    await report(host, trail)


async def report(host: Host, trail: Trail) -> None:
    """Tell the store what became of an attempt, for those who look from elsewhere; the journal itself stays here."""
    with contextlib.suppress(StoreUnavailable):
        await host.jobs.tell(trail)


async def bounded(host: Host, claim: Claim) -> None:
    """A failed try is counted when it fails; one that took the restorer with it has to be counted here."""
    if claim.attempts > host.config.restorer.max_attempts:
        tries = f"it was begun {claim.attempts - 1} times, and each time the restorer ended before it"
        raise Environment(f"{tries}: {await interrupted(host, claim) or 'see its log'}")


async def interrupted(host: Host, claim: Claim) -> str:
    """What earlier attempts of this job came to that ended with their restorer; empty: there was none."""
    if claim.attempts == 1:
        return ""
    trails = [trail for trail in await asyncio.to_thread(host.journals.history) if trail.job == claim.job.id]
    return " | ".join(f"attempt {one.attempt}: {undo.summary(one)}" for one in trails if one.outcome == "interrupted")
