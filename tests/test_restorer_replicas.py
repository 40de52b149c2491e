"""Records of replicas that have ended while nobody could write so, against a real store."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually

from policies.replica import Replica, State
from policies.wire import GatewayReport
from restorer.host import News
from restorer.jobs import JobStore
from restorer.replicas import Replicas

pytestmark = pytest.mark.contract


async def test_an_admitted_record_without_an_engine_is_ended_at_the_second_look(store: Any, store_server: str) -> None:
    """The engine died while the store was away, or the answer to the write that admitted it was lost."""
    jobs = JobStore(store_server, "rewake", "host-a")
    replicas = Replicas(SimpleNamespace(name="host-a", jobs=jobs))  # type: ignore[arg-type]
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
    host = SimpleNamespace(name="host-a", jobs=jobs, news=News(), discard=discard, model=lambda _: drain)
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
        replicas.adopt(SimpleNamespace(box=box, pid=engine.pid, engine=SimpleNamespace(gpus=0)), record)  # type: ignore[arg-type]
        first = asyncio.create_task(replicas.stop("m#0", "one", reason="scaled down"))

        async def draining() -> bool:
            return bool(known := await jobs.replicas()) and known["m#0"].state is State.DRAINING

        await eventually(draining)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (len(replicas), discarded) == (1, [])
        await store.delete("rewake:gateway:g")
        await asyncio.wait_for(replicas.stop("m#0", "one", reason="scaled down"), 5)
        assert (len(replicas), discarded) == (0, ["one"])
        assert (await jobs.replicas())["m#0"].state is State.STOPPED
    finally:
        engine.kill()
        await engine.wait()
        await replicas.stop_all(reason="end", drain_s=0)
        await jobs.close()
