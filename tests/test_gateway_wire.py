"""What comes over the wire, over raw sockets: broken and hostile requests, bodies of every form, edits, other origins."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
from random import Random

import pytest
from conftest import eventually
from fake_replica import CHAT, Exchange, Fleet, configuration, replica_server, serving
from openai import AsyncOpenAI

from gateway import multipart, server
from policies.config import parse

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n"
BODY = b'{"model":"m"}'
SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 13\r\n\r\n" + BODY


async def raw(port: int, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which the pieces have been sent one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    return reader, writer


async def exchange(port: int, *pieces: bytes, within: float = 5) -> bytes:
    """All that comes back until the gateway closes the connection."""
    reader, writer = await raw(port, *pieces)
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(within):
            while piece := await reader.read(65536):
                answer += piece
    writer.close()
    return answer


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, body


@contextlib.asynccontextmanager
async def warm(store, store_server, config=None, script=None):
    """A gateway with one admitted fake replica."""
    async with replica_server(*([script] if script else [])) as fake, serving(store_server, config) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        yield served, fake


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"Content-Length: 13\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"Content-Length: 13\r\nContent-Length: 0\r\n\r\n" + BODY + SMUGGLED,
        HEAD + b"Content-Length: 0, 13\r\n\r\n" + BODY,
        HEAD + b"Content-Length: +13\r\n\r\n" + BODY,
        HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 0x0d\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 1_3\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 1 3\r\n\r\n" + BODY,
        HEAD + b"Content-Length: \xb2\r\n\r\n" + BODY,
        HEAD + b"Content-Length : 13\r\n\r\n" + BODY,
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: identity, chunked, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 13\n\n" + BODY,
        HEAD + b"X-A: b\rc\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"X-A: b\x00c\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b" folded\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"X A: b\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b": b\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"no colon\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"Host: h\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD.replace(b"Host: g\r\n", b"") + b"Content-Length: 13\r\n\r\n" + BODY,
        HEAD + b"X-Long: " + b"x" * (40 << 10) + b"\r\nContent-Length: 13\r\n\r\n" + BODY,
        HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + b"Content-Length: 13\r\n\r\n" + BODY,
        b"POST /" + b"x" * (40 << 10) + b" HTTP/1.1\r\nHost: g\r\n\r\n",
        b"POST /v1/chat completions HTTP/1.1\r\nHost: g\r\n\r\n",
        b"POST /v1/chat/completions HTTP/9.9\r\nHost: g\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"nonsense\r\n\r\n",
    ],
    ids=[str(n) for n in range(36)],
)
async def test_gateway_case_50_what_two_servers_could_read_differently_is_400_and_reaches_nobody(store, store_server, request_):
    async with warm(store, store_server) as (served, fake):
        status, headers, body = parsed(await exchange(served.port, request_))
        error = json.loads(body)["error"]
        assert status == (431 if len(request_) > 30_000 else 400)
        assert (error["code"], error["type"]) == (headers["x-rewake-error"], "invalid_request_error")
        assert headers["content-type"].startswith("application/json")
        assert headers["x-request-id"]
        assert b"HTTP/1.1 " not in body
        assert fake.requests == []
        await eventually(lambda: served.counts() == (0, 0, 0))


PIECES = (
    *(b"POST ", b"GET ", b"/v1/chat/completions", b"/v1/models", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\n", b"\r", b"\r\n\r\n"),
    *(
        b"Host: g\r\n",
        b"Content-Length: 13\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b": ",
        b" ",
        b"\t",
        b"\x00",
    ),
    *(
        BODY,
        b"d\r\n" + BODY + b"\r\n",
        b"0\r\n\r\n",
        b"0\r\nX: y\r\n\r\n",
        b"Connection: close\r\n",
        b"Expect: 100-continue\r\n",
        b"\xff",
    ),
    *(b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Content-Encoding: gzip\r\n", b"1" * 20, b"{", b"\r\n0"),
)
GOOD = (
    HEAD + b"Content-Length: 13\r\n\r\n" + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\n" + BODY[:3] + b"\r\na\r\n" + BODY[3:] + b"\r\n0\r\n\r\n",
    HEAD + b"Content-Type: application/json\r\nAccept: */*\r\nContent-Length: 27\r\n\r\n" + b'{"model":"m","stream":true}',
    b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n",
)


def mutated(random: Random) -> bytes:
    """Good requests behind one another, with some bytes put in, taken out, or changed."""
    data = bytearray(b"".join(random.choices(GOOD, k=random.randint(1, 3))))
    for _ in range(random.randint(0, 3)):
        at = random.randrange(len(data))
        data[at : at + random.choice((0, 0, 1, 2, 8))] = random.choice((*PIECES, b"", b"", bytes([random.randrange(256)])))
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
async def test_mutated_requests_reach_the_replica_whole_or_not_at_all(store, store_server, seed):
    """Whatever the bytes and wherever they are cut: what the replica got was in them, as often as somebody was told 200."""
    random = Random(seed)

    async def attack(port: int) -> tuple[bytes, bytes]:
        data = mutated(random)
        cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.randint(0, 4)))
        pieces = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
        reader, writer = await raw(port, *pieces)
        with contextlib.suppress(ConnectionError):
            writer.write_eof()
        answer = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(30):
                while piece := await reader.read(65536):
                    answer += piece
        writer.close()
        return data, answer

    async with warm(store, store_server) as (served, fake):
        for _ in range(40):
            before = len(fake.requests)
            data, answer = await attack(served.port)
            assert not answer or answer.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), data
            await eventually(lambda: served.counts() == (0, 0, 0))
            got = fake.requests[before:]
            assert len(got) >= answer.count(b"chat.completion"), data
            for request in got:
                assert json.loads(request.body)["model"] in ("m", "alias/of-m"), data
                assert (request.method, request.path.partition("?")[0]) == ("POST", CHAT), data
                names = [name.lower() for name, _ in request.headers]
                assert names.count("content-length") == names.count("host") == 1, data
                assert "transfer-encoding" not in names, data
        assert (await served.chat()).status_code == 200
        assert served.gateway.serving.intake.buffered == 0


async def test_a_head_that_drips_is_408_also_behind_a_request(store, store_server, monkeypatch):
    monkeypatch.setattr(server, "HEAD_S", 0.1)
    async with warm(store, store_server) as (served, fake):
        whole = HEAD + b"Content-Length: 13\r\n\r\n" + BODY
        for before in (b"", whole):
            reader, writer = await raw(served.port, before)
            if before:
                await asyncio.wait_for(reader.readuntil(b"}]}"), 30)
            for piece in (HEAD[:9], HEAD[9:-5]):
                writer.write(piece)
                await writer.drain()
            status, headers, body = parsed(await asyncio.wait_for(reader.read(), 30))
            assert (status, json.loads(body)["error"]["code"], headers["connection"]) == (408, "request_timeout", "close")
            writer.close()
        # Between two requests a client may take its time.
        reader, writer = await raw(served.port, whole)
        await asyncio.wait_for(reader.readuntil(b"}]}"), 30)
        await asyncio.sleep(0.2)
        writer.write(whole)
        await asyncio.wait_for(reader.readuntil(b"}]}"), 30)
        writer.close()
        assert len(fake.requests) == 3


async def test_a_request_behind_a_refused_one_is_not_answered(store, store_server):
    """Nothing of a connection is believed once its bytes were not."""
    async with warm(store, store_server) as (served, fake):
        answer = await exchange(served.port, HEAD + b"Content-Length: +1\r\n\r\n" + SMUGGLED)
        assert answer.count(b"HTTP/1.") == 1
        assert fake.requests == []


async def test_bodies_that_were_not_read_end_their_connection(store, store_server):
    """A body behind an early refusal must not be taken for the next request."""
    async with warm(store, store_server, configuration(gateway__max_body_bytes=1000)) as (served, fake):
        answer = await exchange(served.port, HEAD + b"Content-Length: 1001\r\n\r\n" + SMUGGLED * 10)
        status, headers, _ = parsed(answer)
        assert (status, headers["connection"]) == (413, "close")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert fake.requests == []


@pytest.mark.parametrize("cut", [1, 30, len(HEAD), len(HEAD) + 10, len(HEAD) + 24])
async def test_requests_in_any_pieces_are_one_request(store, store_server, cut):
    whole = HEAD + b"Content-Length: 13\r\n\r\n" + BODY
    async with warm(store, store_server) as (served, fake):
        reader, writer = await raw(served.port, whole[:cut], whole[cut:])
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        assert fake.requests[0].body == BODY
        writer.close()


async def test_gateway_case_51_expect_on_a_held_model_is_answered_promptly_and_not_forwarded(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        reader, writer = await raw(served.port, HEAD + b"Expect: 100-continue\r\nContent-Length: 13\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        await eventually(lambda: served.held() == 1)
        await Fleet(store).admit(fake)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert fake.requests[0].header("expect") is None
        assert fake.requests[0].body == BODY
        writer.close()


async def test_gateway_case_51_a_final_status_may_come_instead_and_other_expectations_are_417(store, store_server):
    async with serving(store_server, configuration(gateway__max_body_bytes=1000)) as served:
        answer = await exchange(served.port, HEAD + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n")
        status, headers, _ = parsed(answer)
        assert (status, headers["connection"]) == (413, "close")
        status, headers, body = parsed(await exchange(served.port, HEAD + b"Expect: foo\r\nContent-Length: 13\r\n\r\n"))
        assert (status, json.loads(body)["error"]["code"]) == (417, "expectation_failed")
        # HTTP/1.0 knows no such thing: nothing is sent in advance.
        old = (
            HEAD.replace(b"1.1", b"1.0")
            + b"Expect: 100-continue\r\nx-rewake-deadline-s: 0.1\r\nContent-Length: 13\r\n\r\n"
            + BODY
        )
        assert parsed(await exchange(served.port, old))[0] == 503


async def test_gateway_case_52_a_large_image_passes_and_too_much_is_413(store, store_server):
    image = json.dumps({"model": "m", "image": "QUFB" * (5 << 20)}).encode()
    async with warm(store, store_server, configuration(gateway__max_body_bytes=21 << 20)) as (served, fake):
        assert (await served.client.post(CHAT, content=image)).status_code == 200
        assert fake.requests[0].body == image
        refused = await served.client.post(CHAT, content=image + b" " * (2 << 20))
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert served.gateway.serving.intake.buffered == 0
        assert len(fake.requests) == 1


async def test_a_hundred_megabytes_are_refused_before_they_are_read(store, store_server):
    async with warm(store, store_server) as (served, fake):
        status, _, body = parsed(await exchange(served.port, HEAD + b"Content-Length: 104857600\r\n\r\n{"))
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        assert fake.requests == []


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xbc.wav"\r\nContent-Type: audio/x-wav\r\n\r\n'
    b"RIFF\x00\x01--x\r\n-x\r\n--\xff\r\n"
    b'--x\r\nX-Own: kept\r\nContent-Disposition: form-data; name="unknown[]"\r\n\r\n1\r\n'
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
)


@pytest.mark.parametrize("spool_bytes", [1, 1 << 20])
@pytest.mark.parametrize("chunked", [False, True])
async def test_gateway_case_53_multipart_byte_for_byte_with_the_model_behind_the_file(store, store_server, chunked, spool_bytes):
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: g\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    if chunked:
        cuts = [FORM[at : at + 7] for at in range(0, len(FORM), 7)]
        sent = [head + b"Transfer-Encoding: chunked\r\n\r\n", *(b"%x\r\n%s\r\n" % (len(cut), cut) for cut in cuts), b"0\r\n\r\n"]
    else:
        sent = [head + b"Content-Length: %d\r\n\r\n" % len(FORM), FORM]
    async with warm(store, store_server, configuration(gateway__spool_bytes=spool_bytes)) as (served, fake):
        reader, writer = await raw(served.port, *sent)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()
        got = fake.requests[0]
        assert (got.body, got.path) == (FORM, "/v1/audio/transcriptions")
        assert got.header("content-type") == "multipart/form-data; boundary=x"
        assert got.header("content-length") == str(len(FORM))
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_gateway_case_54_large_bodies_wait_on_disk_and_arrive_whole_also_when_sent_twice(store, store_server):
    data = json.dumps({"model": "m", "image": "QUFB" * (1 << 20)}).encode()

    async def slam(exchange: Exchange) -> None:
        exchange.writer.close()

    async with warm(store, store_server, configuration(gateway__spool_bytes=1 << 20)) as (served, fake):
        assert (await served.client.post(CHAT, content=data)).status_code == 200
        fake.scripts.append(slam)
        assert (await served.client.post(CHAT, content=data)).status_code == 200
        assert [request.body for request in fake.requests] == [data, data, data]
        assert served.gateway.serving.intake.buffered == 0


async def test_gateway_case_55_gzip_requests_and_answers_pass_as_gzip(store, store_server):
    packed = gzip.compress(b'{"model":"alias/of-m","x":1}')

    async def zipped(exchange: Exchange) -> None:
        await exchange.json({}, head="Vary: Accept-Encoding\r\n")

    async with warm(store, store_server, script=zipped) as (served, fake):
        response = await served.client.post(CHAT, content=packed, headers={"Content-Encoding": "gzip"})
        assert response.status_code == 200
        assert fake.requests[0].body == packed
        assert fake.requests[0].header("content-encoding") == "gzip"
        bomb = gzip.compress(b'{"model":"m","x":"' + b"0" * (200 << 20))
        refused = await served.client.post(CHAT, content=bomb, headers={"Content-Encoding": "gzip"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert len(fake.requests) == 1


async def test_edits_reach_the_replica_and_nothing_else_changes(store, store_server):
    changes = {"model__served_name": "org/served", "model__defaults": {"top_k": 5}, "model__strip": ["user"]}
    async with warm(store, store_server, configuration(**changes)) as (served, fake):
        await served.client.post(CHAT, content=b'{ "model":"alias/of-m", "user": "x" ,"t" : 1.0}')
        assert fake.requests[0].body == b'{ "model":"org/served" ,"t" : 1.0,"top_k":5}'
        assert fake.requests[0].header("content-length") == str(len(fake.requests[0].body))
        packed = gzip.compress(b'{"model":"m"}')
        await served.client.post(CHAT, content=packed, headers={"Content-Encoding": "gzip"})
        assert fake.requests[1].body == b'{"model":"org/served","top_k":5}'
        assert fake.requests[1].header("content-encoding") is None
        await served.client.post("/tokenize?model=m&x=%2F", content=b'{"content":"x"}')
        assert (fake.requests[2].path, fake.requests[2].body) == ("/tokenize?model=org%2Fserved&x=%2F", b'{"content":"x"}')
        await served.client.post("/tokenize", content=b'{"content":"x"}', headers={"x-rewake-model": "m"})
        assert (fake.requests[3].path, fake.requests[3].header("x-rewake-model")) == ("/tokenize", None)


@pytest.mark.parametrize(
    ("target", "upstream"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completions?a=%20b&a=", "/v1/chat/completions?a=%20b&a="),
        ("/v1/rerank", "/v1/rerank"),
        ("/v1/score", "/v1/score"),
        ("/v1/images/generations", "/v1/images/generations"),
        ("/v1/audio/speech", "/v1/audio/speech"),
        ("/v1/messages", "/v1/messages"),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/responses", "/v1/responses"),
        ("/detokenize", "/detokenize"),
    ],
)
async def test_routes_reach_the_replica_as_the_table_spells_them(store, store_server, target, upstream):
    async with warm(store, store_server) as (served, fake):
        assert (await served.client.post(target, content=BODY)).status_code == 200
        assert (fake.requests[0].method, fake.requests[0].path, fake.requests[0].body) == ("POST", upstream, BODY)


async def test_stored_responses_are_asked_for_by_a_hint_and_start_nothing(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        cold = await served.client.get("/v1/responses/resp_1?model=m")
        assert cold.status_code == 503
        assert served.gateway.ledger.loads()["m"].demand == 0
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        for method, path in (
            ("GET", "/v1/responses/resp_1"),
            ("DELETE", "/v1/responses/resp_1"),
            ("POST", "/v1/responses/r/cancel"),
        ):
            response = await served.client.request(method, path, headers={"x-rewake-model": "m"})
            assert response.status_code == 200
            assert (fake.requests[-1].method, fake.requests[-1].path) == (method, path)
        missing = await served.client.get("/v1/responses/resp_1")
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, "missing_model")


async def test_wrong_paths_say_what_was_meant_and_control_routes_do_not_exist(store, store_server):
    async with warm(store, store_server) as (served, fake):
        twice = await served.client.post("/v1/v1/chat/completions", content=BODY)
        assert (twice.status_code, twice.json()["error"]["code"]) == (404, "not_found")
        assert "/v1/chat/completions" in twice.json()["error"]["message"]
        for path in ("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/v1/load_lora_adapter"):
            assert (await served.client.post(path, content=BODY)).status_code == 404
        anthropic = await served.client.post("/v1/messages", content=b"{}")
        assert anthropic.json()["type"] == "error"
        assert fake.requests == []


@pytest.mark.parametrize(
    "name", ["模型/名", "🤖" * 100, "a\u202eb", "x" * 50_000, '"\\\n', "\u0000"], ids=[str(n) for n in range(6)]
)
async def test_unicode_model_names_are_404_with_a_readable_error(store, store_server, name):
    async with warm(store, store_server) as (served, fake):
        for ascii in (True, False):
            response = await served.client.post(CHAT, content=json.dumps({"model": name}, ensure_ascii=ascii).encode())
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert len(error["message"]) < 2000
        assert fake.requests == []


async def test_a_model_may_be_called_anything_that_the_configuration_allows(store, store_server):
    engine = {"kind": "http", "command": ["/bin/true"]}
    config = parse({"models": {"m": {"engine": engine, "aliases": ["模型/名🤖"]}}})
    async with warm(store, store_server, config) as (served, fake):
        body = json.dumps({"model": "模型/名🤖"}).encode()
        assert (await served.client.post(CHAT, content=body)).status_code == 200
        assert fake.requests[0].body == body
        assert (await served.client.get("/v1/models/模型/名🤖")).json()["id"] == "m"


@pytest.mark.parametrize(
    "target", ["/v1/chat/completions", "/v1/models", "/v1/models/org%2Fname", "/tokenize", "/admin/v1/drain"]
)
async def test_gateway_cases_58_60_options_is_204_without_a_key_and_wakes_nothing(store, store_server, target):
    tenants = {"t": {"keys": ["sha256:" + "0" * 64]}}
    config = configuration(gateway__cors={"origins": ["https://a.example"]}).model_dump()
    async with serving(store_server, parse({**config, "tenants": tenants})) as served:
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        answer = await served.client.options(target, headers={**ask, "Access-Control-Request-Headers": "authorization"})
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert answer.headers["access-control-allow-headers"] == "authorization"
        other = await served.client.options(target, headers={**ask, "Origin": "https://b.example"})
        assert other.status_code == 204
        assert "access-control-allow-origin" not in other.headers
        assert served.gateway.ledger.loads()["m"].arrivals == 0
        assert await Fleet(store).jobs() == []
        whole = await exchange(served.port, b"OPTIONS * HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
        assert parsed(whole)[0] == 204


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"CONNECT a:443", 404),
        (b"TRACE /v1/models", 405),
        (b"GET http://other/v1/models", 200),
        (b"GET /v1/models#part", 404),
        (b"GET /v1/models/%ff", 404),
        (b"GET /v1/models?a=\xff", 400),
        (b"BREW /v1/models", 400),
    ],
)
async def test_odd_request_lines(store, store_server, line, status):
    async with serving(store_server) as served:
        found, headers, body = parsed(await exchange(served.port, line + b" HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n"))
        assert found == status
        assert headers["x-request-id"]
        assert status == 200 or json.loads(body)["error"]["code"] == headers["x-rewake-error"]


async def test_gateway_case_59_head_looks_and_wakes_nothing(store, store_server):
    async with serving(store_server) as served:
        answer = await exchange(served.port, b"HEAD /v1/models HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
        status, headers, body = parsed(answer)
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 0
        answer = await exchange(served.port, b"HEAD /v1/chat/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")
        status, headers, body = parsed(answer)
        assert (status, headers["allow"], body) == (405, "POST, OPTIONS", b"")
        assert served.gateway.ledger.loads()["m"].arrivals == 0


async def test_other_origins_are_told_on_every_answer_and_replicas_have_no_say(store, store_server):
    async def generous(exchange: Exchange) -> None:
        await exchange.json({}, head="Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n")

    config = configuration(gateway__cors={"origins": ["https://a.example"]})
    async with warm(store, store_server, config, generous) as (served, fake):
        for origin, granted in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            ask = {"Origin": origin}
            for response in (
                await served.chat(headers=ask),
                await served.chat("nobody", headers=ask),
                await served.client.get("/v1/models", headers=ask),
                await served.client.get("/nowhere", headers=ask),
            ):
                assert response.headers.get("access-control-allow-origin") == granted
                assert "access-control-allow-credentials" not in response.headers
                assert response.headers["vary"] == "Origin"
        assert fake.requests[0].header("origin") is None
    async with warm(store, store_server, None, generous) as (served, _):
        assert not [name for name in (await served.chat()).headers if name.startswith("access-control")]


async def test_gateway_case_61_hop_by_hop_and_the_gateways_own_headers_stay_here(store, store_server):
    head = (
        b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nAuthorization: Bearer secret\r\n"
        b"x-api-key: secret\r\nProxy-Authorization: secret\r\ntraceparent: 00-1\r\nX-Forwarded-For: 1.2.3.4\r\n"
        b"x-request-id: mine\r\nCookie: a=b\r\n"
    )
    async with warm(store, store_server) as (served, fake):
        reader, writer = await raw(served.port, HEAD + head + b"Content-Length: 13\r\n\r\n" + BODY)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()
        got = fake.requests[0]
        gone = ("x-hop", "keep-alive", "te", "authorization", "x-api-key", "proxy-authorization")
        assert [name for name in gone if got.header(name) is not None] == []
        assert b"secret" not in repr(got.headers).encode()
        assert (got.header("traceparent"), got.header("x-request-id"), got.header("cookie")) == ("00-1", "mine", "a=b")
        assert got.header("host") == f"{fake.address}:{fake.port}"
        assert got.header("x-forwarded-proto") == "http"


async def test_the_openai_sdk_sends_files(store, store_server):
    async def text(exchange: Exchange) -> None:
        await exchange.json({"text": "hello"})

    async def image(exchange: Exchange) -> None:
        await exchange.json({"created": 1, "data": [{"b64_json": "QQ=="}]})

    async with warm(store, store_server, configuration(model__served_name="org/whisper")) as (served, fake):
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            fake.scripts += [text, image]
            heard = await client.audio.transcriptions.create(file=("ü.wav", b"RIFF\x00\r\n--", "audio/wav"), model="m")
            assert heard.text == "hello"
            made = await client.images.edit(image=("a.png", b"\x89PNG\r\n"), prompt="more", model="m")
            assert made.data[0].b64_json == "QQ=="
        paths = ("/v1/audio/transcriptions", "/v1/images/edits")
        for request, path, file in zip(fake.requests, paths, (b"RIFF\x00\r\n--", b"\x89PNG\r\n"), strict=True):
            found, _ = multipart.parts(request.body, multipart.boundary(request.header("content-type")))
            assert request.path == path
            assert multipart.field(request.body, found, "model") == "org/whisper"
            assert file in [request.body[part.value : part.end] for part in found if part.file]


async def test_an_upgrade_that_nobody_offers_is_ignored(store, store_server):
    """A POST that also asks for another protocol is a POST; nothing behind it is taken for that protocol."""
    head = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    async with warm(store, store_server) as (served, fake):
        reader, writer = await raw(served.port, HEAD + head + b"Content-Length: 13\r\n\r\n" + BODY)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        assert fake.requests[0].header("upgrade") is None
        writer.close()
