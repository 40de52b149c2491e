"""The pages of what the gateway offers: its routes, its errors, its series; each read off the table that the code works by."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from deploy.site.text import cell, code, prose, table
from gateway import errors, openapi
from gateway.metrics import Metrics
from gateway.routes import TABLE, Route

_ROUTES = """
All that there is; a slash at the end is ignored, anything else is 404 and says what was probably meant, and an engine's control
routes are reached by nobody. The same as a machine reads it: [openapi.json](openapi.json), and `GET /openapi.json` of a gateway.
`HEAD` is answered where `GET` is the gateway's own, `OPTIONS` everywhere with 204, without a key.
[What a client sees](../explanation/requests.md) says what happens on the way.
"""
_ERRORS = """
Errors of the gateway itself carry `x-rewake-error: CODE`; any other comes from the engine, unchanged. They are shaped as
OpenAI's: `{"error": {"message", "type", "param", "code"}}`; on `/v1/messages` as Anthropic's, where what is 503 with a promise is
529 `overloaded_error`.

`Retry-After` is between 1 and 60 seconds: the measured estimate, times 1 to 1.25 so that clients do not come back together;
`retry-after-ms` is the same. SDKs obey `x-should-retry`; where it is absent, the client's own rules decide.
"""
_METRICS = """
`GET /metrics` of any worker answers for all workers of its host. Labels are bounded: models of the configuration, slots, tenants,
codes; never incarnations, requests or keys. Times are in seconds, sizes in bytes.
"""
_MODEL = {"body": "in the body", "either": "in the body, `x-rewake-model` or `?model=`", "hint": "`x-rewake-model` or `?model=`"}
_AUTH = {"tenant": "tenant's key", "admin": "admin token", "none": "anybody"}


def routes() -> str:
    """Markdown."""
    parts = [
        "# Routes",
        _ROUTES.strip(),
        "## Served by replicas",
        table(("", "", "the model is named", ""), [_served(route) for route in TABLE if route.serves in ("replica", "socket")]),
        "## Answered by the gateway",
        table(("", "", "who may"), [_own(route) for route in TABLE if route.serves not in ("replica", "socket")]),
    ]
    return "\n\n".join(parts) + "\n"


def _served(route: Route) -> tuple[str, ...]:
    facts = {
        "event streams": route.events,
        "forms too": route.multipart,
        "starts nothing": not route.wakes,
        "WebSocket": route.serves == "socket",
        "Anthropic's errors": route.dialect == "anthropic",
    }
    return code(f"{route.method} {route.name}"), route.summary, _MODEL[route.model], ", ".join(k for k, v in facts.items() if v)


def _own(route: Route) -> tuple[str, ...]:
    return code(f"{route.method} {route.name}"), route.summary, _AUTH[route.auth]


def description() -> str:
    """OpenAPI, as JSON. The version is the running gateway's to say."""
    document = json.loads(json.dumps(openapi.document()))
    document["info"]["version"] = "0"
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def error_page() -> str:
    """Markdown."""
    # Some have the code of their base, for another reason: the base's words say both.
    made = {kind.code: kind for kind in reversed([*_kinds(errors.GatewayError)])}
    kinds = sorted(made.values(), key=lambda kind: (-kind.status, kind.code))
    promises = {None: "", True: "true", False: "false"}
    rows = [
        (code(kind.status), code(kind.code), cell(prose(_said(kind))), promises[kind.should_retry], code(kind.type))
        for kind in kinds
    ]
    faults = errors.FAULTS.items()
    more = [(code(400), code(each), cell(f"{said}."), "false", code("invalid_request_error")) for each, said in faults]
    parts = [
        "# Errors",
        _ERRORS.strip(),
        table(("status", "code", "when", "`x-should-retry`", "type"), [*rows, *more]),
    ]
    return "\n\n".join(parts) + "\n"


_GENERIC = (errors.InvalidRequest, errors.MissingModel, errors.Unavailable)


def _kinds(kind: type[errors.GatewayError]) -> Iterator[type[errors.GatewayError]]:
    if kind not in _GENERIC:
        yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


def _said(kind: type[errors.GatewayError]) -> str:
    said = (inspect.getdoc(kind) or "").split("\n\n")[0]
    return said.removeprefix(f"{kind.status}: ").removeprefix(f"{kind.status} ")


def metrics() -> str:
    """Markdown."""
    made = Metrics(["m"], version="0")
    rows = []
    for family in _families(made._registry):
        series, kind, labels, said = family
        rows.append((code(series), kind, ", ".join(labels), cell(prose(said))))
    parts = [
        "# Metrics",
        _METRICS.strip(),
        table(("series", "type", "labels", ""), rows),
    ]
    return "\n\n".join(parts) + "\n"


def _families(registry: CollectorRegistry) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name as it is scraped, type, labels, help of each series."""
    for collector in registry._collector_to_names:
        for family in collector.collect():
            suffix = "_total" if family.type == "counter" else ""
            yield f"{family.name}{suffix}", family.type, getattr(collector, "_labelnames", ()), family.documentation
