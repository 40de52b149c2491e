"""No truncated answer looks complete: upstreams cut at every byte, in every framing, seen by clients of both HTTP versions."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from conftest import eventually
from fake_replica import CHAT, Exchange, Fleet, completion, replica_server, serving
from hypothesis import given
from hypothesis import strategies as st

from gateway import intake, upstream
from gateway.relay import Frames

DOCUMENT = b'{"choices":[{"message":{"content":"hello"}}]}'
EVENTS = b': ping\n\ndata: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DOCUMENT) + DOCUMENT,
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(DOCUMENT, 9),
    "events": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS, 30),
    "events by length": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(EVENTS)
    + EVENTS,
}


async def ask(port: int, version: str) -> tuple[bytes, bytes, bool]:
    """Head and body as they came, and whether the connection ended with a reset."""
    body, was_reset, seen = b'{"model":"m","stream":true}', False, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/{version}\r\nHost: g\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        while piece := await asyncio.wait_for(reader.read(65536), 30):
            seen += piece
    except ConnectionError:
        was_reset = True
    writer.close()
    head, _, rest = seen.partition(b"\r\n\r\n")
    return head, rest, was_reset


def complete(head: bytes, rest: bytes, was_reset: bool) -> bytes | None:
    """The body as a careful client understands it; None when it can tell that something is missing."""
    fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
    if b"content-length" in fields:
        return rest if len(rest) == int(fields[b"content-length"]) else None
    if fields.get(b"transfer-encoding") == b"chunked":
        body = b""
        while b"\r\n" in rest:
            size, _, rest = rest.partition(b"\r\n")
            piece, end, rest = rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
            if end != b"\r\n":
                return None
            if not piece:
                return body
            body += piece
        return None
    return None if was_reset else rest


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_an_answer_is_complete_or_visibly_broken_wherever_it_is_cut(store, store_server, kind, version):
    answer, body = ANSWERS[kind], EVENTS if "events" in kind else DOCUMENT
    at, reset = 0, False

    async def cut(exchange: Exchange) -> None:
        if at:
            await exchange.send(answer[:at])
        if at < len(answer):
            exchange.reset() if reset else exchange.writer.close()

    offsets = sorted({0, 1, len(answer) - 1, len(answer), *random.Random(kind).sample(range(len(answer)), 16)})
    async with replica_server(cut) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        for at in offsets:
            for reset in (False, True):
                head, rest, was_reset = await ask(served.port, version)
                understood = complete(head, rest, was_reset)
                if b" 502 " in head.split(b"\r\n")[0]:
                    assert at < len(answer)
                    assert json.loads(rest)["error"]["code"] == "upstream_error"
                elif at == len(answer):
                    assert understood == body
                else:
                    assert understood is None, (at, reset, head, rest)
                    assert rest.count(b"HTTP/1.") == 0
        await eventually(lambda: served.counts() == (0, 0, 0))


@given(st.lists(st.sampled_from([b"\n", b"\r\n", b"data: x", b": c", b"\n\n", b"", b"\r"]), max_size=12), st.randoms())
def test_whether_it_is_between_frames_does_not_depend_on_how_the_pieces_are_cut(parts, rng):
    """The same bytes in other pieces: the same verdict, and it is that of the bytes' end."""
    text, frames = b"".join(parts), Frames()
    at = 0
    while at < len(text):
        size = rng.randint(1, 3)
        frames.feed(text[at : at + size])
        at += size
    assert frames.between is (not text or text.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")))


async def test_gateway_case_36_bytes_of_a_stream_pass_unchanged_however_they_are_cut(store, store_server):
    """llama.cpp's pings, CRLF, several lines of data, characters cut in two: all as the replica sent it."""
    text = ': ping\n\ndata: {"x":"\N{SNOWMAN}"}\r\n\r\nevent: e\nid: 7\ndata: 1\ndata: 2\n\n:\n\ndata: [DONE]\n\n'.encode()
    rng = random.Random(36)

    async def script(exchange: Exchange) -> None:
        await exchange.begin_events()
        at = 0
        while at < len(text):
            size = rng.randint(1, 7)
            await exchange.chunk(text[at : at + size])
            await asyncio.sleep(0)
            at += size
        await exchange.end()

    async with replica_server(script) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        for _ in range(10):
            assert complete(*await ask(served.port, "1.1")) == text


async def test_gateway_case_27_an_upstream_that_closes_idle_connections_just_when_they_are_used(store, store_server, monkeypatch):
    """Both sides give an idle connection the same time. Whoever is first, each request is answered and seen once."""
    monkeypatch.setattr(upstream, "KEEP_IDLE_S", 0.05)

    async def then_close(exchange: Exchange) -> None:
        await exchange.json(completion())
        asyncio.get_running_loop().call_later(0.05, exchange.writer.close)

    async with replica_server(then_close) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        for n in range(30):
            assert (await served.chat(n=n)).status_code == 200
            await asyncio.sleep(0.045 + n * 0.0005)
        answered = [json.loads(request.body)["n"] for request in fake.requests]
        assert sorted(set(answered)) == list(range(30))
        assert served.counts() == (0, 0, 0)


async def test_gateway_cases_13_and_29_no_other_clock_ends_a_slow_answer(store, store_server, monkeypatch):
    """Every wait of the gateway's own is made short: the first byte and the rest may still take as long as the model allows."""
    for module, name in ((upstream, "CONNECT_S"), (upstream, "KEEP_IDLE_S"), (intake, "PAUSE_S")):
        monkeypatch.setattr(module, name, 0.1)

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.6)
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")
        for _ in range(4):
            await asyncio.sleep(0.3)
            await exchange.send(b"x")

    async with replica_server(slow) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        response = await served.chat()
        assert (response.status_code, response.content) == (200, b"xxxx")
