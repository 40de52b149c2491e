"""What clients see when an answer has begun before there is a replica, and when one breaks: raw bytes, and the OpenAI SDK."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import openai
import pytest
from conftest import eventually
from fake_replica import CHAT, Exchange, FakeReplica, Fleet, completion, configuration, delta, replica_server, serving

from policies.replica import Stage, State

HOLD = {"silent_s": 0.1, "keepalive_s": 0.1}
STREAM = {"model": "m", "messages": [], "stream": True}


WRITERS: dict[asyncio.StreamReader, asyncio.StreamWriter] = {}
"""Of the connections that a test has opened."""


@pytest.fixture(autouse=True)
async def close_connections():
    yield
    while WRITERS:
        WRITERS.popitem()[1].close()
    await asyncio.sleep(0)


async def tokens(exchange: Exchange) -> None:
    """A whole streamed answer."""
    await exchange.begin_events()
    for text in "ab":
        await exchange.event(delta(text))
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end()


async def raw(port: int, path: str = CHAT, *, version: str = "1.1", head: str = "", **fields: object) -> asyncio.StreamReader:
    """The answer's bytes, for a request sent on a connection of its own."""
    body = json.dumps({**STREAM, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {path} HTTP/{version}\r\nHost: g\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body)
    WRITERS[reader] = writer
    return reader


async def whole(reader: asyncio.StreamReader) -> bytes:
    """Everything until the connection ends."""
    seen = b""
    with contextlib.suppress(ConnectionError):
        while piece := await asyncio.wait_for(reader.read(65536), 30):
            seen += piece
    return seen


def sdk(served, **more) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused", **more)


async def contents(stream) -> list[str | None]:
    return [chunk.choices[0].delta.content async for chunk in stream]


async def test_gateway_case_34_a_held_stream_is_kept_alive_and_then_served(store, store_server):
    async with replica_server(tokens) as fake, serving(store_server, configuration(model__hold=HOLD)) as served:
        since = time.monotonic()
        reader = await raw(served.port, head="Accept-Encoding: gzip\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert time.monotonic() - since > HOLD["silent_s"] - 0.01
        assert head.startswith("http/1.1 200 ok\r\n")
        assert "content-type: text/event-stream" in head
        assert "x-accel-buffering: no" in head
        assert "x-request-id: " in head
        assert "content-length" not in head
        for _ in range(2):
            await asyncio.wait_for(reader.readuntil(b": queued position=1\n\n"), 30)
        await Fleet(store).admit(fake, incarnation="inc-1")
        rest = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 30)
        assert b": dispatched start=restored incarnation=inc-1\n\n" in rest
        assert rest.index(b": dispatched") < rest.index(b'"a"') < rest.index(b'"b"') < rest.index(b"[DONE]")
        # The client was promised plain events before there was anybody to compress them.
        assert fake.requests[0].header("accept-encoding") is None
        WRITERS[reader].close()
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_openai_client_sees_nothing_but_a_slow_first_token(store, store_server):
    async with replica_server(tokens) as fake, serving(store_server, configuration(model__hold=HOLD)) as served:
        async with sdk(served) as client:
            stream = await client.chat.completions.create(**STREAM)
            assert served.held() == 1
            reading = asyncio.create_task(contents(stream))
            await asyncio.sleep(0.25)
            await Fleet(store).admit(fake)
            assert await reading == ["a", "b"]
        assert len(fake.requests) == 1


@pytest.mark.parametrize("agent", ["strict-client/1", None])
async def test_gateway_case_38_chunks_of_the_apis_own_for_those_who_choke_on_comments(store, store_server, agent):
    """By User-Agent: an empty delta that any client can add to its text; nobody else gets one."""
    hold = {**HOLD, "user_agents": [{"pattern": "^strict", "keepalive": "chunk"}]}
    async with replica_server(tokens) as fake, serving(store_server, configuration(model__hold=hold)) as served:
        async with sdk(served, default_headers={"User-Agent": agent} if agent else {}) as client:
            stream = await client.chat.completions.create(**STREAM)
            reading = asyncio.create_task(contents(stream))
            await asyncio.sleep(0.25)
            await Fleet(store).admit(fake)
            texts = await reading
        assert "".join(text or "" for text in texts) == "ab"
        assert (len(texts) > 2) is (agent is not None)


@pytest.mark.parametrize(
    ("changes", "request_"),
    [
        ({"keepalive": "off"}, {}),
        ({"user_agents": [{"pattern": "quiet", "keepalive": "off"}]}, {"head": "User-Agent: quiet\r\nConnection: close\r\n"}),
        ({}, {"version": "1.0"}),
        ({}, {"stream": False}),
        ({}, {"path": "/v1/embeddings"}),
    ],
)
async def test_gateway_case_37_silence_where_signs_are_not_wanted_or_not_safe(store, store_server, changes, request_):
    """Held well beyond the silent phase, and refused with a status that SDKs retry."""
    async with serving(store_server, configuration(model__hold={**HOLD, **changes, "max_wait_s": 0.4})) as served:
        seen = await whole(await raw(served.port, **{"head": "Connection: close\r\n", **request_}))
        assert b" 503 " in seen.split(b"\r\n")[0]
        assert b"queued" not in seen
        assert json.loads(seen.partition(b"\r\n\r\n")[2])["error"]["code"] == "cold_start_timeout"


async def test_a_failure_in_the_silent_phase_is_a_status_and_later_an_error_frame(store, store_server):
    """The same deadline, before and after the client's head was sent; the SDK raises in both, and retries the first alone."""
    for silent_s, retried in ((5.0, True), (0.1, False)):
        hold = {"silent_s": silent_s, "keepalive_s": 0.1, "max_wait_s": 0.3}
        async with serving(store_server, configuration(model__hold=hold)) as served:
            fleet = Fleet(store)
            # A start took next to nothing before, so the promise is short.
            before = await fleet.admit(FakeReplica(), stages=(Stage(name="restore processes", seconds=0.01),))
            await fleet.change(before, State.STOPPED)
            await eventually(lambda: served.gateway.registry.state("m") == "cold" and served.gateway.registry.seq)
            async with sdk(served, max_retries=1) as client:
                with pytest.raises(openai.APIError) as raised:
                    await contents(await client.chat.completions.create(**STREAM))
            assert raised.value.code == "cold_start_timeout"
            assert isinstance(raised.value, openai.InternalServerError) is retried
            assert served.gateway.ledger.load("m").arrivals == 1 + retried
            # In both cases it was sent away with a promise.
            assert served.gateway.ledger.load("m").rejected == 1 + retried


async def test_gateway_case_03_terminal_failure_reaches_committed_waiters_too(store, store_server):
    async with serving(store_server, configuration(model__hold=HOLD)) as served:
        reader = await raw(served.port)
        await asyncio.wait_for(reader.readuntil(b"queued"), 30)
        since = time.monotonic()
        await Fleet(store).fail("m", "incompatible_host: host.arch: expected arm64, found x86_64")
        seen = await whole(reader)
        assert time.monotonic() - since < 10
        frame = json.loads(seen[seen.index(b"data: ") + 6 :].split(b"\n\n")[0])
        assert frame["error"]["code"] == "restore_failed"
        assert "incompatible_host" in frame["error"]["message"]
        assert b"0\r\n\r\n" not in seen
        assert b"[DONE]" not in seen


async def test_a_committed_waiter_of_a_gateway_that_ends_is_told_so(store, store_server):
    async with serving(store_server, configuration(model__hold=HOLD)) as served:
        reader = await raw(served.port)
        await asyncio.wait_for(reader.readuntil(b"queued"), 30)
        served.gateway.life.drain()
        await asyncio.wait_for(reader.readuntil(b"queued"), 30)
        served.gateway.life.refuse()
        seen = await whole(reader)
        assert b'"shutting_down"' in seen
        assert not seen.endswith(b"0\r\n\r\n")


async def test_a_committed_client_that_leaves_counts_nowhere(store, store_server):
    async with serving(store_server, configuration(model__hold=HOLD)) as served:
        reader = await raw(served.port)
        await asyncio.wait_for(reader.readuntil(b"queued"), 30)
        assert served.held() == 1
        WRITERS[reader].transport.abort()
        await eventually(lambda: served.counts() == (0, 0, 0))


@pytest.mark.parametrize("kind", ["refusal", "document", "compressed"])
async def test_what_does_not_fit_behind_a_head_that_was_sent_is_an_error_frame(store, store_server, kind):
    """The replica's own 400 is repeated as a frame that the SDK raises; a 200 that is no plain stream is our error."""

    async def script(exchange: Exchange) -> None:
        if kind == "refusal":
            await exchange.json({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, "400 Bad Request")
        elif kind == "document":
            await exchange.json(completion("not a stream"))
        else:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n"
            await exchange.send(head + b"\x1f\x8b")

    async with replica_server(script) as fake, serving(store_server, configuration(model__hold=HOLD)) as served:
        async with sdk(served) as client:
            stream = await client.chat.completions.create(**STREAM)
            await Fleet(store).admit(fake)
            with pytest.raises(openai.APIError) as raised:
                await contents(stream)
        assert raised.value.message == "too long" if kind == "refusal" else raised.value.code == "upstream_error"
        assert len(fake.requests) == 1
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_a_committed_request_survives_an_unreachable_replica(store, store_server):
    """It returns to the head of the queue; its client gets one head, more signs, and the next replica's answer."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with replica_server(tokens) as fake, serving(store_server, configuration(model__hold=HOLD)) as served:
        reader = await raw(served.port)
        await asyncio.wait_for(reader.readuntil(b"queued"), 30)
        fleet = Fleet(store)
        await fleet.admit(FakeReplica(port=port), slot=0)
        await eventually(lambda: served.gateway.registry.seq and not served.gateway.registry.available("m"))
        await asyncio.wait_for(reader.readuntil(b"queued"), 30)
        await fleet.admit(fake, slot=0)
        rest = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 30)
        assert b"HTTP/1.1" not in rest
        assert b"[DONE]" in rest
        WRITERS[reader].close()


async def test_responses_raise_in_the_sdk_when_they_fail_late(store, store_server):
    async with serving(store_server, configuration(model__hold={**HOLD, "max_wait_s": 0.3})) as served:
        async with sdk(served) as client:
            stream = await client.responses.create(model="m", input="hi", stream=True)
            with pytest.raises(openai.APIError) as raised:
                _ = [event async for event in stream]
        assert raised.value.code == "cold_start_timeout"


async def test_responses_keepalive_events_are_harmless_in_the_sdk(store, store_server):
    async def created(exchange: Exchange) -> None:
        await exchange.begin_events()
        event = {"type": "response.output_text.delta", "delta": "hi", "sequence_number": 1, "item_id": "i"}
        await exchange.chunk(b"event: response.output_text.delta\ndata: " + json.dumps(event).encode() + b"\n\n")
        await exchange.end()

    config = configuration(model__hold={**HOLD, "keepalive": "chunk"})
    async with replica_server(created) as fake, serving(store_server, config) as served, sdk(served) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        await Fleet(store).admit(fake)
        kinds = [event.type async for event in stream]
        assert kinds[0] == "keepalive"
        assert kinds[-1] == "response.output_text.delta"


async def test_completions_chunks_are_harmless_in_the_sdk(store, store_server):
    async def text(exchange: Exchange) -> None:
        await exchange.begin_events()
        choice = {"index": 0, "text": "hi", "finish_reason": None}
        await exchange.event({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    config = configuration(model__hold={**HOLD, "keepalive": "chunk"})
    async with replica_server(text) as fake, serving(store_server, config) as served, sdk(served) as client:
        stream = await client.completions.create(model="m", prompt="hi", stream=True)
        await Fleet(store).admit(fake)
        texts = [chunk.choices[0].text async for chunk in stream]
        assert "".join(texts) == "hi"
        assert len(texts) > 1


async def test_messages_get_pings_and_error_events(store, store_server):
    config = configuration(model__hold={**HOLD, "keepalive": "chunk", "max_wait_s": 0.3})
    async with serving(store_server, config) as served:
        seen = await whole(await raw(served.port, "/v1/messages", head="x-request-id: mine\r\n"))
        assert b"\r\nrequest-id: mine\r\n" in seen
        assert b'event: ping\ndata: {"type": "ping"}\n\n' in seen
        frame = seen[seen.index(b"event: error\ndata: ") + 19 :].split(b"\n\n")[0]
        assert json.loads(frame)["error"]["type"] == "overloaded_error"
        response = await served.client.post("/v1/messages", json={"model": "m"}, headers={"x-rewake-deadline-s": "0.1"})
        assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error")
        assert response.json()["request_id"] == response.headers["x-request-id"]
        assert 1 <= int(response.headers["retry-after"]) <= 60


async def test_a_stream_broken_within_a_frame_gets_no_frame_of_ours_behind_the_piece(store, store_server):
    """Behind half a frame ours would end that one, and clients would choke on its JSON. So they see a broken connection."""

    async def half(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event(delta("a"))
        await exchange.chunk(b'data: {"id": "c-1", "obj')
        await asyncio.sleep(0.05)
        exchange.reset()

    async with replica_server(half) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        async with sdk(served, max_retries=0) as client:
            stream = await client.chat.completions.create(**STREAM)
            with pytest.raises(openai.APIConnectionError):
                await contents(stream)
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_whole_answers_cut_in_the_middle_are_retried_by_the_sdk(store, store_server):
    """Without a stream there is no place for an error: the connection breaks, and the SDK asks again."""

    async def cut(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{")
        await asyncio.sleep(0.05)
        exchange.writer.close()

    async with replica_server() as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        fake.scripts.append(cut)
        async with sdk(served) as client:
            answer = await client.chat.completions.create(model="m", messages=[])
        assert answer.choices[0].message.content == "hello"
        assert len(fake.requests) == 2


async def test_gateway_case_41_total_timeout_after_the_first_byte_is_an_error_frame(store, store_server):
    async def endless(exchange: Exchange) -> None:
        await exchange.begin_events()
        while True:
            await exchange.event(delta("a"))
            await asyncio.sleep(0.02)

    async with replica_server(endless) as fake, serving(store_server, configuration(model__total_timeout_s=0.3)) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        seen = await whole(await raw(served.port))
        frame = json.loads(seen[seen.rindex(b"data: ") + 6 :].split(b"\n\n")[0])
        assert frame["error"]["code"] == "upstream_timeout"
        assert seen.count(b"HTTP/1.1") == 1
        assert not seen.endswith(b"0\r\n\r\n")
        await eventually(lambda: served.counts() == (0, 0, 0) and fake.inflight == 0)


async def test_a_client_that_takes_nothing_is_dropped_and_not_blamed_on_the_replica(store, store_server):
    async def flood(exchange: Exchange) -> None:
        await exchange.begin_events()
        while True:
            await exchange.chunk(b"x" * 65536)

    async with replica_server(flood) as fake, serving(store_server, configuration(model__idle_body_timeout_s=0.3)) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        reader = await raw(served.port)
        await eventually(lambda: served.inflight() == 1)
        await eventually(lambda: served.counts() == (0, 0, 0))
        served.gateway.metrics.flush()
        errors = served.gateway.metrics.client_disconnects.labels("streaming")
        assert errors._value.get() == 1
        assert served.gateway.registry.available("m")
        WRITERS[reader].close()


async def test_gateway_case_11_a_replica_that_does_not_accept_costs_one_short_wait(store, store_server):
    """A full backlog drops connection attempts silently. The request goes on to the next replica; the others never try it."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        async with replica_server() as fake, serving(store_server, configuration(model__max_replicas=2)) as served:
            fleet = Fleet(store)
            await fleet.admit(FakeReplica(port=full.getsockname()[1]), slot=0)
            await eventually(lambda: served.gateway.registry.available("m"))
            since = time.monotonic()
            first = asyncio.create_task(served.chat())
            await eventually(lambda: served.inflight() == 1)
            await fleet.admit(fake, slot=1)
            await eventually(lambda: len(served.gateway.registry.available("m")) == 2)
            assert (await first).status_code == 200
            assert time.monotonic() - since < 3
            since = time.monotonic()
            answers = await asyncio.gather(*(served.chat() for _ in range(5)))
            assert {answer.status_code for answer in answers} == {200}
            assert time.monotonic() - since < 1
