"""What is asked of this host by name, from the console and the command line: questions and chores, answered one by one.

:data:`KINDS` is the table of them. A question is answered within seconds, a chore takes as long as it takes; neither is ever in
the way of a start. Knows nothing of who asks.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from policies.tasks import MAX_LOG_BYTES, Task, TaskKind, TaskState
from restorer.boxes.remains import ENGINE_LOG
from restorer.errors import RestorerError, StoreUnavailable
from restorer.machine import explain
from restorer.machine.host import Host, log
from restorer.operations.supply import copied, noted
from restorer.records.progress import Work
from restorer.remotes import transfer
from restorer.remotes.catalog import chosen
from restorer.remotes.copies import listed
from restorer.storage.integrity import verify_files
from restorer.storage.weights import verify_weights

_AT_ONCE = 4
_TASK_S = 3_000.0
_LOOK_S = 5.0
_SHOWN = 50
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
Result = tuple[str, Mapping[str, Any]]
"""In one line what was found, and all of it."""


class Failed(RestorerError):
    """A task cannot be done; says why."""

    kind = "environment"


async def _verify(host: Host, task: Task, work: Work) -> Result:
    """Read every byte of a snapshot, and of what it needs besides."""

    def read() -> Result:
        manifest, began = host.snapshots.load(task.snapshot), time.monotonic()
        total = sum(item.bytes for item in manifest.objects)
        faults = [*host.snapshots.verify(manifest.id, full=True, progress=lambda done, _: work.count(done, total))]
        faults += verify_files(manifest, host.stamps)
        faults += verify_weights(manifest, Path(host.config.state_dir), host.stamps)
        seconds = time.monotonic() - began
        said = f"{len(faults)} fault{'s' * (len(faults) != 1)}" if faults else "whole"
        found = {"faults": [str(fault) for fault in faults[:_SHOWN]], "bytes": total, "seconds": round(seconds, 3)}
        return f"{manifest.id} is {said}" if not faults else f"{manifest.id} has {said}", found

    return await asyncio.to_thread(read)


async def _explain(host: Host, task: Task, work: Work) -> Result:
    """Every reason why a snapshot cannot be restored here."""

    def compare() -> Result:
        manifest = host.snapshots.load(task.snapshot)
        name = manifest.profile.model
        if name not in host.config.models:
            raise Failed(f"the configuration has no model {name!r}, which {manifest.id} is a snapshot of")
        (explained,) = explain.explain(host, manifest.id, {})
        (one,) = explained.snapshots
        found, quarantined = one.reasons, one.quarantined
        said = "fits this host" if not found else f"does not fit this host: {len(found)} mismatch{'es' * (len(found) != 1)}"
        said += f"; it is quarantined: {quarantined}" if quarantined else ""
        return f"{manifest.id} {said}", {
            "snapshot": manifest.id,
            "model": name,
            "fits": not found and quarantined is None,
            "quarantined": quarantined,
            "mismatches": [mismatch._asdict() for mismatch in found],
            "signature": one.signature,
            "allowed": [mismatch._asdict() for mismatch in one.allowed],
            "made": {"host": manifest.host.hostname, "ms": manifest.created_ms, "cold_start_s": manifest.cold_start_s},
        }

    return await asyncio.to_thread(compare)


async def _push(host: Host, task: Task, work: Work) -> Result:
    """Copy a snapshot to the remote."""
    manifest = await asyncio.to_thread(host.snapshots.load, task.snapshot)
    catalog = await asyncio.to_thread(chosen, host.config.storage, None)
    with await asyncio.to_thread(host.snapshots.use, manifest.id):
        moved = await transfer.push(catalog, host.snapshots, host.weights, manifest, report=work.count)
    noted(host, "push", moved)
    found = {"remote": catalog.remote.name, "chunks": moved.chunks, "chunks_moved": moved.chunks_moved}
    found |= {"bytes": moved.bytes, "bytes_moved": moved.bytes_moved}
    return f"{manifest.id} is in {catalog.what}", {**found, "seconds": moved.seconds}


async def _pull(host: Host, task: Task, work: Work) -> Result:
    """Bring a snapshot of the remote to this host."""
    catalog = await asyncio.to_thread(chosen, host.config.storage, None)
    copy = await catalog.find(task.snapshot)
    manifest = await catalog.manifest(copy)
    moved = await copied(host, catalog, manifest, copy, work.count)
    found = {"remote": catalog.remote.name, "bytes": moved.bytes, "bytes_moved": moved.bytes_moved, "seconds": moved.seconds}
    return f"{manifest.id} is on {host.name}", found


async def _remote(host: Host, task: Task, work: Work) -> Result:
    """What the remote has."""
    catalog = await asyncio.to_thread(chosen, host.config.storage, None)
    found = sorted(await listed(catalog), key=lambda one: -one["pushed_ms"])[:_SHOWN]
    return f"{len(found)} snapshots in {catalog.what}", {"remote": catalog.what, "snapshots": found}


async def _log(host: Host, task: Task, work: Work) -> Result:
    """The end of an engine's log, or what came since."""
    records = await host.jobs.replicas()
    incarnation = records[task.replica].incarnation if task.replica in records else task.replica
    return await asyncio.to_thread(_log_part, host, task, incarnation)


def _log_part(host: Host, task: Task, incarnation: str) -> Result:
    running = Path(host.config.state_dir) / "boxes" / incarnation.partition("-")[0] / "private" / ENGINE_LOG
    ended = host.remains.find(incarnation or task.replica) or host.remains.find(task.replica)
    path = running if _SAFE.fullmatch(incarnation) and running.exists() else None if ended is None else ended.log()
    if path is None:
        raise Failed(f"{task.replica} has no log on {host.name}: it does not run there, and nothing is kept of it any more")
    try:
        # The engine can write to that folder: a link in it could lead anywhere.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            fresh = task.offset is None or task.offset > size
            file.seek(max(0, size - MAX_LOG_BYTES) if fresh or task.offset is None else max(task.offset, size - MAX_LOG_BYTES))
            data = file.read(MAX_LOG_BYTES)
            end = file.tell()
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from None
    if fresh:
        data = b"".join(data.splitlines(keepends=True)[-task.lines :]) if task.lines else b""
    found = {"text": data.decode(errors="replace"), "offset": end, "running": path == running, "incarnation": incarnation}
    return f"{len(data)} bytes", found


KINDS: Mapping[TaskKind, Callable[[Host, Task, Work], Awaitable[Result]]] = {
    "verify": _verify,
    "explain": _explain,
    "push": _push,
    "pull": _pull,
    "remote": _remote,
    "log": _log,
}


class Tasks:
    """Those of one host. :meth:`run` is its life."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._due = asyncio.Event()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._running: set[asyncio.Task[None]] = set()

    def poke(self) -> None:
        """There may be one."""
        self._due.set()

    async def run(self) -> None:
        """Take tasks until cancelled; a few at once."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            try:
                while True:
                    await self._room.acquire()
                    task = None
                    try:
                        task = await self._host.jobs.take_task()
                    finally:
                        if task is None:
                            self._room.release()
                    if task is None:
                        break
                    self._begin(task)
            except StoreUnavailable:
                continue

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _begin(self, task: Task) -> None:
        running = asyncio.create_task(self._answer(task))
        self._running.add(running)

        def ended(_: asyncio.Task[None]) -> None:
            self._running.discard(running)
            self._room.release()

        running.add_done_callback(ended)

    async def _answer(self, task: Task) -> None:
        host, work = self._host, self._host.progress.begin(task.id, task.kind, replica=task.replica, snapshot=task.snapshot)
        state, found = TaskState.FAILED, dict[str, JsonValue]()
        try:
            async with asyncio.timeout(_TASK_S):
                detail, result = await KINDS[task.kind](host, task, work)
            state, found = TaskState.SUCCEEDED, dict(result)
        except TimeoutError:
            detail = f"not done within {_TASK_S:g} s"
        except RestorerError as error:
            detail = str(error)
        except OSError as error:
            detail = f"{error.filename or host.name}: {error.strerror}"
        except Exception as error:
            log.error("task %s (%s): a bug: %r", task.id, task.kind, error, exc_info=error)
            detail = f"a bug in the restorer on {host.name}; its log tells more under {task.id}"
        finally:
            await host.progress.end(task.id)
        changes = {"state": state, "detail": detail, "result": found, "updated_ms": time.time_ns() // 1_000_000}
        try:
            await host.jobs.settle_task(task.model_copy(update=changes))
        except StoreUnavailable as error:
            log.warning("the answer to task %s is lost: %s", task.id, error)
