"""The fast path against the ordinary one as its oracle: any bytes, cut anywhere, mean the same on both.

For the same bytes both give the client the same statuses, headers and bodies, and a replica sees the same requests or none.
What may differ is listed in :data:`OWN`: ids, dates, and how a body of unknown length is cut into chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from conftest import eventually
from fake_replica import CHAT, PATH, Exchange, FakeReplica, Fleet, Served, configuration, delta, replica_server, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

OWN = frozenset(("x-request-id", "request-id", "date", "server", "connection", "transfer-encoding", "keep-alive"))
"""Headers that are not compared."""
QUIET_S, SLOW_S = 0.08, 4.0
"""How long a connection is read before it is taken for quiet; and again where the two differ: one that is closed with bytes
unread lingers."""
EXAMPLES = int(os.environ.get("REWAKE_FUZZ_EXAMPLES", "120"))

_BODIES = [
    {"model": "m", "messages": []},
    {"model": "m", "messages": [], "stream": True},
    {"model": "alias/of-m", "messages": [{"role": "user", "content": "\u00e4\u20ac\U0001f600"}]},
    {"model": "nobody"},
    {"messages": []},
    {"model": 3},
    {"model": "m", "stream": "yes"},
    {"model": "m", "n": "x" * 5000},
]
_TEXTS = [b"", b"{", b"[]", b'{"model":"m","model":"n"}', b'{"model":"m"}' + b" " * 300, b'\xff\xfe{"model":"m"}', b'"m"']
_TARGETS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/chat/completions?x=1",
    "/v1/messages",
    "/v1/nothing",
    "/v1/v1/models",
    "/v1//x",
]
_ODD_HEADERS = [
    b"Connection: keep-alive",
    b"Connection: close",
    b"Connection: X-Private",
    b"X-Private: 1",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity",
    b"Content-Length: 0",
    b"Content-Length: 5",
    b"Content-Encoding: gzip",
    b"Expect: 100-continue",
    b"Expect: nothing",
    b"Upgrade: websocket",
    b"Origin: https://example.com",
    b"Host: other",
    b"X-Forwarded-For: 1.2.3.4",
    b"X-Request-Id: mine-1",
    b"x-rewake-deadline-s: 5",
    b"x-rewake-deadline-s: soon",
    b"x-stainless-read-timeout: 600",
    b"Content-Type: text/plain",
    b"Content-Type: application/json; charset=utf-8",
    b"Content-Type: multipart/form-data; boundary=x",
    b"TE: trailers",
    b"X-Empty:",
    b"X-Spaces:    a  b  ",
    b"X-Latin: \xe4",
    b" folded: 1",
    b"Bad Name: 1",
    b"NoColon",
    b"X-Nul: a\x00b",
    b"X-Long: " + b"y" * 9000,
]


_FRAMING = (
    b"Transfer-Encoding",
    b"Content-Length",
    b"Content-Encoding",
    b"Expect",
    b"Upgrade",
    b"Connection",
    b"TE",
    b"Bad",
    b"No",
)
_HARMLESS = [line for line in _ODD_HEADERS if not line.startswith((*_FRAMING, b" ", b"Host", b"X-Nul", b"X-Latin", b"X-Long"))]
_bodies = st.one_of(st.sampled_from(_BODIES).map(lambda body: json.dumps(body).encode()), st.sampled_from(_TEXTS))
_targets = st.sampled_from([*_TARGETS[:2] * 4, *_TARGETS])


@st.composite
def one(draw: st.DrawFn) -> bytes:
    """A request, plain or not quite, or not one at all."""
    body = draw(_bodies)
    method = draw(st.sampled_from(["POST"] * 8 + ["GET", "post", "PUT"]))
    version = draw(st.sampled_from(["HTTP/1.1"] * 8 + ["HTTP/1.0", "HTTP/2.0", "http/1.1"]))
    lines = [f"{method} {draw(_targets)} {version}".encode(), b"Host: gateway"]
    if draw(st.integers(0, 9)):
        lines.append(b"Content-Type: application/json")
    lines += draw(st.lists(st.sampled_from(_ODD_HEADERS), max_size=2))
    if draw(st.integers(0, 11)):
        lines.append(b"Content-Length: %d" % (len(body) + draw(st.sampled_from([0] * 10 + [-1, 1]))))
    request = b"\r\n".join(lines) + b"\r\n\r\n" + body
    return draw(st.one_of(st.just(request), st.just(request), _mutated(request)))


@st.composite
def _mutated(draw: st.DrawFn, request: bytes) -> bytes:
    at = draw(st.integers(0, len(request) - 1))
    with_what = draw(st.sampled_from([b"", b"\r", b"\n", b"\x00", b" ", b":", b"\xff", b"0", b"\r\n\r\n"]))
    return request[:at] + with_what + request[at + draw(st.integers(0, 2)) :]


@st.composite
def several(draw: st.DrawFn) -> bytes:
    """Requests without faults of framing, one behind the other. What follows a fault depends, on the ordinary path, on how it
    arrives: its parser forgets what it has read before it in the same piece."""
    whole = b""
    for _ in range(draw(st.integers(2, 3))):
        body = draw(_bodies)
        lines = [f"POST {draw(_targets)} HTTP/1.1".encode(), b"Host: gateway", b"Content-Length: %d" % len(body)]
        lines += draw(st.lists(st.sampled_from(_HARMLESS), max_size=2, unique_by=lambda line: line.partition(b":")[0]))
        whole += b"\r\n".join(lines) + b"\r\n\r\n" + body
    return whole


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """The bytes of one connection, in the pieces in which they are sent."""
    whole = draw(st.one_of(one(), one(), several()))
    cuts = sorted(set(draw(st.lists(st.integers(1, max(1, len(whole) - 1)), max_size=4))))
    return [piece for piece in (whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)) if piece]


@dataclass(frozen=True)
class Seen:
    """What came of a connection, as far as both paths must agree."""

    answers: tuple[tuple[int, tuple[tuple[str, str], ...], bytes], ...]
    rest: bytes
    """What was not a whole answer."""
    closed: bool
    upstream: tuple[tuple[str, str, tuple[tuple[str, str], ...], bytes], ...]


def _dechunked(data: bytes) -> tuple[bytes, bytes] | None:
    """(body, what follows it) of a chunked body, or None while it is not whole."""
    body = b""
    while True:
        line, found, data = data.partition(b"\r\n")
        if not found:
            return None
        size = int(line.split(b";")[0], 16)
        if len(data) < size + 2:
            return None
        body, data = body + data[:size], data[size + 2 :]
        if size == 0:
            return body, data


def _answers(data: bytes) -> tuple[list[tuple[int, tuple[tuple[str, str], ...], bytes]], bytes]:
    """The whole answers, and what is left."""
    found = []
    while b"\r\n\r\n" in data:
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        names = dict(headers)
        status = int(first.split()[1])
        if status < 200:
            data = rest
            continue
        if names.get("transfer-encoding") == "chunked":
            whole = _dechunked(rest)
            if whole is None:
                return found, data
            body, data = whole
        else:
            size = int(names.get("content-length", "0"))
            if len(rest) < size:
                return found, data
            body, data = rest[:size], rest[size:]
        kept = tuple(sorted((name, value) for name, value in headers if name not in OWN))
        found.append((status, kept, _without_ids(body)))
    return found, data


def _without_ids(body: bytes) -> bytes:
    """Anthropic's errors repeat the request's id."""
    head, found, rest = body.partition(b'"request_id": "')
    return head + found + rest.partition(b'"')[2] if found else body


def one_by_one(whole: bytes) -> list[bytes]:
    """The bytes cut behind each request whose length is plain, for the ordinary path: it forgets a request that came in one
    piece with a broken one behind it."""
    pieces = []
    while (found := re.match(rb"[^\n]+\r\n(?:[^\n]+\r\n)*?Content-Length: (\d+)\r\n(?:[^\n]+\r\n)*\r\n", whole)) is not None:
        end = found.end() + int(found[1])
        pieces.append(whole[:end])
        whole = whole[end:]
    return [piece for piece in (*pieces, whole) if piece]


class Ask:
    """One connection that is read until it is quiet."""

    def __init__(self, served: Served, fake: FakeReplica) -> None:
        self._served = served
        self._fake = fake
        self._data = b""
        self._closed = False

    async def send(self, pieces: list[bytes], *, slowly: bool) -> None:
        self._before = len(self._fake.requests)
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._served.port)
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                self._writer.write(piece)
                await self._writer.drain()
                await (self.read(QUIET_S) if slowly else asyncio.sleep(0))
        await self.read(QUIET_S)

    async def read(self, quiet_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            while not self._closed:
                async with asyncio.timeout(quiet_s):
                    try:
                        piece = await self._reader.read(65536)
                    except ConnectionError:
                        piece = b""
                self._closed = not piece
                self._data += piece

    def seen(self) -> Seen:
        answers, rest = _answers(self._data)
        return Seen(tuple(answers), rest, self._closed, tuple(_essence(one) for one in self._fake.requests[self._before :]))

    async def close(self) -> None:
        self._writer.close()
        await eventually(lambda: self._served.counts() == (0, 0, 0), what="nothing to be left of it")


def _essence(exchange: Exchange) -> tuple[str, str, tuple[tuple[str, str], ...], bytes]:
    headers = sorted((name.lower(), value) for name, value in exchange.headers if name.lower() not in OWN)
    return exchange.method, exchange.path, tuple(headers), exchange.body


async def _answer(exchange: Exchange) -> None:
    """Says what it got; as events if asked to."""
    if b'"stream": true' not in exchange.body:
        await exchange.json({"got": len(exchange.body)})
        return
    await exchange.begin_events()
    for word in ("one", "two"):
        await exchange.event(delta(word))
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end()


@contextlib.asynccontextmanager
async def _both(store, store_server) -> AsyncIterator[tuple[Served, Served, FakeReplica]]:
    async with contextlib.AsyncExitStack() as stack:
        fake = await stack.enter_async_context(replica_server(_answer))
        served = {}
        for path in ("fast", "ordinary"):
            token = PATH.set(path)
            served[path] = await stack.enter_async_context(serving(store_server, configuration(), id=f"gw-{path}"))
            PATH.reset(token)
        await Fleet(store).admit(fake, concurrency=64)
        for one in served.values():
            await eventually(lambda one=one: one.gateway.registry.available("m"))
        yield served["fast"], served["ordinary"], fake


async def _compare(fast: Served, ordinary: Served, fake: FakeReplica, pieces: list[bytes]) -> None:
    """The fast path agrees with one of the two ways in which the ordinary one may read the bytes."""
    asked = Ask(fast, fake)
    await asked.send(pieces, slowly=False)
    found, oracles = asked.seen(), []
    for feeding, slowly in ((one_by_one(b"".join(pieces)), True), (pieces, False)):
        oracle = Ask(ordinary, fake)
        await oracle.send(feeding, slowly=slowly)
        oracles.append((oracle, oracle.seen()))
        if found == oracles[-1][1]:
            break
    else:
        # Perhaps one of them was only slow, or still lingers.
        for ask in (asked, *(oracle for oracle, _ in oracles)):
            await ask.read(SLOW_S)
        late = [oracle.seen() for oracle, _ in oracles]
        assert _answered(asked.seen()) in [_answered(one) for one in late], (asked.seen(), late)
    for ask in (asked, *(oracle for oracle, _ in oracles)):
        await ask.close()


def _answered(seen: Seen) -> object:
    """Without the requests upstream: which of several connections they came by cannot be told any more."""
    return seen.answers, seen.rest, seen.closed


async def test_any_bytes_mean_the_same_on_both_paths(store, store_server):
    async with _both(store, store_server) as (fast, ordinary, fake):
        loop = asyncio.get_running_loop()

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        @given(streams())
        def compare(pieces: list[bytes]) -> None:
            asyncio.run_coroutine_threadsafe(_compare(fast, ordinary, fake, pieces), loop).result(30)

        await asyncio.to_thread(compare)
        assert any(exchange.path == CHAT for exchange in fake.requests)


@pytest.mark.parametrize("body", _BODIES[:3])
async def test_every_split_of_a_plain_request_means_the_same(store, store_server, body):
    text = json.dumps(body).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(text) + text
    async with _both(store, store_server) as (fast, ordinary, fake):
        for at in range(1, len(request), 7):
            await _compare(fast, ordinary, fake, [request[:at], request[at:]])
