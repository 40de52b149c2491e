"""Which requests are traced, and what their spans say: made of a request's facts when it has ended, not on its way.

A request that nobody traces pays for one comparison. Ids alone are drawn early, since replicas and starts must name them. Spans
speak of generative AI as OpenTelemetry's conventions do. Knows no tracing library: :mod:`gateway.otlp` has the one that sends.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from gateway import logs, spanwire, whereabouts
from gateway.errors import StoreUnavailable
from gateway.sampling import Sampler
from gateway.trail import Trace, Trail
from policies.config import Config, Model
from policies.observing import Tracing
from policies.replica import Replica
from policies.tracing import Context, Span
from policies.wire import Operation

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Names of operations by route, where the conventions have one."""
_PERIOD_S = 1.0
_BATCH = 500
_MAX_ASKED = 64
_SECOND_NS = 1_000_000_000
_ODD = 1 << 256 | 1 << 192 | 1 << 128 | 1
"""Three ids of spans and one of a trace, next to each other: none of them is 0, which would be no id."""


class Missing(Exception):
    """Tracing is asked for, and its libraries are not there."""


class Outlet(Protocol):
    """Where finished requests and spans go; never waits."""

    def put(self, spans: Callable[[], Iterable[bytes]]) -> None:
        """Send these, as :mod:`gateway.spanwire` writes them; made when it suits, dropped when too many wait."""

    def start(self) -> None: ...

    def close(self) -> None: ...


class Source(Protocol):
    """The store, as far as it is asked here."""

    async def take_spans(self, most: int) -> Sequence[Span]:
        """Spans that restorers left there; each is given once. Raises StoreUnavailable."""


def tracer(config: Config, id: str, report: Callable[[str, int], None]) -> Tracer | None:
    """The traces of this process, if the configuration says where they go. Needs a running event loop.

    Args:
        report: called with ``exported``, ``dropped`` or ``failed``, and how many.

    Raises:
        Missing: they are not installed.
    """
    sender = load(config)
    if sender is None:
        return None
    return Tracer(config.tracing, sender(config.tracing, id, report), address=(config.gateway.host, config.gateway.port))


def load(config: Config) -> Callable[..., Outlet] | None:
    """Load what sends spans, where the configuration wants that; a process does so before it gives root up.

    Raises:
        Missing: its libraries are not installed.
    """
    if config.tracing.endpoint is None:
        return None
    try:
        module = importlib.import_module("gateway.otlp")
        module.preload()
    except ImportError as error:
        raise Missing(
            f"tracing.endpoint is set, and {error.name} is not installed: pip install 'rewake[tracing]', or leave tracing out"
        ) from None
    sender: Callable[..., Outlet] = module.Sender
    return sender


class Tracer:
    """The traces of one gateway process.

    Args:
        address: host and port at which clients reach it.
    """

    def __init__(self, settings: Tracing, out: Outlet, *, address: tuple[str, int]) -> None:
        self.sampler = Sampler(settings.sample)
        self._out = out
        self._address = address
        self._clock = asyncio.get_running_loop().time
        self._random = random.Random()
        self._held: dict[str, dict[Trail, None]] = {}
        self._asked: dict[str, tuple[Context, Context]] = {}

    def begin(self, given: str) -> Trace | None:
        """The trace of a request that came with this ``traceparent``, empty: with none; None: it is in no trace."""
        parent = Context.of(given)
        if parent is None:
            return self.drawn() if self.sampler.chosen() else None
        return self._new(parent) if parent.sampled else None

    def drawn(self) -> Trace:
        """The trace of a request that the sampler has chosen."""
        return self._new(None)

    def held(self, headers: Mapping[str, str], trail: Trail) -> None:
        """It has to wait: whoever waits is traced, unless its client said no."""
        if trail.trace is None:
            parent = Context.of(headers.get("traceparent"))
            if parent is not None and not parent.sampled:
                return
            trail.trace = self._new(parent)
        if trail.trace.held_at is None:
            trail.trace.held_at = self._clock()
        self._held.setdefault(trail.model or "", {})[trail] = None

    def released(self, trail: Trail, replica: Replica | None) -> None:
        """It waits no more; ``replica``: what it waited for, if it came."""
        self._held.get(trail.model or "", {}).pop(trail, None)
        if trail.trace is not None and replica is not None:
            trail.trace.cause = Context.of(replica.trace)

    def dispatched(self, trail: Trail, replica: Replica, spec: Model) -> None:
        """It goes to this replica."""
        assert trail.trace is not None
        trail.trace.sent_at = self._clock()
        address, port, _ = whereabouts.way(replica) or (replica.address, replica.port, False)
        trail.trace.peer = (address, port, spec.engine.kind)

    def ended(self, trail: Trail) -> None:
        """Whatever became of it."""
        if trail.trace is not None:
            self._out.put(lambda: _request(trail, self._address))

    def asking(self, model: str) -> str:
        """The ``traceparent`` of an operation that is about to be asked for: it is part of the trace of who waits longest."""
        first = next(iter(self._held.get(model, ())), None)
        if first is None or first.trace is None:
            return ""
        own = Context(first.trace.id, self._span_id())
        if len(self._asked) >= _MAX_ASKED:
            self._asked.clear()
        self._asked[own.header] = own, Context(first.trace.id, first.trace.hold)
        return own.header

    def asked(self, operation: Operation, created: bool) -> None:
        """What came of it; one that joined another's is that other's."""
        found = self._asked.pop(operation.trace, None)
        if found is not None and created:
            span = _operation(operation, *found)
            self._out.put(_constant((span,)))

    async def run(self, source: Source) -> None:
        """Send what restorers leave in the store, until cancelled. Several gateways share it."""
        self._out.start()
        while True:
            try:
                spans = await source.take_spans(_BATCH)
            except StoreUnavailable as error:
                logs.warning("no spans taken from the store", reason=str(error))
                spans = ()
            if spans:
                self._out.put(_constant(spans))
            if len(spans) < _BATCH:
                await asyncio.sleep(_PERIOD_S)

    def close(self) -> None:
        """Send what waits, and end. Blocks for a moment."""
        self._out.close()

    def _new(self, parent: Context | None) -> Trace:
        # One draw for all ids.
        drawn = f"{self._random.getrandbits(320) | _ODD:080x}"
        trace = drawn[48:] if parent is None else parent.trace
        return Trace(Context(trace, drawn[:16]), parent, drawn[16:32], drawn[32:48])

    def _span_id(self) -> str:
        return f"{self._random.getrandbits(64) or 1:016x}"


def _constant(spans: Sequence[Span]) -> Callable[[], Iterable[bytes]]:
    return lambda: map(spanwire.span, spans)


def _request(trail: Trail, address: tuple[str, int]) -> Iterator[bytes]:
    """Its own span, that of its being held, and that of its being answered by a replica."""
    trace, now, now_ns = trail.trace, trail.since + trail.seconds, int(trail.ended * _SECOND_NS)
    assert trace is not None
    begun_ns = now_ns - int(trail.seconds * _SECOND_NS)
    facts, events, asked = _facts(trail), _events(trail, begun_ns), _asked(trail)
    yield spanwire.written(
        name=f"{trail.method} {trail.route}",
        context=trace.own,
        parent=trace.parent,
        kind="server",
        begun_ns=begun_ns,
        ended_ns=now_ns,
        attributes={
            "http.request.method": trail.method,
            "http.route": trail.route,
            "http.response.status_code": trail.status,
            "server.address": address[0],
            "server.port": address[1],
            "client.address": trail.client,
            "gen_ai.provider.name": "rewake",
            "rewake.request_id": trail.id,
            **facts,
            **asked,
        },
        events=events,
        error=trail.code if trail.status >= 400 or trail.code else "",
    )

    def at(moment: float) -> int:
        return now_ns - int((now - moment) * _SECOND_NS)

    if trace.held_at is not None:
        until = trace.sent_at if trace.sent_at is not None else now
        yield spanwire.written(
            name="hold",
            context=Context(trace.id, trace.hold),
            parent=trace.own,
            begun_ns=at(trace.held_at),
            ended_ns=at(until),
            attributes={"gen_ai.request.model": trail.model or "", "rewake.waited_s": trail.waited_s},
            links=() if trace.cause is None else (trace.cause,),
            error="" if trace.sent_at is not None else trail.code,
        )
    if trace.sent_at is not None:
        host, port, engine = trace.peer
        yield spanwire.written(
            name=f"{asked.get('gen_ai.operation.name', 'request')} {trail.model}",
            context=Context(trace.id, trace.asking),
            parent=trace.own,
            kind="client",
            begun_ns=at(trace.sent_at),
            ended_ns=now_ns,
            attributes={"server.address": host, "server.port": port, "gen_ai.provider.name": engine, **facts, **asked},
            events=events,
            error=trail.code,
        )


def _asked(trail: Trail) -> dict[str, str]:
    said = {"gen_ai.request.model": trail.asked} if trail.asked else {}
    operation = OPERATIONS.get(trail.route)
    return {**said, "gen_ai.operation.name": operation} if operation else said


def _facts(trail: Trail) -> dict[str, str | int | float | bool]:
    """What is known of its answer; what is not is left out."""
    found = {
        "error.type": trail.code or None,
        "gen_ai.response.model": trail.model,
        "gen_ai.usage.input_tokens": trail.prompt_tokens,
        "gen_ai.usage.output_tokens": trail.completion_tokens,
        "rewake.tenant": trail.tenant or None,
        "rewake.replica": trail.replica or None,
        "rewake.incarnation": trail.incarnation or None,
        "rewake.start": trail.start,
        "rewake.retries": trail.retries or None,
        "rewake.stream": trail.stream,
    }
    return {name: value for name, value in found.items() if value is not None}


def _events(trail: Trail, begun_ns: int) -> dict[str, int]:
    return {} if trail.first_byte_s is None else {"first byte": begun_ns + int(trail.first_byte_s * _SECOND_NS)}


def _operation(operation: Operation, own: Context, parent: Context) -> Span:
    begun_ns = operation.created_ms * 1_000_000
    return Span(
        name=f"{operation.kind} {operation.model}",
        context=own,
        parent=parent,
        kind="producer",
        begun_ns=begun_ns,
        ended_ns=max(begun_ns, time.time_ns()),
        attributes={
            "gen_ai.request.model": operation.model,
            "rewake.operation": operation.id,
            "rewake.reason": operation.reason,
            "rewake.target": operation.target,
        },
    )
