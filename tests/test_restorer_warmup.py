"""Warm-up: which shapes there are, and that each is really served, as many at a time as it says, before a capture."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from policies import warmup as policy
from policies.config import Model
from policies.warmup import Shape, Warmup
from restorer.adapters import warmup
from restorer.adapters.engines import adapter
from restorer.errors import EngineNotReady, SnapshotError


def model(kind: str = "vllm", **wanted: Any) -> Model:
    engine = {"kind": kind, "command": ["/bin/engine"]}
    return Model.model_validate({"engine": engine, "warmup": wanted})


class Counter:
    """An engine that answers when as many as are expected are there, and notes how many were at a time."""

    def __init__(self, status: int = 200) -> None:
        self.bodies: list[tuple[str, Any]] = []
        self.most = self.now = 0
        self._status = status

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.now += 1
        self.most = max(self.most, self.now)
        self.bodies.append((request.url.path, json.loads(request.content)))
        for _ in range(20):
            await asyncio.sleep(0)
        self.now -= 1
        return httpx.Response(self._status, text="prompt too long")

    async def run(self, settings: Model) -> tuple[Shape, ...]:
        async with httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(self.answer)) as client:
            return await warmup.run(client, adapter("m", settings))


def test_without_settings_the_canarys_first_prompt_is_sent_alone_and_as_many_as_may_be_in_flight_to_four() -> None:
    assert policy.shapes(Warmup(), "hello", 8) == (Shape("hello", 1, False), Shape("hello", 4, False))
    assert policy.shapes(Warmup(), "hello", 1) == (Shape("hello", 1, False),)


def test_every_prompt_meets_every_concurrency_small_ones_first() -> None:
    wanted = Warmup(lengths=(512, 16), prompts=("once",), concurrency=(4, 1), embeddings=True)
    found = policy.shapes(wanted, "unused", 8)
    assert [(one.prompt, one.at_once) for one in found if not one.embeddings] == [
        *(("once", 1), ("once", 4)),
        *((16, 1), (16, 4)),
        *((512, 1), (512, 4)),
    ]
    assert sum(one.embeddings for one in found) == 6


async def test_each_shape_is_served_at_its_length_and_concurrency_and_no_two_prompts_are_equal() -> None:
    engine = Counter()
    found = await engine.run(model(lengths=[3, 40], concurrency=[1, 5], max_tokens=3))
    assert engine.most == 5
    assert [(one.prompt, one.at_once) for one in found] == [(3, 1), (3, 5), (40, 1), (40, 5)]
    prompts = [tuple(body["prompt"]) for _, body in engine.bodies]
    assert [len(prompt) for prompt in prompts] == [3] * 6 + [40] * 6
    assert len(set(prompts)) == len({prompt[0] for prompt in prompts}) == 12
    assert {body["max_tokens"] for _, body in engine.bodies} == {3}
    assert len({body["cache_salt"] for _, body in engine.bodies}) == 12


async def test_an_engine_that_takes_no_tokens_gets_words_and_llama_server_any_slot() -> None:
    for kind, path in (("http", "/v1/completions"), ("llama-server", "/completion")):
        engine = Counter()
        await engine.run(model(kind, lengths=[5], concurrency=[2]))
        (first, body), (_, other) = engine.bodies
        assert first == path
        assert len(body["prompt"].split()) == 5
        assert body["prompt"] != other["prompt"]
        assert "id_slot" not in body


async def test_embeddings_are_asked_for_where_they_are_wanted() -> None:
    engine = Counter()
    await engine.run(model(prompts=["hello"], concurrency=[1], embeddings=True))
    assert [path for path, _ in engine.bodies] == ["/v1/completions", "/v1/embeddings"]
    assert engine.bodies[1][1]["input"] == "hello"


async def test_a_shape_that_the_engine_refuses_names_the_setting_and_the_shape() -> None:
    with pytest.raises(SnapshotError, match=r"models\.m\.warmup: 1 of a prompt of 9000 tokens was answered 400: prompt too long"):
        await Counter(400).run(model(lengths=[9000], concurrency=[1]))


async def test_an_engine_that_does_not_answer_in_time_is_not_ready() -> None:
    async def silent(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(silent)) as client:
        with pytest.raises(EngineNotReady, match="got no answer within"):
            await warmup.run(client, adapter("m", model(timeout_s=0.05, concurrency=[3])))
