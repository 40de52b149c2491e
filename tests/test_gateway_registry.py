"""The view: what pushes, re-reads, losses and suspicions make of it; and the link that feeds it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from conftest import eventually, running_store
from fake_replica import FakeReplica, Fleet
from redis import asyncio as redis_asyncio

from gateway import link as link_module
from gateway.link import Link
from gateway.registry import Registry
from gateway.store import Store, WrongSchema
from policies.health import PAUSE_S, Outcome
from policies.replica import Replica, State
from policies.wire import Failure, Hint

pytestmark = pytest.mark.contract


def record(seq: int, state: State = State.ADMITTED, slot: int = 0, incarnation: str = "i", model: str = "m") -> Replica:
    return Replica(id=f"{model}#{slot}", model=model, state=state, fence=1, seq=seq, incarnation=incarnation)


async def test_pushes_apply_in_order_and_older_ones_change_nothing():
    registry, changes = Registry(["m"]), []
    registry.on_change.append(changes.append)
    assert registry.apply(record(1, State.VERIFYING))
    assert registry.apply(record(2))
    assert [replica.incarnation for replica in registry.available("m")] == ["i"]
    assert registry.apply(record(1, State.VERIFYING))
    assert registry.available("m")
    assert (registry.seq, changes) == (2, ["m", "m"])


async def test_a_gap_is_applied_but_not_acknowledged():
    """A drain trusts the acknowledged number: with a write missing it must not move."""
    registry = Registry(["m"])
    registry.apply(record(1))
    assert not registry.apply(record(3, State.DRAINING))
    assert registry.available("m") == ()
    assert registry.seq == 1
    registry.load(4, {"m#0": record(3, State.DRAINING), "m#1": record(4, slot=1)})
    assert registry.seq == 4


async def test_a_reread_does_not_undo_what_was_pushed_since():
    registry = Registry(["m"])
    registry.apply(record(1))
    registry.apply(record(2, State.DRAINING))
    registry.load(1, {"m#0": record(1)})
    assert registry.available("m") == ()
    registry.load(2, {})
    assert registry.replicas() == []


async def test_suspects_get_no_traffic_until_time_or_a_new_incarnation():
    registry = Registry(["m"])
    registry.apply(record(1))
    registry.outcome(record(1), Outcome.DEAD, "refused")
    assert registry.available("m") == ()
    registry.apply(record(2, incarnation="j"))
    assert [replica.incarnation for replica in registry.available("m")] == ["j"]
    assert registry.take_suspicions() == {"i": "refused"}
    assert registry.take_suspicions() == {}
    registry.put_back({"i": "refused"})
    assert registry.take_suspicions() == {"i": "refused"}
    registry.close()


@pytest.mark.looptime
async def test_a_suspicion_ends_by_itself():
    registry, changes = Registry(["m"]), []
    registry.apply(record(1))
    registry.on_change.append(changes.append)
    registry.outcome(record(1), Outcome.DEAD, "refused")
    await asyncio.sleep(PAUSE_S + 0.1)
    assert registry.available("m")
    assert changes == ["m", "m"]


@pytest.mark.looptime
async def test_after_the_pause_one_request_at_a_time_tries_it():
    registry, ejected = Registry(["m"]), []
    registry.on_eject = lambda replica, pause_s, reason: ejected.append((replica.incarnation, pause_s, reason))
    suspect = record(1)
    registry.apply(suspect)
    assert not registry.dispatch(suspect), "nothing is on trial"
    registry.outcome(suspect, Outcome.DEAD, "refused")
    await asyncio.sleep(PAUSE_S + 0.1)
    assert registry.available("m")
    assert registry.dispatch(suspect)
    assert registry.available("m") == (), "it has its one request"
    registry.outcome(suspect, Outcome.BUSY)
    registry.end_trial(suspect)
    assert registry.available("m"), "that said nothing; the next one may try"
    assert registry.dispatch(suspect)
    registry.outcome(suspect, Outcome.DEAD, "refused again")
    registry.end_trial(suspect)
    assert registry.available("m") == ()
    await asyncio.sleep(2 * PAUSE_S + 0.1)
    assert registry.dispatch(suspect)
    registry.outcome(suspect, Outcome.OK)
    assert registry.available("m"), "trusted again while that request goes on"
    registry.end_trial(suspect)
    assert not registry.dispatch(suspect)
    assert ejected == [("i", pytest.approx(PAUSE_S), "refused"), ("i", pytest.approx(2 * PAUSE_S), "refused again")]


async def test_what_is_said_of_a_former_incarnation_is_not_held_against_the_next():
    registry = Registry(["m"])
    former = record(1)
    registry.apply(former)
    registry.apply(record(2, incarnation="j"))
    registry.outcome(former, Outcome.DEAD, "refused")
    assert [replica.incarnation for replica in registry.available("m")] == ["j"]
    assert registry.take_suspicions() == {}


async def test_models_come_and_go_with_the_configuration():
    registry, changes = Registry(["m"]), []
    registry.apply(record(1))
    registry.apply(record(2, model="n"))
    registry.on_change.append(changes.append)
    registry.know(["n"])
    assert (registry.available("m"), [replica.id for replica in registry.available("n")]) == ((), ["n#0"])
    registry.know(["m", "n"])
    assert registry.available("m")
    assert changes == ["n", "m"]


@pytest.mark.looptime
async def test_a_failure_ends_with_its_time_and_tells():
    registry, changes = Registry(["m"]), []
    registry.on_change.append(changes.append)
    registry.load_failure("m", Failure(code="restore_failed", detail="", operation=""), 10)
    assert registry.state("m") == "failed"
    await asyncio.sleep(11)
    assert registry.failure("m") is None
    assert changes == ["m", "m"]


async def test_records_of_unknown_models_are_listed_but_get_nothing():
    registry = Registry(["m"])
    registry.apply(record(1, model="x"))
    assert [replica.id for replica in registry.replicas()] == ["x#0"]
    assert registry.available("x") == ()


async def test_state_in_one_word():
    registry = Registry(["m"])
    assert registry.state("m") == "cold"
    registry.apply(record(1, State.MATCHING))
    registry.apply(record(2, State.RESTORING, slot=1))
    assert registry.state("m") == "restoring"
    registry.apply(record(3, State.ADMITTED, slot=1))
    assert registry.state("m") == "ready"


@contextlib.asynccontextmanager
async def linked(url: str):
    store, registry = Store(url, "rewake"), Registry(["m"])
    link = Link(store, registry, ["m"])
    task = asyncio.create_task(link.run())
    try:
        await asyncio.wait_for(link.connected.wait(), 30)
        yield link, registry
    finally:
        task.cancel()
        await asyncio.wait([task])
        registry.close()
        await store.close()


async def test_records_written_before_and_after_the_start_are_known(store, store_server):
    fleet = Fleet(store)
    await fleet.admit(FakeReplica(), slot=0)
    async with linked(store_server) as (_, registry):
        assert len(registry.available("m")) == 1
        await fleet.admit(FakeReplica(), slot=1)
        await eventually(lambda: len(registry.available("m")) == 2)
        assert registry.seq == 2


async def test_a_gap_in_the_hints_makes_it_read_everything(store, store_server, monkeypatch):
    monkeypatch.setattr(link_module, "REREAD_S", 3600.0)
    async with linked(store_server) as (_, registry):
        fleet = Fleet(store)
        await fleet.admit(FakeReplica(), slot=0, hint=False)
        await fleet.admit(FakeReplica(), slot=1)
        await eventually(lambda: registry.seq == 2)
        assert len(registry.available("m")) == 2


async def test_lost_hints_cost_at_most_a_reread(store, store_server, monkeypatch):
    monkeypatch.setattr(link_module, "REREAD_S", 0.1)
    async with linked(store_server) as (_, registry):
        await Fleet(store).admit(FakeReplica(), hint=False)
        await eventually(lambda: registry.available("m"))


async def test_junk_in_the_store_is_skipped(store, store_server):
    fleet = Fleet(store)
    await store.hset(fleet.keys.replicas, "junk", "{")
    async with linked(store_server) as (_, registry):
        await store.publish(fleet.keys.events, "nonsense")
        await fleet.admit(FakeReplica())
        await eventually(lambda: registry.available("m"))


async def test_the_view_outlives_the_store_and_catches_up(tmp_path):
    with running_store(tmp_path) as url:
        async with linked(url) as (link, registry):
            client = redis_asyncio.from_url(url, decode_responses=True)
            await client.set("rewake:seq", 40)
            await Fleet(client).admit(FakeReplica(), incarnation="running")
            await eventually(lambda: registry.available("m"))
            await client.shutdown(nosave=True)
            await eventually(lambda: not link.connected.is_set())
            assert registry.available("m")
            (tmp_path / "store.sock").unlink(missing_ok=True)
            with running_store(tmp_path):
                await eventually(link.connected.is_set)
                # It is empty and counts from one again. The replica that it forgot still runs and is still known ...
                await Fleet(client).admit(FakeReplica(), slot=1)
                await eventually(lambda: {replica.id for replica in registry.available("m")} == {"m#0", "m#1"})
                assert registry.seq == 1
                # ... and whatever is written about it now counts.
                await Fleet(client).admit(FakeReplica(), slot=0, state=State.FAILED)
                await eventually(lambda: [replica.id for replica in registry.available("m")] == ["m#1"])
            await client.aclose()


@pytest.mark.looptime
async def test_what_a_forgetful_store_lacks_is_dropped_in_the_end():
    registry = Registry(["m"])
    registry.load(7, {"m#0": record(7)}, first=True)
    registry.load(0, {}, first=True)
    assert registry.available("m")
    await asyncio.sleep(31)
    registry.load(0, {})
    assert registry.available("m") == ()


async def test_a_broken_subscription_is_noticed_and_made_again(store, store_server):
    """The store kills just the listening connection; what is written meanwhile is read again."""
    async with linked(store_server) as (link, registry):
        for _ in range(3):
            await store.client_kill_filter(_type="pubsub")
            await Fleet(store).admit(FakeReplica(), hint=False)
            await eventually(lambda: not link.connected.is_set())
            await eventually(link.connected.is_set)
            seq = int(await store.get("rewake:seq"))
            assert registry.seq == seq


async def test_another_schema_is_refused(store, store_server):
    await store.set("rewake:schema", "999")
    mine = Store(store_server, "rewake")
    with pytest.raises(WrongSchema, match=r"999.*store\.namespace"):
        await mine.check_schema()
    await mine.close()


async def test_failure_hints_are_read_at_once(store, store_server):
    async with linked(store_server) as (_, registry):
        fleet = Fleet(store)
        await fleet.fail("m", "why")
        failure = await eventually(lambda: registry.failure("m"))
        assert failure.detail == "why"
        await store.delete(fleet.keys.failure("m"))
        await store.publish(fleet.keys.events, Hint(model="m").model_dump_json())
        await eventually(lambda: registry.failure("m") is None)
