"""Tenants through the whole gateway: keys, permissions, limits, accounts, access log, and what replicas are told of callers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import redis.asyncio
from conftest import eventually
from fake_replica import CHAT, Exchange, FakeReplica, Fleet, Served, completion, delta, replica_server, serving

from gateway import keys
from policies.config import Config, parse

ALICE, BOB = keys.new(), keys.new()
AS_ALICE, AS_BOB = ({"Authorization": f"Bearer {key.key}"} for key in (ALICE, BOB))
USAGE = {"prompt_tokens": 7, "completion_tokens": 40, "total_tokens": 47}
SECRET = "the prompt that nobody may read"


def config(
    *, gateway: dict[str, Any] | None = None, limits: dict[str, int] | None = None, models: list[str] | None = None
) -> Config:
    engine = {"engine": {"kind": "http", "command": ["/bin/true"]}}
    tenants = {"alice": {"keys": [ALICE.hash], "limits": limits or {}}, "bob": {"keys": [BOB.hash], "models": models or ["n"]}}
    return parse({"models": {"m": engine, "n": engine}, "tenants": tenants, "gateway": gateway or {}})


async def metered(exchange: Exchange) -> None:
    """An engine that counts, as a document or as a stream."""
    asked = json.loads(exchange.body)
    if not asked.get("stream"):
        return await exchange.json({**completion(), "usage": USAGE})
    await exchange.begin_events()
    for _ in range(5):
        await exchange.event(delta("x"))
    if asked.get("stream_options"):
        await exchange.event({"id": "c-1", "choices": [], "usage": USAGE})
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end()


@contextlib.asynccontextmanager
async def running(
    store: redis.asyncio.Redis, url: str, told: Config, *, admit: bool = True, id: str = "gw"
) -> AsyncIterator[tuple[Served, FakeReplica]]:
    async with replica_server(metered) as fake, serving(url, told, id) as served:
        if admit:
            replica = await Fleet(store).admit(fake)
            await eventually(lambda: served.gateway.registry.available(replica.model))
        yield served, fake


def sample(served: Served, name: str, **labels: str) -> float:
    page = served.gateway.metrics.expose().body.decode()
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items())
    )


# ---------------------------------------------------------------- who may


async def test_case_60_calls_without_a_key_are_401_and_no_demand(store: redis.asyncio.Redis, store_server: str) -> None:
    async with running(store, store_server, config(), admit=False) as (served, fake):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            answer = await served.chat(headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-should-retry"] == "false"
        assert (await served.client.get("/v1/models")).status_code == 401
        assert served.gateway.ledger.load("m").arrivals == 0
        assert served.gateway.ledger.load("m").demand == 0
        assert await Fleet(store).jobs() == []
        assert fake.requests == []


async def test_a_wrong_key_is_refused_before_the_body_is_sent(store: redis.asyncio.Redis, store_server: str) -> None:
    async with running(store, store_server, config()) as (served, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: gw\r\nContent-Length: 1000000\r\n\r\n".encode())
        async with asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_anothers_model_is_403_and_no_demand(store: redis.asyncio.Redis, store_server: str) -> None:
    async with running(store, store_server, config(), admit=False) as (served, _):
        answer = await served.chat(headers=AS_BOB)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "model_not_allowed"
        assert answer.json()["error"]["param"] == "model"
        assert served.gateway.ledger.load("m").arrivals == 0
        assert (await served.chat(model="unknown", headers=AS_BOB)).status_code == 404


async def test_a_tenant_sees_its_models_alone(store: redis.asyncio.Redis, store_server: str) -> None:
    async with running(store, store_server, config(), admit=False) as (served, _):
        seen = {}
        for name, headers in (("alice", AS_ALICE), ("bob", AS_BOB)):
            answer = await served.client.get("/v1/models", headers=headers)
            seen[name] = [model["id"] for model in answer.json()["data"]]
    assert seen == {"alice": ["m", "n"], "bob": ["n"]}


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key"])
async def test_case_61_keys_never_reach_a_replica(store: redis.asyncio.Redis, store_server: str, header: str) -> None:
    async with running(store, store_server, config()) as (served, fake):
        value = f"Bearer {ALICE.key}" if header == "Authorization" else ALICE.key
        assert (await served.chat(headers={header: value})).status_code == 200
        assert ALICE.key not in str(fake.requests[0].headers)


async def test_the_openai_client_takes_its_errors_for_what_they_are(store: redis.asyncio.Redis, store_server: str) -> None:
    async with running(store, store_server, config(limits={"requests_per_minute": 1})) as (served, _):
        messages: Any = [{"role": "user", "content": "hi"}]

        async def ask(key: str, model: str = "m") -> None:
            async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
                await client.chat.completions.create(model=model, messages=messages)

        await ask(ALICE.key)
        with pytest.raises(openai.RateLimitError) as limited:
            await ask(ALICE.key)
        assert limited.value.code == "rate_limit_exceeded"
        assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60
        with pytest.raises(openai.AuthenticationError):
            await ask("sk-wrong")
        with pytest.raises(openai.PermissionDeniedError):
            await ask(BOB.key)


# ---------------------------------------------------------------- how much


async def test_a_limit_holds_over_two_gateways(store: redis.asyncio.Redis, store_server: str) -> None:
    told = config(limits={"requests_per_minute": 12})
    async with running(store, store_server, told) as (one, fake), serving(store_server, told, "gw2") as two:
        await eventually(lambda: two.gateway.registry.available("m"))
        answers = await asyncio.gather(*(served.chat(headers=AS_ALICE) for _ in range(15) for served in (one, two)))
        assert [answer.status_code for answer in answers].count(200) == 12
        refused = next(answer for answer in answers if answer.status_code != 200)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after-ms"]) == 1000 * int(refused.headers["retry-after"])
        assert len(fake.requests) == 12
        limited = sum(sample(served, "rewake_rate_limited_total", tenant="alice", limit="requests") for served in (one, two))
        assert limited == 18


@pytest.mark.parametrize("more", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_tokens_are_charged_as_the_engine_counts_them(
    store: redis.asyncio.Redis, store_server: str, more: dict[str, Any]
) -> None:
    async with running(store, store_server, config(limits={"tokens_per_minute": 60})) as (served, _):
        went = [(await served.chat(headers=AS_ALICE, **more)).status_code for _ in range(3)]
        assert went == [200, 200, 429]
        assert sample(served, "rewake_tenant_tokens_total", tenant="alice", model="m", kind="prompt") == 14
        assert sample(served, "rewake_tenant_tokens_total", tenant="alice", model="m", kind="completion") == 80
        assert sample(served, "rewake_tenant_requests_total", tenant="alice", model="m", code="200") == 2
        assert sample(served, "rewake_tenant_requests_total", tenant="alice", code="429") == 1
        assert sample(served, "rewake_rate_limited_total", tenant="alice", limit="tokens") == 1


async def test_a_stream_without_usage_does_not_evade_the_limit(store: redis.asyncio.Redis, store_server: str) -> None:
    async with running(store, store_server, config(limits={"tokens_per_minute": 8})) as (served, _):
        went = [(await served.chat(headers=AS_ALICE, stream=True)).status_code for _ in range(3)]
        assert went == [200, 200, 429]


async def test_a_reload_brings_a_tenant_and_takes_one(store: redis.asyncio.Redis, store_server: str) -> None:
    async with running(store, store_server, config()) as (served, _):
        assert (await served.chat(headers=AS_BOB)).status_code == 403
        served.gateway.current.replace(config(models=["m"]))
        assert (await served.chat(headers=AS_BOB)).status_code == 200
        served.gateway.current.replace(parse({"models": {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}}}}))
        assert (await served.chat()).status_code == 200


# ---------------------------------------------------------------- what is noted, and told


async def lines(capfd: pytest.CaptureFixture[str], count: int, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def gather() -> bool:
        found.extend(json.loads(line) for line in capfd.readouterr().out.splitlines())
        return len(found) >= count

    await eventually(gather, what=f"{count} lines of access log")
    return found


async def test_the_access_log_has_a_line_for_every_request(
    store: redis.asyncio.Redis, store_server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(store, store_server, config(gateway={"trusted_proxies": ["127.0.0.0/8"]})) as (served, _):
        messages = [{"role": "user", "content": SECRET}]
        behind = {**AS_ALICE, "X-Forwarded-For": "192.0.2.7", "x-request-id": "mine"}
        await served.client.post(f"{CHAT}?secret={SECRET[:3]}", json={"model": "m", "messages": messages}, headers=behind)
        await served.chat(headers=AS_ALICE, stream=True, stream_options={"include_usage": True})
        await served.chat(headers={"Authorization": f"Bearer wrong-{SECRET}"})
        await served.chat(headers=AS_BOB)
        told = await lines(capfd, 4, [])
    document, stream, stranger, foreign = told
    assert document["request_id"] == "mine"
    assert document["client"] == "192.0.2.7"
    assert document["tenant"] == "alice"
    assert document["route"] == CHAT
    assert (document["model"], document["replica"], document["start"]) == ("m", "m#0", "restored")
    assert document["incarnation"] == "inc-0-1"
    assert (document["status"], document["code"]) == (200, "")
    assert (document["prompt_tokens"], document["completion_tokens"]) == (7, 40)
    assert 0 < document["ttft_s"] <= document["duration_s"]
    assert document["bytes_in"] > 0
    assert document["bytes_out"] > 0
    assert (stream["stream"], stream["completion_tokens"]) == (True, 40)
    assert (stranger["status"], stranger["code"], stranger["tenant"], stranger["model"]) == (401, "invalid_api_key", "", None)
    assert (foreign["status"], foreign["code"], foreign["tenant"]) == (403, "model_not_allowed", "bob")
    assert SECRET not in json.dumps(told)
    assert ALICE.key not in json.dumps(told)
    assert "secret=" not in json.dumps(told)


async def test_the_gateways_own_answers_are_logged_but_for_probes(
    store: redis.asyncio.Redis, store_server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(store, store_server, config(), admit=False) as (served, _):
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/admin/v1/models", "/nowhere/" + "x" * 500):
            await served.client.get(path, headers=AS_ALICE)
        await served.client.options("/v1/models")
        told = await lines(capfd, 4, [])
    seen = [(line["method"], line["route"], line["status"], line["code"], line["tenant"]) for line in told]
    assert seen == [
        ("GET", "/v1/models", 200, "", "alice"),
        ("GET", "/admin/v1/models", 401, "invalid_api_key", ""),
        ("GET", "_other", 404, "not_found", ""),
        ("OPTIONS", "/v1/models", 204, "", ""),
    ]
    assert all(line["client"] == "127.0.0.1" for line in told)


async def test_a_client_that_leaves_is_noted_with_its_phase(
    store: redis.asyncio.Redis, store_server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(store, store_server, config(), admit=False) as (served, _):
        held = asyncio.create_task(served.chat(headers=AS_ALICE))
        await eventually(lambda: served.held() == 1)
        held.cancel()
        (line,) = await lines(capfd, 1, [])
        assert (line["status"], line["code"], line["phase"], line["tenant"]) == (499, "client_left", "held", "alice")


async def whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


@pytest.mark.parametrize("path", ["fast", "ordinary"])
async def test_a_client_that_leaves_with_the_last_frame_has_had_its_answer(
    store: redis.asyncio.Redis, store_server: str, capfd: pytest.CaptureFixture[str], path: str
) -> None:
    """Some SDKs close at ``[DONE]`` and do not wait for the end of the body."""

    async def script(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event(delta("a"))
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.client_left()

    body = json.dumps({"model": "m", "stream": True}).encode()
    async with running(store, store_server, config()) as (served, fake):
        fake.default = script
        # A body in chunks is not plain.
        asked = body if path == "fast" else whole(body)
        headers = {**AS_ALICE, "content-type": "application/json"}
        async with served.client.stream("POST", CHAT, content=asked, headers=headers) as stream:
            async for line in stream.aiter_lines():
                if line == "data: [DONE]":
                    break
        (told,) = await lines(capfd, 1, [])
        assert (told["status"], told["code"], told["phase"]) == (200, "", "streaming")
        assert sample(served, "rewake_client_disconnects_total") == 0


async def test_what_is_waited_for_is_logged(
    store: redis.asyncio.Redis, store_server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(store, store_server, config(), admit=False) as (served, fake):
        held = asyncio.create_task(served.chat(headers=AS_ALICE))
        await eventually(lambda: served.held() == 1)
        served.gateway.gauges.observe()
        assert sample(served, "rewake_tenant_held_requests", tenant="alice") == 1
        await Fleet(store).admit(fake)
        assert (await held).status_code == 200
        served.gateway.gauges.observe()
        assert sample(served, "rewake_tenant_held_requests", tenant="alice") == 0
        assert sample(served, "rewake_tenant_inflight_requests", tenant="alice") == 0
        (line,) = await lines(capfd, 1, [])
        assert 0 < line["waited_s"] <= line["ttft_s"]


async def test_case_61_replicas_hear_of_a_client_what_can_be_believed(store: redis.asyncio.Redis, store_server: str) -> None:
    said = {
        "X-Forwarded-For": "192.0.2.7",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Host": "api.example.com",
        "Forwarded": "for=6.6.6.6",
        "X-Real-IP": "6.6.6.6",
        "traceparent": "00-a-b-01",
        "x-request-id": "mine",
    }
    seen: list[Exchange] = []
    for trusted in ([], ["127.0.0.1"]):
        async with running(store, store_server, config(gateway={"trusted_proxies": trusted})) as (served, fake):
            assert (await served.chat(headers={**AS_ALICE, **said})).status_code == 200
            seen += fake.requests
    doubted, believed = seen
    host = doubted.header("x-forwarded-host")
    assert host is not None
    assert host.startswith("127.0.0.1:")
    assert doubted.header("x-forwarded-for") == "127.0.0.1"
    assert doubted.header("x-forwarded-proto") == "http"
    assert believed.header("x-forwarded-for") == "192.0.2.7, 127.0.0.1"
    assert believed.header("x-forwarded-proto") == "https"
    assert believed.header("x-forwarded-host") == "api.example.com"
    for exchange in seen:
        assert "6.6.6.6" not in str(exchange.headers)
        assert exchange.header("x-real-ip") is None
        assert exchange.header("traceparent") == "00-a-b-01"
        assert exchange.header("x-request-id") == "mine"
