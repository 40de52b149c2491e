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
from policies.series import SERIES

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
`GET /metrics` of any gateway worker, in Prometheus' text format, or as OpenMetrics with exemplars (the trace of one request for a
bucket of a histogram) for who asks for it, as Prometheus does. It needs no key unless `metrics.keys` has some; `rewake key` makes
one, which Prometheus sends by `authorization: {credentials_file: ...}`. With `metrics.address` it is there alone, by plain HTTP.

Labels are bounded: models and tenants of the configuration (`_other` for all else), slots, hosts; never incarnations, snapshots,
requests or keys. Times are in seconds, sizes in bytes.
"""
_OURS = "All workers of a host answer for each other, so one scrape for each host is whole."
_THEIRS = """
What restorers count travels through the store and is shown by every gateway. Counters live in the store, so that neither a
restorer's nor a gateway's end loses them; a host that has been silent for a day is forgotten. Who scrapes several gateways sees
each number several times: take the maximum over them.

`result` of `rewake_restores_total` is the state that a start ended in, or `fell_back` (a restore failed and its start went on
cold), or `retried`; its `reason` is `canary`, `snapshot`, `host`, `tool`, `transient`, `environment`, `cancelled`, or nothing.
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
    ours = [_series(*family) for family in _families(Metrics(["m"], version="0")._registry)]
    theirs = [
        _series(f"rewake_{name}{_suffix(series.kind)}", series.kind, ("host", *series.labels), series.text)
        for name, series in SERIES.items()
    ]
    heads = ("series", "type", "labels", "")
    parts = ["# Metrics", _METRICS.strip(), "## Of gateways", _OURS.strip(), table(heads, ours)]
    parts += ["## Of hosts", _THEIRS.strip(), table(heads, theirs)]
    return "\n\n".join(parts) + "\n"


def _series(name: str, kind: str, labels: tuple[str, ...], said: str) -> tuple[str, ...]:
    return code(name), kind, ", ".join(labels), cell(prose(said))


def _suffix(kind: str) -> str:
    return "_total" if kind == "counter" else ""


def _families(registry: CollectorRegistry) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name as it is scraped, type, labels, help of each series."""
    for collector in registry._collector_to_names:
        for family in collector.collect():
            yield f"{family.name}{_suffix(family.type)}", family.type, getattr(collector, "_labelnames", ()), family.documentation
