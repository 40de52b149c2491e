"""Reading just enough of a request, cleaning heads, and the one shape of errors."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway import envelope, errors
from gateway.errors import InvalidRequest
from policies.admission import Code

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(extra=st.dictionaries(st.text(), JSON), model=st.text(min_size=1), stream=st.booleans(), ascii=st.booleans())
def test_any_valid_body_is_read_exactly(extra, model, stream, ascii):
    document = {**extra, "nested": {"model": 1, "stream": "x"}, "model": model, "stream": stream}
    body = json.dumps(document, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    found = envelope.peek(body)
    assert (found.model, found.stream) == (model, stream)


@settings(deadline=None)
@given(body=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body):
    try:
        found = envelope.peek(body)
    except InvalidRequest:
        return
    assert json.loads(body)["model"] == found.model


@pytest.mark.parametrize("twice", ["model", "stream", "mod\\u0065l", "\\u0073tream", "\\u006D\\u006F\\u0064\\u0065\\u006C"])
def test_a_field_given_twice_is_refused_however_it_is_spelt(twice):
    value = "true" if "m" in json.loads(f'"{twice}"') and "stream" in json.loads(f'"{twice}"') else '"b"'
    with pytest.raises(InvalidRequest, match="more than once"):
        envelope.peek(f'{{"model":"a","stream":true,"{twice}":{value}}}'.encode())


def test_patience_is_the_least_of_all():
    assert envelope.patience_s({}, 600) == 600
    assert envelope.patience_s({"x-stainless-read-timeout": "600"}, 900) == 599
    assert envelope.patience_s({"x-stainless-timeout": "10"}, 900) == 9.5
    assert envelope.patience_s({"x-stainless-read-timeout": "NaN"}, 900) == 900
    assert envelope.patience_s({"x-stainless-read-timeout": "not given"}, 900) == 900
    assert envelope.patience_s({"x-rewake-deadline-s": "3", "x-stainless-read-timeout": "600"}, 900) == 3
    for nonsense in ("", "-1", "0", "inf", "x"):
        with pytest.raises(InvalidRequest):
            envelope.patience_s({"x-rewake-deadline-s": nonsense}, 900)


def test_case_61_heads_lose_what_is_not_end_to_end():
    given_ = [
        ("Connection", "close, X-One"),
        ("x-one", "1"),
        ("Upgrade", "h2c"),
        ("Cookie", "a=b"),
        ("Cookie", "c=d"),
        ("HOST", "x"),
        ("Forwarded", "for=203.0.113.9"),
        ("X-Forwarded-For", "203.0.113.9"),
        ("X-Real-IP", "203.0.113.9"),
    ]
    kept = envelope.forwarded(given_, id="i", origin=[("X-Forwarded-For", "192.0.2.1")])
    assert kept == [("Cookie", "a=b"), ("Cookie", "c=d"), ("x-request-id", "i"), ("X-Forwarded-For", "192.0.2.1")]


def test_replicas_cannot_speak_in_the_gateways_name():
    given_ = [
        ("x-rewake-error", "e"),
        ("x-rewake-start", "cold"),
        ("x-request-id", "theirs"),
        ("Set-Cookie", "a"),
        ("Set-Cookie", "b"),
    ]
    kept, stream = envelope.returned(given_, id="ours", start="restored", incarnation="i")
    assert not stream
    assert kept == [
        ("Set-Cookie", "a"),
        ("Set-Cookie", "b"),
        ("x-request-id", "ours"),
        ("x-rewake-start", "restored"),
        ("x-rewake-incarnation", "i"),
    ]


@pytest.mark.parametrize("code", Code.__args__)
@pytest.mark.parametrize("retry_after_s", [0, 0.2, 5, 1e9])
def test_every_refusal_has_its_row(code, retry_after_s):
    """The table of errors: status, type, whether to come back, and never a time that makes an SDK stampede or give up."""
    rendered = errors.render(errors.refusal(code, model="m", detail="why", retry_after_s=retry_after_s))
    error, headers = json.loads(rendered.body)["error"], rendered.headers
    assert error["code"] == headers["x-rewake-error"] == code
    assert set(error) == {"message", "type", "param", "code"}
    limits, final = ("capacity_exceeded", "rate_limit_exceeded"), ("restore_failed", "model_not_found")
    assert rendered.status == (429 if code in limits else 404 if code == "model_not_found" else 503)
    kind = "rate_limit_error" if code in limits else "invalid_request_error" if code == "model_not_found" else "server_error"
    assert error["type"] == kind
    if code in final:
        assert (headers["x-should-retry"], "Retry-After" in headers) == ("false", False)
    else:
        assert headers.get("x-should-retry") == (None if code in limits else "true")
        assert 1 <= int(headers["Retry-After"]) <= 60
        assert int(headers["retry-after-ms"]) == 1000 * int(headers["Retry-After"])
