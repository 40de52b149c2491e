"""A collector of the tests: takes OTLP over HTTP, decodes the real protobuf, keeps the spans. May refuse, hang, or be gone."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class Received:
    """A span as it came, ids in hexadecimal."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    events: dict[str, int]
    error: str
    resource: dict[str, Any]


@dataclass
class Collector:
    """What it got, and how it answers."""

    spans: list[Received] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    url: str = ""

    def named(self, name: str) -> list[Received]:
        return [span for span in list(self.spans) if span.name == name]

    def trace(self, id: str) -> list[Received]:
        return [span for span in list(self.spans) if span.trace == id]

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            name=span.name,
                            trace=span.trace_id.hex(),
                            id=span.span_id.hex(),
                            parent=span.parent_span_id.hex(),
                            kind=span.kind,
                            begun_ns=span.start_time_unix_nano,
                            ended_ns=span.end_time_unix_nano,
                            attributes=_values(span.attributes),
                            links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                            events={event.name: event.time_unix_nano for event in span.events},
                            error=span.status.message if span.status.code == 2 else "",
                            resource=_values(resource.resource.attributes),
                        )
                    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """One on a port of its own."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.headers.append({name.lower(): value for name, value in self.headers.items()})
            if kept.status == 200:
                kept.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(kept.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
