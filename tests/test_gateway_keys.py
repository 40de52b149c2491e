"""``rewake key``: what it prints is what the gateway recognises."""

from __future__ import annotations

import io
import json

import pytest

import rewake
from gateway.current import Current
from gateway.tenants import Tenants
from policies.config import parse


def recognised(key: str, hash: str) -> bool:
    config = parse(
        {"models": {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}}}, "tenants": {"alice": {"keys": [hash]}}}
    )
    return Tenants(Current(config)).authenticate({"authorization": f"Bearer {key}"}) == "alice"


def test_a_new_key_is_printed_once_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert rewake.main(["key"]) == 0
    said = capsys.readouterr()
    (key_label, key), (hash_label, hash) = (line.split() for line in said.out.splitlines())
    assert (key_label, hash_label) == ("key", "hash")
    assert recognised(key, hash)
    assert key not in said.err


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert rewake.main(["key", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made.keys() == {"key", "hash"}
    assert recognised(made["key"], made["hash"])


def test_a_key_of_ones_own_is_hashed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own = "sk-live-0123456789abcdef0123456789"
    monkeypatch.setattr("sys.stdin", io.StringIO(own + "\n"))
    assert rewake.main(["key", "--stdin", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["key"] == own
    assert recognised(own, made["hash"])


def test_a_weak_key_is_a_usage_error_that_does_not_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hunter2\n"))
    assert rewake.main(["key", "--stdin"]) == 2
    said = capsys.readouterr()
    assert "guessed" in said.err
    assert "hunter2" not in said.out + said.err
