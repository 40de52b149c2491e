"""WebSockets through the gateway: held or refused like any request, never 101 before the replica's, bytes both ways."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib

import aiohttp
import pytest
from conftest import eventually
from fake_replica import Exchange, Fleet, configuration, replica_server, serving

from gateway import websocket
from gateway.errors import InvalidRequest, UpgradeRequired
from gateway.exchange import Head
from policies.config import parse
from policies.replica import State
from policies.tenancy import key_hash

PATH = "/v1/realtime?model=m"
ASK = {"Connection": "keep-alive, Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
RAW = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: g\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + KEY.encode() + b"\r\n\r\n"
)


def accept(exchange: Exchange, more: str = "") -> bytes:
    """The replica's agreement."""
    key = exchange.header("sec-websocket-key") or ""
    digest = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
    return (
        f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}\r\n{more}\r\n"
    ).encode()


async def echo(exchange: Exchange) -> None:
    """Sends back whatever comes, unmasked; frames are shorter than 126 bytes."""
    await exchange.send(accept(exchange, "Sec-WebSocket-Protocol: realtime\r\n"))
    while True:
        first, size = await exchange.reader.readexactly(2)
        mask = await exchange.reader.readexactly(4)
        data = await exchange.reader.readexactly(size & 127)
        plain = bytes(byte ^ mask[n % 4] for n, byte in enumerate(data))
        await exchange.send(bytes((first, len(plain))) + plain)
        if first & 15 == 8:
            exchange.writer.close()
            return


def quiet(served) -> bool:
    return served.counts() == (0, 0, 0)


@contextlib.asynccontextmanager
async def session(served):
    async with aiohttp.ClientSession(served.url) as client:
        yield client


async def test_a_real_client_talks_through_and_closes_cleanly(store, store_server):
    async with replica_server(echo) as fake, serving(store_server) as served, session(served) as client:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        async with client.ws_connect(PATH, protocols=["realtime", "openai-insecure-api-key.secret"]) as socket:
            assert socket.protocol == "realtime"
            for text in ("hello", "", "ü" * 40):
                await socket.send_str(text)
                assert await socket.receive_str() == text
            await socket.send_bytes(b"\x00\xff")
            assert await socket.receive_bytes() == b"\x00\xff"
            assert served.inflight() == 1
        assert socket.close_code == 1000
        got = fake.requests[0]
        assert (got.method, got.path) == ("GET", PATH)
        assert got.header("sec-websocket-protocol") == "realtime"
        await eventually(lambda: quiet(served))


async def test_a_browser_may_hide_its_key_among_the_protocols(store, store_server):
    tenants = {"t": {"keys": [key_hash("secret")]}}
    config = parse({**configuration().model_dump(), "tenants": tenants})
    async with replica_server(echo) as fake, serving(store_server, config) as served, session(served) as client:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect(PATH, protocols=["realtime"])
        assert refused.value.status == 401
        async with client.ws_connect(PATH, protocols=["realtime", "openai-insecure-api-key.secret"]) as socket:
            await socket.send_str("hello")
            assert await socket.receive_str() == "hello"
        assert "secret" not in repr(fake.requests[0].headers)


async def test_a_cold_model_holds_the_handshake_and_sends_no_101_before_the_replica(store, store_server):
    agree = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await agree.wait()
        await echo(exchange)

    async with replica_server(slow) as fake, serving(store_server) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        # A frame that comes early is kept for the replica.
        writer.write(RAW + b"\x81\x82\x00\x00\x00\x00hi")
        await eventually(lambda: served.held() == 1)
        await Fleet(store).admit(fake)
        await eventually(lambda: fake.requests)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        agree.set()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"x-rewake-incarnation: inc-0-1" in head
        assert b"content-length" not in head.lower()
        assert b"transfer-encoding" not in head.lower()
        assert await asyncio.wait_for(reader.readexactly(4), 30) == b"\x81\x02hi"
        writer.close()
        await eventually(lambda: quiet(served))


async def test_what_cannot_be_served_is_an_ordinary_error(store, store_server):
    async with serving(store_server, configuration(model__on_cold="reject")) as served, session(served) as client:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect(PATH)
        assert (refused.value.status, refused.value.headers["x-rewake-error"]) == (503, "model_loading")
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect("/v1/realtime?model=nobody")
        assert (refused.value.status, refused.value.headers["x-rewake-error"]) == (404, "model_not_found")
        plain = await served.client.get(PATH)
        assert (plain.status_code, plain.json()["error"]["code"]) == (426, "upgrade_required")
        assert plain.headers["sec-websocket-version"] == "13"
        assert quiet(served)


async def test_an_engine_without_websockets_says_so_itself(store, store_server):
    async def missing(exchange: Exchange) -> None:
        await exchange.json({"detail": "Not Found"}, "404 Not Found")

    async with replica_server(missing) as fake, serving(store_server) as served, session(served) as client:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        async with client.get(PATH, headers={**ASK, "Sec-WebSocket-Key": KEY}) as response:
            assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
            assert "x-rewake-error" not in response.headers
        await eventually(lambda: quiet(served))


@pytest.mark.parametrize("how", ["reset", "close", "incarnation"])
async def test_a_replica_that_dies_ends_the_socket_without_a_farewell(store, store_server, how):
    end = asyncio.Event()

    async def dies(exchange: Exchange) -> None:
        await exchange.send(accept(exchange) + b"\x81\x02hi")
        await end.wait()
        exchange.reset() if how == "reset" else exchange.writer.close()

    async with replica_server(dies) as fake, serving(store_server) as served, session(served) as client:
        fleet = Fleet(store)
        replica = await fleet.admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        async with client.ws_connect(PATH) as socket:
            assert await socket.receive_str() == "hi"
            if how == "incarnation":
                await fleet.change(replica, State.FAILED, reason="the engine died")
            else:
                end.set()
            closed = await asyncio.wait_for(socket.receive(), 30)
            assert closed.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
            assert socket.close_code == 1006
        end.set()
        await eventually(lambda: quiet(served))


async def test_a_client_that_leaves_frees_the_replica_at_once(store, store_server):
    left = asyncio.Event()

    async def listen(exchange: Exchange) -> None:
        await exchange.send(accept(exchange))
        await exchange.client_left()
        left.set()

    async with replica_server(listen) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(RAW)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert served.inflight() == 1
        writer.transport.abort()
        await asyncio.wait_for(left.wait(), 30)
        await eventually(lambda: quiet(served))


async def test_a_socket_on_which_nothing_moves_is_closed(store, store_server):
    async def silent(exchange: Exchange) -> None:
        await exchange.send(accept(exchange))
        await exchange.client_left()

    config = configuration(model__idle_body_timeout_s=0.2)
    async with replica_server(silent) as fake, serving(store_server, config) as served, session(served) as client:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        async with client.ws_connect(PATH) as socket:
            closed = await asyncio.wait_for(socket.receive(), 30)
            assert closed.type is aiohttp.WSMsgType.CLOSED
        await eventually(lambda: quiet(served))


async def test_a_slow_reader_holds_the_replica_back(store, store_server):
    sent = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.send(accept(exchange))
        for _ in range(400):
            await exchange.send(b"x" * 65536)
            sent += 65536
        exchange.writer.close()

    async with replica_server(flood) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(RAW)
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 20 << 20
        total = 0
        while piece := await asyncio.wait_for(reader.read(1 << 20), 30):
            total += len(piece)
        assert total == 400 * 65536
        writer.close()


def head(version: tuple[int, int] = (1, 1), **changes: str | None) -> Head:
    headers = {name.lower(): value for name, value in ASK.items()} | {"sec-websocket-key": KEY}
    for name, value in changes.items():
        headers.pop(name.replace("_", "-"), None)
        if value is not None:
            headers[name.replace("_", "-")] = value
    return Head("GET", PATH, headers, "id", 0.0, version=version)


def test_proper_handshakes_pass_and_others_do_not():
    websocket.check(head())
    for wrong in ({"connection": "close"}, {"upgrade": "h2c"}, {"sec_websocket_version": "8"}, {"upgrade": None}):
        with pytest.raises(UpgradeRequired):
            websocket.check(head(**wrong))
    with pytest.raises(UpgradeRequired):
        websocket.check(head((1, 0)))
    for key in (None, "", "x", "AAAA", "é"):
        with pytest.raises(InvalidRequest):
            websocket.check(head(sec_websocket_key=key))


@pytest.mark.parametrize(
    ("offered", "asked"),
    [
        ("realtime", "realtime"),
        ("realtime, openai-insecure-api-key.sk-1, openai-beta.realtime-v1", "realtime, openai-beta.realtime-v1"),
        ("realtime, openai-insecure-api-key.sk-1", "realtime"),
        ("openai-insecure-api-key.sk-1", None),
    ],
)
def test_a_browsers_key_stays_here(offered, asked):
    made = dict(websocket.asking([("Sec-WebSocket-Protocol", offered)]))
    assert made.get("Sec-WebSocket-Protocol") == asked
