"""Who a request comes from: what trusted proxies say, and nothing that anybody else says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from gateway.client import Clients, Origin
from gateway.current import Current
from policies.config import parse

MODELS = {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}}}


def clients(*trusted: str) -> Clients:
    return Clients(Current(parse({"models": MODELS, "gateway": {"trusted_proxies": list(trusted)}})))


def seen(peer: str | None, *headers: tuple[str, str], trusted: tuple[str, ...] = ("10.0.0.0/8", "fd00::/8")) -> Origin:
    return clients(*trusted).origin(peer, "http", CIMultiDict([("Host", "gw:8080"), *headers]))


FORGED = (
    ("X-Forwarded-For", "1.2.3.4"),
    ("X-Forwarded-Proto", "https"),
    ("X-Forwarded-Host", "evil"),
    ("Forwarded", "for=1.2.3.4"),
    ("X-Real-IP", "1.2.3.4"),
)


@pytest.mark.parametrize("trusted", [(), ("10.0.0.0/8",)])
def test_a_stranger_is_not_believed(trusted: tuple[str, ...]) -> None:
    assert seen("192.0.2.7", *FORGED, trusted=trusted) == Origin("192.0.2.7", "http", "gw:8080", ("192.0.2.7",))


def test_a_trusted_proxy_is() -> None:
    said = (("X-Forwarded-For", "192.0.2.7"), ("X-Forwarded-Proto", "https"), ("X-Forwarded-Host", "api.example.com"))
    assert seen("10.0.0.1", *said) == Origin("192.0.2.7", "https", "api.example.com", ("192.0.2.7", "10.0.0.1"))


def test_a_trusted_proxy_that_says_nothing_is_the_client() -> None:
    assert seen("10.0.0.1") == Origin("10.0.0.1", "http", "gw:8080", ("10.0.0.1",))


@pytest.mark.parametrize(
    ("said", "client"),
    [
        ("192.0.2.7, 10.0.0.9", "192.0.2.7"),
        ("6.6.6.6, 192.0.2.7, 10.0.0.9, 10.1.1.1", "192.0.2.7"),
        ("6.6.6.6, nonsense, 10.0.0.9", "10.0.0.9"),
        ("nonsense", "10.0.0.1"),
        ("unknown", "10.0.0.1"),
        ("", "10.0.0.1"),
        ("192.0.2.7:4711", "192.0.2.7"),
        ("[2001:db8::7]:4711", "2001:db8::7"),
        ('"[2001:db8::7]"', "2001:db8::7"),
        ("2001:db8::7", "2001:db8::7"),
        ("fd00::1, ::ffff:10.9.9.9", "fd00::1"),
        ("10.0.0.3, 10.0.0.2", "10.0.0.3"),
    ],
)
def test_the_client_is_the_first_that_is_not_trusted(said: str, client: str) -> None:
    assert seen("10.0.0.1", ("X-Forwarded-For", said)).address == client


def test_a_line_that_the_client_made_up_before_the_proxys_own_changes_nothing() -> None:
    origin = seen(
        "10.0.0.1",
        ("X-Forwarded-For", "6.6.6.6"),
        ("X-Forwarded-For", "192.0.2.7"),
        ("X-Forwarded-Proto", "http"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "evil, api.example.com"),
    )
    assert (origin.address, origin.scheme, origin.host) == ("192.0.2.7", "https", "api.example.com")
    assert "6.6.6.6" not in str(origin.pairs())


@pytest.mark.parametrize("host", ["a b", 'a"; for=6.6.6.6', "a\r\nX: y", "", "a" * 300, "[::1"])
def test_a_host_that_is_none_is_not_repeated(host: str) -> None:
    origin = clients().origin("192.0.2.7", "http", {"host": host})
    assert origin.host == ""
    assert dict(origin.pairs()) == {
        "X-Forwarded-For": "192.0.2.7",
        "X-Forwarded-Proto": "http",
        "Forwarded": "for=192.0.2.7;proto=http",
    }


@pytest.mark.parametrize("said", ["javascript", "", "https,ftp", "HTTP/1.1"])
def test_a_scheme_that_is_none_is_not_believed(said: str) -> None:
    assert seen("10.0.0.1", ("X-Forwarded-Proto", said)).scheme == "http"


def test_an_address_in_another_spelling_is_the_same() -> None:
    origin = seen("::ffff:10.0.0.1", ("X-Forwarded-For", "192.0.2.7"))
    assert origin.chain == ("192.0.2.7", "10.0.0.1")


def test_a_connection_without_an_address() -> None:
    origin = seen(None, *FORGED)
    assert origin == Origin("", "http", "gw:8080", ())
    assert dict(origin.pairs())["Forwarded"] == 'for=unknown;host="gw:8080";proto=http'


def test_case_61_replicas_are_told_the_whole_chain() -> None:
    origin = seen("fd00::1", ("X-Forwarded-For", "2001:db8::7, 10.0.0.9"), ("X-Forwarded-Proto", "https"))
    assert origin.pairs() == [
        ("X-Forwarded-For", "2001:db8::7, 10.0.0.9, fd00::1"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "gw:8080"),
        ("Forwarded", 'for="[2001:db8::7]";host="gw:8080";proto=https, for=10.0.0.9, for="[fd00::1]"'),
    ]


def test_a_reload_changes_who_is_trusted() -> None:
    current = Current(parse({"models": MODELS}))
    found = Clients(current)
    said = {"host": "gw", "x-forwarded-for": "192.0.2.7"}
    assert found.origin("10.0.0.1", "http", said).address == "10.0.0.1"
    current.replace(parse({"models": MODELS, "gateway": {"trusted_proxies": ["10.0.0.1"]}}))
    assert found.origin("10.0.0.1", "http", said).address == "192.0.2.7"


def test_a_long_chain_is_not_walked_to_its_end() -> None:
    assert len(seen("10.0.0.1", ("X-Forwarded-For", ", ".join(["10.0.0.2"] * 10_000))).chain) <= 33


@given(said=st.text(max_size=80), host=st.text(max_size=40), proto=st.text(max_size=10))
def test_whatever_is_said_no_header_breaks(said: str, host: str, proto: str) -> None:
    pairs = seen("10.0.0.1", ("X-Forwarded-For", said), ("X-Forwarded-Host", host), ("X-Forwarded-Proto", proto)).pairs()
    assert all(value.isascii() and value.isprintable() for _, value in pairs)
