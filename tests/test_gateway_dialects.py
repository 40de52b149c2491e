"""Errors and signs of life in each API's own words, and what the OpenAI SDK makes of the frames."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import dialects, errors
from gateway.errors import GatewayError

LOADING = errors.ModelLoading("come back", retry_after_s=7)


def events(frame: bytes) -> tuple[str, dict]:
    """The name and the data of one whole frame."""
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n\n") == 1
    fields = dict(line.split(": ", 1) for line in frame.decode().strip().split("\n"))
    return fields.get("event", ""), json.loads(fields["data"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/chat/completions/", "chat"),
        ("/v1/completions", "completions"),
        ("/v1/responses", "responses"),
        ("/v1/messages", "anthropic"),
        ("/v1/messages/count_tokens", "anthropic"),
        ("/v1/messagesx", "openai"),
        ("/v1/embeddings", "openai"),
        ("/nowhere", "openai"),
    ],
)
def test_the_path_tells_the_dialect(path, name):
    assert dialects.of(path).name == name


@pytest.mark.parametrize(
    ("error", "status", "type"),
    [
        (errors.InvalidRequest("x", "invalid_json"), 400, "invalid_request_error"),
        (errors.Unauthorized("x"), 401, "authentication_error"),
        (errors.PermissionDenied("x"), 403, "permission_error"),
        (errors.ModelNotFound("x"), 404, "not_found_error"),
        (errors.RequestTooLarge("x"), 413, "request_too_large"),
        (errors.RateLimited("x", retry_after_s=3), 429, "rate_limit_error"),
        (errors.CapacityExceeded("x"), 429, "rate_limit_error"),
        (LOADING, 529, "overloaded_error"),
        (errors.QueueFull("x"), 529, "overloaded_error"),
        (errors.ShuttingDown("x"), 529, "overloaded_error"),
        (errors.RestoreFailed("x"), 503, "api_error"),
        (errors.UpstreamError("x"), 502, "api_error"),
        (errors.UpstreamTimeout("x"), 504, "timeout_error"),
        (GatewayError("x"), 500, "api_error"),
    ],
)
def test_anthropic_errors_have_their_types_and_529(error, status, type):
    reply = dialects.ANTHROPIC.render(error, "req_1")
    document = json.loads(reply.body)
    assert (reply.status, document["error"]["type"]) == (status, type)
    assert document == {"type": "error", "error": {"type": type, "message": str(error)}, "request_id": "req_1"}
    assert reply.headers["x-rewake-error"] == error.code
    assert reply.headers == {**errors.render(error).headers, "request-id": "req_1"}


def test_openai_errors_are_rendered_as_ever():
    for dialect in (dialects.OPENAI, dialects.CHAT, dialects.COMPLETIONS, dialects.RESPONSES):
        assert dialect.render(LOADING, "req_1") == errors.render(LOADING)


def test_late_errors_are_data_with_an_error_in_every_openai_api():
    for dialect in (dialects.OPENAI, dialects.CHAT, dialects.COMPLETIONS):
        name, data = events(dialect.late(LOADING, "req_1"))
        assert (name, data) == ("", errors.envelope(LOADING))


def test_late_errors_of_responses_are_flat_and_nested():
    name, data = events(dialects.RESPONSES.late(LOADING, "req_1"))
    assert (name, data["type"], data["code"], data["message"]) == ("error", "error", "model_loading", "come back")
    assert data["error"] == errors.envelope(LOADING)["error"]
    assert isinstance(data["sequence_number"], int)


def test_late_errors_of_anthropic_are_error_events():
    name, data = events(dialects.ANTHROPIC.late(LOADING, "req_1"))
    assert (name, data["type"]) == ("error", "error")
    assert data["error"] == {"type": "overloaded_error", "message": "come back"}


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        (b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}', "too long", 400),
        (b'{"object":"error","message":"too long","type":"BadRequestError","code":40303}', "too long", 40303),
        (b'{"error":"too long"}', "too long", 422),
        (b'{"type":"error","error":{"type":"invalid_request_error","message":"too long"}}', "too long", 422),
        (b"too long", "too long", 422),
        (b"", "The replica answered 422 without a reason.", 422),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}", 422),
        (b"[1]", "[1]", 422),
        (b"[" * 100_000, "[" * 2000, 422),
        (b'{"error":{"message":{"a":1}}}', '{"error":{"message":{"a":1}}}', 422),
    ],
)
def test_a_replicas_own_error_becomes_the_last_frame(body, message, code):
    _, data = events(dialects.CHAT.relayed(422, body, "req_1"))
    assert (data["error"]["message"], data["error"]["code"]) == (message, code)
    name, data = events(dialects.ANTHROPIC.relayed(422, body, "req_1"))
    assert (name, data["error"]) == ("error", {"type": "invalid_request_error", "message": message})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["error", "message", "type", "code", "param"]), inner),
    max_leaves=8,
)


@given(st.binary() | JSON.map(lambda document: json.dumps(document).encode()), st.integers(300, 599))
def test_whatever_a_replica_answers_becomes_one_whole_frame(body, status):
    for dialect in (dialects.CHAT, dialects.RESPONSES, dialects.ANTHROPIC):
        _, data = events(dialect.relayed(status, body, "req_1"))
        assert data["error"], "an SDK raises for what is true"
        assert isinstance(data["error"]["message"], str)
        assert isinstance(data["error"]["type"], str)


def test_comments_tell_place_and_time_in_every_dialect():
    for dialect in (dialects.OPENAI, dialects.CHAT, dialects.RESPONSES, dialects.ANTHROPIC):
        assert dialect.sign("comment", position=3, eta_s=11.2, model="m") == b": queued position=3 eta=12\n\n"
        assert dialect.sign("comment", position=1, eta_s=None, model="m") == b": queued position=1\n\n"
        assert dialect.sign("off", position=1, eta_s=None, model="m") == b""
        assert dialect.dispatched("comment", start="cold", incarnation="i") == b": dispatched start=cold incarnation=i\n\n"
        assert dialect.dispatched("chunk", start="cold", incarnation="i") == b""


def test_chunks_are_the_apis_own_and_empty():
    _, chat = events(dialects.CHAT.sign("chunk", position=1, eta_s=1, model="m"))
    assert (chat["object"], chat["model"], chat["choices"][0]["delta"]["content"]) == ("chat.completion.chunk", "m", "")
    _, text = events(dialects.COMPLETIONS.sign("chunk", position=1, eta_s=1, model="m"))
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "")
    assert events(dialects.RESPONSES.sign("chunk", position=1, eta_s=1, model="m"))[0] == "keepalive"
    assert events(dialects.ANTHROPIC.sign("chunk", position=1, eta_s=1, model="m")) == ("ping", {"type": "ping"})
    assert dialects.OPENAI.sign("chunk", position=1, eta_s=1, model="m") == b""
