"""The fast path's own promises: connections are used again, odd requests go to the other path, nobody's bytes pile up."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from conftest import eventually
from fake_replica import CHAT, Exchange, Fleet, completion, replica_server, serving

from gateway.plain import MAX_BODY, plain
from policies.replica import State

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 13"
BODY = b'{"model":"m"}'


async def admitted(store, served, fake, **more):
    record = await Fleet(store).admit(fake, **more)
    # Without a permit the first request would wait, and take the other way.
    await eventually(lambda: served.gateway.permits.limit(record))
    return record


@contextlib.asynccontextmanager
async def connection(served, **options):
    """A client's connection, closed whatever happens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, **options)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """One answer with a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return int(head.split()[1]), await reader.readexactly(size)


async def test_connections_are_used_again_on_both_sides(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        async with connection(served) as (reader, writer):
            for _ in range(50):
                writer.write(HEAD + b"\r\n\r\n" + BODY)
                assert (await answer_of(reader))[0] == 200
            assert fake.connections == 1
            assert len(served.gateway.serving.fast.clients) == 1, "it never left the fast path"
        await eventually(lambda: not served.gateway.serving.fast.clients)


async def test_an_answer_that_says_close_is_not_followed_by_another(store, store_server):
    async def closing(exchange: Exchange) -> None:
        await exchange.json(completion(), head="Connection: close\r\n")

    async with replica_server(closing) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        for _ in range(3):
            assert (await served.chat()).status_code == 200
        assert fake.connections == 3


async def test_bytes_that_nobody_asked_for_end_the_connection(store, store_server):
    async def talkative(exchange: Exchange) -> None:
        text = json.dumps(completion()).encode()
        one = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text) + text
        await exchange.send(one + one.replace(b"hello", b"other"))

    async with replica_server(talkative) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        for _ in range(3):
            assert (await served.chat()).json()["choices"][0]["message"]["content"] == "hello"
        assert fake.connections == 3


async def test_a_connection_goes_over_to_the_other_path_and_stays_in_order(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        async with connection(served) as (reader, writer):
            writer.write(HEAD + b"\r\n\r\n" + BODY)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
            writer.write(HEAD + b"\r\n\r\n" + BODY)
            answers = [await answer_of(reader) for _ in range(3)]
            assert [status for status, _ in answers] == [200, 200, 200]
            assert json.loads(answers[1][1])["object"] == "list"
            assert not served.gateway.serving.fast.clients


async def test_half_a_request_is_handed_over_after_a_while(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        async with connection(served) as (reader, writer):
            writer.write(HEAD + b"\r\n\r\n" + BODY[:5])
            await eventually(lambda: not served.gateway.serving.fast.clients, what="the other path to have it")
            writer.write(BODY[5:])
            assert (await answer_of(reader))[0] == 200


async def test_a_client_that_sends_ahead_is_held_back(store, store_server):
    proceed = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await proceed.wait()
        await exchange.json(completion())

    async with replica_server(slow) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        async with connection(served) as (reader, writer):
            writer.write((HEAD + b"\r\n\r\n" + BODY) * 40_000)
            await eventually(lambda: fake.requests)
            (client,) = served.gateway.serving.fast.clients
            await eventually(lambda: client._paused_reading)
            assert len(client._buffer) < 1 << 20
            proceed.set()
            for _ in range(100):
                assert (await answer_of(reader))[0] == 200
            writer.transport.abort()
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_a_reader_that_stops_stops_the_replica(store, store_server):
    sent = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.begin_events()
        while True:
            await exchange.chunk(b"data: " + b"x" * 65536 + b"\n\n")
            sent += 65536

    async with replica_server(flood) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        async with connection(served, limit=1024) as (_, writer):
            body = b'{"model":"m","stream":true}'
            writer.write(HEAD.replace(b"13", b"%d" % len(body)) + b"\r\n\r\n" + body)
            await eventually(lambda: sent > 0)
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.3)
            assert sent < 32 << 20
            writer.transport.abort()
        await eventually(lambda: served.counts() == (0, 0, 0) and fake.inflight == 0)


async def test_a_stopped_incarnation_gets_no_more_bytes(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        record = await admitted(store, served, fake)
        assert (await served.chat()).status_code == 200
        pool = served.gateway.serving.fast._pools[record.incarnation]
        await Fleet(store).change(record, State.STOPPED)
        await eventually(lambda: not served.gateway.registry.available("m"))
        assert pool.ended
        await eventually(lambda: not pool.alive)


@pytest.mark.parametrize(
    "head",
    [
        HEAD,
        HEAD + b"\r\nContent-Type: application/json",
        HEAD + b"\r\nContent-Type: application/json; charset=utf-8\r\nAuthorization: Bearer x",
        HEAD + b"\r\nConnection: keep-alive\r\nUser-Agent: OpenAI/Python 3.0\r\nX-Empty:",
        HEAD.replace(b"/v1/chat/completions", b"/v1/embeddings"),
        HEAD.replace(b"/v1/chat/completions", b"/v1/chat/completions/"),
    ],
)
def test_plain(head):
    found = plain(head)
    assert found is not None
    assert found.length == 13
    assert found.found.path == found.target.rstrip("/")


@pytest.mark.parametrize(
    "head",
    [
        HEAD.replace(b"POST", b"GET"),
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n"),
        HEAD.replace(b"POST ", b"POST  "),
        HEAD.replace(b"/v1/chat/completions", b"/v1/chat/completions?model=x"),
        HEAD.replace(b"/v1/chat/completions", b"http://g/v1/chat/completions"),
        HEAD.replace(b"/v1/chat/completions", b"/v1/models"),
        HEAD.replace(b"Host: g\r\n", b""),
        HEAD.replace(b"13", b"0"),
        HEAD.replace(b"13", b"-1"),
        HEAD.replace(b"13", b"+13"),
        HEAD.replace(b"13", b"1_3"),
        HEAD.replace(b"13", b"%d" % (MAX_BODY + 1)),
        HEAD.replace(b"13", b"\xb2"),
        HEAD.replace(b": 13", b" : 13"),
        *(
            HEAD + b"\r\n" + line
            for line in (
                b"Content-Length: 13",
                b"Host: g",
                b"Transfer-Encoding: chunked",
                b"Transfer-encoding: identity",
                b"Expect: 100-continue",
                b"Upgrade: websocket",
                b"Connection: close",
                b"Connection: keep-alive, X-Private",
                b"Content-Encoding: gzip",
                b"Content-Type: multipart/form-data; boundary=x",
                b"Content-Type: text/plain",
                b"Origin: https://example.com",
                b"TE: trailers",
                b" folded: 1",
                b"Bad Name: 1",
                b"NoColon",
                b"X-Nul: a\x00b",
                b"X-Latin: \xe4",
                b"X-Twice: 1\r\nx-twice: 2",
            )
        ),
    ],
)
def test_not_plain(head):
    assert plain(head) is None


def test_the_route_is_known_by_its_path():
    assert plain(HEAD) is not None
    assert plain(HEAD).found.route.name == CHAT
