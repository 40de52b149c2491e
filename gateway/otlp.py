"""Sends spans to a collector, by OTLP over HTTP. The one module that knows OpenTelemetry; loaded only when something is traced.

A thread of its own makes and sends them, many at a time. What waits is bounded, and a collector that is slow, or is none, costs
spans, which are counted: never a request.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - as netrc: used when something is sent, and it may lie where only root can read
import logging
import netrc  # noqa: F401
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway import logs
from gateway.version import version
from policies.observing import Tracing
from policies.tracing import Context, Span

_GATHER_S = 2.0
_BATCH = 512
_TIMEOUT_S = 5.0
_KINDS = {kind.name.lower(): kind for kind in SpanKind}
# It would say in words of its own what is said here already, once for each try.
logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def preload() -> None:
    """Load what the libraries would load when they are first used: it may lie where only root can read.

    Raises:
        ImportError: something of it is not installed.
    """
    exporter = OTLPSpanExporter("http://127.0.0.1:9/", timeout=0.001)
    # Nothing is sent: the list is empty, and encoded all the same.
    encode_spans([]).SerializeToString()
    exporter.shutdown()  # type: ignore[no-untyped-call]


class Sender:
    """Sends for one process; its thread lives from :meth:`start` to :meth:`close`.

    Args:
        id: of this process, among those of one service.
        report: called in any thread with ``exported``, ``dropped`` or ``failed``, and the number of spans (of requests, for
            ``dropped``).
    """

    def __init__(self, settings: Tracing, id: str, report: Callable[[str, int], None]) -> None:
        self._bound = settings.queue
        self._report = report
        self._resource = Resource.create(
            {"service.name": "rewake-gateway", "service.version": version(), "service.instance.id": id}
        )
        self._scope = InstrumentationScope("rewake", version())
        self._exporter = OTLPSpanExporter(settings.endpoint, headers=dict(settings.headers), timeout=_TIMEOUT_S)
        self._waiting: deque[Callable[[], Sequence[Span]]] = deque()
        self._some = threading.Event()
        self._ending = threading.Event()
        self._failing = False
        # A daemon: a collector that does not answer must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, spans: Callable[[], Sequence[Span]]) -> None:
        """Take in what is to be sent."""
        if len(self._waiting) >= self._bound:
            self._report("dropped", 1)
            return
        self._waiting.append(spans)
        if not self._some.is_set():
            self._some.set()

    def close(self, within_s: float = 2.0) -> None:
        """Send what waits, and end; what could not be sent by then is lost. Blocks for so long at most."""
        self._ending.set()
        self._some.set()
        if self._thread.is_alive():
            self._thread.join(within_s)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        while not self._ending.is_set():
            self._some.wait()
            self._ending.wait(_GATHER_S)
            self._some.clear()
            batch: list[ReadableSpan] = []
            for span in self._spans():
                batch.append(span)
                if len(batch) >= _BATCH:
                    self._send(batch)
                    batch = []
            if batch:
                self._send(batch)

    def _spans(self) -> Iterator[ReadableSpan]:
        while self._waiting:
            yield from map(self._written, self._waiting.popleft()())

    def _send(self, batch: Sequence[ReadableSpan]) -> None:
        try:
            well = self._exporter.export(batch) is SpanExportResult.SUCCESS
            reason = "it refused them, or did not answer"
        except Exception as error:  # whatever its HTTP client raises
            well, reason = False, str(error)
        self._report("exported" if well else "failed", len(batch))
        if not well and not self._failing:
            logs.warning("spans cannot be sent to the collector; they are dropped until it answers", reason=reason)
        elif well and self._failing:
            logs.info("the collector answers again")
        self._failing = not well

    def _written(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.context, remote=False),
            parent=None if span.parent is None else _context(span.parent, remote=True),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, timestamp=at) for name, at in span.events.items()],
            links=[Link(_context(link, remote=True)) for link in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.begun_ns,
            end_time=span.ended_ns,
            instrumentation_scope=self._scope,
        )


def _context(context: Context, *, remote: bool) -> SpanContext:
    return SpanContext(int(context.trace, 16), int(context.span, 16), remote, TraceFlags(context.sampled))
