"""Connections that are used again, on either side: no answer is another's, none that broke looks whole, none is kept for ever."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from certificates import make
from conftest import eventually
from fake_replica import CHAT, Exchange, FakeReplica, Fleet, configuration, replica_server, serving

from gateway import connection, fastpath
from gateway.downstream import ClientGone
from gateway.relay import Relay
from gateway.trail import Trail
from gateway.upstream import Unreachable, Upstreams
from policies.config import Config, parse
from policies.replica import Replica, State
from policies.tenancy import key_hash

BODY = b'{"model":"m"}'
CHATS = b"POST %s HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(BODY), BODY)


async def admitted(store, served, fake, **more):
    record = await Fleet(store).admit(fake, **more)
    # Without a permit the first request would wait, and take the other way.
    await eventually(lambda: served.gateway.permits.limit(record))
    return record


async def narrow(port: int) -> socket.socket:
    """A client that takes little at a time, and nothing before it is asked to."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return client


async def read_for(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """All that comes within that time."""
    data = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while piece := await reader.read(65536):
                data += piece
    return data


async def test_what_follows_an_answer_reaches_nobody(store, store_server):
    async def talkative(exchange: Exchange) -> None:
        one = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n"
        await exchange.send(one + b'"first"' + one + b'"other"')

    async with replica_server(talkative) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(CHATS)
        seen = await read_for(reader, 0.3)
        assert seen.count(b"HTTP/1.1") == 1
        assert seen.endswith(b'"first"')
        writer.close()


KNOWN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        pytest.param([KNOWN + b'"another"'], True, id="whole"),
        pytest.param([KNOWN, b'"another"'], True, id="head-first"),
        pytest.param([KNOWN + b'"ano', b'ther"'], True, id="in-two"),
        pytest.param([KNOWN[:20], KNOWN[20:] + b'"another"'], True, id="head-in-two"),
        pytest.param([KNOWN + b'"another"' + KNOWN + b'"surplus"'], True, id="more-than-whole"),
        pytest.param([KNOWN + b'"ano'], False, id="cut"),
        pytest.param([KNOWN.replace(b"9", b"4") + b'"an"'], True, id="other-length"),
    ],
)
async def test_an_answer_behind_a_known_head_is_told_by_its_own_bytes(store, store_server, pieces, whole):
    """Two answers teach the gateway the head; the third one has it too, and comes as it likes."""
    expected = b'"an"' if b"Content-Length: 4" in pieces[0] else b'"another"'

    async def answer(exchange: Exchange) -> None:
        if len(fake.requests) < 3:
            await exchange.send(KNOWN + b'"learned"')
            return
        for piece in pieces:
            await exchange.send(piece)
            await asyncio.sleep(0.01)  # reads of their own
        if not whole or b"surplus" in pieces[0]:
            exchange.reset()

    async with replica_server(answer) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        for _ in range(2):
            writer.write(CHATS)
            assert (await reader.readuntil(b'"learned"')).startswith(b"HTTP/1.1 200")
        assert fake.connections == 1
        writer.write(CHATS)
        seen = await read_for(reader, 0.5)
        assert seen.count(b"HTTP/1.1 200") == 1
        assert seen.endswith(expected) is whole
        assert b"surplus" not in seen
        await eventually(lambda: served.counts() == (0, 0, 0))
        writer.close()


async def test_rubbish_behind_an_answer_does_not_spoil_it(store, store_server):
    async def talkative(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}RUBBISH\r\n\r\n")

    async with replica_server(talkative) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        assert (await served.chat()).json() == {}
        assert (await served.chat()).json() == {}
        assert fake.connections == 2


async def test_a_body_that_its_connection_ends_is_not_complete_when_the_incarnation_has_ended(store, store_server):
    begun = asyncio.Event()

    async def endless(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{")
        begun.set()
        await exchange.client_left()

    async with replica_server(endless) as fake, serving(store_server) as served:
        record = await admitted(store, served, fake)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(CHATS)
        await reader.readuntil(b"\r\n\r\n")
        await begun.wait()
        await Fleet(store).change(record, State.STOPPED)
        rest = await read_for(reader, 3)
        assert not rest.endswith(b"0\r\n\r\n"), "a body that was cut looks complete"
        await eventually(lambda: served.counts() == (0, 0, 0))
        writer.close()


async def clog(served, fake: FakeReplica, client: socket.socket) -> int:
    """Send requests, one at a time, and read nothing, until the gateway has an answer that it cannot send on. Bytes of text."""
    text = b'"' + b"x" * 30_000 + b'"'

    async def answer(exchange: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text)
        await exchange.send(head + text)

    fake.default, ours = answer, None
    while ours is None or ours.transport.get_write_buffer_size() <= 64 << 10:
        before = len(fake.requests)
        await asyncio.get_running_loop().sock_sendall(client, CHATS)
        await eventually(functools.partial(answered, served, fake, before + 1))
        (ours,) = served.gateway.serving.fast.clients
    fake.default = FakeReplica().default
    return len(fake.requests) * len(text)


def answered(served, fake: FakeReplica, count: int) -> bool:
    """The replica has had so many requests, and none is under way."""
    return len(fake.requests) == count and served.counts() == (0, 0, 0)


async def drain(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 20), 30)
    return data


async def test_a_client_that_is_slow_with_an_answers_end_leaves_a_usable_connection(store, store_server):
    async with replica_server() as fake, serving(store_server, configuration(model__first_byte_timeout_s=3)) as served:
        await admitted(store, served, fake)
        client = await narrow(served.port)
        size = await clog(served, fake, client)
        (pool,) = served.gateway.serving.fast._pools.values()
        assert [idle.transport.is_reading() for idle in pool._idle] == [True]
        await drain(client, size)
        assert (await served.chat()).status_code == 200
        client.close()


@pytest.mark.interpreted
async def test_a_replica_that_accepts_and_resets_at_once_is_unreachable(store, store_server, monkeypatch):
    # The reset is between the moment that the connection is made and that its maker hears of it.
    made = connection.Connection.connection_made

    def lost_at_once(self, transport):
        made(self, transport)
        asyncio.get_running_loop().call_soon(self.connection_lost, ConnectionResetError())

    async with replica_server() as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        monkeypatch.setattr(connection.Connection, "connection_made", lost_at_once)
        request = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1, what="its request to wait again")
        request.cancel()
        await eventually(lambda: served.counts() == (0, 0, 0) and served.gateway.life.open == 0)


async def test_a_client_that_reads_nothing_is_not_served_on_and_on(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        client = await narrow(served.port)
        size, before = await clog(served, fake, client), len(fake.requests)
        await asyncio.get_running_loop().sock_sendall(client, CHATS * 10)
        await eventually(lambda: next(iter(served.gateway.serving.fast.clients))._buffer)
        assert len(fake.requests) == before, "nothing more is answered before it reads"
        assert (await served.chat()).status_code == 200, "others are served"
        await drain(client, size)
        await eventually(lambda: len(fake.requests) == before + 11)
        client.close()
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_back_pressure_goes_over_with_the_connection(store, store_server, caplog):
    async with replica_server() as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        client = await narrow(served.port)
        size = await clog(served, fake, client)
        await asyncio.get_running_loop().sock_sendall(client, b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
        await eventually(lambda: next(iter(served.gateway.serving.fast.clients))._buffer)
        seen = await drain(client, size)
        while b'"list"' not in seen:
            seen += await drain(client, 1)
        assert not served.gateway.serving.fast.clients
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
        client.close()


async def test_a_client_that_leaves_while_it_is_held_back_leaves_no_error(store, store_server, caplog):
    async def flood(exchange: Exchange) -> None:
        await exchange.begin_events()
        while True:
            await exchange.chunk(b"data: " + b"x" * 65536 + b"\n\n")

    gc.collect()  # what earlier tests have left says so now
    caplog.clear()
    async with replica_server(flood) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        loop, client = asyncio.get_running_loop(), await narrow(served.port)
        await loop.sock_sendall(client, CHATS)
        await eventually(lambda: any(passing._held_back for passing in served.gateway.serving.fast.passing))
        client.close()
        await eventually(lambda: served.counts() == (0, 0, 0))
        gc.collect()
        await asyncio.sleep(0)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


@contextlib.asynccontextmanager
async def over_tls(served, folder: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the same gateway, encrypted; its server runs in the loop of the test."""
    pair, runner = make(folder, "gateway"), served.runner
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(pair.certificate, pair.key)
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=there)
    await site.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=pair.client(), server_hostname="localhost")
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """One answer with a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return int(head.split()[1]), await reader.readexactly(size)


ODD = b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"


@pytest.mark.parametrize("together", [True, False])
async def test_an_encrypted_connection_goes_over_like_any_other(store, store_server, tmp_path, together):
    async with replica_server() as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        async with over_tls(served, tmp_path) as (reader, writer):
            requests, answers = [CHATS, CHATS, ODD, CHATS, ODD], []
            for piece in [b"".join(requests)] if together else requests:
                writer.write(piece)
                answers += [await answer_of(reader) for _ in range(5 if together else 1)]
                assert len(served.gateway.serving.fast.clients) == (len(answers) < 3)
            assert [status for status, _ in answers] == [200] * 5
            assert [b'"list"' in body for _, body in answers] == [False, False, True, False, True]
        forwarded = [request.header("X-Forwarded-Proto") for request in fake.requests]
        assert forwarded == ["https"] * 3


async def test_a_cut_over_tls_is_no_proper_end(store, store_server, tmp_path):
    async def broken(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event({"a": 1})
        exchange.reset()

    async with replica_server(broken) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        async with over_tls(served, tmp_path) as (reader, writer):
            writer.write(CHATS)
            seen = await read_for(reader, 3)
            assert seen.startswith(b"HTTP/1.1 200")
            assert not seen.endswith(b"0\r\n\r\n")
        await eventually(lambda: served.counts() == (0, 0, 0) and not served.gateway.serving.fast.clients)


class Stalled:
    """A client that takes the body, and never its end."""

    begun, version = True, (1, 1)

    def __init__(self) -> None:
        self._gone = asyncio.Event()

    async def write(self, data: bytes) -> None:
        pass

    async def finish(self) -> None:
        await self._gone.wait()
        raise ClientGone

    def abort(self) -> None:
        self._gone.set()


class Whole:
    """An answer of one piece."""

    content_type = encoding = ""
    pieces = (b"x", b"")

    def __init__(self) -> None:
        self._left = list(self.pieces)

    async def read(self) -> bytes:
        return self._left.pop(0)

    def abort(self) -> None:
        """It has been read: there is nothing left to end."""


async def test_a_client_that_stalls_at_the_very_end_is_cut_off():
    spec, trail = configuration(model__idle_body_timeout_s=0.05).models["m"], Trail("id", CHAT, 0.0)
    with pytest.raises(ClientGone):
        await asyncio.wait_for(Relay(Whole(), Stalled(), spec, trail).run(), 30)
    assert trail.code == "client_stalled"


async def test_nobody_makes_a_new_connection_to_an_incarnation_that_has_ended():
    replica = Replica(
        id="m#0", model="m", state=State.ADMITTED, fence=1, host="h", incarnation="i1", address="127.0.0.1", port=1, concurrency=1
    )
    upstreams = Upstreams()
    upstreams.retain(frozenset(("i1",)))
    assert upstreams.pool(replica) is upstreams.pool(replica)
    upstreams.retain(frozenset(("i2",)))
    with pytest.raises(Unreachable):
        upstreams.pool(replica)
    await upstreams.close()


@pytest.mark.interpreted
async def test_a_bug_at_the_end_of_an_answer_costs_no_slot(store, store_server, monkeypatch):
    def bug(*args: object) -> None:
        raise RuntimeError("bug")

    async with replica_server() as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        monkeypatch.setattr(served.gateway.serving.decisions, "served", bug)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(CHATS)
        assert (await answer_of(reader))[0] == 200
        await eventually(lambda: served.counts() == (0, 0, 0) and served.gateway.life.open == 0)
        writer.close()


async def test_a_bug_before_an_answer_is_told_as_on_the_other_path(store, store_server, monkeypatch):
    async def bug(*args: object) -> None:
        raise RuntimeError("bug")

    async with serving(store_server) as served:
        monkeypatch.setattr(served.gateway.serving.proxy, "go", bug)
        answer = await served.chat()
        assert answer.status_code == 500
        assert answer.headers["x-request-id"]
        assert served.gateway.life.open == 0


async def test_connections_that_are_idle_for_too_long_are_closed(store, store_server, monkeypatch):
    monkeypatch.setattr(fastpath, "_IDLE_S", 0.5)
    proceed = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await proceed.wait()
        await exchange.json({})

    async with replica_server(slow) as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", served.port)
        busy, busy_writer = await asyncio.open_connection("127.0.0.1", served.port)
        busy_writer.write(CHATS)
        assert await asyncio.wait_for(idle.read(), 30) == b""
        proceed.set()
        assert (await answer_of(busy))[0] == 200
        assert await asyncio.wait_for(busy.read(), 30) == b""
        for writer in (idle_writer, busy_writer):
            writer.close()


async def test_a_client_that_never_takes_its_answers_end_is_cut_off(store, store_server, monkeypatch):
    monkeypatch.setattr(fastpath, "_STALLED_S", 0.5)
    async with replica_server() as fake, serving(store_server) as served:
        await admitted(store, served, fake)
        client = await narrow(served.port)
        await clog(served, fake, client)
        await eventually(lambda: not served.gateway.serving.fast.clients)
        client.close()


@pytest.mark.interpreted
async def test_a_connection_that_clogs_as_it_is_handed_over_stays_until_it_is_free(store, store_server):
    class Full:
        """What waits to be sent is more than the client takes."""

        def send(self) -> None:
            if ours.outbox is self:
                ours.outbox = served.gateway.serving.fast.outbox
                ours.pause_writing()

    async with serving(store_server) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        await eventually(lambda: served.gateway.serving.fast.clients)
        (ours,) = served.gateway.serving.fast.clients
        ours.outbox = Full()
        writer.write(ODD)
        await eventually(lambda: ours._clogged)
        assert ours.transport is not None
        assert ours.transport.get_protocol() is ours
        ours.resume_writing()
        assert (await asyncio.wait_for(answer_of(reader), 30))[0] == 200
        assert not served.gateway.serving.fast.clients
        writer.close()


async def test_a_key_that_a_reload_revokes_is_revoked_on_open_connections(store, store_server):
    key, other = "sk-one", "sk-two"

    def config(*keys: str, models: list[str]) -> Config:
        tenant = {"keys": [key_hash(one) for one in keys], "models": models}
        engine = {"engine": {"kind": "http", "command": ["/bin/true"]}}
        return parse({"models": {"m": engine, "n": engine}, "tenants": {"t": tenant}})

    request = CHATS.replace(b"Host: g", b"Host: g\r\nAuthorization: Bearer " + key.encode())
    async with replica_server() as fake, serving(store_server, config(key, models=["m"])) as served:
        await admitted(store, served, fake)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        changes = [(config(key, models=["n"]), 403), (config(other, models=["m"]), 401), (config(key, models=["m"]), 200)]
        for changed, status in [(None, 200), *changes]:
            if changed is not None:
                served.gateway.current.replace(changed)
            for _ in range(2):
                writer.write(request)
                assert (await answer_of(reader))[0] == status
        assert len(served.gateway.serving.fast.clients) == 1, "it never left the fast path"
        writer.close()
