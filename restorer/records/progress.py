"""What this restorer is doing, told to the store as it happens, for people who watch.

Nothing waits for it and nothing fails by it: what cannot be written is left out. Several steps within a moment share one write,
and what is over within a moment is never told.
Knows neither what a stage means nor who looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from policies.replica import Stage
from policies.tasks import Progress
from policies.wire import Job
from restorer.coordination.jobs import JobStore
from restorer.errors import StoreUnavailable
from restorer.records.stages import Stages

_CALM_S = 0.02
_LAST_S = 1.0


@dataclass(slots=True)
class Work:
    """One job or task under way. May be told of bytes from any thread."""

    base: Progress
    loop: asyncio.AbstractEventLoop
    stages: Stages = field(default_factory=Stages)
    bytes_done: int | None = None
    bytes_total: int | None = None
    due: asyncio.Event = field(default_factory=asyncio.Event)
    told: bool = False

    def count(self, done: int, total: int) -> None:
        """So many bytes of so many."""
        self.bytes_done, self.bytes_total = done, total
        self.loop.call_soon_threadsafe(self.due.set)

    def record(self) -> Progress:
        """How it stands now."""
        stages = self.stages
        changes = {
            "now_ms": _now_ms(),
            "doing": tuple(stage.record() for stage in stages.open),
            "stages": tuple(stages.done),
            "bytes_done": self.bytes_done,
            "bytes_total": self.bytes_total,
        }
        return self.base.model_copy(update=changes)


class ProgressBoard:
    """All that goes on at one host. Used within one event loop."""

    def __init__(self, jobs: JobStore) -> None:
        self._jobs = jobs
        self._work: dict[str, tuple[Work, asyncio.Task[None]]] = {}

    def stages(self, job: Job) -> Stages:
        """The clock of a job; what it is told of is seen by whoever watches, until :meth:`end`."""
        return self.begin(job.id, str(job.kind), model=job.model, replica=job.replica).stages

    def begin(self, id: str, what: str, *, model: str = "", replica: str = "", snapshot: str = "") -> Work:
        """Something has begun; told at once."""
        before = self._work.pop(id, None)
        if before is not None:
            before[1].cancel()
        base = Progress(
            id=id,
            what=what,
            host=self._jobs.host,
            model=model,
            replica=replica,
            snapshot=snapshot,
            begun_ms=_now_ms(),
        )
        work = Work(base, asyncio.get_running_loop())
        work.stages = Stages(tell=work.due.set)
        work.due.set()
        self._work[id] = work, asyncio.create_task(self._tell(work))
        return work

    def done(self, id: str) -> tuple[Stage, ...]:
        """The finished stages of what goes on; of nothing when it never began."""
        return tuple(self._work[id][0].stages.done) if id in self._work else ()

    async def end(self, id: str) -> None:
        """It is over, however it went; nothing when it never began."""
        found = self._work.pop(id, None)
        if found is None:
            return
        found[1].cancel()
        await asyncio.wait([found[1]])
        if not found[0].told:
            return
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await self._jobs.forget_progress(id)

    async def clear(self) -> None:
        """At the start: nothing goes on, whatever an earlier restorer of this host has left written."""
        with contextlib.suppress(StoreUnavailable):
            await self._jobs.forget_progress()

    async def _tell(self, work: Work) -> None:
        while True:
            await work.due.wait()
            await asyncio.sleep(_CALM_S)
            work.due.clear()
            work.told = True
            with contextlib.suppress(StoreUnavailable):
                await self._jobs.tell_progress(work.record())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
