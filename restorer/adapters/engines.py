"""Which adapter speaks to which kind of engine: :func:`adapter` chooses by the configured ``engine.kind``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from policies.config import Model
from restorer.adapters.abilities import probe
from restorer.adapters.engine import TCP_CLOSE, Body, HttpEngine, counted, expect, field, only, parsed
from restorer.adapters.trtllm import TensorRtLlm
from restorer.adapters.vllm import Vllm
from restorer.errors import EngineNotReady, SnapshotError

__all__ = ["ENGINES", "HttpEngine", "LlamaServer", "Sglang", "TensorRtLlm", "Vllm", "adapter"]

_SLEEP_S = 60.0


class LlamaServer(HttpEngine):
    """llama.cpp's server: one process, no connections of its own, so that every TCP connection may be closed."""

    dump_options = TCP_CLOSE
    restore_options = TCP_CLOSE

    def essence(self, answer: Any) -> tuple[Any, int]:
        tokens = field(answer, "tokens")
        if not isinstance(tokens, list):
            raise SnapshotError("a canary's answer has no list of tokens; is this llama-server?")
        kept = ("content", "tokens", "completion_probabilities", "tokens_evaluated", "stop_type", "truncated")
        return only(answer, kept), counted(len(tokens))

    def shaped(self, prompt: str | int, embeddings: bool, serial: int, tokens: int) -> tuple[str, Body]:
        path, body = super().shaped(prompt, embeddings, serial, tokens)
        # Whatever slot is free, so that as many as wanted are computed together.
        return path, {name: value for name, value in body.items() if name != "id_slot"}

    def request(self, prompt: str | list[int], tokens: int) -> tuple[str, Body]:
        # The native route, because it gives token ids, and takes a slot: clones must not differ by which one was free.
        return "/completion", {
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": 0,
            "seed": 1,
            "n_probs": 3,
            "cache_prompt": False,
            "return_tokens": True,
            "id_slot": 0,
        }


class Sglang(HttpEngine):
    """SGLang's server. On a GPU its cache stays out of the dump where it was started with ``--enable-memory-saver``.

    For answers that repeat bit for bit it wants ``engine.deterministic``; without, its canary may refuse.
    """

    async def quiesce(self, client: httpx.AsyncClient) -> None:
        """Empty the prefix cache."""
        expect(await self.post(client, "/flush_cache", None, _SLEEP_S))

    async def ask(self, client: httpx.AsyncClient, path: str, body: Body | None = None) -> httpx.Response:
        # A prefix out of the cache makes a shorter prefill, which may round differently.
        await self.quiesce(client)
        return await super().ask(client, path, body)

    def argv(self) -> tuple[str, ...]:
        command, wanted = self.model.engine.command, list[str]()
        if self.sleeps:
            wanted.append("--enable-memory-saver")
            if self.model.engine.sleep.level == 1:
                # Its weights must have a place in the host's memory, or they would be gone.
                wanted.append("--enable-weights-cpu-backup")
        if self.model.engine.deterministic:
            wanted.append("--enable-deterministic-inference")
        return (*command, *(option for option in wanted if option not in command))

    def prompt(self, length: int, serial: int) -> str | list[int]:
        return self.tokens(length, serial)

    async def sleep(self, client: httpx.AsyncClient) -> None:
        # A version without the route has the cache in the dump, which costs size alone.
        if self.gpus and not self.sleeps:
            await self._occupy(client, "release", "kv_cache", statuses=(httpx.codes.OK, httpx.codes.NOT_FOUND))

    async def wake(self, client: httpx.AsyncClient) -> None:
        if self.gpus and not self.sleeps:
            await self._occupy(client, "resume", "kv_cache", statuses=(httpx.codes.OK, httpx.codes.NOT_FOUND))

    async def doze(self, client: httpx.AsyncClient, level: int) -> None:
        if (await probe(client)).lacks("/release_memory_occupation"):
            raise SnapshotError("this SGLang has no route /release_memory_occupation: it is too old to sleep")
        await self.quiesce(client)
        await self._occupy(client, "release", "kv_cache", "weights")

    async def rouse(self, client: httpx.AsyncClient, level: int) -> None:
        await self._occupy(client, "resume", "weights")
        if level == 2:
            # What is there now is whatever the memory held.
            await self._reload(client)
        await self._occupy(client, "resume", "kv_cache")
        await self.quiesce(client)

    async def _reload(self, client: httpx.AsyncClient) -> None:
        try:
            async with asyncio.timeout(_SLEEP_S):
                answer = await client.get("/get_model_info", timeout=None)
        except (httpx.HTTPError, TimeoutError) as error:
            raise EngineNotReady(f"{self.name}: GET /get_model_info got no answer: {type(error).__name__} {error}") from error
        path = field(parsed(answer), "model_path")
        if not isinstance(path, str):
            raise EngineNotReady(f"{self.name} does not say where its weights are: /get_model_info answered {answer.text[:200]}")
        answer = await self.post(client, "/update_weights_from_disk", {"model_path": path}, self.model.engine.ready_timeout_s)
        expect(answer)
        if field(parsed(answer), "success") is not True:
            raise EngineNotReady(f"{self.name} could not read its weights again: {answer.text[:300]}")

    async def _occupy(
        self, client: httpx.AsyncClient, verb: str, *tags: str, statuses: Sequence[int] = (httpx.codes.OK,)
    ) -> None:
        expect(await self.post(client, f"/{verb}_memory_occupation", {"tags": list(tags)}, _SLEEP_S), statuses)


ENGINES: Mapping[str, type[HttpEngine]] = {
    "http": HttpEngine,
    "llama-server": LlamaServer,
    "vllm": Vllm,
    "sglang": Sglang,
    "tensorrt-llm": TensorRtLlm,
}
"""Configured ``engine.kind`` -> adapter."""


def adapter(name: str, model: Model) -> HttpEngine:
    """The adapter for a configured model."""
    return ENGINES[model.engine.kind](name, model)
