"""The restorer's side of the GPU helper: one process, started when first needed and again when it ends, spoken to in JSON.

Every call has a deadline. The helper's death fails the calls that were in flight, typed; the next call starts another.
Knows the protocol of :mod:`restorer.gpu.cuda_helper` and how its faults are worded; what to call when is its callers'.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from policies.manifest import GpuFacts
from restorer.errors import Environment, RestorerError, ToolFailed, ToolHung
from restorer.system import modules

log = logging.getLogger("rewake.restorer")

TOOL = "GPU helper"
_SMALL_S = 30.0
"""For what only asks: the first call initialises CUDA, which takes seconds on a host with many GPUs."""
_LINE_BYTES = 1 << 24
_SLACK_S = 10.0
"""The helper keeps the deadlines itself; only when it is stuck as a whole do ours pass."""
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_HELPLESS = frozenset(
    {"NO_NVML", "NO_DRIVER", "NO_TOOL", "NO_BINDINGS", "NO_SUCH_GPU", "NO_GPU_MAP", "TOO_OLD", "IO", OUT_OF_MEMORY}
)
"""Faults of the moment or of the host, not of the driver's work."""


def command(configured: Sequence[str]) -> tuple[str, ...]:
    """argv of the helper."""
    return tuple(configured) or modules.command("restorer.gpu.cuda_helper")


class Cuda:
    """The helper of this host. Methods are called from one event loop.

    Raises:
        ToolFailed: the driver refused, or the helper died. ToolHung: a process or the driver did not answer in time.
        Environment: the host lacks something, such as free device memory. (All methods.)
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = tuple(argv)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._hung: asyncio.subprocess.Process | None = None
        """The one that was killed for its silence."""
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def facts(self) -> GpuFacts:
        """What the driver says of itself and the GPUs."""
        found = await self._call("facts", _SMALL_S)
        try:
            return GpuFacts.model_validate(found)
        except ValidationError as error:
            raise ToolFailed(TOOL, 0, f"its facts are none: {str(error).splitlines()[0]}") from None

    async def memory(self) -> dict[str, dict[str, Any]]:
        """UUID -> ``free`` and ``total`` bytes, and the ``pids`` that use the GPU."""
        return await self._call("memory", _SMALL_S)

    async def find(self, pids: Sequence[int]) -> list[int]:
        """Those of some processes that have CUDA state. The driver is asked: nvidia-smi does not list all of them."""
        return list((await self._call("find", _SMALL_S, pids=list(pids)))["pids"])

    async def states(self, pids: Sequence[int]) -> dict[int, str]:
        """``running``, ``locked``, ``checkpointed`` or ``failed``."""
        found = await self._call("states", _SMALL_S, pids=list(pids))
        return {int(pid): str(state) for pid, state in found["states"].items()}

    async def freeze(self, pids: Sequence[int], *, lock_s: float, within_s: float) -> dict[str, Any]:
        """Lock all processes and move their GPU state into their memory. Either all are checkpointed then, or all run on."""
        return await self._call("freeze", lock_s + 3 * within_s, pids=list(pids), lock_s=lock_s, within_s=within_s)

    async def thaw(self, pids: Sequence[int], pairs: Sequence[tuple[str, str]], *, within_s: float) -> dict[str, Any]:
        """Put their GPU state back and let them run, from whatever state each is in. ``pairs``: see :func:`gpus.mapping`."""
        return await self._call("thaw", 3 * within_s, pids=list(pids), pairs=[list(pair) for pair in pairs], within_s=within_s)

    async def quiet(self, pids: Sequence[int], *, lock_s: float, within_s: float) -> dict[int, str]:
        """Bring processes that will be killed off the GPU as far as they can be; the state of each."""
        found = await self._call("quiet", lock_s + 3 * within_s, pids=list(pids), lock_s=lock_s, within_s=within_s)
        for fault in found["faults"]:
            log.warning("before its end: %s", fault)
        return {int(pid): str(state) for pid, state in found["states"].items()}

    async def load(
        self,
        name: str,
        gpu: str,
        files: Sequence[tuple[Path, int]],
        socket: Path,
        *,
        threads: int,
        direct: bool = False,
        late: bool = False,
    ) -> None:
        """Begin to read files into device memory of the helper, and to offer it at ``socket``; they are open when this returns.

        Args:
            name: for :meth:`drop`, which frees it, also when this has failed.
            direct: what the page cache does not hold is read past it.
            late: none of them is read before :meth:`arrived` says that it is whole.
        """
        wanted = [[str(path), count] for path, count in files]
        where = {"name": name, "gpu": gpu, "files": wanted, "socket": str(socket)}
        await self._call("load", _SMALL_S, **where, threads=threads, direct=direct, late=late)

    async def arrived(self, name: str, number: int) -> None:
        """This file of a late load is whole, and may be read."""
        await self._call("arrived", _SMALL_S, name=name, number=number)

    async def loaded(self, name: str, *, within_s: float) -> dict[str, Any]:
        """Wait until all of a load is in device memory; its ``bytes`` and ``seconds``."""
        return await self._call("loaded", within_s, name=name)

    async def drop(self, name: str) -> None:
        """Free what a load holds. One that is unknown, as after the helper's death, is free already."""
        await self._call("drop", _SMALL_S, name=name)

    async def bandwidth(self, gpu: str) -> float:
        """Bytes a second from pinned host memory to a GPU, measured."""
        return float((await self._call("bandwidth", _SMALL_S, gpu=gpu))["bytes_per_s"])

    async def close(self) -> None:
        """End the helper; its device memory goes with it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    async def _call(self, op: str, deadline_s: float, **arguments: Any) -> dict[str, Any]:
        process = await self._running()
        id = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[id] = answer
        try:
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps({"id": id, "op": op, **arguments}).encode() + b"\n")
                await process.stdin.drain()
            async with asyncio.timeout(deadline_s + _SLACK_S):
                found = await answer
        except TimeoutError:
            # Whatever else it was doing fails too; a driver that does not answer at all leaves no better way.
            await asyncio.shield(self._end(process))
            raise ToolHung(f"the GPU helper did not answer to {op} within {deadline_s + _SLACK_S:g} s, and was killed") from None
        finally:
            self._waiting.pop(id, None)
        if "error" in found:
            raise _failure(op, found["error"])
        result: dict[str, Any] = found["result"]
        return result

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        *self._argv,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        limit=_LINE_BYTES,
                        start_new_session=True,
                        env=modules.environment(),
                    )
                except OSError as error:
                    raise Environment(f"the GPU helper {self._argv[0]} does not start: {error.strerror}") from None
                self._reader = asyncio.create_task(self._read(self._process))
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand answers to who waits for them; at the helper's end, fail the rest."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            found = json.loads(line)
            waiting = self._waiting.get(found["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(found)
        rc = await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                if process is self._hung:
                    waiting.set_exception(ToolHung("the GPU helper did not answer to another call, and was killed"))
                else:
                    waiting.set_exception(ToolFailed(TOOL, rc, "it ended in the midst of its work; it is started again"))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._hung = process
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _failure(op: str, error: Mapping[str, Any]) -> RestorerError:
    code, said = str(error["code"]), str(error["message"])
    if code == "HUNG":
        return ToolHung(f"GPU {op}: {said}")
    if code == OUT_OF_MEMORY:
        return Environment(f"GPU {op}: {said}: the GPU has too little free memory; see who else uses it with nvidia-smi")
    if code in _HELPLESS:
        return Environment(f"GPU {op}: {said}")
    return ToolFailed(f"GPU {op}", 1, f"{code}: {said}" if code not in said else said)
