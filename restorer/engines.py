"""Which adapter speaks to which kind of engine: :func:`adapter` chooses by the configured ``engine.kind``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from policies.config import Model
from restorer.engine import TCP_CLOSE, Body, HttpEngine, counted, expect, field, only
from restorer.errors import SnapshotError
from restorer.vllm import Vllm

__all__ = ["ENGINES", "HttpEngine", "LlamaServer", "Sglang", "Vllm", "adapter"]

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

    def request(self, prompt: str, tokens: int) -> tuple[str, Body]:
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

    For answers that repeat bit for bit it wants ``--enable-deterministic-inference``; without, its canary may refuse.
    """

    async def quiesce(self, client: httpx.AsyncClient) -> None:
        """Empty the prefix cache."""
        expect(await self.post(client, "/flush_cache", None, _SLEEP_S))

    async def ask(self, client: httpx.AsyncClient, path: str, body: Body | None = None) -> httpx.Response:
        # A prefix out of the cache makes a shorter prefill, which may round differently.
        await self.quiesce(client)
        return await super().ask(client, path, body)

    async def sleep(self, client: httpx.AsyncClient) -> None:
        if self.gpus:
            await self._occupy(client, "release")

    async def wake(self, client: httpx.AsyncClient) -> None:
        if self.gpus:
            await self._occupy(client, "resume")

    async def _occupy(self, client: httpx.AsyncClient, verb: str) -> None:
        answer = await self.post(client, f"/{verb}_memory_occupation", {"tags": ["kv_cache"]}, _SLEEP_S)
        # A version without the route has the cache in the dump, which costs size alone.
        expect(answer, (httpx.codes.OK, httpx.codes.NOT_FOUND))


ENGINES: Mapping[str, type[HttpEngine]] = {
    "http": HttpEngine,
    "llama-server": LlamaServer,
    "vllm": Vllm,
    "sglang": Sglang,
}
"""Configured ``engine.kind`` -> adapter."""


def adapter(name: str, model: Model) -> HttpEngine:
    """The adapter for a configured model."""
    return ENGINES[model.engine.kind](name, model)
