"""How each kind of engine is started, asked and dumped: one adapter per kind, chosen by :func:`adapter`.

An adapter speaks to an engine through an httpx client whose base URL is the engine's; it knows nothing of processes,
namespaces or snapshots. It must never change what the operator configured: argv is the configured one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx

from policies.config import Model
from restorer.errors import EngineNotReady, SnapshotError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HEALTH_S = 5.0
_TCP_CLOSE = ("--tcp-close",)
_TCP_INSIDE = ("--tcp-established", "--network-lock", "skip")

Body = Mapping[str, Any]
"""A JSON object: a request's body."""


class HttpEngine:
    """Any server with an OpenAI-compatible ``/v1/completions``; the base of the others.

    Args:
        name: the model's name, which the engine must serve it under: requests reach it unchanged.
        model: its settings.
    """

    dump_options: ClassVar[tuple[str, ...]] = (*_TCP_INSIDE, "--link-remap", "--ghost-limit", "256M")
    """CRIU's options for a dump, besides those every engine gets."""
    restore_options: ClassVar[tuple[str, ...]] = _TCP_INSIDE
    """Their counterparts for a restore."""

    def __init__(self, name: str, model: Model) -> None:
        self.name = name
        self.model = model

    def argv(self) -> tuple[str, ...]:
        """The command to start it with."""
        return self.model.engine.command

    def environment(self, private: Path) -> dict[str, str]:
        """Its whole environment. ``private`` is a folder of its own with ``home`` and ``tmp`` in it.

        What the operator set wins; nothing is inherited from the restorer.
        """
        minimal = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": str(private / "home"), "TMPDIR": str(private / "tmp")}
        return {**minimal, **self.model.engine.env}

    async def ready(self, client: httpx.AsyncClient) -> bool:
        """It says that it is healthy. That is not yet serving: see :meth:`warm`."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                answer = await client.get(self.model.engine.health_path, timeout=None)
        except (httpx.HTTPError, TimeoutError):
            return False
        return answer.status_code == httpx.codes.OK

    async def warm(self, client: httpx.AsyncClient) -> None:
        """Make it generate one token: the first request pays for what later ones find done, and proves that it serves.

        Raises:
            EngineNotReady: it did not, or not within the canary's deadline.
        """
        path, body = self._request(self.model.canary.prompts[0], 1)
        _expect(await self.ask(client, path, body), (httpx.codes.OK,))

    async def ask(self, client: httpx.AsyncClient, path: str, body: Body | None = None) -> httpx.Response:
        """POST a body; the whole answer, whatever its status, within the canary's deadline for one request.

        Raises:
            EngineNotReady: there was no whole answer in time.
        """
        seconds = self.model.canary.timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await client.post(path, json=None if body is None else self.as_sent(body), timeout=None)
        except TimeoutError:
            raise EngineNotReady(f"{self.name}: POST {path} got no answer within {seconds:g} s") from None
        except httpx.HTTPError as error:
            raise EngineNotReady(f"{self.name}: POST {path} got no answer: {type(error).__name__} {error}") from error

    async def quiesce(self, client: httpx.AsyncClient) -> None:
        """Bring it to rest before a dump: no request in flight is the caller's duty, caches are the engine's.

        Raises:
            EngineNotReady: it offers a way to do so, and failed.
        """

    def canary_requests(self) -> list[tuple[str, Body]]:
        """(path, body) of each fixed request: greedy, seeded, with as many exact numbers in the answer as it can give."""
        return [self._request(prompt, self.model.canary.max_tokens) for prompt in self.model.canary.prompts]

    def as_sent(self, body: Body) -> Body:
        """The body to send for a recorded one: with what makes the engine compute the answer rather than remember it."""
        return body

    def essence(self, answer: Any) -> tuple[Any, int]:
        """(what of a canary's answer must be repeated bit for bit, tokens generated).

        What differs by nature (ids, times, the server's name) is left out.

        Raises:
            SnapshotError: the answer is not one, or holds no token: nothing could be proved by it.
        """
        choices = _field(answer, "choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise SnapshotError("a canary's answer has no list of choices; is this an OpenAI-compatible engine?")
        kept = [
            _only(choice, ("index", "text", "token_ids", "prompt_token_ids", "logprobs", "finish_reason", "stop_reason"))
            for choice in choices
        ]
        usage = answer.get("usage") or {}
        return {"choices": kept}, _counted(usage.get("completion_tokens") or _logprobs(kept) or _with_text(kept))

    def _request(self, prompt: str, tokens: int) -> tuple[str, Body]:
        return "/v1/completions", {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "seed": 1,
            "logprobs": 1,
        }


class LlamaServer(HttpEngine):
    """llama.cpp's server: one process, no connections of its own, so that every TCP connection may be closed."""

    dump_options = _TCP_CLOSE
    restore_options = _TCP_CLOSE

    def essence(self, answer: Any) -> tuple[Any, int]:
        tokens = _field(answer, "tokens")
        if not isinstance(tokens, list):
            raise SnapshotError("a canary's answer has no list of tokens; is this llama-server?")
        kept = ("content", "tokens", "completion_probabilities", "tokens_evaluated", "stop_type", "truncated")
        return _only(answer, kept), _counted(len(tokens))

    def _request(self, prompt: str, tokens: int) -> tuple[str, Body]:
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


class Vllm(HttpEngine):
    """vLLM's OpenAI server: several processes that talk over loopback TCP, unix sockets and /dev/shm."""

    async def quiesce(self, client: httpx.AsyncClient) -> None:
        """Empty the prefix cache, where the server offers it (it does so in its development mode only)."""
        _expect(await self.ask(client, "/reset_prefix_cache"), (httpx.codes.OK, httpx.codes.NOT_FOUND))

    def as_sent(self, body: Body) -> Body:
        """With a salt of its own, so that no cached prefix is used: a shorter prefill may round differently."""
        return {**body, "cache_salt": secrets.token_hex(16)}

    def _request(self, prompt: str, tokens: int) -> tuple[str, Body]:
        path, body = super()._request(prompt, tokens)
        return path, {**body, "return_token_ids": True}


ENGINES: Mapping[str, type[HttpEngine]] = {"http": HttpEngine, "llama-server": LlamaServer, "vllm": Vllm}
"""Configured ``engine.kind`` -> adapter."""


def adapter(name: str, model: Model) -> HttpEngine:
    """The adapter for a configured model."""
    return ENGINES[model.engine.kind](name, model)


def _expect(answer: httpx.Response, statuses: Sequence[int]) -> None:
    if answer.status_code not in statuses:
        raise EngineNotReady(f"POST {answer.request.url} answered {answer.status_code}: {answer.text[:300]}")


def _field(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None


def _only(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: found[name] for name in names if name in found}


def _logprobs(choices: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that came with a probability."""
    return sum(len((choice.get("logprobs") or {}).get("tokens") or ()) for choice in choices)


def _with_text(choices: Sequence[Mapping[str, Any]]) -> int:
    """A server that counts nothing still generated at least one token for each text that is not empty."""
    return sum(bool(choice.get("text")) for choice in choices)


def _counted(tokens: Any) -> int:
    if not isinstance(tokens, int) or tokens < 1:
        raise SnapshotError("a canary's answer holds no token, so nothing can be proved by it; change canary.prompts")
    return tokens
