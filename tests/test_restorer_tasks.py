"""What a host is asked by name, answered on a real store; and what goes on there, told as it happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio
from conftest import eventually

from policies.config import parse
from policies.replica import Replica, State
from policies.tasks import Progress, Task, TaskState
from policies.wire import Job, JobKind
from restorer.boxes.remains import Remains
from restorer.coordination.jobs import JobStore
from restorer.operations import tasks
from restorer.operations.tasks import Tasks
from restorer.records.progress import ProgressBoard

JOB = Job(id="op-1/0", kind=JobKind.START, model="m", operation="op-1", reason="admin", replica="m#0")


@pytest.fixture
async def host(store: redis.asyncio.Redis, store_server: str, tmp_path: Path) -> AsyncIterator[Any]:
    jobs = JobStore(store_server, "rewake", "h1")
    engine = {"engine": {"kind": "http", "command": ["/bin/true"]}}
    config = parse({"models": {"m": engine}, "state_dir": str(tmp_path), "run_dir": str(tmp_path)})
    yield SimpleNamespace(
        name="h1", jobs=jobs, config=config, progress=ProgressBoard(jobs), remains=Remains(tmp_path / "ended"), snapshots=None
    )
    await jobs.close()


@contextlib.asynccontextmanager
async def answering(host: Any) -> AsyncIterator[Tasks]:
    """Its tasks are taken."""
    taken = Tasks(host)
    running = asyncio.create_task(taken.run())
    try:
        yield taken
    finally:
        running.cancel()
        await asyncio.wait([running])
        await taken.close()


async def asked(store: redis.asyncio.Redis, taken: Tasks, **more: Any) -> Task:
    """A task as a gateway makes it, once it is settled."""
    task = Task(id=f"task-{more.get('replica', '')}{more.get('offset', '')}", host="h1", **more)
    await store.set(f"rewake:task:{task.id}", task.model_dump_json())
    await store.lpush("rewake:tasks:h1", task.id)
    taken.poke()

    async def settled() -> Task | None:
        found = Task.model_validate_json(await store.get(f"rewake:task:{task.id}"))
        return found if found.state != TaskState.RUNNING else None

    found = await eventually(settled)
    assert found is not None
    return found


async def test_a_log_is_read_in_parts_and_found_when_its_engine_has_ended(store, host, tmp_path):
    record = Replica(id="m#0", model="m", state=State.ADMITTED, fence=1, incarnation="aa11-2")
    await store.hset("rewake:replicas", "m#0", record.model_dump_json())
    log = tmp_path / "boxes/aa11/private/engine.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\nthree\n")
    async with answering(host) as taken:
        first = await asked(store, taken, kind="log", replica="m#0", lines=2)
        assert (first.result["text"], first.result["running"]) == ("two\nthree\n", True)
        with log.open("a") as file:
            file.write("four\n")
        more = await asked(store, taken, kind="log", replica="m#0", offset=first.result["offset"])
        assert more.result["text"] == "four\n"
        box = SimpleNamespace(id="aa11", log=log, work=tmp_path, folder=tmp_path, facts={"model": "m", "replica": "m#0"})
        host.remains.keep(box)
        log.unlink()
        ended = await asked(store, taken, kind="log", replica="m#0", lines=1, offset=None, model="ended")
        assert (ended.result["text"], ended.result["running"]) == ("four\n", False)
        gone = await asked(store, taken, kind="log", replica="m#7")
        assert (gone.state, "has no log on h1" in gone.detail) == (TaskState.FAILED, True)
        outside = await asked(store, taken, kind="log", replica="../../etc")
        assert outside.state == TaskState.FAILED


async def test_a_log_that_is_a_link_leads_nowhere(store, host, tmp_path):
    log = tmp_path / "boxes/bb/private/engine.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/etc/passwd")
    async with answering(host) as taken:
        found = await asked(store, taken, kind="log", replica="bb")
        assert (found.state, found.result) == (TaskState.FAILED, {})


async def test_a_bug_settles_its_task_and_the_next_is_answered(store, host, monkeypatch):
    async def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(tasks, "KINDS", {**tasks.KINDS, "verify": broken})
    async with answering(host) as taken:
        found = await asked(store, taken, kind="verify", snapshot="x")
        assert (found.state, found.detail) == (
            TaskState.FAILED,
            f"a bug in the restorer on h1; its log tells more under {found.id}",
        )
        assert (await asked(store, taken, kind="log", replica="none")).state == TaskState.FAILED


async def test_stages_are_told_as_they_begin_and_end_and_nothing_is_left(store, host):
    async def told() -> Progress | None:
        text = await store.hget("rewake:progress:h1", JOB.id)
        return Progress.model_validate_json(text) if text else None

    stages = host.progress.stages(JOB)
    with stages.timed("verify bytes") as stage:
        stage.bytes = 5
        doing = await eventually(told)
        assert [one.name for one in doing.doing] == ["verify bytes"]
        assert (doing.host, doing.replica, doing.what) == ("h1", "m#0", "start")
    with stages.timed("restore processes"):

        async def both() -> bool:
            found = await told()
            return found is not None and [one.name for one in (*found.stages, *found.doing)] == [
                "verify bytes",
                "restore processes",
            ]

        await eventually(both)
    await host.progress.end(JOB.id)
    assert await store.exists("rewake:progress:h1") == 0


async def test_what_is_over_within_a_moment_is_never_told(store, host):
    with host.progress.stages(JOB).timed("match"):
        pass
    await host.progress.end(JOB.id)
    assert await store.exists("rewake:progress:h1") == 0


async def test_what_a_dead_restorer_said_is_forgotten_at_the_start(store, host):
    await store.hset("rewake:progress:h1", "op-0/0", "{}")
    await host.progress.clear()
    assert await store.exists("rewake:progress:h1") == 0
