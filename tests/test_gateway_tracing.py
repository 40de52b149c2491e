"""One trace from the client's request to its first byte, over both paths; and no request pays for a collector that is away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
import redis.asyncio
from conftest import eventually
from fake_replica import Exchange, Fleet, answer, configuration, delta, replica_server, serving
from otlp_receiver import Collector, Received, collector

from gateway.tracing import Missing, load
from gateway.trail import Trail
from policies.config import Config
from policies.observing import Tracing
from policies.replica import Stage
from policies.tracing import Context, Span
from policies.wire import Job, JobKind, OperationState
from restorer.coordination.jobs import Claim, JobStore, Outcome
from restorer.records import spans

CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = CLIENT[:-1] + "0"
SENT_S = 30.0
"""On a busy machine the libraries alone take seconds to load."""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def traced(url: str, **settings: Any) -> Config:
    return configuration().model_copy(update={"tracing": Tracing(endpoint=url, **settings)})


async def stream(exchange: Exchange) -> None:
    await exchange.begin_events()
    await exchange.event(delta("a"))
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end()


def chain(found: Collector, span: Received) -> list[str]:
    """Names from a span up to its root, as far as it is known."""
    by_id = {one.id: one for one in found.spans}
    names = []
    while span is not None:
        names.append(span.name)
        span = by_id.get(span.parent)  # type: ignore[assignment]
    return names


async def test_a_request_is_part_of_its_clients_trace_and_the_replicas_is_part_of_it(
    store: redis.asyncio.Redis, store_server: str
) -> None:
    with collector() as found:
        async with replica_server() as fake, serving(store_server, traced(found.url, sample=0.0)) as served:
            await Fleet(store).admit(fake)
            await eventually(lambda: served.gateway.registry.available("m"))
            # Who is the first may have to wait for a slot to be lent, and whoever waits is traced, unless its client says no.
            await served.chat(headers={"traceparent": UNSAMPLED})
            await served.chat(headers={"traceparent": CLIENT, "tracestate": "vendor=1"})
            await served.chat()
            await eventually(lambda: len(found.spans) == 2, within=SENT_S)
            sent = [exchange.header("traceparent") for exchange in fake.requests]
            assert fake.requests[1].header("tracestate") == "vendor=1"
        root, asking = found.named("POST /v1/chat/completions")[0], found.named("chat m")[0]
        assert (root.trace, root.parent) == (TRACE, "00f067aa0ba902b7")
        assert (asking.trace, asking.parent) == (TRACE, root.id)
        assert sent == [UNSAMPLED, f"00-{TRACE}-{asking.id}-01", None]
        assert root.kind == 2
        assert asking.kind == 3
        assert root.attributes["http.response.status_code"] == 200
        assert asking.attributes["gen_ai.operation.name"] == "chat"
        assert asking.attributes["gen_ai.request.model"] == "m"
        assert asking.attributes["gen_ai.provider.name"] == "http"
        assert asking.attributes["server.port"] == fake.port
        assert asking.attributes["rewake.start"] == "restored"
        assert root.begun_ns <= asking.begun_ns <= asking.events["first byte"] <= asking.ended_ns <= root.ended_ns
        assert root.resource["service.name"] == "rewake-gateway"
    assert len(found.spans) == 2


async def test_held_requests_are_traced_and_linked_to_the_one_operation_that_one_of_them_began(
    store: redis.asyncio.Redis, store_server: str
) -> None:
    with collector() as found:
        async with replica_server(stream) as fake, serving(store_server, traced(found.url, sample=0.0)) as served:
            fleet = Fleet(store)
            first = asyncio.create_task(served.chat(stream=True, headers={"traceparent": CLIENT}))
            await eventually(lambda: served.held() == 1)
            others = [asyncio.create_task(served.chat()) for _ in range(3)]
            no = asyncio.create_task(served.chat(headers={"traceparent": UNSAMPLED.replace("4bf9", "aaaa")}))
            await eventually(lambda: served.held() == 5)
            [job] = await eventually(fleet.jobs)
            assert job["trace"].startswith(f"00-{TRACE}-")
            await fleet.admit(fake, trace=job["trace"])
            await asyncio.gather(first, no, *others)
            await eventually(lambda: len(found.named("hold")) == 4 and len(found.named("chat m")) == 4, within=SENT_S)
            await eventually(lambda: len(found.named("scale_up m")) == 1, within=SENT_S)
        operation = found.named("scale_up m")[0]
        assert chain(found, operation) == ["scale_up m", "hold", "POST /v1/chat/completions"]
        assert operation.trace == TRACE
        assert job["trace"] == f"00-{TRACE}-{operation.id}-01"
        holds = found.named("hold")
        assert all(hold.links == [(TRACE, operation.id)] for hold in holds)
        assert len({hold.trace for hold in holds}) == 4, "each in a trace of its own"
        assert not [span for span in found.spans if span.trace.startswith("aaaa")], "its client said no"
        assert all(hold.ended_ns > hold.begun_ns for hold in holds)


async def test_what_a_restorer_leaves_is_sent_once_by_one_of_the_gateways(store: redis.asyncio.Redis, store_server: str) -> None:
    job = Job(id="op/0", kind=JobKind.START, model="m", operation="op", reason="demand", replica="m#0", trace=CLIENT)
    restore = Stage(name="restore", seconds=0.5, bytes=7, tier="disk", begun_ms=1000)
    stages = [restore, Stage(name="canary", seconds=0.1, begun_ms=1500)]
    record = (await Fleet(store).admit(type("F", (), {"address": "", "port": 0})())).model_copy(update={"snapshot": "s1"})
    made = spans.of_job(
        Claim(job, 1, 1, "q"), "host-a", stages, 900_000_000, 1_700_000_000, (Outcome(OperationState.SUCCEEDED), record)
    )
    jobs = JobStore(store_server, "rewake", "host-a")
    with collector() as found:
        config = traced(found.url)
        async with serving(store_server, config, "gw1"), serving(store_server, config, "gw2"):
            await jobs.trace(made)
            await eventually(lambda: len(found.spans) == 4, within=SENT_S)
        assert sorted(span.name for span in found.spans) == ["admit", "canary", "restore", "start m#0"]
        root, restore, admit = (found.named(name)[0] for name in ("start m#0", "restore", "admit"))
        assert (root.trace, root.parent, root.kind) == (TRACE, "00f067aa0ba902b7", 5)
        assert root.attributes["rewake.snapshot"] == "s1"
        assert {span.parent for span in found.spans if span is not root} == {root.id}
        assert (restore.begun_ns, restore.ended_ns) == (1_000_000_000, 1_500_000_000)
        assert (restore.attributes["rewake.bytes"], restore.attributes["rewake.tier"]) == (7, "disk")
        assert (admit.begun_ns, admit.ended_ns) == (1_600_000_000, 1_700_000_000)
    await jobs.close()


def test_a_job_that_nobody_traces_has_no_spans_and_one_that_failed_says_why() -> None:
    plain = Job(id="op/0", kind=JobKind.START, model="m", operation="op", reason="demand", replica="m#0")
    for trace in ("", "nonsense", UNSAMPLED):
        claim = Claim(plain.model_copy(update={"trace": trace}), 1, 1, "q")
        assert spans.of_job(claim, "h", [], 0, 1, None) == []
    claim = Claim(plain.model_copy(update={"trace": CLIENT}), 1, 1, "q")
    [failed] = spans.of_job(claim, "h", [], 0, 1, (Outcome(OperationState.FAILED, "criu failed\nlong log"), None))
    assert failed.error == "criu failed"
    [lost] = spans.of_job(claim, "h", [], 0, 1, None)
    assert lost.error


async def test_errors_and_clients_that_left_say_so(store: redis.asyncio.Redis, store_server: str) -> None:
    with collector() as found:
        async with serving(store_server, traced(found.url, sample=1.0)) as served:
            await served.chat("nobody-ever-heard-of")
            leaving = asyncio.create_task(served.chat())
            await eventually(lambda: served.held() == 1)
            leaving.cancel()
            await eventually(lambda: len(found.named("POST /v1/chat/completions")) == 2 and found.named("hold"), within=SENT_S)
        unknown, left = sorted(found.named("POST /v1/chat/completions"), key=lambda span: span.begun_ns)
        assert unknown.error == unknown.attributes["error.type"] == "model_not_found"
        assert left.error == "client_left"
        assert left.attributes["http.response.status_code"] == 499
        assert found.named("hold")[0].error == "client_left"


@pytest.mark.parametrize("away", ["dead", "refuses"])
async def test_a_collector_that_is_away_harms_nobody(store: redis.asyncio.Redis, store_server: str, away: str) -> None:
    with collector() as found:
        found.status = 400
        url = found.url if away == "refuses" else "http://127.0.0.1:1/v1/traces"
        config = traced(url, sample=1.0, queue=5)
        async with replica_server(answer) as fake, serving(store_server, config) as served:
            await Fleet(store).admit(fake)
            await eventually(lambda: served.gateway.registry.available("m"))
            for _ in range(4):
                answers = await asyncio.gather(*(served.chat() for _ in range(8)))
                assert {one.status_code for one in answers} == {200}
            spans_total = served.gateway.metrics.spans
            await eventually(lambda: spans_total.labels("dropped")._value.get() > 0, within=SENT_S)
            assert len(served.gateway.tracer._out._waiting) <= 5
            if away == "refuses":
                await eventually(lambda: spans_total.labels("failed")._value.get() > 0, within=SENT_S)


async def test_spans_that_cannot_be_made_cost_no_other(store: redis.asyncio.Redis, store_server: str) -> None:
    with collector() as found:
        async with serving(store_server, traced(found.url, sample=1.0)) as served:
            served.gateway.tracer._out.put(lambda: [b"never" for _ in [1 // 0]])
            await served.chat("nobody")
            await eventually(lambda: found.spans, within=SENT_S)
            assert served.gateway.metrics.spans.labels("failed")._value.get() == 1


async def test_a_collector_that_has_no_time_is_asked_again(store: redis.asyncio.Redis, store_server: str) -> None:
    with collector() as found:
        found.status = 503
        async with serving(store_server, traced(found.url, sample=1.0)) as served:
            await served.chat("nobody")
            await eventually(lambda: found.headers, within=SENT_S)
            found.status = 200
            await eventually(lambda: found.spans, within=SENT_S)
            await eventually(lambda: served.gateway.metrics.spans.labels("exported")._value.get() >= 1, within=SENT_S)
            assert served.gateway.metrics.spans.labels("failed")._value.get() == 0


async def test_sent_with_the_key_that_the_collector_wants(store: redis.asyncio.Redis, store_server: str) -> None:
    with collector() as found:
        async with serving(store_server, traced(found.url, sample=1.0, headers={"x-key": "k"})) as served:
            await served.chat("nobody")
            await eventually(lambda: found.headers, within=SENT_S)
            assert found.headers[0]["x-key"] == "k"
            page = (await served.client.get("/metrics")).text
            await eventually(lambda: served.gateway.metrics.spans.labels("exported")._value.get() >= 1, within=SENT_S)
            assert "rewake_spans_total" in page


async def test_the_part_that_is_traced_is_as_wished(store: redis.asyncio.Redis, store_server: str) -> None:
    with collector() as found:
        async with serving(store_server, traced(found.url, sample=0.25)) as served:
            tracer = served.gateway.tracer
            begun = [tracer.begin("") for _ in range(4000)]
            assert 800 < sum(trace is not None for trace in begun) < 1200
            assert len({trace.id for trace in begun if trace is not None}) == sum(trace is not None for trace in begun)
            assert tracer.begin(CLIENT).id == TRACE
            assert tracer.begin(UNSAMPLED) is None
            assert tracer.asking("m") == "", "nobody waits"
            trail = Trail("id", "/v1/chat/completions", 0.0)
            trail.model = "m"
            tracer.held({}, trail)
            assert Context.of(tracer.asking("m")).trace == trail.trace.id
            tracer.released(trail, None)
            assert tracer.asking("m") == ""


def test_off_costs_not_even_an_import() -> None:
    """The store's client looks for OpenTelemetry by itself; what makes and sends spans is nobody's but ours."""
    code = "import sys, gateway.app, gateway.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "gateway.app" in loaded
    assert "gateway.otlp" not in loaded


def test_libraries_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gateway.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    assert load(configuration()) is None
    with pytest.raises(Missing, match=r"rewake\[tracing\]"):
        load(traced("http://127.0.0.1:1/"))


@pytest.mark.parametrize(
    ("header", "valid"),
    [
        (CLIENT, True),
        (UNSAMPLED, True),
        ("cc" + CLIENT[2:] + "-what-the-future-will-be-like", True),
        (CLIENT + "-more", False),
        ("ff" + CLIENT[2:], False),
        (CLIENT.upper(), False),
        ("00-" + "0" * 32 + CLIENT[35:], False),
        (CLIENT[:36] + "0" * 16 + CLIENT[52:], False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_a_traceparent_is_read_as_the_standard_says(header: str, valid: bool) -> None:
    assert (Context.of(header) is not None) is valid
    found = Context.of(header)
    if found is not None and header.startswith("00"):
        assert found.header == header


def test_a_span_survives_its_way_through_the_store() -> None:
    own, link = Context("ab" * 16, "cd" * 8), Context("ef" * 16, "01" * 8)
    span = Span(name="x", context=own, begun_ns=1, ended_ns=2, links=(link,), attributes={"n": 1, "s": "x", "b": True})
    assert Span.model_validate_json(span.model_dump_json()) == span
