"""operations.lua against a real store: one operation per wish, whoever asks and however often."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from conftest import eventually
from fake_replica import FakeReplica, Fleet

from gateway.link import Link
from gateway.operations import Operations
from gateway.registry import Registry
from gateway.store import Store
from policies.replica import State
from policies.wire import Hint, Job, JobKind, Operation, OperationState

pytestmark = pytest.mark.contract


@pytest.fixture
async def operations(store, store_server):
    async with running(store_server) as made:
        yield made


@contextlib.asynccontextmanager
async def running(url: str):
    mine = Store(url, "rewake")
    yield Operations(mine, Link(mine, Registry(["m"]), ["m"]))
    await mine.close()


@pytest.fixture
def fleet(store) -> Fleet:
    return Fleet(store)


async def job(fleet: Fleet, id: str) -> Job:
    fields = await fleet.store.hgetall(fleet.keys.job(id))
    assert (fields["fence"], fields["owner"], fields["attempts"]) == ("0", "", "0")
    return Job.model_validate_json(fields["record"])


async def settle(fleet: Fleet, operation: Operation, state: OperationState = OperationState.SUCCEEDED) -> None:
    """What the restorer does at the end, as far as these tests look."""
    for id in operation.jobs:
        await fleet.store.zrem(fleet.keys.jobs, id)
        await fleet.store.zrem(fleet.keys.host_jobs("h1"), id)
        await fleet.store.delete(fleet.keys.job(id))
        await fleet.store.hdel(fleet.keys.starts(operation.model), id.rpartition("/")[2])
    ended = operation.model_copy(update={"jobs": (), "state": state})
    await fleet.store.set(fleet.keys.operation(operation.id), ended.model_dump_json())
    await fleet.store.delete(fleet.keys.active(operation.model))
    await fleet.store.publish(fleet.keys.events, Hint(model=operation.model, operation=operation.id).model_dump_json())


async def test_scale_up_writes_everything_a_restorer_needs(operations, fleet, store):
    async with store.pubsub() as pubsub:
        await pubsub.subscribe(fleet.keys.events)
        outcome = await operations.scale_up("m", 2, "demand")
        operation = outcome.operation
        assert outcome.created
        assert (operation.kind, operation.state, operation.target, operation.reason) == ("scale_up", "running", 2, "demand")
        assert operation.created_ms == operation.updated_ms > 1_600_000_000_000
        assert operation.jobs == (f"{operation.id}/0", f"{operation.id}/1")
        assert await job(fleet, operation.jobs[1]) == Job(
            id=operation.jobs[1], kind=JobKind.START, model="m", operation=operation.id, reason="demand", replica="m#1"
        )
        assert await store.hgetall(fleet.keys.starts("m")) == {"0": operation.jobs[0], "1": operation.jobs[1]}
        assert await store.get(fleet.keys.active("m")) == operation.id
        seconds, micros = await store.time()
        for _, score in await store.zrange(fleet.keys.jobs, 0, -1, withscores=True):
            assert 0 <= seconds * 1000 + micros / 1000 - score < 5000
        assert await operations.get(operation.id) == operation
        hints = []
        while (message := await pubsub.get_message(timeout=0.2)) is not None:
            if message["type"] == "message":
                hints.append(Hint.model_validate_json(message["data"]))
        assert hints == [Hint(job=id, model="m", operation=operation.id) for id in operation.jobs]


async def test_case_21_concurrent_scale_ups_are_one_operation(fleet, store_server, store):
    async with contextlib.AsyncExitStack() as stack:
        askers = [await stack.enter_async_context(running(store_server)) for _ in range(3)]
        outcomes = await asyncio.gather(*(askers[n % 3].scale_up("m", 1, "demand") for n in range(50)))
        assert len({outcome.operation.id for outcome in outcomes}) == 1
        assert sum(outcome.created for outcome in outcomes) == 1
        assert len(await fleet.jobs()) == 1


async def test_a_larger_target_adds_only_what_is_missing(operations, fleet, store):
    first = (await operations.scale_up("m", 1, "demand")).operation
    second = (await operations.scale_up("m", 3, "demand")).operation
    assert second.id != first.id
    assert [(await job(fleet, id)).replica for id in second.jobs] == ["m#1", "m#2"]
    assert (await operations.scale_up("m", 2, "demand")).operation.id == second.id
    await settle(fleet, second)
    # The newer one has ended; the older still runs and is what a caller joins.
    assert (await operations.scale_up("m", 1, "demand")).operation.id == first.id


async def test_enough_replicas_is_an_operation_that_has_succeeded(operations, fleet, store):
    await fleet.admit(FakeReplica())
    outcome = await operations.scale_up("m", 1, "admin")
    assert outcome.operation.state is OperationState.SUCCEEDED
    assert outcome.operation.jobs == ()
    text = await store.get(fleet.keys.operation(outcome.operation.id))
    assert json.loads(text)["jobs"] == []
    assert 0 < await store.ttl(fleet.keys.operation(outcome.operation.id)) <= 86_400
    assert await fleet.jobs() == []


async def test_a_start_that_is_admitted_but_not_settled_counts_once(operations, fleet):
    await operations.scale_up("m", 1, "demand")
    await fleet.admit(FakeReplica(), slot=0)
    outcome = await operations.scale_up("m", 2, "demand")
    assert [(await job(fleet, id)).replica for id in outcome.operation.jobs] == ["m#1"]


async def test_slots_of_replicas_that_are_not_over_stay_theirs(operations, fleet):
    await fleet.admit(FakeReplica(), slot=0, state=State.DRAINING)
    await fleet.admit(FakeReplica(), slot=1, state=State.FAILED)
    await fleet.admit(FakeReplica(), model="other", slot=2)
    await fleet.admit(FakeReplica(), slot=3)
    outcome = await operations.scale_up("m", 3, "demand")
    assert [(await job(fleet, id)).replica for id in outcome.operation.jobs] == ["m#1", "m#2"]


async def test_a_failure_refuses_demand_but_not_the_operator(operations, fleet):
    await fleet.fail("m", "no")
    assert await operations.scale_up("m", 1, "demand") is None
    assert await operations.scale_up("m", 1, "keep") is None
    assert await fleet.jobs() == []
    assert (await operations.scale_up("m", 1, "admin")).created


async def test_scale_down_stops_the_idlest_and_repeats_itself(operations, fleet, store):
    replicas = [await fleet.admit(FakeReplica(), slot=slot) for slot in range(3)]
    await fleet.admit(FakeReplica(), model="other")
    inflight = {replicas[0].incarnation: 2, replicas[2].incarnation: 1}
    operation = (await operations.scale_down("m", 1, inflight)).operation
    assert (operation.kind, operation.state, operation.jobs) == (
        "scale_down",
        "running",
        (f"{operation.id}/1", f"{operation.id}/2"),
    )
    assert await job(fleet, operation.jobs[0]) == Job(
        id=operation.jobs[0],
        kind=JobKind.STOP,
        model="m",
        operation=operation.id,
        reason="admin",
        replica="m#1",
        incarnation=replicas[1].incarnation,
    )
    assert await store.zrange(fleet.keys.host_jobs("h1"), 0, -1) == list(operation.jobs)
    assert await store.zcard(fleet.keys.jobs) == 0
    again = await operations.scale_down("m", 1, inflight)
    assert (again.operation.id, again.created) == (operation.id, False)
    deeper = (await operations.scale_down("m", 0, inflight)).operation
    assert deeper.jobs == (f"{deeper.id}/0",)


async def test_gateway_case_46_a_scale_down_leaves_what_is_on_its_way_to_those_who_wait(operations, fleet, store):
    coming = (await operations.scale_up("m", 1, "demand")).operation
    for state in (State.MATCHING, State.RESTORING, State.VERIFYING):
        await fleet.admit(FakeReplica(), state=state)
        assert (await operations.scale_down("m", 0, {})).operation.jobs == ()
    assert await store.hgetall(fleet.keys.starts("m")) == {"0": coming.jobs[0]}
    assert (await operations.get(coming.id)).state is OperationState.RUNNING


async def test_scale_down_of_nothing_has_succeeded(operations):
    assert (await operations.scale_down("m", 0, {})).operation.state is OperationState.SUCCEEDED


async def test_one_replica_can_be_drained_by_its_slot(operations, fleet):
    await fleet.admit(FakeReplica(), slot=0)
    await fleet.admit(FakeReplica(), slot=1)
    first = (await operations.scale_down("m", 0, {}, "m#1")).operation
    assert first.jobs == (f"{first.id}/1",)
    assert (await operations.scale_down("m", 0, {}, "m#1")).operation.id == first.id
    assert await operations.scale_down("m", 0, {}, "m#7") is None


async def test_snapshot_is_one_operation_while_it_runs(operations, fleet):
    first = await operations.create_snapshot("m")
    assert (first.operation.kind, first.created) == ("snapshot", True)
    assert (await job(fleet, first.operation.jobs[0])).kind is JobKind.SNAPSHOT
    again = await operations.create_snapshot("m")
    assert (again.operation.id, again.created) == (first.operation.id, False)
    assert (await operations.create_snapshot("n")).created
    await settle(fleet, first.operation)
    assert (await operations.create_snapshot("m")).created


async def test_names_with_any_characters_survive_the_script(operations, fleet):
    model = 'org/na"me:v1%s[]{}'
    operation = (await operations.scale_up(model, 1, "demand")).operation
    assert operation.model == model
    assert (await job(fleet, operation.jobs[0])).replica == f"{model}#0"


async def test_waiting_for_an_operation_is_pushed(fleet, store_server, store):
    mine = Store(store_server, "rewake")
    link = Link(mine, Registry(["m"]), ["m"])
    operations = Operations(mine, link)
    listening = asyncio.create_task(link.run())
    await asyncio.wait_for(link.connected.wait(), 30)
    operation = (await operations.scale_up("m", 1, "admin")).operation
    assert (await operations.wait(operation.id, 0)).state is OperationState.RUNNING
    since = asyncio.get_running_loop().time()
    waiting = asyncio.create_task(operations.wait(operation.id, 30))
    await eventually(lambda: link._followers)
    await settle(fleet, operation, OperationState.FAILED)
    assert (await waiting).state is OperationState.FAILED
    assert asyncio.get_running_loop().time() - since < 1
    assert await operations.wait("op-unknown", 30) is None
    listening.cancel()
    await asyncio.wait([listening])
    await mine.close()
