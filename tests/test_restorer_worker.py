"""What the restorer's loop makes of a claimed job, against a real store, with parts that do nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually

from gateway.operations import Crowded, Operations, Sharing
from gateway.registry import Registry
from gateway.store import Store
from policies.config import Config, parse
from policies.replica import Replica, State
from policies.wire import HostReport, JobKind, OperationState, SnapshotSummary, StageKey
from restorer.boxes.doors import Doors
from restorer.coordination.fleet import Fleet
from restorer.coordination.jobs import JobStore
from restorer.errors import Environment
from restorer.machine.host import News
from restorer.operations.worker import Worker
from restorer.records.journal import Journals
from restorer.records.progress import ProgressBoard
from restorer.records.tally import Tally

ENGINE = {"kind": "http", "command": ["/bin/true"]}
CONFIG = parse({"models": {name: {"engine": ENGINE, "group": "gpu"} for name in ("a", "b")}, "groups": {"gpu": {}}})


@dataclass
class Bench:
    worker: Worker
    jobs: JobStore
    operations: Operations
    engine: asyncio.subprocess.Process

    def admit(self, model: str) -> Replica:
        """An engine that runs here, whatever the store says."""
        record = Replica(id=f"{model}#0", model=model, host="host-a", incarnation="one", state=State.ADMITTED, fence=1)
        box: Any = SimpleNamespace(id="one", remember=lambda **_: None)
        instance: Any = SimpleNamespace(box=box, pid=self.engine.pid, engine=SimpleNamespace(gpus=0, sleeps=False))
        self.worker._replicas.adopt(instance, record)
        return record

    async def work(self) -> None:
        claim = await self.jobs.claim(10.0)
        assert claim is not None
        await self.worker._work(claim)


async def nothing(*_: object, **__: object) -> tuple[()]:
    return ()


@contextlib.asynccontextmanager
async def bench(url: str, config: Config = CONFIG, snapshots: tuple[SnapshotSummary, ...] = ()) -> AsyncIterator[Bench]:
    folder = tempfile.TemporaryDirectory()
    jobs, store = JobStore(url, "rewake", "host-a"), Store(url, "rewake")
    host: Any = SimpleNamespace(
        name="host-a",
        jobs=jobs,
        news=News(),
        progress=ProgressBoard(jobs),
        config=config,
        model=config.models.__getitem__,
        summaries=lambda: snapshots,
        snapshots=SimpleNamespace(
            verdicts=SimpleNamespace(exchange=nothing), sweep=lambda older_than_s: [], list=list, root=Path("/proc/self/fdinfo")
        ),
        criu=None,
        capability="",
        tally=Tally(),
        gpus=SimpleNamespace(facts=None),
        facts_now=lambda: None,
        described=dict,
        obstacles=dict,
        place="",
        fleet=Fleet("host-a"),
        discard=nothing,
        journals=Journals(Path(folder.name)),
        weights=SimpleNamespace(sweep=lambda used, older_than_s: []),
        speed=None,
        boxes=SimpleNamespace(discard=nothing, close=nothing, fill=nothing, survivors=nothing, doors=Doors(None, print)),
    )
    operations = Operations(store, Registry(config.models), lambda model: Sharing.of(config, model))
    engine = await asyncio.create_subprocess_exec("sleep", "60")
    worker = Worker(host)
    try:
        yield Bench(worker, jobs, operations, engine)
    finally:
        await worker._replicas.stop_all(reason="end", drain_s=0)
        engine.kill()
        await engine.wait()
        await jobs.close()
        await store.close()
        folder.cleanup()


async def test_a_snapshot_waits_for_no_place_that_an_engine_has_against_the_stores_word(store: Any, store_server: str) -> None:
    """The store forgot who has the place; the donor must not start beside the engine that is there."""
    async with bench(store_server) as one:
        one.admit("a")
        made = await one.operations.create_snapshot("b")
        await one.work()
        ended = await one.operations.get(made.operation.id)
        assert ended is not None
        assert (ended.state, ended.code) == (OperationState.CANCELLED, 1)
        assert ended.detail == "the place of b in group gpu is taken by a"


async def test_a_displaced_replica_keeps_the_reason(store: Any, store_server: str) -> None:
    async with bench(store_server) as one:
        await one.jobs.write(one.admit("a"))
        with contextlib.suppress(Crowded):
            await one.operations.scale_up("b", 1, "demand")
        outcome = await one.operations.displace("a", asker="b", min_tenure_s=0.0, detail="displaced by b: its turn was over")
        assert outcome is not None
        await one.work()
        record = (await one.jobs.replicas())["a#0"]
        assert (record.state, record.reason) == (State.STOPPED, "displaced by b: its turn was over")


@pytest.mark.parametrize("found", [False, True])
async def test_models_may_be_preloaded_again_when_nothing_runs_here_or_elsewhere(
    store: Any, store_server: str, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    async with bench(store_server) as one:
        if found:
            # What an earlier restorer left is taken over: the installation goes on.
            one.admit("a")
        monkeypatch.setattr(one.worker._replicas, "reconcile", nothing)
        await store.sadd("rewake:preloaded", "a")
        other = HostReport(host="host-b", capable=False, capability="", snapshots=(), running=0, parallel_starts=1)
        neighbour = JobStore(store_server, "rewake", "host-b")
        await neighbour.report(other)
        await neighbour.close()
        await one.worker._prepare()
        assert await store.exists("rewake:preloaded")
        await store.delete("rewake:host:host-b")
        await one.worker._prepare()
        assert bool(await store.exists("rewake:preloaded")) is found


async def test_what_a_gateway_preloaded_before_the_restorer_came_is_not_preloaded_twice(store: Any, store_server: str) -> None:
    async with bench(store_server) as one:
        await store.sadd("rewake:preloaded", "b")
        assert await one.operations.preload("a") is not None
        await one.jobs.begin_anew()
        assert await store.smembers("rewake:preloaded") == {"a"}
        assert await one.operations.preload("a") is None


async def test_housekeeping_forgets_what_starts_of_lost_snapshots_took(store: Any, store_server: str) -> None:
    kept, gone = StageKey("host-a", "s1", "canary").field, StageKey("host-a", "s2", "canary").field
    await store.hset("rewake:stages:a", mapping={kept: "[1.0]", gone: "[2.0]"})
    summary = SnapshotSummary(id="s1", model="a", created_ms=0, bytes=0, fits=True)
    async with bench(store_server, snapshots=(summary,)) as one:
        keeping = asyncio.create_task(one.worker._keep_house())

        async def left() -> bool:
            return await store.hkeys("rewake:stages:a") == [kept]

        await eventually(left)
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_second_host_of_one_name_does_not_start(store: Any, store_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the first one's jobs for its own, and end its replicas."""
    monkeypatch.setattr("restorer.operations.worker.REPORT_TTL_MS", 100)
    async with bench(store_server) as one:
        usual: dict[str, Any] = {"capable": True, "capability": "", "snapshots": (), "running": 0, "parallel_starts": 1}
        await one.jobs.report(HostReport(host="host-a", place="other/1", **usual))
        # However long this takes on a busy machine.
        await store.persist("rewake:host:host-a")
        with pytest.raises(Environment, match=r"'host-a': set restorer\.host"):
            await one.worker._be_the_only_one()
        # What this one replaces ends by itself.
        await store.delete("rewake:host:host-a")
        await one.worker._be_the_only_one()


async def test_jobs_are_left_to_a_host_that_has_the_snapshot(store: Any, store_server: str) -> None:
    async with bench(store_server) as one:
        fits = SnapshotSummary(id="s", model="a", created_ms=0, bytes=1, fits=True)
        better = HostReport(host="host-b", capable=True, capability="", snapshots=(fits,), running=0, parallel_starts=1)
        one.worker._host.fleet.mine = one.worker._report_now
        assert await one.worker._ranking() is None, "alone, it takes everything"
        await store.set("rewake:host:host-b", better.model_dump_json())
        await store.sadd("rewake:hosts", "host-b")
        await one.worker._host.fleet.read(one.jobs)
        await one.operations.scale_up("a", 1, "admin")
        ranking = await one.worker._ranking()
        assert ranking is not None
        assert [rank.host for rank in ranking[JobKind.START, "a"]] == ["host-b", "host-a"]
