"""The gateway's one door to the shared store: a Redis protocol client, and the verbs that the gateway needs.

Every error of the client becomes :class:`StoreUnavailable` here. Key names and records are :mod:`policies.wire`'s; what
to do with them is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio
from pydantic import BaseModel, ValidationError
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway import logs
from gateway.errors import StoreUnavailable
from gateway.hosts import HostNumbers
from gateway.permits import SETTLE_S, TENURE_S, TTL_S, Grant, Wish, payload
from policies.journal import Trail
from policies.limits import SHARE, Claim, Settled
from policies.manifest import HostFacts
from policies.replica import Replica
from policies.tasks import MAX_TASKS, TASK_TTL_S, Progress, Task
from policies.tracing import Span
from policies.wire import RECENT, REPORT_TTL_MS, SCHEMA, Failure, GatewayReport, Hint, HostReport, Keys, Operation, StageKey

T = TypeVar("T", bound=BaseModel)

# Read with the code: later this process may have given up the right to read where it lies, in root's home for one.
_SCRIPTS = ("operations.lua", "limits.lua", "permits.lua")
_OPERATIONS, _LIMITS, _PERMITS = (Path(__file__).with_name(name).read_text() for name in _SCRIPTS)
_CALL_S = 5.0
"""The longest that one exchange with the store may take."""


class WrongSchema(Exception):
    """Another version of the software wrote this store."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The records as they were at one moment."""

    seq: int
    replicas: Mapping[str, Replica]
    failures: Mapping[str, tuple[Failure, float] | None]
    """model -> the failure and its remaining seconds."""


class Store:
    """Calls to one installation's keys. All methods but :meth:`close` raise :class:`StoreUnavailable`.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        namespace: prefix of every key.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self.keys = Keys(namespace)
        common: dict[str, Any] = {"decode_responses": True, "socket_connect_timeout": _CALL_S, "socket_timeout": _CALL_S}
        self._client: Any = redis.asyncio.from_url(url, retry=Retry(NoBackoff(), 1), **common)
        # A subscription must not reconnect behind our back: messages would be lost and nothing read again.
        self._listener: Any = redis.asyncio.from_url(url, retry=Retry(NoBackoff(), 0), health_check_interval=5, **common)
        self._script = self._client.register_script(_OPERATIONS)
        self._budgets = self._client.register_script(_LIMITS)
        self._permits = self._client.register_script(_PERMITS)

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()
            await self._listener.aclose()

    async def check_schema(self) -> None:
        """Claim an empty store for this schema, or make sure that it has it.

        Raises:
            WrongSchema: it has another one.
        """
        with _translated():
            await self._client.set(self.keys.schema, SCHEMA, nx=True)
            found = await self._client.get(self.keys.schema)
        if found != SCHEMA:
            raise WrongSchema(
                f"the store's keys under {self.keys.prefix!r} have schema {found}, this gateway speaks {SCHEMA}; "
                "stop the other version, or set store.namespace to a new name"
            )

    @contextlib.asynccontextmanager
    async def hints(self) -> AsyncIterator[AsyncIterator[Hint]]:
        """Subscribe to the events; yields them until the connection is lost."""
        pubsub = self._listener.pubsub(ignore_subscribe_messages=True)
        try:
            with _translated():
                await pubsub.subscribe(self.keys.events)
            yield _listen(pubsub)
        finally:
            with contextlib.suppress(RedisError, OSError):
                await pubsub.aclose()

    async def snapshot(self, models: Sequence[str]) -> Snapshot:
        """All replica records and the models' failures, read in one transaction."""
        pipe = self._client.pipeline(transaction=True)
        pipe.get(self.keys.seq)
        pipe.hgetall(self.keys.replicas)
        for model in models:
            pipe.get(self.keys.failure(model))
            pipe.pttl(self.keys.failure(model))
        with _translated():
            seq, records, *failures = await pipe.execute()
        replicas = {id: record for id, text in records.items() if (record := _decoded(Replica, text)) is not None}
        found: dict[str, tuple[Failure, float] | None] = {}
        for model, text, ttl_ms in zip(models, failures[::2], failures[1::2], strict=True):
            failure = _decoded(Failure, text) if text else None
            found[model] = None if failure is None else (failure, max(ttl_ms, 0) / 1000)
        return Snapshot(int(seq or 0), replicas, found)

    async def stages(self, model: str) -> Mapping[StageKey, Sequence[float]]:
        """What each stage of the model's latest starts took, in seconds, the newest last."""
        with _translated():
            found: dict[str, str] = await self._client.hgetall(self.keys.stages(model))
        return {key: samples for field, text in found.items() if (key := StageKey.of(field)) and (samples := _numbers(text))}

    async def report(self, report: GatewayReport, suspicions: Mapping[str, str], *, edge: bool) -> None:
        """Renew this gateway's report and pass suspicions on; ``edge``: tell everyone that it changed."""
        pipe = self._client.pipeline(transaction=True)
        pipe.set(self.keys.gateway(report.id), report.model_dump_json(), px=REPORT_TTL_MS)
        pipe.sadd(self.keys.gateways, report.id)
        if suspicions:
            pipe.hset(self.keys.suspects, mapping=dict(suspicions))
        if edge:
            pipe.publish(self.keys.events, Hint(gateway=report.id).model_dump_json())
        with _translated():
            await pipe.execute()

    async def withdraw(self, id: str) -> None:
        """This gateway is no more."""
        pipe = self._client.pipeline(transaction=True)
        pipe.delete(self.keys.gateway(id))
        pipe.srem(self.keys.gateways, id)
        pipe.publish(self.keys.events, Hint(gateway=id).model_dump_json())
        with _translated():
            await pipe.execute()

    async def reports(self) -> Mapping[str, GatewayReport]:
        """Every live gateway's report; the names of those that are gone are removed."""
        found, gone = await self._members(self.keys.gateways, self.keys.gateway)
        if gone:
            with _translated():
                await self._client.srem(self.keys.gateways, *gone)
        reports = {id: _decoded(GatewayReport, text) for id, text in found.items()}
        return {id: report for id, report in reports.items() if report is not None}

    async def hosts(self) -> Sequence[HostReport]:
        """Every live restorer's report."""
        found, _ = await self._members(self.keys.hosts, self.keys.host)
        reports = [_decoded(HostReport, text) for _, text in sorted(found.items())]
        return [report for report in reports if report is not None]

    async def silent(self) -> set[str]:
        """Hosts that have reported and do not any more."""
        _, gone = await self._members(self.keys.hosts, self.keys.host)
        return set(gone)

    async def facts(self) -> Mapping[str, HostFacts]:
        """What each live restorer's host is."""
        found, _ = await self._members(self.keys.hosts, self.keys.facts)
        facts = {name: _decoded(HostFacts, text) for name, text in sorted(found.items())}
        return {name: one for name, one in facts.items() if one is not None}

    async def numbers(self) -> Mapping[str, HostNumbers]:
        """What each host has counted, and what it says of itself if it still reports. One whose counts are gone is forgotten."""
        reports, silent = await self._members(self.keys.hosts, self.keys.host)
        names = [*reports, *silent]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(self.keys.tally(name))
        with _translated():
            tallies = dict(zip(names, await pipe.execute(), strict=True))
            gone = [name for name in silent if not tallies[name]]
            if gone:
                await self._client.srem(self.keys.hosts, *gone)
        found = {}
        for name in names:
            report = _decoded(HostReport, reports[name]) if name in reports else None
            gauges = {"host_up": 0.0} if report is None else {**report.gauges, "host_up": 1.0}
            counts = {field: number for field, text in tallies[name].items() if (number := _number(text)) is not None}
            found[name] = HostNumbers(report is not None, counts, gauges)
        return {name: found[name] for name in names if name not in gone}

    async def take_spans(self, most: int) -> Sequence[Span]:
        """Spans that restorers have left, the oldest first; nobody else gets them any more."""
        with _translated():
            texts = await self._client.lpop(self.keys.spans, most)
        return [span for text in texts or () if (span := _decoded(Span, text)) is not None]

    async def operation(self, id: str) -> Operation | None:
        with _translated():
            text = await self._client.get(self.keys.operation(id))
        return _decoded(Operation, text) if text else None

    async def create_task(self, task: Task) -> bool:
        """Ask one host's restorer; False when too much waits for it already."""
        keys = self.keys
        with _translated():
            if await self._client.llen(keys.host_tasks(task.host)) >= MAX_TASKS:
                return False
            pipe = self._client.pipeline(transaction=True)
            pipe.set(keys.task(task.id), task.model_dump_json(), ex=TASK_TTL_S)
            pipe.lpush(keys.host_tasks(task.host), task.id)
            pipe.expire(keys.host_tasks(task.host), TASK_TTL_S)
            pipe.publish(keys.events, Hint(task=task.id).model_dump_json())
            await pipe.execute()
        return True

    async def task(self, id: str) -> Task | None:
        with _translated():
            text = await self._client.get(self.keys.task(id))
        return _decoded(Task, text) if text else None

    async def note(self, id: str, created_ms: int) -> None:
        """This operation or task shall be listed among the recent ones."""
        pipe = self._client.pipeline(transaction=True)
        pipe.zadd(self.keys.recent, {id: created_ms})
        pipe.zremrangebyrank(self.keys.recent, 0, -RECENT - 1)
        with _translated():
            await pipe.execute()

    async def recent(self, most: int) -> tuple[Sequence[Operation], Sequence[Task]]:
        """The latest operations and tasks that are still remembered, the newest first."""
        with _translated():
            ids = await self._client.zrevrange(self.keys.recent, 0, most - 1)
            both = [self.keys.operation(id) for id in ids] + [self.keys.task(id) for id in ids]
            texts = await self._client.mget(both) if both else []
        operations = [_decoded(Operation, text) for text in texts[: len(ids)] if text]
        tasks = [_decoded(Task, text) for text in texts[len(ids) :] if text]
        return [one for one in operations if one is not None], [one for one in tasks if one is not None]

    async def trails(self) -> Sequence[Trail]:
        """The last attempts of all hosts that have ended, the latest first."""
        with _translated():
            texts = await self._client.lrange(self.keys.journal, 0, -1)
        return [one for text in texts if (one := _decoded(Trail, text)) is not None]

    async def progress(self, hosts: Sequence[str]) -> Sequence[Progress]:
        """What goes on at these hosts."""
        pipe = self._client.pipeline(transaction=False)
        for host in hosts:
            pipe.hvals(self.keys.progress(host))
        with _translated():
            found = await pipe.execute() if hosts else []
        told = [_decoded(Progress, text) for texts in found for text in texts]
        return sorted((one for one in told if one is not None), key=lambda one: one.begun_ms)

    async def run(self, command: str, model: str, arguments: Mapping[str, object], *, group: str = "") -> tuple[str, str]:
        """Run one command of operations.lua; its verdict, and what comes with it as JSON (or nothing)."""
        keys = self.keys
        prefixes = {
            "operation_key": keys.operation(""),
            "job_key": keys.job(""),
            "host_jobs_key": keys.host_jobs(""),
            "host_key": keys.host(""),
            "starts_key": keys.starts(""),
            "tenure_key": keys.tenure(""),
        }
        own = [keys.starts(model), keys.active(model), keys.failure(model)]
        with _translated():
            verdict, text = await self._script(
                keys=[keys.replicas, keys.jobs, *own, keys.events, keys.group(group), keys.preloaded],
                args=[command, json.dumps({**arguments, **prefixes, "model": model})],
            )
        return verdict, text

    async def settle(self, claims: Sequence[Claim]) -> Sequence[Settled]:
        """Settle tenants' budgets (limits.lua): one answer for each claim."""
        arguments = [
            {**claim._asdict(), "requests": claim.requests or 0, "tokens": claim.tokens or 0, "share": SHARE} for claim in claims
        ]
        with _translated():
            answers = await self._budgets(
                keys=[self.keys.events, *(self.keys.budget(claim.tenant) for claim in claims)], args=[json.dumps(arguments)]
            )
        return [Settled(int(granted), float(requests), float(tokens)) for granted, requests, tokens in answers]

    async def lend(
        self, gateway: str, number: int, wishes: Sequence[Wish], *, spare: bool, leave: bool, dead: str = ""
    ) -> Sequence[Grant | None]:
        """Settle this gateway's part of pools of permits (permits.lua): one grant for each wish. ``dead``: one that left
        without a word."""
        arguments = {
            "gateway": gateway,
            "number": number,
            "ttl_ms": round(TTL_S * 1000),
            "settle_ms": round(SETTLE_S * 1000),
            "tenure_ms": round(TENURE_S * 1000),
            "spare": int(spare),
            "leave": leave,
            "dead": dead,
            "pools": payload(wishes),
        }
        with _translated():
            answer = await self._permits(
                keys=[self.keys.events, *(self.keys.permits(wish.name) for wish in wishes)], args=[json.dumps(arguments)]
            )
        return [None if "stale" in grant else Grant(**grant) for grant in json.loads(answer)]

    async def _members(self, index: str, key: Any) -> tuple[dict[str, str], list[str]]:
        """Members of a set whose own key is alive (with its value), and those whose key has expired."""
        with _translated():
            members: list[str] = sorted(await self._client.smembers(index))
            values = await self._client.mget([key(member) for member in members]) if members else []
        found = dict(zip(members, values, strict=True))
        return {m: text for m, text in found.items() if text}, [m for m, text in found.items() if not text]


async def _listen(pubsub: redis.asyncio.client.PubSub) -> AsyncIterator[Hint]:
    while True:
        with _translated():
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=_CALL_S)
        if message is not None and message["type"] == "message":
            hint = _decoded(Hint, message["data"])
            if hint is not None:
                yield hint


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, asyncio.IncompleteReadError) as error:
        _heed_cancellation()
        raise StoreUnavailable(f"The store does not answer: {error}", retry_after_s=1.0) from error
    _heed_cancellation()


def _heed_cancellation() -> None:
    """The client polls its sockets with timeouts of zero, and such a timeout can swallow a cancellation that comes just then."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _numbers(text: str) -> Sequence[float]:
    """A JSON list of numbers; empty when it is none: an estimate can do without."""
    try:
        return [float(number) for number in json.loads(text)]
    except (ValueError, TypeError):
        logs.warning("unreadable durations", reason=text[:100])
        return []


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _decoded(kind: type[T], text: str) -> T | None:
    """A record, or None when it is not one: somebody else's mistake must not stop this gateway."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        logs.warning("unreadable record", kind=kind.__name__, reason=str(error).splitlines()[0])
        return None
