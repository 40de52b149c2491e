"""What every engine is to the restorer: how it is started, asked, put to sleep and dumped; and the plainest of them.

An adapter speaks to an engine through an httpx client whose base URL is the engine's; it knows nothing of processes,
namespaces or snapshots. It must never change what the operator configured: it may add what a capture needs, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx

from policies.config import Model
from policies.manifest import Allocation, WeightsPart
from restorer.errors import EngineNotReady, SnapshotError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HEALTH_S = 5.0
_FIRST_TOKEN, _TOKENS = 100, 151
TCP_CLOSE = ("--tcp-close",)
_TCP_INSIDE = ("--tcp-established", "--network-lock", "skip")

_ALONE = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Memory that several processes share on GPUs, or that a network card knows, cannot be restored, so their collectives go through
the host's memory; and a watchdog must not take the time that a snapshot lay on a disk for a collective that hangs."""
_BETWEEN_GPUS = {name: _ALONE[name] for name in ("NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE")}
"""With the opposite of one of these driver 580 checkpoints, and then does not restore."""

Body = Mapping[str, Any]
"""A JSON object: a request's body."""


class HttpEngine:
    """Any server with an OpenAI-compatible ``/v1/completions``; the base of the others.

    Args:
        name: the model's name, which the engine must serve it under, unless ``served_name`` says what it knows it by.
        model: its settings.
    """

    dump_options: ClassVar[tuple[str, ...]] = _TCP_INSIDE
    """CRIU's options for a dump, besides those every engine gets."""
    most_gpus: ClassVar[int] = 1
    """GPUs with which one of its replicas has been seen to survive a checkpoint."""
    restore_options: ClassVar[tuple[str, ...]] = _TCP_INSIDE
    """Their counterparts for a restore."""

    def __init__(self, name: str, model: Model) -> None:
        self.name = name
        self.model = model

    @property
    def gpus(self) -> int:
        """How many GPUs each replica has; 0: it runs on the CPU."""
        return self.model.engine.gpu.count

    @property
    def apart(self) -> bool:
        """Its weights can be taken out of a dump, and are to be."""
        return False

    @property
    def captured(self) -> bool:
        """Snapshots are to be made of it."""
        return self.model.engine.backend in ("criu", "runc")

    @property
    def sleeps(self) -> bool:
        """It is to be kept asleep while nobody asks for it."""
        return self.model.engine.backend == "sleep"

    @property
    def tells_weights(self) -> bool:
        """It can tell what its weights are, for them to be compared after a sleep."""
        return False

    def argv(self) -> tuple[str, ...]:
        """The command to start it with."""
        return self.model.engine.command

    def settings(self) -> dict[str, str]:
        """Environment that makes it another engine: the operator's, and what a capture needs."""
        return {**(_ALONE if self.gpus > 1 else {}), **self.model.engine.env}

    def needed(self) -> Mapping[str, str]:
        """The part of its environment without which it cannot be captured."""
        return _BETWEEN_GPUS if self.gpus > 1 and not self.model.engine.gpu.untested else {}

    def obstacles(self) -> Sequence[str]:
        """Why it cannot be captured as it is configured, each with its remedy; nothing was started."""
        return [
            f"engine.env: {name} is {self.model.engine.env[name]!r}, with which its state cannot be captured; set it to {value!r}"
            for name, value in self.needed().items()
            if self.captured and self.model.engine.env.get(name, value) != value
        ]

    def environment(self, private: Path, visible: Sequence[int] = ()) -> dict[str, str]:
        """Its whole environment. What the operator set wins; nothing is inherited from the restorer.

        Args:
            private: a folder of its own with ``home`` and ``tmp`` in it.
            visible: the GPUs that it may see, by their place on the bus.
        """
        minimal = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": str(private / "home"), "TMPDIR": str(private / "tmp")}
        if visible:
            # A lease is no wish: these win over the operator's.
            return {**minimal, **self.settings(), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": _joined(visible)}
        return {**minimal, **self.settings()}

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
        path, body = self.request(self.model.canary.prompts[0], 1)
        expect(await self.ask(client, path, body))

    async def ask(self, client: httpx.AsyncClient, path: str, body: Body | None = None) -> httpx.Response:
        """POST a body; the whole answer, whatever its status, within the canary's deadline for one request.

        Raises:
            EngineNotReady: there was no whole answer in time.
        """
        return await self.post(client, path, None if body is None else self.as_sent(body), self.model.canary.timeout_s)

    async def post(self, client: httpx.AsyncClient, path: str, body: Body | None, seconds: float) -> httpx.Response:
        try:
            async with asyncio.timeout(seconds):
                return await client.post(path, json=body, timeout=None)
        except TimeoutError:
            raise EngineNotReady(f"{self.name}: POST {path} got no answer within {seconds:g} s") from None
        except httpx.HTTPError as error:
            raise EngineNotReady(f"{self.name}: POST {path} got no answer: {type(error).__name__} {error}") from error

    async def quiesce(self, client: httpx.AsyncClient) -> None:
        """Bring it to rest before a dump: no request in flight is the caller's duty, caches are the engine's.

        Raises:
            EngineNotReady: it offers a way to do so, and failed.
        """

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """Let go of device memory that need not be in a dump, as far as the engine can: it answers nobody until it wakes.

        Raises:
            SnapshotError: it cannot, and must. EngineNotReady: it did not in time.
        """

    async def wake(self, client: httpx.AsyncClient) -> None:
        """Serve again after :meth:`sleep`; weights that lie apart are in their place by now."""

    async def rejoin(self, client: httpx.AsyncClient) -> None:
        """Connect its workers again, whose GPU state is back; the first thing after :meth:`sleep` that is asked of it."""

    async def doze(self, client: httpx.AsyncClient, level: int) -> None:
        """Sleep by the engine's own API until :meth:`rouse`: it gives memory back and answers nobody.

        Args:
            level: 1: its weights stay in the host's memory; 2: nowhere.

        Raises:
            SnapshotError: it has no such API. EngineNotReady: it did not fall asleep in time.
        """
        raise SnapshotError(f"{self.model.engine.kind} cannot be put to sleep")

    async def rouse(self, client: httpx.AsyncClient, level: int) -> None:
        """Serve again after :meth:`doze`, with weights read anew where they were thrown away."""
        raise SnapshotError(f"{self.model.engine.kind} cannot be woken")

    async def describe_weights(self, client: httpx.AsyncClient) -> list[tuple[Allocation, ...]]:
        """The allocations that hold weights, of each worker. Asked where they are :attr:`apart`, or it :attr:`tells_weights`.

        Raises:
            SnapshotError: it cannot tell.
        """
        raise SnapshotError(f"{self.model.engine.kind} cannot part with its weights")

    async def export_weights(
        self, client: httpx.AsyncClient, folders: Sequence[Path], part_bytes: int, *, within_s: float
    ) -> list[tuple[WeightsPart, ...]]:
        """Have each worker write its weights into a folder, in parts."""
        raise SnapshotError(f"{self.model.engine.kind} cannot part with its weights")

    async def import_weights(
        self, client: httpx.AsyncClient, sources: Sequence[Body], *, within_s: float
    ) -> list[tuple[str, ...]]:
        """Give weights their memory again and have each worker fill it; the fingerprints of what is there now.

        Args:
            sources: of each worker, ``socket`` (device memory is offered there) or ``files`` (pairs of path and bytes).
        """
        raise SnapshotError(f"{self.model.engine.kind} cannot take weights in")

    def canary_requests(self) -> list[tuple[str, Body]]:
        """(path, body) of each fixed request: greedy, seeded, with as many exact numbers in the answer as it can give."""
        return [self.request(prompt, self.model.canary.max_tokens) for prompt in self.model.canary.prompts]

    def shaped(self, prompt: str | int, embeddings: bool, serial: int, tokens: int) -> tuple[str, Body]:
        """(path, body) of a request of some shape, for the warm-up.

        Args:
            prompt: a text, or how many tokens.
            serial: no two of a warm-up are equal, or a cache would answer.
        """
        text = self.prompt(prompt, serial) if isinstance(prompt, int) else prompt
        if embeddings:
            return "/v1/embeddings", {"model": self.model.served_name or self.name, "input": text}
        return self.request(text, tokens)

    def prompt(self, length: int, serial: int) -> str | list[int]:
        """A prompt of about ``length`` tokens that begins as no other does."""
        return " ".join([str(serial), *["one"] * (length - 1)])

    def tokens(self, length: int, serial: int) -> list[int]:
        """One of exactly so many, for engines that take tokens: small numbers, which every vocabulary has."""
        return [_FIRST_TOKEN + (serial * 31 + n * 7) % _TOKENS for n in range(length)]

    def as_sent(self, body: Body) -> Body:
        """The body to send for a recorded one: with what makes the engine compute the answer rather than remember it."""
        return body

    def essence(self, answer: Any) -> tuple[Any, int]:
        """(what of a canary's answer must be repeated bit for bit, tokens generated).

        What differs by nature (ids, times, the server's name) is left out.

        Raises:
            SnapshotError: the answer is not one, or holds no token: nothing could be proved by it.
        """
        choices = field(answer, "choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise SnapshotError("a canary's answer has no list of choices; is this an OpenAI-compatible engine?")
        kept = [
            only(choice, ("index", "text", "token_ids", "prompt_token_ids", "logprobs", "finish_reason", "stop_reason"))
            for choice in choices
        ]
        usage = answer.get("usage") or {}
        return {"choices": kept}, counted(usage.get("completion_tokens") or _logprobs(kept) or _with_text(kept))

    def request(self, prompt: str | list[int], tokens: int) -> tuple[str, Body]:
        return "/v1/completions", {
            "model": self.model.served_name or self.name,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "seed": 1,
            "logprobs": 1,
        }


def expect(answer: httpx.Response, statuses: Sequence[int] = (httpx.codes.OK,)) -> None:
    """Raise EngineNotReady unless the status is one of these."""
    if answer.status_code not in statuses:
        raise EngineNotReady(f"POST {answer.request.url} answered {answer.status_code}: {answer.text[:300]}")


def parsed(answer: httpx.Response) -> Any:
    """The JSON of an answer, or None."""
    try:
        return answer.json()
    except ValueError:
        return None


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def field(answer: Any, name: str) -> Any:
    """A field of a JSON object; None where there is none."""
    return answer.get(name) if isinstance(answer, dict) else None


def only(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of an object's fields that are there."""
    return {name: found[name] for name in names if name in found}


def _logprobs(choices: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that came with a probability."""
    return sum(len((choice.get("logprobs") or {}).get("tokens") or ()) for choice in choices)


def _with_text(choices: Sequence[Mapping[str, Any]]) -> int:
    """A server that counts nothing still generated at least one token for each text that is not empty."""
    return sum(bool(choice.get("text")) for choice in choices)


def counted(tokens: Any) -> int:
    """A count of tokens that proves something; raises SnapshotError otherwise."""
    if not isinstance(tokens, int) or tokens < 1:
        raise SnapshotError("a canary's answer holds no token, so nothing can be proved by it; change canary.prompts")
    return tokens
