"""Keys become tenants, and tenants get at their models alone."""

from __future__ import annotations

import pytest

from gateway import keys
from gateway.current import Current
from gateway.errors import PermissionDenied, Unauthorized
from gateway.tenants import Tenants
from policies.config import Config, parse
from policies.tenancy import key_hash

ALICE, BOB = keys.new(), keys.new()
ENGINE = {"engine": {"kind": "http", "command": ["/bin/true"]}}


def config(**tenants: object) -> Config:
    return parse({"models": {"m": ENGINE, "n": ENGINE}, "tenants": tenants})


@pytest.fixture
def current() -> Current:
    return Current(config(alice={"keys": [ALICE.hash]}, bob={"keys": [BOB.hash], "models": ["n"]}))


def test_without_tenants_everybody_is_nobody_in_particular() -> None:
    tenants = Tenants(Current(config()))
    assert tenants.authenticate({}) == ""
    assert tenants.authenticate({"authorization": "Bearer whatever"}) == ""
    tenants.may_use("", "m")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {ALICE.key}"},
        {"authorization": f"bearer   {ALICE.key} "},
        {"x-api-key": ALICE.key},
        {"api-key": ALICE.key},
        {"authorization": "Basic dTpw", "x-api-key": ALICE.key},
        {"sec-websocket-protocol": f"realtime, openai-insecure-api-key.{ALICE.key}, openai-beta.realtime-v1"},
        {"sec-websocket-protocol": f"openai-insecure-api-key.{ALICE.key}"},
    ],
)
def test_a_key_is_found_where_sdks_put_it(current: Current, headers: dict[str, str]) -> None:
    assert Tenants(current).authenticate(headers) == "alice"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {ALICE.key}"},
        {"authorization": "Bearer rwk-wrong"},
        {"authorization": f"Bearer {ALICE.key}x"},
        {"authorization": f"Bearer {ALICE.hash}"},
        {"authorization": "Bearer k\udcff\udcfe"},
        {"authorization": "Bearer wrong", "x-api-key": ALICE.key},
    ],
)
def test_a_missing_or_wrong_key_is_401_and_appears_nowhere(current: Current, headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized) as caught:
        Tenants(current).authenticate(headers)
    error = caught.value
    assert (error.status, error.code, error.should_retry) == (401, "invalid_api_key", False)
    assert error.headers == {"WWW-Authenticate": "Bearer"}
    assert not any(value.removeprefix("Bearer ") in str(error) for value in headers.values() if len(value) > 8)


def test_a_model_that_is_not_its_own_is_403(current: Current) -> None:
    tenants = Tenants(current)
    tenants.may_use("alice", "m")
    tenants.may_use("bob", "n")
    assert [tenants.allows("bob", model) for model in ("m", "n")] == [False, True]
    with pytest.raises(PermissionDenied) as caught:
        tenants.may_use("bob", "m")
    assert (caught.value.status, caught.value.code, caught.value.param) == (403, "model_not_allowed", "model")


def test_a_reload_reaches_the_next_request(current: Current) -> None:
    tenants, headers = Tenants(current), {"x-api-key": BOB.key}
    assert tenants.authenticate(headers) == "bob"
    current.replace(config(carol={"keys": [BOB.hash]}))
    assert tenants.authenticate(headers) == "carol"
    with pytest.raises(Unauthorized):
        tenants.authenticate({"x-api-key": ALICE.key})


def test_a_tenant_without_keys_is_nobody() -> None:
    with pytest.raises(Unauthorized):
        Tenants(Current(config(closed={}))).authenticate({"authorization": "Bearer "})


def test_new_keys_differ_and_are_recognised_by_their_hash() -> None:
    made = [keys.new() for _ in range(50)]
    assert len({key.key for key in made}) == 50
    assert all(key.key.startswith(keys.PREFIX) and len(key.key) > 40 and key.hash == key_hash(key.key) for key in made)
    assert all(key.key not in key.hash for key in made)


@pytest.mark.parametrize("key", ["", "short", "x" * 23, "spaces are no good in headers", "ümlauts-are-no-good-either-in-here"])
def test_a_key_of_ones_own_must_be_long_and_plain(key: str) -> None:
    with pytest.raises(keys.UnusableKey):
        keys.given(key)


def test_a_long_key_of_ones_own_is_taken() -> None:
    assert keys.given("sk-" + "a" * 40).hash == key_hash("sk-" + "a" * 40)
