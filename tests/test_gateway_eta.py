"""What is expected of the next start and of the queue, from records, stages and finished requests."""

from __future__ import annotations

import asyncio
import json
import time

from conftest import eventually
from fake_replica import Fleet as Restorer
from fake_replica import replica_server, serving

from gateway.eta import UNKNOWN_S, Eta
from policies.replica import Replica, Stage, State
from policies.wire import COLD, Keys, StageKey


class Fleet:
    """Records as a registry has them."""

    def __init__(self) -> None:
        self.records: list[Replica] = []

    def replicas(self):
        return self.records

    def available(self, model):
        return [r for r in self.records if r.model == model and r.state is State.ADMITTED]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(state: State, *, slot: int = 0, start: str | None = "restored", snapshot: str | None = "s1", host="h", **stages):
    timed = tuple(Stage(name=name.replace("_", " "), seconds=seconds) for name, seconds in stages.items())
    return Replica(id=f"m#{slot}", model="m", state=state, fence=1, host=host, start=start, snapshot=snapshot, stages=timed)


def estimator(slots: int = 4) -> tuple[Eta, Fleet, Clock]:
    fleet, clock = Fleet(), Clock()
    return Eta(fleet, slots=lambda model: slots, clock=clock, random=lambda low, high: high), fleet, clock


STAGES = {"match": 1.0, "restore_processes": 10.0, "canary": 4.0}


def test_what_was_never_measured_is_none_and_promised_as_the_default():
    eta, _, _ = estimator()
    assert eta.seconds("m") is None
    assert eta.wait_s("m", 3) is None
    assert eta.start_s("m") is None
    assert eta.retry_after_s("m") == 7
    assert UNKNOWN_S * 1.25 < 7


def test_a_cold_model_takes_what_its_starts_took():
    eta, _, _ = estimator()
    for seconds in (10.0, 12.0, 11.0):
        eta.learn(record(State.ADMITTED, match=1.0, restore_processes=seconds, canary=4.0))
    assert eta.seconds("m") == 17.0
    assert eta.start_s("m") == 17.0
    assert eta.retry_after_s("m") == 22


def test_a_model_that_waits_for_its_turn_in_a_group_takes_so_much_longer():
    eta, fleet, _ = estimator()
    eta.learn(record(State.ADMITTED, match=1.0))
    eta.place_s = lambda model: 30.0
    assert eta.seconds("m") == 31.0
    assert eta.start_s("m") == 1.0
    # On its way, it has its place.
    fleet.records = [record(State.MATCHING)]
    assert eta.seconds("m") == 1.0


def test_the_estimate_counts_down_with_the_start():
    eta, fleet, clock = estimator()
    eta.learn(record(State.ADMITTED, **STAGES))
    for state, at, stages, left in (
        (State.QUEUED, 0, {}, 15.0),
        (State.MATCHING, 1, {}, 15.0),
        (State.RESTORING, 2, {"match": 1.0}, 14.0),
        (State.VERIFYING, 12, {"match": 1.0, "restore_processes": 10.0}, 4.0),
    ):
        clock.now = at
        known = state not in (State.QUEUED, State.MATCHING)
        fleet.records = [record(state, start="restored" if known else None, snapshot="s1" if known else None, **stages)]
        eta.learn(fleet.records[0])
        assert eta.seconds("m") == left
        clock.now += 0.5
        assert eta.seconds("m") == (left if state is State.QUEUED else left - 0.5)
    fleet.records = [record(State.ADMITTED, **STAGES)]
    assert eta.seconds("m") == 0


def test_the_soonest_of_several_counts():
    eta, fleet, _ = estimator()
    eta.learn(record(State.ADMITTED, **STAGES))
    fleet.records = [record(State.RESTORING, slot=0, match=1.0), record(State.VERIFYING, slot=1, match=1, restore_processes=9)]
    assert eta.seconds("m") == 4.0


def test_cold_and_restored_starts_are_kept_apart_and_so_are_hosts():
    eta, fleet, _ = estimator()
    eta.learn(record(State.ADMITTED, host="slow", **STAGES))
    eta.learn(record(State.ADMITTED, start="cold", snapshot=None, start_engine=90.0, warm_up=1.0))
    eta.learn(record(State.ADMITTED, host="fast", match=0.1, restore_processes=1.0, canary=0.4))
    for host, left in (("fast", 1.4), ("slow", 14.0)):
        fleet.records = [record(State.RESTORING, host=host, match=1.0)]
        assert eta.seconds("m") == left
    fleet.records = [record(State.STARTING, start="cold", snapshot=None)]
    assert eta.seconds("m") == 91.0


def test_a_snapshot_just_made_is_expected_to_take_its_rehearsal():
    eta, _, _ = estimator()
    eta.learn(record(State.ADMITTED, start="cold", snapshot=None, start_engine=90.0, dump=5, rehearse=3.0, publish=2, warm_up=1))
    assert eta.seconds("m") == 3.0


def test_the_queue_is_added():
    eta, fleet, _ = estimator(slots=2)
    eta.learn(record(State.ADMITTED, **STAGES))
    assert eta.wait_s("m", 5) == 15.0
    eta.served("m", 6.0)
    assert [eta.wait_s("m", position) for position in (1, 2, 3, 5)] == [15.0, 15.0, 21.0, 27.0]
    fleet.records = [record(State.ADMITTED, **STAGES)]
    assert [eta.wait_s("m", position) for position in (1, 2)] == [3.0, 6.0]
    assert eta.retry_after_s("m", 100) == 60


async def test_what_the_store_remembers_is_known_after_a_restart(store, store_server):
    keys = Keys("rewake")
    fields = {
        StageKey("h1", "snap", "restore processes").field: json.dumps([2.0, 3.0]),
        StageKey("h1", "snap", "canary").field: json.dumps([1.0]),
        StageKey("h1", COLD, "start engine").field: json.dumps([80.0]),
        "not one of ours": "[1]",
        StageKey("h1", "snap", "broken").field: "{",
    }
    await store.hset(keys.stages("m"), mapping=fields)
    async with serving(store_server) as served:
        eta = served.gateway.serving.proxy._eta
        assert await eventually(lambda: eta.seconds("m")) == 4.0


async def test_a_request_that_cannot_make_its_deadline_is_refused_now_with_the_time_to_come_back(store, store_server):
    """As a client sees it: 30 s were measured, half a minute is promised, within the jitter."""
    async with replica_server() as fake, serving(store_server) as served:
        restorer = Restorer(store)
        before = await restorer.admit(fake, stages=(Stage(name="restore processes", seconds=30.0),))
        await restorer.change(before, State.STOPPED)
        await eventually(lambda: served.gateway.registry.state("m") == "cold")
        since = time.monotonic()
        response = await served.chat(headers={"x-rewake-deadline-s": "10"})
        assert time.monotonic() - since < 8, "it cannot be served before its deadline, so it is told now"
        assert (response.status_code, response.json()["error"]["code"]) == (503, "cold_start_timeout")
        assert 30 <= int(response.headers["retry-after"]) <= 38
        assert int(response.headers["retry-after-ms"]) == 1000 * int(response.headers["retry-after"])
        assert await eventually(restorer.jobs), "who was told to come back is demand"
        held = asyncio.create_task(served.chat(headers={"x-rewake-deadline-s": "60"}))
        await eventually(lambda: served.held() == 1)
        held.cancel()
        await asyncio.wait([held])
