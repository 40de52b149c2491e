"""Replicas that gateways suspect: real sockets, a real store, and engines that answer, stay silent, refuse or die."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually
from fake_replica import Exchange, FakeReplica, replica_server

from policies.config import Config, parse
from policies.replica import Replica, Stage, State
from policies.wire import GatewayReport
from restorer.adapters.engines import adapter
from restorer.coordination.jobs import JobStore
from restorer.machine.host import News
from restorer.operations.instance import Instance
from restorer.operations.replicas import Replicas
from restorer.operations.suspects import Suspects, _idle_limit_s

TOKEN = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}


@dataclass
class Engine:
    """What the fake does: health and completions, until told otherwise."""

    healthy: bool = True
    complete: Callable[[Exchange], Awaitable[None]] = field(default_factory=lambda: answer)
    asked: int = 0

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.path == "/health":
            await exchange.json({}, "200 OK" if self.healthy else "503 Service Unavailable")
        else:
            self.asked += 1
            await self.complete(exchange)


async def answer(exchange: Exchange) -> None:
    await exchange.json(TOKEN)


async def silence(exchange: Exchange) -> None:
    await exchange.client_left()


async def refusal(exchange: Exchange) -> None:
    await exchange.json({"error": "dead"}, "500 Internal Server Error")


@dataclass
class Bench:
    """A restorer's parts with one replica ``m#0`` of incarnation ``one``, whose engine is the fake."""

    jobs: JobStore
    replicas: Replicas
    suspects: Suspects
    process: asyncio.subprocess.Process
    discarded: list[str]
    store: Any

    async def suspect(self) -> None:
        await self.store.hset("rewake:suspects", "one", "no answer within 600 s")
        await self.suspects.look()

    async def record(self) -> Replica:
        return (await self.jobs.replicas())["m#0"]

    async def quiet(self) -> bool:
        return not self.suspects._asking

    async def use(self, requests: int) -> None:
        """A gateway reports so many requests in flight on it."""
        report = GatewayReport(id="g", seq=0, models={}, replicas={"one": requests} if requests else {})
        await self.store.set("rewake:gateway:g", report.model_dump_json())
        await self.store.sadd("rewake:gateways", "g")


def configured(port: int, **model: Any) -> Config:
    engine = {"kind": "http", "command": ["/bin/true"], "port": port}
    return parse({"models": {"m": {"engine": engine, "canary": {"timeout_s": 0.3}, "first_byte_timeout_s": 1.5, **model}}})


@contextlib.asynccontextmanager
async def bench(store: Any, url: str, fake: FakeReplica, **model: Any) -> AsyncIterator[Bench]:
    config, jobs, discarded = configured(fake.port, **model), JobStore(url, "rewake", "host-a"), []

    async def discard(box: Any) -> None:
        discarded.append(box.id)

    host: Any = SimpleNamespace(
        name="host-a",
        jobs=jobs,
        news=News(),
        config=config,
        model=config.models.__getitem__,
        discard=discard,
        boxes=SimpleNamespace(doors=SimpleNamespace()),
    )
    replicas = Replicas(host)
    suspects = Suspects(host, replicas)
    box: Any = SimpleNamespace(id="one", address="127.0.0.1", remember=lambda **_: None, log=SimpleNamespace())
    box.log.read_text = lambda errors: "last words"
    # Any process: what is watched is its end.
    process = await asyncio.create_subprocess_exec("sleep", "60")
    stages = (Stage(name="canary", seconds=0.1),)
    record = Replica(id="m#0", model="m", host="host-a", incarnation="one", state=State.ADMITTED, fence=1, stages=stages)
    await jobs.write(record)
    replicas.adopt(Instance(box, adapter("m", config.models["m"]), 1, process.pid), record)
    try:
        yield Bench(jobs, replicas, suspects, process, discarded, store)
    finally:
        await suspects.close()
        await replicas.stop_all(reason="end", drain_s=0)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await jobs.close()


async def test_one_that_answers_stays(store, store_server):
    engine = Engine()
    async with replica_server(engine) as fake, bench(store, store_server, fake) as one:
        await one.suspect()
        await eventually(one.quiet)
        assert engine.asked == 1
        assert (await one.record()).state is State.ADMITTED
        assert await store.hgetall("rewake:suspects") == {}


async def test_gateway_case_30_one_that_accepts_and_never_answers_is_replaced(store, store_server):
    async with replica_server(Engine(complete=silence)) as fake, bench(store, store_server, fake) as one:
        await one.suspect()
        await eventually(one.quiet, within=4)
        record = await one.record()
        assert record.state is State.FAILED
        assert record.reason == "hung: no token came within 0.3 s (a gateway had said: no answer within 600 s)"
        assert one.discarded == ["one"]
        assert len(one.replicas) == 0


async def test_one_that_is_not_healthy_is_replaced(store, store_server):
    async with replica_server(Engine(healthy=False)) as fake, bench(store, store_server, fake) as one:
        await one.suspect()
        await eventually(one.quiet)
        record = await one.record()
        assert (record.state, record.reason.partition(" (")[0]) == (
            State.FAILED,
            "hung: its health was asked 3 times, and was not good once",
        )


async def test_one_that_only_refuses_is_replaced_but_not_for_one_refusal(store, store_server):
    engine = Engine(complete=refusal)
    async with replica_server(engine) as fake, bench(store, store_server, fake) as one:
        await one.suspect()
        await eventually(lambda: engine.asked == 1)
        assert (await one.record()).state is State.ADMITTED
        await eventually(one.quiet)
        assert engine.asked == 3
        assert (await one.record()).state is State.FAILED

    engine = Engine(complete=refusal)
    async with replica_server(engine) as fake, bench(store, store_server, fake) as one:
        await one.suspect()
        await eventually(lambda: engine.asked == 1)
        engine.complete = answer
        await eventually(one.quiet)
        assert (await one.record()).state is State.ADMITTED


async def test_a_busy_one_has_as_long_as_a_request_may_take(store, store_server):
    """It works on somebody's long answer, and one token has to wait its turn: no reason to kill both."""
    engine = Engine(complete=silence)
    async with replica_server(engine) as fake, bench(store, store_server, fake, first_byte_timeout_s=30.0) as one:
        await one.use(1)
        await one.suspect()
        await eventually(lambda: engine.asked == 2, within=4)
        assert (await one.record()).state is State.ADMITTED
        engine.complete = answer
        await eventually(one.quiet, within=4)
        assert (await one.record()).state is State.ADMITTED


async def test_a_busy_one_that_is_silent_for_longer_than_any_request_may_take_is_replaced(store, store_server):
    async with replica_server(Engine(complete=silence)) as fake, bench(store, store_server, fake) as one:
        await one.use(3)
        await one.suspect()
        await eventually(one.quiet)
        assert (await one.record()).state is State.FAILED


async def test_one_whose_last_request_has_ended_is_idle_and_has_no_more_time(store, store_server):
    engine = Engine(complete=silence)
    async with replica_server(engine) as fake, bench(store, store_server, fake, first_byte_timeout_s=600.0) as one:
        await one.use(1)
        await one.suspect()
        await eventually(lambda: engine.asked == 1)
        await one.use(0)
        await eventually(one.quiet)
        assert (await one.record()).state is State.FAILED


async def test_it_is_asked_by_one_at_a_time(store, store_server):
    engine = Engine(complete=silence)
    async with replica_server(engine) as fake, bench(store, store_server, fake, canary={"timeout_s": 20}) as one:
        await one.suspect()
        await eventually(lambda: engine.asked == 1)
        await one.suspect()
        await one.suspect()
        assert len(one.suspects._asking) == 1


async def test_an_engine_that_dies_while_it_is_asked_is_the_watchers_affair(store, store_server):
    engine = Engine(complete=silence)
    async with replica_server(engine) as fake, bench(store, store_server, fake, canary={"timeout_s": 20}) as one:
        await one.suspect()
        await eventually(lambda: engine.asked == 1)
        one.process.kill()
        await eventually(one.quiet)
        record = await eventually(one.record)
        await eventually(lambda: one.discarded == ["one"])
        record = await one.record()
        assert (record.state, record.reason) == (State.FAILED, "the engine ended by itself; its log ends: last words")


async def test_a_replica_that_is_stopping_is_not_failed(store, store_server):
    engine = Engine(complete=silence)
    async with replica_server(engine) as fake, bench(store, store_server, fake) as one:
        await one.suspect()
        await eventually(lambda: engine.asked == 1)
        await one.replicas.stop("m#0", "one", reason="scaled down", drain_s=0)
        await eventually(one.quiet, within=4)
        assert (await one.record()).state is State.STOPPED
        assert one.discarded == ["one"]


@pytest.mark.parametrize(("proof_s", "limit_s"), [(0.0, 10.0), (3.0, 30.0), (60.0, 120.0)])
def test_an_idle_engine_has_far_longer_than_its_start_took_to_prove_itself(proof_s: float, limit_s: float) -> None:
    model = configured(8000, canary={"timeout_s": 120}).models["m"]
    stages = (Stage(name="restore processes", seconds=500.0), Stage(name="canary", seconds=proof_s))
    record = Replica(id="m#0", model="m", state=State.ADMITTED, fence=1, stages=stages)
    assert _idle_limit_s(record, adapter("m", model)) == limit_s
