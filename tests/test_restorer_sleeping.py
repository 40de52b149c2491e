"""Engines that sleep by their own API, and TensorRT-LLM, which does not: what adapters ask of them, against scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from policies.config import ConfigError, Model, parse
from restorer.adapters.abilities import Abilities, probe
from restorer.adapters.engines import adapter
from restorer.errors import EngineNotReady, SnapshotError


def model(kind: str, *, level: int = 1, backend: str = "sleep", gpus: int = 0, **more: Any) -> Model:
    engine = {"kind": kind, "command": ["/bin/engine"], "backend": backend, "sleep": {"level": level}, "gpu": {"count": gpus}}
    return Model.model_validate({"engine": {**engine, **more.pop("engine", {})}, **more})


class Server:
    """An engine that notes what it is asked, and sleeps like vLLM."""

    def __init__(self, answers: Mapping[str, Any] | None = None) -> None:
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.asleep = False
        self._answers = answers or {}

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        target = request.url.raw_path.decode()
        self.asked.append(target)
        self.bodies.append(json.loads(request.content) if request.content else None)
        if target in self._answers:
            found = self._answers[target]
            return httpx.Response(found) if isinstance(found, int) else httpx.Response(200, json=found)
        if target == "/is_sleeping":
            return httpx.Response(200, json={"is_sleeping": self.asleep})
        if target.startswith("/sleep"):
            self.asleep = True
        elif target == "/wake_up" or "kv_cache" in target:
            self.asleep = False
        return httpx.Response(200, json={})


@pytest.mark.parametrize(
    ("level", "woken"),
    [
        (1, ["/wake_up"]),
        (2, ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]),
    ],
)
async def test_vllm_sleeps_and_reads_thrown_away_weights_again(level: int, woken: list[str]) -> None:
    server, engine = Server(), adapter("m", model("vllm", level=level))
    async with server.client() as client:
        await engine.doze(client, level)
        assert server.asleep
        assert f"/sleep?level={level}" in server.asked
        server.asked.clear()
        await engine.rouse(client, level)
    assert not server.asleep
    assert [one for one in server.asked if one not in ("/is_sleeping", "/reset_prefix_cache")] == woken
    assert server.asked[-1] == "/reset_prefix_cache"
    if level == 2:
        assert {"method": "reload_weights", "timeout": 1800.0} in server.bodies


async def test_a_vllm_without_the_route_is_not_put_to_sleep() -> None:
    async with Server({"/is_sleeping": 404}).client() as client:
        with pytest.raises(SnapshotError, match="no route /is_sleeping"):
            await adapter("m", model("vllm")).doze(client, 1)


@pytest.mark.parametrize("level", [1, 2])
async def test_sglang_gives_all_memory_back_and_reads_its_weights_from_where_it_says_they_are(level: int) -> None:
    answers = {"/get_model_info": {"model_path": "/srv/m"}, "/update_weights_from_disk": {"success": True}, "/openapi.json": 404}
    server, engine = Server(answers), adapter("m", model("sglang", level=level))
    async with server.client() as client:
        await engine.doze(client, level)
        await engine.rouse(client, level)
    told = [(path, body) for path, body in zip(server.asked, server.bodies, strict=True) if body]
    reload = [("/update_weights_from_disk", {"model_path": "/srv/m"})] if level == 2 else []
    assert told == [
        ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        *reload,
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"/get_model_info": {}}, "does not say where its weights are"),
        (
            {"/get_model_info": {"model_path": "/m"}, "/update_weights_from_disk": {"success": False, "message": "no"}},
            "could not read",
        ),
        ({"/resume_memory_occupation": 500}, "answered 500"),
    ],
)
async def test_a_sglang_that_does_not_get_its_weights_back_is_not_awake(answers: Mapping[str, Any], reason: str) -> None:
    async with Server(answers).client() as client:
        with pytest.raises(EngineNotReady, match=reason):
            await adapter("m", model("sglang", level=2)).rouse(client, 2)


async def test_a_sglang_that_says_it_has_no_such_route_is_not_put_to_sleep() -> None:
    async with Server({"/openapi.json": {"paths": {"/health": {}}}}).client() as client:
        with pytest.raises(SnapshotError, match="no route /release_memory_occupation"):
            await adapter("m", model("sglang")).doze(client, 1)


def test_what_it_takes_to_sleep_is_added_to_the_command_and_nothing_else() -> None:
    assert adapter("m", model("vllm")).argv() == ("/bin/engine", "--enable-sleep-mode")
    assert adapter("m", model("vllm")).settings() == {"VLLM_SERVER_DEV_MODE": "1"}
    assert "--worker-extension-cls" in adapter("m", model("vllm", gpus=1)).argv()
    assert adapter("m", model("vllm", backend="cold", gpus=1)).argv() == ("/bin/engine",)
    saver = ("/bin/engine", "--enable-memory-saver")
    assert adapter("m", model("sglang")).argv() == (*saver, "--enable-weights-cpu-backup")
    assert adapter("m", model("sglang", level=2)).argv() == saver
    assert adapter("m", model("sglang", backend="criu")).argv() == ("/bin/engine",)


async def test_other_engines_say_that_they_cannot_sleep() -> None:
    for kind in ("http", "llama-server", "tensorrt-llm"):
        with pytest.raises(SnapshotError, match=f"{kind} cannot be put to sleep"):
            await adapter("m", model(kind, backend="criu")).doze(None, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"kind": "http", "backend": "sleep"}, "backend: sleep wants an engine with an API for it"),
        ({"kind": "vllm", "backend": "runc", "gpu": {"count": 1}}, "backend: runc does not put GPUs into its containers"),
        ({"kind": "vllm", "bundle": "/srv/b"}, "bundle is for backend: runc, but backend is criu"),
    ],
)
def test_a_backend_that_does_not_fit_is_refused_with_the_way_out(engine: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse({"models": {"m": {"engine": {"command": ["/bin/engine"], **engine}}}})


# ---------------------------------------------------------------- TensorRT-LLM, and what engines say of themselves


def described(*fields: str) -> dict[str, Any]:
    """An OpenAPI description whose completions take these members."""
    schema = {"$ref": "#/components/schemas/CompletionRequest"}
    route = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
    properties = {field: {"type": "string"} for field in fields}
    return {"paths": {"/v1/completions": route}, "components": {"schemas": {"CompletionRequest": {"properties": properties}}}}


@pytest.mark.parametrize(("fields", "salted"), [(("prompt", "cache_salt"), True), (("prompt",), False)])
async def test_tensorrt_llm_gets_a_salt_where_it_says_that_it_takes_one(fields: tuple[str, ...], salted: bool) -> None:
    server, engine = Server({"/openapi.json": described(*fields)}), adapter("m", model("tensorrt-llm", backend="criu"))
    async with server.client() as client:
        for _ in range(2):
            path, body = engine.request("hello", 2)
            await engine.ask(client, path, body)
    assert server.asked.count("/openapi.json") == 1
    sent = [body for body in server.bodies if body]
    assert [("cache_salt" in body) for body in sent] == [salted] * 2
    if salted:
        assert sent[0]["cache_salt"] != sent[1]["cache_salt"]


def test_tensorrt_llm_is_not_captured_with_what_a_checkpoint_cannot_hold() -> None:
    env = {"TLLM_NCCL_SYMMETRIC_ZERO_COPY": "1"}
    (fault,) = adapter("m", model("tensorrt-llm", backend="criu", engine={"env": env})).obstacles()
    assert "TLLM_NCCL_SYMMETRIC_ZERO_COPY is '1'" in fault
    assert "set it to '0'" in fault
    assert not adapter("m", model("tensorrt-llm", backend="criu")).obstacles()
    assert not adapter("m", model("tensorrt-llm", backend="cold", engine={"env": env})).obstacles()


async def test_the_name_that_an_engine_knows_a_model_by_is_what_it_is_asked_for() -> None:
    engine = adapter("m", model("tensorrt-llm", backend="criu", served_name="Qwen3-8B"))
    assert {body["model"] for _, body in engine.canary_requests()} == {"Qwen3-8B"}


@pytest.mark.parametrize("answer", [404, [], {"paths": []}, {}])
async def test_an_engine_that_does_not_describe_itself_is_simply_asked(answer: Any) -> None:
    async with Server({"/openapi.json": answer}).client() as client:
        found = await probe(client)
    assert found == Abilities()
    assert not found.lacks("/anything")


async def test_an_engine_that_is_gone_does_not_describe_itself() -> None:
    def refused(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    answer: Callable[[httpx.Request], httpx.Response] = refused
    async with httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer)) as client:
        assert await probe(client) == Abilities()
