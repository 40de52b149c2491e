"""Spans on the wire are what the protocol's own library would have written, and reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway import spanwire
from policies.tracing import Context, Span

KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
KEYS = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
LOCAL, REMOTE = 0x100, 0x300
contexts = st.builds(Context, st.integers(1, 2**128 - 1).map("{:032x}".format), st.integers(1, 2**64 - 1).map("{:016x}".format))
times = st.integers(0, 2**64 - 1)
plain = st.text(st.characters(codec="utf-8"), max_size=300)
values = plain | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
spans = st.builds(
    Span,
    name=plain,
    context=contexts,
    parent=st.none() | contexts,
    kind=st.sampled_from(list(KINDS)),
    begun_ns=times,
    ended_ns=times,
    attributes=st.dictionaries(plain | st.just("rewake.request_id"), values, max_size=8),
    links=st.lists(contexts, max_size=3).map(tuple),
    events=st.dictionaries(plain, times, max_size=3),
    error=plain,
)


def expected(span: Span) -> dict[str, object]:
    """The fields of its message."""
    parent = {} if span.parent is None else {"parent_span_id": bytes.fromhex(span.parent.span)}
    return {
        "trace_id": bytes.fromhex(span.context.trace),
        "span_id": bytes.fromhex(span.context.span),
        **parent,
        "name": span.name,
        "kind": KINDS[span.kind],
        "start_time_unix_nano": span.begun_ns,
        "end_time_unix_nano": span.ended_ns,
        "attributes": attributes(span.attributes),
        "events": [{"name": name, "time_unix_nano": at} for name, at in span.events.items()],
        "links": [
            {"trace_id": bytes.fromhex(link.trace), "span_id": bytes.fromhex(link.span), "flags": REMOTE} for link in span.links
        ],
        **({"status": {"code": 2, "message": span.error}} if span.error else {}),
        "flags": REMOTE if parent else LOCAL,
    }


def attributes(found: dict[str, object]) -> list[dict[str, object]]:
    return [{"key": name, "value": {KEYS[type(value)]: value}} for name, value in found.items()]


@given(made=st.lists(spans, max_size=4), resource=st.dictionaries(plain, values, max_size=3))
def test_what_is_written_is_what_the_library_reads(made: list[Span], resource: dict[str, object]) -> None:
    written = spanwire.request(resource, "rewake", "1.0", map(spanwire.span, made))
    scope = {"scope": {"name": "rewake", "version": "1.0"}, "spans": [expected(span) for span in made]}
    whole = ExportTraceServiceRequest(resource_spans=[{"resource": {"attributes": attributes(resource)}, "scope_spans": [scope]}])
    assert ExportTraceServiceRequest.FromString(written) == whole


@pytest.mark.parametrize(("one", "other"), [(1, True), (0, False), (1, 1.0), (0.0, False)])
def test_values_that_are_equal_keep_their_kind(one: object, other: object) -> None:
    """What is kept of one is not taken for the other."""
    context = Context("a" * 32, "b" * 16)
    for value in (one, other, one):
        span = Span(name="n", context=context, begun_ns=1, ended_ns=2, attributes={"k": value})
        read = ExportTraceServiceRequest.FromString(spanwire.request({}, "s", "v", [spanwire.span(span)]))
        [found] = read.resource_spans[0].scope_spans[0].spans[0].attributes
        assert found.value.WhichOneof("value") == KEYS[type(value)]


def test_text_that_is_no_unicode_costs_no_span() -> None:
    span = Span.model_construct(
        name="chat \ud800",
        context=Context("a" * 32, "b" * 16),
        begun_ns=1,
        ended_ns=2,
        attributes={"gen_ai.request.model": "\ud800"},
    )
    read = ExportTraceServiceRequest.FromString(spanwire.request({}, "s", "v", [spanwire.span(span)]))
    assert read.resource_spans[0].scope_spans[0].spans[0].name == "chat ?"
