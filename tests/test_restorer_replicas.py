"""Replicas of one host, against a real store: ended while nobody could write so, parked, retired, out of another's way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually

from policies.config import Config, parse
from policies.replica import Replica, State
from policies.schedule import Moment
from policies.wire import GatewayReport, ModelLoad
from restorer.coordination.jobs import JobStore
from restorer.errors import Cancelled
from restorer.machine.host import News
from restorer.operations.replicas import Replicas

pytestmark = pytest.mark.contract

BOXES = SimpleNamespace(doors=SimpleNamespace())


async def test_an_admitted_record_without_an_engine_is_ended_at_the_second_look(store: Any, store_server: str) -> None:
    """The engine died while the store was away, or the answer to the write that admitted it was lost."""
    jobs = JobStore(store_server, "rewake", "host-a")
    replicas = Replicas(SimpleNamespace(name="host-a", jobs=jobs, boxes=BOXES))  # type: ignore[arg-type]
    common: dict[str, Any] = {"model": "m", "state": State.ADMITTED, "fence": 1}
    await jobs.write(Replica(id="m#0", host="host-a", incarnation="gone", **common))
    await jobs.write(Replica(id="m#1", host="host-b", incarnation="elsewhere", **common))
    await replicas.repeat_records()
    assert (await jobs.replicas())["m#0"].state is State.ADMITTED
    await replicas.repeat_records()
    records = await jobs.replicas()
    assert (records["m#0"].state, records["m#0"].reason) == (State.FAILED, "its engine has ended")
    assert records["m#1"].state is State.ADMITTED
    await jobs.close()


async def test_a_stop_that_was_given_up_half_way_can_be_asked_for_again(store: Any, store_server: str) -> None:
    jobs = JobStore(store_server, "rewake", "host-a")
    discarded = []

    async def discard(box: Any) -> None:
        discarded.append(box.id)

    drain = SimpleNamespace(drain_s=60)
    host = SimpleNamespace(
        name="host-a",
        jobs=jobs,
        news=News(),
        discard=discard,
        model=lambda _: drain,
        boxes=BOXES,
    )
    replicas = Replicas(host)  # type: ignore[arg-type]
    box = SimpleNamespace(id="one", remember=lambda **_: None)
    record = Replica(id="m#0", model="m", host="host-a", incarnation="one", state=State.ADMITTED, fence=1)
    # A gateway that has a request in flight on it.
    busy = GatewayReport(id="g", seq=1 << 30, models={}, replicas={"one": 1}, draining=False)
    await store.set("rewake:gateway:g", busy.model_dump_json())
    await store.sadd("rewake:gateways", "g")
    # Any process that runs on: what is watched is its end.
    engine = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        replicas.adopt(SimpleNamespace(box=box, pid=engine.pid, engine=SimpleNamespace(gpus=0, sleeps=False)), record)  # type: ignore[arg-type]
        first = asyncio.create_task(replicas.stop("m#0", "one", reason="scaled down"))

        async def draining() -> bool:
            return bool(known := await jobs.replicas()) and known["m#0"].state is State.DRAINING

        await eventually(draining)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (len(replicas), discarded) == (1, [])
        await store.delete("rewake:gateway:g")
        await asyncio.wait_for(replicas.stop("m#0", "one", reason="scaled down"), 30)
        assert (len(replicas), discarded) == (0, ["one"])
        assert (await jobs.replicas())["m#0"].state is State.STOPPED
    finally:
        engine.kill()
        await engine.wait()
        await replicas.stop_all(reason="end", drain_s=0)
        await jobs.close()


# ---------------------------------------------------------------- several models


@dataclass
class Place:
    """Replicas of a host whose engines are processes that only run, and whose boxes are removed when a test says so."""

    replicas: Replicas
    jobs: JobStore
    host: Any
    engine: asyncio.subprocess.Process
    local: Moment = field(default_factory=lambda: Moment(2, 12 * 60))
    removable: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: boxes go at once."""

    async def admit(self, model: str) -> Replica:
        box: Any = SimpleNamespace(id=f"box-{model}", remember=lambda **_: None)
        record = Replica(id=f"{model}#0", model=model, host="host-a", incarnation=box.id, state=State.ADMITTED, fence=1)
        await self.jobs.write(record)
        instance: Any = SimpleNamespace(box=box, pid=self.engine.pid, engine=SimpleNamespace(gpus=0, sleeps=False))
        self.replicas.adopt(instance, record)
        return record

    async def states(self) -> dict[str, tuple[State, str]]:
        return {record.model: (record.state, record.reason) for record in (await self.jobs.replicas()).values()}


def configured(**models: dict[str, Any]) -> Config:
    engine = {"kind": "http", "command": ["/bin/true"]}
    return parse({"models": {name: {"engine": engine, **more} for name, more in models.items()}, "groups": {"gpu": {}}})


@contextlib.asynccontextmanager
async def place(url: str, config: Config) -> AsyncIterator[Place]:
    jobs = JobStore(url, "rewake", "host-a")
    host = SimpleNamespace(
        name="host-a",
        jobs=jobs,
        news=News(),
        config=config,
        model=config.models.__getitem__,
        boxes=BOXES,
    )
    engine = await asyncio.create_subprocess_exec("sleep", "60")
    made = Place(Replicas(host, lambda: made.local), jobs, host, engine)  # type: ignore[arg-type]
    made.removable.set()

    async def discard(box: Any) -> None:
        await made.removable.wait()

    host.discard = discard
    try:
        yield made
    finally:
        made.removable.set()
        await made.replicas.stop_all(reason="end", drain_s=0)
        engine.kill()
        await engine.wait()
        await jobs.close()


SHARED = {"group": "gpu"}


async def test_a_start_waits_until_the_engine_that_had_its_place_is_gone(store: Any, store_server: str) -> None:
    """Its record is over, so the store gives the place away; the engine holds the GPU's memory for a moment longer."""
    async with place(store_server, configured(a=SHARED, b=SHARED, c={})) as here:
        record = await here.admit("a")
        here.removable.clear()
        stopping = asyncio.create_task(here.replicas.stop("a#0", record.incarnation, reason="displaced", drain_s=0))
        await eventually(lambda: _is(here, "a", State.STOPPED))
        starting = asyncio.create_task(here.replicas.vacated("b"))
        # A model of no group, and another replica of the same one, wait for nobody.
        await asyncio.wait_for(here.replicas.vacated("c"), 30)
        await asyncio.wait_for(here.replicas.vacated("a"), 30)
        assert not starting.done()
        here.removable.set()
        await asyncio.wait_for(starting, 30)
        assert len(here.replicas) == 0
        await stopping


async def _is(here: Place, model: str, state: State) -> bool:
    return (await here.states())[model][0] is state


async def test_a_start_beside_a_member_that_serves_is_cancelled_whatever_the_store_said(store: Any, store_server: str) -> None:
    async with place(store_server, configured(a=SHARED, b=SHARED)) as here:
        await here.admit("a")
        with pytest.raises(Cancelled, match="the place of b in group gpu is taken by a"):
            await here.replicas.vacated("b")


async def test_a_group_with_room_lets_a_start_in_at_once(store: Any, store_server: str) -> None:
    config = configured(a=SHARED, b=SHARED)
    roomy = parse({**config.model_dump(mode="json"), "groups": {"gpu": {"members": 2}}})
    async with place(store_server, roomy) as here:
        await here.admit("a")
        await asyncio.wait_for(here.replicas.vacated("b"), 30)


async def test_what_a_schedule_keeps_is_not_parked_until_the_window_ends(store: Any, store_server: str) -> None:
    policy = {"idle_park_s": 0.001, "schedule": [{"start": "09:00", "end": "18:00"}]}
    async with place(store_server, configured(a=policy, b={"idle_park_s": 0.001})) as here:
        for model in ("a", "b"):
            await here.admit(model)
        await eventually(lambda: _parked(here, "b"))
        assert (await here.states())["a"][0] is State.ADMITTED
        here.local = Moment(2, 18 * 60)
        await eventually(lambda: _parked(here, "a"))


async def _parked(here: Place, model: str) -> bool:
    await here.replicas.park_idle()
    return await _is(here, model, State.STOPPED)


async def test_gateway_case_19_the_idle_clock_does_not_run_while_a_start_is_under_way_or_a_request_in_flight(
    store: Any, store_server: str
) -> None:
    async with place(store_server, configured(m={"idle_park_s": 0.05, "max_replicas": 2})) as here:
        record = await here.admit("m")
        load = ModelLoad(held=0, inflight=1, rejected=0, arrivals=1)
        busy = GatewayReport(id="g", seq=1 << 30, models={"m": load}, replicas={record.incarnation: 1})
        await store.set("rewake:gateway:g", busy.model_dump_json())
        await store.sadd("rewake:gateways", "g")
        running = here.replicas.admitted()[record.incarnation]
        running.active_at -= 1000
        assert not await _parked(here, "m")
        # The request has ended, but a second replica is on its way.
        idle = busy.model_copy(update={"models": {"m": load.model_copy(update={"inflight": 0})}, "replicas": {}})
        await store.set("rewake:gateway:g", idle.model_dump_json())
        await store.hset("rewake:starts:m", "1", "op/1")
        running.active_at -= 1000
        assert not await _parked(here, "m")
        assert record.incarnation in here.replicas.admitted()
        await store.delete("rewake:starts:m")
        await eventually(lambda: _parked(here, "m"))


async def test_a_model_that_a_reload_took_away_is_drained_and_stopped(store: Any, store_server: str) -> None:
    async with place(store_server, configured(a={}, b={})) as here:
        for model in ("a", "b"):
            await here.admit(model)
        here.host.config = configured(b={})
        await here.replicas.park_idle()
        await here.replicas.park_idle()
        await eventually(lambda: _is(here, "a", State.STOPPED))
        assert await here.states() == {
            "a": (State.STOPPED, "the configuration has this model no more"),
            "b": (State.ADMITTED, ""),
        }


# ---------------------------------------------------------------- several hosts


async def test_a_replica_that_was_given_up_is_ended_and_not_written_again(store: Any, store_server: str) -> None:
    """This host was cut off, another one buried its replica; now it is back."""
    async with place(store_server, configured(m={})) as one:
        record = await one.admit("m")
        buried = record.model_copy(update={"state": State.FAILED, "fence": 9, "reason": "host host-a is lost"})
        await one.jobs.write(buried)
        await one.replicas.repeat_records()
        await eventually(lambda: len(one.replicas) == 0, what="the engine to be ended")
        await one.replicas.repeat_records()
        await one.replicas.repeat_records()
        assert await one.states() == {"m": (State.FAILED, "host host-a is lost")}


async def test_a_replica_whose_slot_another_host_has_is_ended_even_while_it_drains(store: Any, store_server: str) -> None:
    async with place(store_server, configured(m={"drain_s": 600})) as one:
        record = await one.admit("m")
        busy = GatewayReport(id="g", seq=1 << 30, models={}, replicas={record.incarnation: 1})
        await store.set("rewake:gateway:g", busy.model_dump_json())
        await store.sadd("rewake:gateways", "g")
        stop = asyncio.create_task(one.replicas.stop(record.id, record.incarnation, reason="scaled down"))

        async def draining() -> bool:
            return (await one.states())["m"][0] is State.DRAINING

        await eventually(draining)
        await one.jobs.write(record.model_copy(update={"fence": 9, "incarnation": "theirs", "host": "host-b"}))
        await one.replicas.repeat_records()
        await asyncio.wait_for(stop, 30)
        assert len(one.replicas) == 0
        found = (await one.jobs.replicas())["m#0"]
        assert (found.incarnation, found.state) == ("theirs", State.ADMITTED)


async def test_a_replica_of_this_host_is_kept_only_if_no_other_host_keeps_one(store: Any, store_server: str) -> None:
    async with place(store_server, configured(m={"keep": 1, "max_replicas": 2, "idle_park_s": 0.001})) as one:
        await one.admit("m")
        await asyncio.sleep(0)
        await one.replicas.park_idle()
        assert (await one.states())["m"][0] is State.ADMITTED
        elsewhere = Replica(id="m#1", model="m", host="host-b", incarnation="b", state=State.ADMITTED, fence=1)
        await one.jobs.write(elsewhere)

        async def parked() -> bool:
            await one.replicas.park_idle()
            return (await one.jobs.replicas())["m#0"].state is State.STOPPED

        await eventually(parked, within=30.0)
        assert (await one.jobs.replicas())["m#1"].state is State.ADMITTED


async def test_a_park_that_comes_second_leaves_what_is_kept(store: Any, store_server: str) -> None:
    """Both hosts saw the other's replica admitted; the store lets one of them park."""
    async with place(store_server, configured(m={"keep": 1, "max_replicas": 2, "idle_park_s": 0.001})) as one:
        await one.admit("m")
        running = one.replicas.admitted()["box-m"]
        await one.replicas._park(running, 1, "parked")
        assert (await one.states())["m"][0] is State.ADMITTED
        assert not running.stopping
        await asyncio.wait_for(one.replicas.stop("m#0", "box-m", reason="an operator's word"), 30)
        assert (await one.states())["m"] == (State.STOPPED, "an operator's word")
