"""What hosts tell each other, and whoever looks: reports, verdicts, ended attempts, spans, progress, tasks.

Nothing here is decided on, and nothing of it needs a lease: each key has one writer, and what is lost is told again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from policies.journal import Trail
from policies.manifest import HostFacts
from policies.tasks import PROGRESS_TTL_S, TASK_TTL_S, Progress, Task
from policies.tracing import SPANS_KEPT, Span
from policies.wire import REPORT_TTL_MS, TALLY_TTL_S, TRAILS, Hint, HostReport
from restorer.coordination.store import StoreClient, decoded, translated

_SPANS_TTL_S = 600


class Board(StoreClient):
    """One host's.

    Args:
        host: its name.
    """

    def __init__(self, url: str, namespace: str, host: str, script: Path) -> None:
        super().__init__(url, namespace, script)
        self.host = host

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

    async def hosts(self) -> dict[str, HostReport | None]:
        """Every host that is remembered, and its report if it still reports."""
        with translated():
            names = sorted(await self._client.smembers(self.keys.hosts))
            texts = await self._client.mget([self.keys.host(name) for name in names]) if names else []
        found = zip(names, texts, strict=True)
        return {name: decoded(HostReport, text) if text else None for name, text in found}

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
