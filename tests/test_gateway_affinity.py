"""Keys of requests that belong together."""

from __future__ import annotations

import json

from multidict import CIMultiDict

from gateway import affinity


def body(*turns: str, **more: object) -> bytes:
    return json.dumps({"model": "m", **more, "messages": [{"role": "user", "content": turn} for turn in turns]}).encode()


def key(balance: str, content: bytes | None = b"{}", tenant: str = "", **headers: str) -> str:
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return affinity.key(balance, tenant=tenant, headers=named, body=content)


def test_balances_that_need_none_read_nothing():
    assert key("least_outstanding", body("hello"), x_session_id="s") == ""
    assert key("power_of_two", body("hello")) == ""


def test_a_session_is_named_by_a_header_and_counts_within_its_tenant():
    assert key("session", X_Session_Id="s") == key("session", body("other"), x_session_id="s")
    assert key("session", x_session_id="s", tenant="a") != key("session", x_session_id="s", tenant="b")
    assert key("session", x_rewake_session="ours", x_session_id="s") == key("session", x_rewake_session="ours")
    assert len(key("session", x_session_id="s" * 10_000)) < 300


def test_a_conversation_that_has_grown_is_the_same_prefix_and_another_one_is_not():
    first = "Tell me of the history of bridges. " * 40
    grown = body(first, "an answer", "a question")
    assert key("prefix", body(first)) == key("prefix", grown) == key("session", grown) != ""
    assert key("prefix", body(first)) == key("prefix", body(first, temperature=0)), "what comes before the prompt counts not"
    assert key("prefix", body(first)) != key("prefix", body("Tell me of roads. " * 80))


def test_what_has_no_prompt_within_reach_belongs_nowhere():
    assert key("prefix", None) == key("prefix", b"") == key("prefix", b'{"model": "m"}') == ""
    assert key("prefix", b'{"pad": "' + b"x" * 70_000 + b'", "prompt": "late"}') == ""
