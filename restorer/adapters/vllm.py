"""vLLM, on CPUs and on GPUs: how it sleeps, and how its weights are taken out and put back.

Capabilities are probed, never read off a version. What runs in its workers is ``inside/vllm_weights.py``; here is the other
end of that conversation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from policies.manifest import Allocation, WeightsPart
from restorer.adapters.engine import Body, HttpEngine, expect, field, parsed
from restorer.errors import EngineNotReady, SnapshotError

log = logging.getLogger("rewake.restorer")
INSIDE = Path(__file__).with_name("inside")
"""Where engines find what of ours runs inside them."""
_SLEEP_S = 60.0
_POLL_S = 0.02
"""For weights on their way to or from a disk."""
_SMALL_STATE = "expandable_segments:True"
"""torch then gives back before a dump all that nothing lies in, not only whole segments: 1 GB of a 7B's 2.7 GB of GPU state."""
_ALLOCATIONS = TypeAdapter(tuple[Allocation, ...])
_PARTS = TypeAdapter(tuple[WeightsPart, ...])


class Vllm(HttpEngine):
    """vLLM's OpenAI server: several processes that talk over loopback TCP, unix sockets and /dev/shm.

    On a GPU it is started so that it can sleep, and with a class of ours in its workers (``inside/vllm_weights.py``).
    """

    most_gpus = 2
    EXTENSION = "vllm_weights.RewakeWeights"
    PROTOCOL = 1

    @property
    def apart(self) -> bool:
        return self.gpus > 0 and self.model.engine.gpu.weights == "apart" and self.model.engine.backend == "criu"

    @property
    def tells_weights(self) -> bool:
        return self._extended

    @property
    def _extended(self) -> bool:
        """Our class is in its workers."""
        return self.apart or (self.sleeps and self.gpus > 0)

    def argv(self) -> tuple[str, ...]:
        command = self.model.engine.command
        wanted: list[tuple[str, ...]] = []
        if self.apart or self.sleeps:
            wanted.append(("--enable-sleep-mode",))
        if self.captured and self.gpus > 1:
            # vLLM's own all-reduce maps memory of one GPU's process into another's, which no checkpoint holds.
            wanted.append(("--disable-custom-all-reduce",))
        if self._extended:
            wanted.append(("--worker-extension-cls", self.EXTENSION))
        given = {word.partition("=")[0] for word in command}
        return (*command, *(word for option in wanted if option[0] not in given for word in option))

    def settings(self) -> dict[str, str]:
        # The routes to sleep and to reach the workers are there in the server's development mode only; none leads outside.
        added = {"VLLM_SERVER_DEV_MODE": "1"} if self.apart or self.sleeps else {}
        if self.apart:
            added["PYTORCH_CUDA_ALLOC_CONF"] = _SMALL_STATE
        if self.gpus > 1:
            # Memory that is symmetric over GPUs is shared memory.
            added["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        if self.model.engine.deterministic:
            added["VLLM_BATCH_INVARIANT"] = "1"
        return {**added, **super().settings()}

    def environment(self, private: Path, visible: Sequence[int] = ()) -> dict[str, str]:
        found = super().environment(private, visible)
        if self._extended:
            found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INSIDE), found.get("PYTHONPATH"))))
        return found

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """Level 2: neither weights nor cache stay in memory, on either side."""
        if not self.apart:
            return
        await self._each(client, "rewake_tidy", [], _SLEEP_S)
        expect(await self.post(client, "/sleep?level=2", None, _SLEEP_S))
        await self._until(client, asleep=True)
        if self.gpus > 1:
            await self._each(client, "rewake_part", [], _SLEEP_S)

    async def rejoin(self, client: httpx.AsyncClient) -> None:
        if self.apart and self.gpus > 1:
            await self._each(client, "rewake_join", [], _SLEEP_S)

    async def wake(self, client: httpx.AsyncClient) -> None:
        if not self.apart:
            return
        expect(await self.post(client, "/wake_up?tags=kv_cache", None, _SLEEP_S))
        if await self._asleep(client):
            # Whatever else a version puts to sleep.
            expect(await self.post(client, "/wake_up", None, _SLEEP_S))
            await self._until(client, asleep=False)

    async def doze(self, client: httpx.AsyncClient, level: int) -> None:
        if await self._asleep(client) is None:
            raise SnapshotError(
                "this vLLM has no route /is_sleeping: it is too old to sleep, or its command turns the routes off"
            )
        await self.quiesce(client)
        expect(await self.post(client, f"/sleep?level={level}", None, _SLEEP_S))
        await self._until(client, asleep=True)

    async def rouse(self, client: httpx.AsyncClient, level: int) -> None:
        if level == 2:
            expect(await self.post(client, "/wake_up?tags=weights", None, _SLEEP_S))
            # What is there now is whatever the memory held.
            seconds = self.model.engine.ready_timeout_s
            expect(await self.post(client, "/collective_rpc", {"method": "reload_weights", "timeout": seconds}, seconds))
            expect(await self.post(client, "/wake_up?tags=kv_cache", None, _SLEEP_S))
        else:
            expect(await self.post(client, "/wake_up", None, _SLEEP_S))
        await self._until(client, asleep=False)
        await self.quiesce(client)

    async def describe_weights(self, client: httpx.AsyncClient) -> list[tuple[Allocation, ...]]:
        if await self._asleep(client) is None:
            raise SnapshotError(
                "this vLLM has no route /is_sleeping, so that its weights cannot be taken apart: use a version with sleep mode, "
                "or set engine.gpu.weights: dump"
            )
        found = await self._each(client, "rewake_describe", [], _SLEEP_S)
        if any(one.get("protocol") != self.PROTOCOL for one in found):
            raise SnapshotError(f"the workers run another version of {self.EXTENSION}; start the donor anew")
        ranks = [[{"bytes": count, "fingerprint": print} for count, print in one["allocations"]] for one in found]
        if not all(ranks):
            raise SnapshotError("a worker has no allocation that vLLM's allocator calls weights; set engine.gpu.weights: dump")
        return [_validated(_ALLOCATIONS, rank) for rank in ranks]

    async def export_weights(
        self, client: httpx.AsyncClient, folders: Sequence[Path], part_bytes: int, *, within_s: float
    ) -> list[tuple[WeightsPart, ...]]:
        asked = [{"folder": str(folder), "part_bytes": part_bytes} for folder in folders]
        return [_validated(_PARTS, one["parts"]) for one in await self._each(client, "rewake_export", asked, within_s)]

    async def import_weights(
        self, client: httpx.AsyncClient, sources: Sequence[Body], *, within_s: float
    ) -> list[tuple[str, ...]]:
        expect(await self.post(client, "/wake_up?tags=weights", None, _SLEEP_S))
        found = await self._each(client, "rewake_import", sources, within_s)
        log.info("%s: its weights took, by worker, in seconds: %s", self.name, [one.get("seconds") for one in found])
        return [tuple(map(str, one["fingerprints"])) for one in found]

    async def _each(self, client: httpx.AsyncClient, method: str, asked: Sequence[Body], seconds: float) -> list[dict[str, Any]]:
        """Call a method of every worker, which takes what is asked of its rank; the answers by rank."""
        body = {"method": method, "args": [json.dumps({"ranks": list(asked)})], "timeout": seconds}
        answer = await self.post(client, "/collective_rpc", body, seconds)
        expect(answer)
        results = field(parsed(answer), "results")
        if not isinstance(results, list) or not results or not all(isinstance(one, dict) for one in results):
            raise EngineNotReady(f"{self.name}: {method} of the workers answered {answer.text[:300]}")
        faults = [str(one["error"]) for one in results if "error" in one]
        if faults:
            raise EngineNotReady(f"{self.name}: {method}: {faults[0]}")
        return results

    async def _until(self, client: httpx.AsyncClient, *, asleep: bool) -> None:
        deadline = time.monotonic() + _SLEEP_S
        while await self._asleep(client) is not asleep:
            if time.monotonic() > deadline:
                raise EngineNotReady(f"{self.name} did not {'fall asleep' if asleep else 'wake up'} within {_SLEEP_S:g} s")
            await asyncio.sleep(_POLL_S)

    async def _asleep(self, client: httpx.AsyncClient) -> bool | None:
        """Whether it sleeps; None when it has no such route."""
        try:
            async with asyncio.timeout(_SLEEP_S):
                answer = await client.get("/is_sleeping", timeout=None)
        except (httpx.HTTPError, TimeoutError) as error:
            raise EngineNotReady(f"{self.name}: GET /is_sleeping got no answer: {type(error).__name__} {error}") from error
        found = field(parsed(answer), "is_sleeping") if answer.status_code == httpx.codes.OK else None
        return found if isinstance(found, bool) else None

    async def quiesce(self, client: httpx.AsyncClient) -> None:
        """Empty the prefix cache, where the server offers it (it does so in its development mode only)."""
        expect(await self.ask(client, "/reset_prefix_cache"), (httpx.codes.OK, httpx.codes.NOT_FOUND))

    def as_sent(self, body: Body) -> Body:
        """With a salt of its own, so that no cached prefix is used: a shorter prefill may round differently."""
        return {**body, "cache_salt": secrets.token_hex(16)}

    def prompt(self, length: int, serial: int) -> str | list[int]:
        return self.tokens(length, serial)

    def request(self, prompt: str | list[int], tokens: int) -> tuple[str, Body]:
        path, body = super().request(prompt, tokens)
        return path, {**body, "return_token_ids": True}


def _validated(kind: TypeAdapter[Any], found: Any) -> Any:
    try:
        return kind.validate_python(found)
    except ValidationError as error:
        raise EngineNotReady(f"the workers described their weights as {str(found)[:200]}: {error}") from None
