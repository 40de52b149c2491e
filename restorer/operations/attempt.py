"""One attempt of a job: its record, its journal and its clock, and how it ends.

Knows nothing of what an attempt does; that is :mod:`restorer.operations.pipeline`'s.
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
from restorer.adapters.engines import adapter
from restorer.coordination.jobs import Claim
from restorer.errors import Cancelled, Environment, LeaseLost, RestorerError, StoreUnavailable
from restorer.machine.host import Host
from restorer.operations import undo
from restorer.records.journal import Journal


class Work:
    """One attempt of any job: its clock and its journal."""

    def __init__(self, host: Host, claim: Claim) -> None:
        self.host, self.claim, self.began = host, claim, time.monotonic()
        self.stages = host.progress.stages(claim.job)
        self.detail = ""
        """What its journal says at its end."""
        self.verdict: Verdict | None = None
        """Whose fault it was that a restore failed."""

    @property
    def journal(self) -> Journal:
        assert self.stages.journal is not None, "within journaled() alone"
        return self.stages.journal

    @contextlib.asynccontextmanager
    async def journaled(self) -> AsyncIterator[None]:
        """Whatever is raised within is undone before it is raised on; what could not be undone keeps the journal open.

        Raises:
            Environment: nothing can be written down, so nothing may be done.
        """
        host, job = self.host, self.claim.job
        what = {"operation": job.operation, "job": job.id, "kind": job.kind.value, "model": job.model, "replica": job.replica}
        journal = self.stages.journal = host.journals.begin(**what, attempt=self.claim.attempts, host=host.name)
        outcome: Outcome = "interrupted"
        try:
            async with undo.unwinding(host, journal):
                yield
            outcome = "succeeded"
        except (LeaseLost, StoreUnavailable) as error:
            self.detail = str(error)
            raise
        except RestorerError as error:
            outcome = "cancelled" if isinstance(error, Cancelled) else "failed"
            self.detail, self.verdict = str(error), error.verdict
            raise
        finally:
            await asyncio.shield(self._closed(journal, outcome))

    async def _closed(self, journal: Journal, outcome: Outcome) -> None:
        done = outcome == "succeeded" or await undo.unwind(self.host, journal)
        await report(self.host, await self.host.journals.end(journal, outcome if done else None, self.detail, self.verdict))

    async def bounded(self) -> None:
        """A failed try is counted when it fails; one that took the restorer with it has to be counted here."""
        if self.claim.attempts > self.host.config.restorer.max_attempts:
            tries = f"it was begun {self.claim.attempts - 1} times, and each time the restorer ended before it"
            raise Environment(f"{tries}: {await self.interrupted() or 'see its log'}")

    async def interrupted(self) -> str:
        """What earlier attempts of this job came to that ended with their restorer; empty: there was none."""
        if self.claim.attempts == 1:
            return ""
        trails = [one for one in await asyncio.to_thread(self.host.journals.history) if one.job == self.claim.job.id]
        return " | ".join(f"attempt {one.attempt}: {undo.summary(one)}" for one in trails if one.outcome == "interrupted")


class Attempt(Work):
    """One try of a START job: its record too."""

    def __init__(self, host: Host, claim: Claim) -> None:
        super().__init__(host, claim)
        self.source: Manifest | None = None
        """What it was restored from."""
        self.choices: tuple[str, ...] = ()
        """What was chosen on the way, beside how it was read."""
        self.lost: RestorerError | None = None
        """Why an engine that rested did not come back."""
        model = host.model(claim.job.model)
        self.engine = adapter(claim.job.model, model)
        self.record = Replica(
            id=claim.job.replica,
            model=claim.job.model,
            state=State.QUEUED,
            fence=claim.fence,
            host=host.name,
            place=host.place,
            port=model.engine.port,
            concurrency=model.concurrency,
            trace=claim.job.trace,
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


async def report(host: Host, trail: Trail) -> None:
    """Tell the store what became of an attempt, for those who look from elsewhere; the journal itself stays here."""
    with contextlib.suppress(StoreUnavailable):
        await host.jobs.tell(trail)
