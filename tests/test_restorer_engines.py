"""Engine adapters: against scripted answers, and against a real llama-server where there is one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import eventually

from policies.config import Model
from restorer.adapters import canary
from restorer.adapters import engine as base
from restorer.adapters.engines import ENGINES, HttpEngine, adapter
from restorer.errors import EngineNotReady, SnapshotError

KINDS = ["http", "llama-server", "vllm", "sglang", "tensorrt-llm"]
LLAMA_SERVER = os.environ.get("REWAKE_LLAMA_SERVER") or shutil.which("llama-server")
GGUF = os.environ.get("REWAKE_MODEL")


def model(kind: str, **canary: Any) -> Model:
    engine = {"kind": kind, "command": ["/bin/engine", "--x"], "env": {"HOME": "/mine", "A": "1"}, "health_path": "/up"}
    return Model.model_validate({"engine": engine, "canary": {"prompts": ["one", "two"], "max_tokens": 4, **canary}})


def client(answer: Callable[[httpx.Request], Any]) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer))


def test_every_configurable_kind_has_an_adapter() -> None:
    for kind in KINDS:
        assert type(adapter("m", model(kind))) is ENGINES[kind]
    assert set(ENGINES) == set(KINDS)


def test_the_command_is_the_operators_and_the_environment_is_minimal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the restorer")
    for kind in KINDS:
        engine = adapter("m", model(kind))
        assert engine.argv() == ("/bin/engine", "--x")
        environment = engine.environment(Path("/private"))
        if kind == "tensorrt-llm":
            assert environment.pop("TLLM_NCCL_SYMMETRIC_ZERO_COPY") == "0"
            assert environment.pop("UCX_TLS") == "tcp,self"
        assert environment == {"PATH": base.PATH, "LANG": "C.UTF-8", "HOME": "/mine", "TMPDIR": "/private/tmp", "A": "1"}


def test_dump_and_restore_options_fit_each_other() -> None:
    for kind, engine in ENGINES.items():
        assert ("--tcp-close" in engine.dump_options) == ("--tcp-close" in engine.restore_options) == (kind == "llama-server")
        assert ("--tcp-established" in engine.dump_options) == ("--tcp-established" in engine.restore_options)
        assert "--lazy-pages" not in (*engine.dump_options, *engine.restore_options)


@pytest.mark.parametrize(("status", "expected"), [(200, True), (503, False), (204, False), (404, False)])
async def test_ready_is_a_healthy_answer_on_the_configured_path(status: int, expected: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("GET", "/up")
        return httpx.Response(status)

    async with client(answer) as http:
        assert await adapter("m", model("http")).ready(http) is expected


async def test_an_engine_that_is_not_there_or_silent_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    def refused(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(base, "_HEALTH_S", 0.05)
    for transport in (silent, refused):
        async with client(transport) as http:
            assert not await adapter("m", model("http")).ready(http)


async def test_gateway_case_43_warm_proves_that_a_healthy_engine_serves() -> None:
    asked: list[tuple[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200 if len(asked) == 1 else 503, text="loading")

    for kind, route, field in [("http", "/v1/completions", "max_tokens"), ("llama-server", "/completion", "n_predict")]:
        asked.clear()
        async with client(answer) as http:
            await adapter("m", model(kind)).warm(http)
            assert asked[0][0] == route
            assert asked[0][1][field] == 1
            with pytest.raises(EngineNotReady, match=rf"{route} answered 503: loading"):
                await adapter("m", model(kind)).warm(http)


async def test_asking_has_a_deadline_however_slowly_bytes_come() -> None:
    class Drip(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                await asyncio.sleep(0.01)
                yield b" "

    async with client(lambda _: httpx.Response(200, stream=Drip())) as http:
        with pytest.raises(EngineNotReady, match=r"got no answer within 0\.1 s"):
            await adapter("m", model("http", timeout_s=0.1)).ask(http, "/v1/completions", {})


def test_canary_requests_are_greedy_seeded_and_one_for_each_prompt() -> None:
    for kind in KINDS:
        requests = adapter("m", model(kind)).canary_requests()
        assert [body["prompt"] for _, body in requests] == ["one", "two"]
        for _, body in requests:
            assert (body["temperature"], body["seed"]) == (0, 1)
            assert body.get("max_tokens", body.get("n_predict")) == 4
    assert adapter("m", model("vllm")).canary_requests()[0][1]["model"] == "m"


def test_no_canary_is_answered_from_a_cache() -> None:
    llama, vllm = adapter("m", model("llama-server")), adapter("m", model("vllm"))
    _, body = llama.canary_requests()[0]
    assert llama.as_sent(body)["cache_prompt"] is False
    _, body = vllm.canary_requests()[0]
    salts = {vllm.as_sent(body)["cache_salt"] for _ in range(10)}
    assert len(salts) == 10
    assert "cache_salt" not in body, "the recorded request stays the same"


COMPLETION: dict[str, Any] = {
    "id": "cmpl-1",
    "created": 1,
    "system_fingerprint": "x",
    "choices": [{"index": 0, "text": "Paris", "logprobs": {"tokens": ["Paris"]}, "finish_reason": "length", "token_ids": [7]}],
    "usage": {"completion_tokens": 3},
    "timings": {},
}


def test_the_essence_leaves_out_what_differs_by_nature() -> None:
    essence, tokens = HttpEngine("m", model("http")).essence(COMPLETION)
    assert tokens == 3
    assert essence == {"choices": COMPLETION["choices"]}
    native = {
        "content": "a",
        "tokens": [7, 8],
        "completion_probabilities": [],
        "timings": {},
        "id_slot": 0,
        "generation_settings": {},
    }
    essence, tokens = adapter("m", model("llama-server")).essence(native)
    assert tokens == 2
    assert essence == {"content": "a", "tokens": [7, 8], "completion_probabilities": []}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [({"usage": None}, 1), ({"usage": {}, "choices": [{"text": "x"}, {"text": ""}, {"text": "y", "logprobs": None}]}, 2)],
)
def test_tokens_are_counted_even_when_the_server_does_not(changes: dict[str, Any], tokens: int) -> None:
    assert HttpEngine("m", model("http")).essence({**COMPLETION, **changes})[1] == tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        "x",
        {},
        {"choices": None},
        {"choices": [1]},
        {"choices": []},
        {"choices": [{"text": ""}]},
        {"tokens": []},
        {"tokens": 1},
    ],
)
def test_an_answer_without_tokens_proves_nothing(kind: str, answer: Any) -> None:
    with pytest.raises(SnapshotError, match="canary's answer"):
        adapter("m", model(kind)).essence(answer)


async def test_vllm_is_quiesced_where_it_offers_that() -> None:
    for status in (200, 404):
        async with client(
            lambda request, status=status: httpx.Response(status if request.url.path == "/reset_prefix_cache" else 500)
        ) as http:
            await adapter("m", model("vllm")).quiesce(http)
    async with client(lambda _: httpx.Response(500, text="busy")) as http:
        with pytest.raises(EngineNotReady, match="answered 500: busy"):
            await adapter("m", model("vllm")).quiesce(http)
        await adapter("m", model("llama-server")).quiesce(http)


@pytest.fixture
async def llama() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a real llama-server."""
    if LLAMA_SERVER is None or GGUF is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs REWAKE_LLAMA_SERVER and REWAKE_MODEL")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [LLAMA_SERVER, "-m", GGUF, "--host", "127.0.0.1", "--port", str(port), "-c", "2048", "-t", "1"]
    server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220 - it lives longer than the call
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            engine = adapter("m", Model.model_validate({"engine": {"kind": "llama-server", "command": ["/x"]}}))
            await eventually(lambda: engine.ready(http), within=60, what="llama-server is healthy")
            yield http
    finally:
        server.kill()
        server.wait()


async def test_a_real_llama_server_repeats_itself_bit_for_bit_whatever_it_did_meanwhile(llama: httpx.AsyncClient) -> None:
    engine = adapter("m", Model.model_validate({"engine": {"kind": "llama-server", "command": ["/x"]}}))
    await engine.warm(llama)
    await engine.quiesce(llama)
    exchanges, _ = await canary.record(llama, engine)
    assert [exchange.tokens for exchange in exchanges] == [16, 16]
    assert all(isinstance(exchange.answer["completion_probabilities"][0]["logprob"], str) for exchange in exchanges)
    noise = [engine.ask(llama, "/completion", {"prompt": f"noise {n}", "n_predict": 8}) for n in range(6)]
    await asyncio.gather(*noise)
    assert await canary.check(llama, engine, exchanges) == canary.Verdict(2, 32, True)
    http = adapter("m", Model.model_validate({"engine": {"kind": "http", "command": ["/x"]}}))
    plain, _ = await canary.record(llama, http)
    assert (await canary.check(llama, http, plain)).equal
