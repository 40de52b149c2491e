"""The data path through the gateway's own runner: what reaches the replica, what reaches the client, what is cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import httpx
import pytest
from conftest import eventually
from fake_replica import CHAT, Exchange, FakeReplica, Fleet, completion, configuration, delta, replica_server, serving

from gateway import intake
from policies.replica import State


async def raw(port: int, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which ``request`` has been sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    return reader, writer


def post(body: bytes, *, path: str = CHAT, version: str = "1.1", head: str = "") -> bytes:
    return f"POST {path} HTTP/{version}\r\nHost: gw.example\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


BODY = b'{ "model" : "m",\n "stream":true, "x": [1.0, "\\u00e9\xc3\xa9"] }'


async def test_body_passes_verbatim_and_heads_are_cleaned(store, store_server):
    """Host, hop-by-hop headers and the client's key stop at the gateway; traces, ids and everything else go on."""
    async with replica_server() as fake, serving(store_server) as served:
        replica = await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        head = (
            "Authorization: Bearer secret\r\nX-Api-Key: secret\r\nConnection: keep-alive, X-Private\r\nX-Private: 1\r\n"
            "TE: trailers\r\ntraceparent: 00-a-b-01\r\nx-request-id: my-id\r\nX-Forwarded-For: 10.0.0.9\r\nUser-Agent: me\r\n"
        )
        reader, writer = await raw(served.port, post(BODY, path=CHAT + "?a=%2F", head=head))
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        writer.close()
        got = fake.requests[0]
        names = {name.lower() for name, _ in got.headers}
        assert got.body == BODY
        assert got.path == CHAT + "?a=%2F"
        assert not names & {"authorization", "x-api-key", "connection", "x-private", "te", "accept", "accept-encoding"}
        assert got.header("host") == f"127.0.0.1:{fake.port}"
        assert got.header("traceparent") == "00-a-b-01"
        assert got.header("x-request-id") == "my-id"
        assert got.header("x-forwarded-for") == "127.0.0.1"
        assert got.header("x-forwarded-host") == "gw.example"
        assert got.header("user-agent") == "me"
        assert "x-request-id: my-id" in answer
        assert "x-rewake-start: restored" in answer
        assert f"x-rewake-incarnation: {replica.incarnation}" in answer


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b"{}", 400, "missing_model"),
        (b'{"model":7}', 400, "missing_model"),
        (b'{"model":""}', 400, "missing_model"),
        (b'{"model":"m","stream":"yes"}', 400, "invalid_json"),
        (b'{"model":"m","model":"n"}', 400, "invalid_json"),
        (b'{"model":"m","mod\\u0065l":"n"}', 400, "invalid_json"),
        (b'{"model":"nobody"}', 404, "model_not_found"),
    ],
)
async def test_unusable_bodies_are_refused_in_openai_shape(store_server, store, body, status, code):
    async with serving(store_server) as served:
        response = await served.client.post(CHAT, content=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert response.headers["x-rewake-error"] == code
        assert response.headers["x-should-retry"] == "false"
        assert response.headers["x-request-id"]
        assert served.gateway.ledger.load("m").arrivals == 0


async def test_nested_model_keys_and_aliases_are_fine(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        response = await served.chat("alias/of-m", tools=[{"model": 1, "stream": 2}, {"model": 3, "stream": 4}])
        assert response.status_code == 200


async def test_case_52_over_limit_is_413_and_large_bodies_pass(store, store_server):
    async with replica_server() as fake, serving(store_server, configuration(gateway__max_body_bytes="4 MiB")) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        large = json.dumps({"model": "m", "image": "A" * (3 << 20)}).encode()
        assert (await served.client.post(CHAT, content=large)).status_code == 200
        assert fake.requests[0].body == large

        async def pieces():
            for _ in range(5):
                yield b"A" * (1 << 20)

        for content in (b"A" * (5 << 20), pieces()):
            response = await served.client.post(CHAT, content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        assert len(fake.requests) == 1


async def test_errors_of_the_framework_have_our_shape(store_server, store):
    """404, 405 with Allow, and what is not even HTTP."""
    async with serving(store_server) as served:
        missing = await served.client.get("/nowhere")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await served.client.get(CHAT)
        assert (wrong.status_code, wrong.json()["error"]["code"], wrong.headers["allow"]) == (
            405,
            "method_not_allowed",
            "POST, OPTIONS",
        )
        for junk in (
            b"nonsense\r\n\r\n",
            post(b"{}", head="Transfer-Encoding: chunked\r\n"),
            post(b"", head="Content-Length: +1\r\n"),
        ):
            reader, writer = await raw(served.port, junk)
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b" 400 " in head.split(b"\r\n")[0]
            assert json.loads(body)["error"]["code"] == "invalid_http"


async def test_case_35_chunks_arrive_as_they_are_sent(store, store_server):
    """Each chunk passes on its own and unchanged, comments included; nobody on the way may buffer or expect a length."""
    gates = [asyncio.Event() for _ in range(3)]
    pieces = [b": ping\n\n", b'data: {"a":1}\n\n', b"data: [DONE]\n\n"]

    async def script(exchange: Exchange) -> None:
        await exchange.begin_events()
        for gate, piece in zip(gates, pieces, strict=True):
            await gate.wait()
            await exchange.chunk(piece)
        await exchange.end()

    async with replica_server(script) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        async with served.client.stream("POST", CHAT, json={"model": "m", "stream": True}) as response:
            assert response.headers["x-accel-buffering"] == "no"
            assert response.headers["cache-control"] == "no-cache"
            assert "content-length" not in response.headers
            chunks = response.aiter_raw()
            for gate, piece in zip(gates, pieces, strict=True):
                gate.set()
                assert await asyncio.wait_for(anext(chunks), 0.5) == piece
            with pytest.raises(StopAsyncIteration):
                await anext(chunks)
        await eventually(lambda: served.counts() == (0, 0, 0))


@pytest.mark.parametrize("reset", [True, False])
async def test_case_39_upstream_death_in_a_stream_is_an_error_frame_and_no_clean_end(store, store_server, reset):
    async def script(exchange: Exchange) -> None:
        await exchange.begin_events()
        for text in "abc":
            await exchange.event(delta(text))
        await cut.wait()
        exchange.reset() if reset else exchange.writer.close()

    async with replica_server(script) as fake, serving(store_server) as served:
        cut = asyncio.Event()
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        reader, writer = await raw(served.port, post(BODY))
        seen = await reader.readuntil(b'"c"')
        cut.set()
        with contextlib.suppress(ConnectionError):
            seen += await asyncio.wait_for(reader.read(), 30)
        writer.close()
        frame = seen[seen.index(b'data: {"error"') :].split(b"\n\n")[0]
        assert json.loads(frame.removeprefix(b"data: "))["error"]["code"] == "upstream_error"
        assert b"[DONE]" not in seen
        assert b"0\r\n\r\n" not in seen
        assert seen.count(b"HTTP/1.1") == 1
        await eventually(lambda: served.counts() == (0, 0, 0))


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_truncated_answers_never_look_complete(store, store_server, version):
    """With a length, chunked, or ended by the connection: the client can tell in each case."""

    async def with_length(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await asyncio.sleep(0.05)
        exchange.writer.close()

    async def chunked(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await exchange.chunk(b"half")
        await asyncio.sleep(0.05)
        exchange.writer.close()

    async with replica_server() as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        for script in (with_length, chunked):
            fake.scripts.append(script)
            reader, writer = await raw(served.port, post(BODY, version=version))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            was_reset, rest = False, b""
            try:
                while piece := await asyncio.wait_for(reader.read(100), 30):
                    rest += piece
            except ConnectionError:
                was_reset = True
            writer.close()
            assert b"half" in rest
            if b"content-length: 100" in head:
                assert len(rest) < 100
            elif b"chunked" in head:
                assert not rest.endswith(b"0\r\n\r\n")
            else:
                assert was_reset
        await eventually(lambda: served.counts() == (0, 0, 0))


@pytest.mark.parametrize("streaming", [True, False])
async def test_case_23_client_leaving_closes_the_upstream_and_frees_the_slot(store, store_server, streaming):
    left = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if streaming:
            await exchange.begin_events()
            await exchange.event(delta("a"))
        await exchange.client_left()
        left.set()

    async with replica_server(script) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        reader, writer = await raw(served.port, post(BODY))
        if streaming:
            await reader.readuntil(b'"a"')
        await eventually(lambda: served.inflight() == 1 and fake.requests)
        writer.transport.abort()
        await asyncio.wait_for(left.wait(), 30)
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_case_28_stale_reused_connection_is_replayed_once_on_a_fresh_one(store, store_server):
    """The upstream closes a kept connection just as the next request comes: one answer, one more body seen, no error."""

    async def slam(exchange: Exchange) -> None:
        exchange.writer.close()

    async with replica_server() as fake, serving(store_server) as served:
        record = await Fleet(store).admit(fake)
        # Without a permit the first request would wait, and take the other path's connection.
        await eventually(lambda: served.gateway.permits.limit(record))
        assert (await served.chat()).status_code == 200
        fake.scripts.append(slam)
        assert (await served.chat(n=2)).status_code == 200
        assert fake.connections == 2
        assert [json.loads(request.body).get("n") for request in fake.requests] == [None, 2, 2]


async def test_case_28_never_replayed_after_a_byte_nor_on_a_fresh_connection(store, store_server):
    async def one_byte(exchange: Exchange) -> None:
        await exchange.send(b"H")
        exchange.writer.close()

    async def slam(exchange: Exchange) -> None:
        exchange.writer.close()

    async with replica_server() as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        fake.scripts.append(slam)
        response = await served.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_error")
        assert len(fake.requests) == 1
        assert (await served.chat()).status_code == 200
        fake.scripts.append(one_byte)
        assert (await served.chat()).status_code == 502
        assert len(fake.requests) == 3
        fake.scripts += [slam, slam]
        assert (await served.chat()).status_code == 502
        assert len(fake.requests) == 4
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_case_12_first_byte_timer_starts_at_dispatch(store, store_server):
    """Held for longer than the timeout, answered in time: 200. Then one that is silent: 504, not to be retried."""
    silent = asyncio.Event()

    async def hang(exchange: Exchange) -> None:
        await exchange.client_left()
        silent.set()

    config = configuration(model__first_byte_timeout_s=0.3)
    async with replica_server() as fake, serving(store_server, config) as served:
        held = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        await asyncio.sleep(0.4)
        await Fleet(store).admit(fake)
        assert (await held).status_code == 200
        fake.scripts.append(hang)
        response = await served.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "upstream_timeout")
        assert response.headers["x-should-retry"] == "false"
        await asyncio.wait_for(silent.wait(), 30)
        assert served.counts() == (0, 0, 0)


async def test_cases_13_and_29_are_allowed_by_the_defaults():
    """Minutes to the first token and minutes of generation are normal."""
    model = configuration().models["m"]
    assert model.first_byte_timeout_s > 180
    assert model.idle_body_timeout_s >= 300


async def test_silence_within_a_body_ends_it(store, store_server):
    async def stall(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event(delta("a"))
        await exchange.client_left()

    async with replica_server(stall) as fake, serving(store_server, configuration(model__idle_body_timeout_s=0.2)) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        reader, writer = await raw(served.port, post(BODY))
        seen = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert b"upstream_timeout" in seen
        assert not seen.endswith(b"0\r\n\r\n")


async def test_refused_connection_returns_to_the_waiting_room_and_is_served_by_the_next_replica(store, store_server):
    """No byte was sent, so nobody sees a 502; the suspicion reaches the store."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with replica_server() as fake, serving(store_server) as served:
        fleet = Fleet(store)
        dead = await fleet.admit(FakeReplica(port=port), slot=0)
        await eventually(lambda: served.gateway.registry.available("m"))
        request = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        assert served.gateway.registry.available("m") == ()
        assert await eventually(lambda: store.hget(fleet.keys.suspects, dead.incarnation))
        await fleet.admit(fake, slot=0)
        response = await request
        assert response.status_code == 200
        assert served.counts() == (0, 0, 0)


async def test_end_of_an_incarnation_cuts_its_answers(store, store_server):
    """A host that vanished sends no reset: what the record says must end the stream."""

    async def stall(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event(delta("a"))
        await exchange.client_left()

    async with replica_server(stall) as fake, serving(store_server) as served:
        fleet = Fleet(store)
        replica = await fleet.admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        reader, writer = await raw(served.port, post(BODY))
        await reader.readuntil(b'"a"')
        await fleet.change(replica, State.DRAINING)
        await eventually(lambda: not served.gateway.registry.available("m"))
        assert served.inflight() == 1
        await fleet.change(replica, State.FAILED, reason="the engine died")
        seen = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert b"upstream_error" in seen
        assert not seen.endswith(b"0\r\n\r\n")
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_case_65_replica_errors_and_their_retry_after_pass_unchanged(store, store_server):
    async def busy(exchange: Exchange) -> None:
        await exchange.json({"error": {"message": "later"}}, "429 Too Many Requests", "Retry-After: 7\r\n")

    async with replica_server(busy) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        response = await served.chat()
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert "x-rewake-error" not in response.headers
        assert served.gateway.registry.available("m")


async def test_compressed_answers_pass_as_they_are(store, store_server):
    async def zipped(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00")

    async with replica_server(zipped) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        async with served.client.stream("POST", CHAT, json={"model": "m"}) as response:
            assert response.headers["content-encoding"] == "gzip"
            assert b"".join([piece async for piece in response.aiter_raw()]) == b"\x1f\x8b\x08\x00"


async def test_slow_reader_holds_the_upstream_back(store, store_server):
    """Back-pressure: the gateway does not collect what its client does not take."""
    sent = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.begin_events()
        for _ in range(400):
            await exchange.chunk(b"x" * 65536)
            sent += 65536
        await exchange.end()

    async with replica_server(flood) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        reader, writer = await raw(served.port, post(BODY))
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 20 << 20
        total = 0
        while not (piece := await reader.read(1 << 20)).endswith(b"0\r\n\r\n"):
            total += len(piece)
        assert total > 24 << 20
        writer.close()


async def test_connections_to_a_replica_are_reused(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        for _ in range(5):
            assert (await served.chat()).json() == completion()
        assert fake.connections == 1


async def test_a_dead_store_does_not_stop_serving(tmp_path):
    """Invariant 10: with the store gone the last view serves on; readiness says so."""
    import redis.asyncio  # noqa: PLC0415
    from conftest import running_store  # noqa: PLC0415

    with running_store(tmp_path) as url:
        client = redis.asyncio.from_url(url, decode_responses=True)
        context = serving(url)
        served = await context.__aenter__()
        async with replica_server() as fake:
            replica = await Fleet(client).admit(fake)
            await eventually(lambda: served.gateway.permits.limit(replica))
            await client.shutdown(nosave=True)
            await client.aclose()
            await eventually(lambda: not served.gateway.link.connected.is_set())
            assert (await served.chat()).status_code == 200
            ready = await served.client.get("/ready")
            assert (ready.status_code, ready.json()["error"]["code"]) == (503, "store_unavailable")
            assert (await served.client.get("/health")).status_code == 200
            await context.__aexit__(None, None, None)


async def test_a_body_that_stops_coming_is_408(store, store_server, monkeypatch):
    monkeypatch.setattr(intake, "PAUSE_S", 0.1)
    async with serving(store_server) as served:
        reader, writer = await raw(served.port, b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 9\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()
        await eventually(lambda: served.gateway.life.open == 0)


async def test_compressed_requests_are_refused_clearly(store, store_server):
    async with serving(store_server) as served:
        response = await served.client.post(CHAT, content=b"\x28\xb5", headers={"Content-Encoding": "zstd"})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")


async def test_ids_of_clients_are_kept_only_when_plain(store, store_server):
    async with serving(store_server) as served:
        for given, kept in (("abc-1", True), ("x" * 200, False), ("a b", False)):
            response = await served.client.get("/health", headers={"x-request-id": given})
            assert (response.headers["x-request-id"] == given) is kept
        assert isinstance(response, httpx.Response)
