"""Models that share a GPU: what operations.lua guarantees whatever gateways ask, and what the scaler makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from conftest import eventually
from fake_replica import FakeReplica, Fleet, Served, replica_server, serving

from gateway.errors import Busy
from gateway.link import Link
from gateway.operations import Crowded, Operations, Outcome, Sharing
from gateway.registry import Registry
from gateway.scaling import Scaler
from gateway.store import Store
from policies import schedule
from policies.config import Config, parse
from policies.replica import TERMINAL, Replica, State
from policies.wire import Job, JobKind

ENGINE = {"kind": "http", "command": ["/bin/true"]}


def shared(group: dict[str, Any] | None = None, **models: dict[str, Any]) -> Config:
    """A configuration whose models are all in one group."""
    settings = {name: {"engine": ENGINE, "group": "gpu", "max_replicas": 2, **more} for name, more in models.items()}
    return parse({"models": settings, "groups": {"gpu": group or {}}})


@contextlib.asynccontextmanager
async def asking(url: str, config: Config) -> AsyncIterator[Operations]:
    store = Store(url, "rewake")
    try:
        yield Operations(store, Link(store, Registry(config.models), list(config.models)), lambda name: Sharing.of(config, name))
    finally:
        await store.close()


class Group(Fleet):
    """A fleet, and what a restorer does with jobs as far as these tests look."""

    async def admit_start(self, model: str, slot: int = 0) -> Replica:
        """Settle the start of a slot: its replica is admitted."""
        record = await self.admit(FakeReplica(), model, slot)
        await self.end_start(model, slot)
        if not await self.store.exists(self.keys.tenure(model)):
            await self.serve_since(model, 0)
        return record

    async def end_start(self, model: str, slot: int = 0) -> None:
        id = await self.store.hget(self.keys.starts(model), str(slot))
        await self.store.hdel(self.keys.starts(model), str(slot))
        await self.store.zrem(self.keys.jobs, id)
        await self.store.delete(self.keys.job(id), self.keys.active(model))

    async def end_stop(self, id: str) -> None:
        await self.store.zrem(self.keys.host_jobs("h1"), id)
        await self.store.delete(self.keys.job(id))

    async def stops(self) -> list[Job]:
        ids = await self.store.zrange(self.keys.host_jobs("h1"), 0, -1)
        return [Job.model_validate_json(await self.store.hget(self.keys.job(id), "record")) for id in ids]

    async def serve_since(self, model: str, seconds: float) -> None:
        """Say that a model was first admitted so many seconds ago."""
        now, _ = await self.store.time()
        await self.store.set(self.keys.tenure(model), int((now - seconds) * 1000))

    async def queue(self) -> dict[str, dict[str, Any]]:
        return {model: json.loads(text) for model, text in (await self.store.hgetall(self.keys.group("gpu"))).items()}

    async def seated(self, *models: str) -> set[str]:
        """Models that have a place: seen from outside, with no help of the script."""
        records = [Replica.model_validate_json(text) for text in (await self.store.hgetall(self.keys.replicas)).values()]
        found = {record.model for record in records if record.state not in TERMINAL}
        found |= {model for model in models if await self.store.hlen(self.keys.starts(model))}
        return found | {job["model"] for job in await self.jobs()}


@pytest.fixture
def fleet(store) -> Group:
    return Group(store)


contract = pytest.mark.contract


@contract
async def test_a_full_group_says_who_has_the_place_and_who_waits(fleet, store_server):
    async with asking(store_server, shared(a={}, b={}, c={})) as operations:
        assert (await operations.scale_up("a", 1, "demand")).created
        with pytest.raises(Crowded, match="Group 'gpu' has no place for 'b': 'a' comes first") as crowded:
            await operations.scale_up("b", 1, "demand")
        assert isinstance(crowded.value, Busy)
        assert [(one.model, one.leaving, one.serving_s) for one in crowded.value.seated] == [("a", False, None)]
        assert [(one.model, one.yields) for one in crowded.value.queue] == [("b", False)]
        assert [job["model"] for job in await fleet.jobs()] == ["a"]
        await fleet.admit_start("a")
        await fleet.serve_since("a", 30)
        with pytest.raises(Crowded) as crowded:
            await operations.scale_up("c", 1, "demand")
        assert 29 < crowded.value.seated[0].serving_s < 32
        assert [one.model for one in crowded.value.queue] == ["b", "c"]
        assert 0 <= crowded.value.queue[1].waited_s < 5


@contract
async def test_a_place_is_taken_until_the_last_replica_is_over(fleet, store_server):
    async with asking(store_server, shared(a={}, b={})) as operations:
        await operations.scale_up("a", 1, "demand")
        replica = await fleet.admit_start("a")
        for state in (State.ADMITTED, State.DRAINING):
            await fleet.change(replica, state)
            with pytest.raises(Crowded):
                await operations.scale_up("b", 1, "demand")
        await fleet.change(replica, State.STOPPED)
        assert (await operations.scale_up("b", 1, "demand")).created
        with pytest.raises(Crowded):
            await operations.scale_up("a", 1, "demand")


@contract
async def test_a_free_place_goes_to_the_first_in_the_queue_and_to_nobody_else(fleet, store_server, store):
    async with asking(store_server, shared(a={}, b={}, c={}, d={})) as operations:
        await operations.scale_up("a", 1, "demand")
        replica = await fleet.admit_start("a")
        for model in ("b", "c"):
            with pytest.raises(Crowded):
                await operations.scale_up(model, 1, "demand")
            await asyncio.sleep(0.002)
        await fleet.change(replica, State.STOPPED)
        for model in ("d", "c", "a"):
            with pytest.raises(Crowded):
                await operations.scale_up(model, 1, "demand")
            await asyncio.sleep(0.002)  # who comes within the same millisecond comes first by name
        assert (await operations.scale_up("b", 1, "demand")).created
        assert set(await fleet.queue()) == {"d", "c", "a"}
        # Nobody asks for c any more: it holds nobody up.
        await fleet.end_start("b")
        gone = (await fleet.queue())["c"] | {"seen_ms": 0}
        await store.hset(fleet.keys.group("gpu"), "c", json.dumps(gone))
        assert (await operations.scale_up("d", 1, "demand")).created
        assert set(await fleet.queue()) == {"a"}


@contract
async def test_who_is_waited_for_comes_before_who_is_to_be_kept_warm(fleet, store_server):
    async with asking(store_server, shared(a={}, b={}, c={})) as operations:
        await operations.scale_up("a", 1, "demand")
        replica = await fleet.admit_start("a")
        with pytest.raises(Crowded):
            await operations.scale_up("b", 1, "schedule", yields=True)
        with pytest.raises(Crowded):
            await operations.scale_up("c", 1, "demand")
        # Another gateway, where nobody waits, does not weaken it.
        with pytest.raises(Crowded):
            await operations.scale_up("c", 1, "keep", yields=True)
        assert {model: waiting["yields"] for model, waiting in (await fleet.queue()).items()} == {"b": True, "c": False}
        await fleet.change(replica, State.STOPPED)
        with pytest.raises(Crowded):
            await operations.scale_up("b", 1, "schedule", yields=True)
        assert (await operations.scale_up("c", 1, "demand")).created


@contract
@pytest.mark.parametrize("pinned", [False, True])
async def test_nobody_takes_more_while_another_waits_unless_it_is_pinned(fleet, store_server, pinned):
    """A start under way cannot be displaced: without this rule, a model that grows could keep another out for ever."""
    async with asking(store_server, shared(a={"pinned": pinned}, b={})) as operations:
        await operations.scale_up("a", 1, "demand")
        await fleet.admit_start("a")
        with pytest.raises(Crowded):
            await operations.scale_up("b", 1, "demand")
        if pinned:
            assert (await operations.scale_up("a", 2, "demand")).created
        else:
            with pytest.raises(Crowded):
                await operations.scale_up("a", 2, "demand")
            assert (await operations.scale_up("a", 1, "demand")).operation.jobs == ()


async def displaced(operations: Operations, victim: str = "a", asker: str = "b", tenure: float = 10.0) -> Outcome | None:
    return await operations.displace(victim, asker=asker, min_tenure_s=tenure, detail="its turn was over")


@contract
async def test_displacing_stops_all_replicas_and_is_done_once(fleet, store_server):
    async with asking(store_server, shared(a={}, b={}, c={})) as operations:
        await operations.scale_up("a", 2, "demand")
        first = await fleet.admit_start("a", 0)
        # b does not wait yet; then one replica of a is still on its way; then a has not served for long enough.
        await fleet.serve_since("a", 60)
        assert await displaced(operations) is None
        with pytest.raises(Crowded):
            await operations.scale_up("b", 1, "demand")
        assert await displaced(operations) is None
        await fleet.admit_start("a", 1)
        assert await displaced(operations, tenure=120) is None
        assert await displaced(operations, victim="c") is None
        done = (await displaced(operations)).operation
        assert (done.kind, done.model, done.reason, len(done.jobs)) == ("scale_down", "a", "group", 2)
        assert {(job.kind, job.replica, job.detail) for job in await fleet.stops()} == {
            (JobKind.STOP, "a#0", "its turn was over"),
            (JobKind.STOP, "a#1", "its turn was over"),
        }
        assert await displaced(operations) is None
        # Its place is b's already: a comes behind, though its replicas still run.
        with pytest.raises(Crowded) as crowded:
            await operations.scale_up("a", 3, "demand")
        assert [(one.model, one.leaving) for one in crowded.value.seated] == [("a", True)]
        for job in await fleet.stops():
            await fleet.end_stop(job.id)
        await fleet.change(first, State.STOPPED)
        await fleet.change(first.model_copy(update={"id": "a#1"}), State.STOPPED)
        with pytest.raises(Crowded):
            await operations.scale_up("a", 1, "demand")
        assert (await operations.scale_up("b", 1, "demand")).created


@contract
async def test_tenure_begins_anew_when_a_model_is_let_in_again(fleet, store_server, store):
    async with asking(store_server, shared(a={}, b={})) as operations:
        await fleet.serve_since("a", 1000)
        await operations.scale_up("a", 1, "demand")
        assert not await store.exists(fleet.keys.tenure("a"))
        await fleet.admit_start("a")
        with pytest.raises(Crowded):
            await operations.scale_up("b", 1, "demand")
        assert await displaced(operations) is None
        # A store that forgot counts from the moment that somebody asks.
        await store.delete(fleet.keys.tenure("a"))
        with pytest.raises(Crowded) as crowded:
            await operations.scale_up("b", 1, "demand")
        assert crowded.value.seated[0].serving_s < 5


@contract
async def test_an_operator_needs_a_place_too_and_does_not_queue(fleet, store_server):
    async with asking(store_server, shared(a={}, b={})) as operations:
        await operations.scale_up("a", 1, "admin")
        with pytest.raises(Crowded):
            await operations.scale_up("b", 1, "admin")
        assert await fleet.queue() == {}


@contract
async def test_a_snapshot_needs_a_place_for_its_donor(fleet, store_server):
    async with asking(store_server, shared(a={}, b={})) as operations:
        made = await operations.create_snapshot("a")
        with pytest.raises(Crowded):
            await operations.scale_up("b", 1, "admin")
        with pytest.raises(Crowded):
            await operations.create_snapshot("b")
        # The model itself may start beside its donor: it is one member.
        assert (await operations.scale_up("a", 1, "demand")).created
        assert not (await operations.create_snapshot("a")).created
        assert made.created


@contract
async def test_a_model_is_preloaded_once_in_the_life_of_an_installation(fleet, store_server, store):
    async with asking(store_server, shared(a={}, b={})) as operations:
        outcomes = [await operations.preload("a") for _ in range(3)]
        assert [outcome is not None for outcome in outcomes] == [True, False, False]
        assert [(job["model"], job["reason"]) for job in await fleet.jobs()] == [("a", "preload")]
        with pytest.raises(Crowded):
            await operations.preload("b")
        assert await operations.preload("b") is None
        assert await fleet.queue() == {}


@contract
async def test_a_failure_gives_up_the_place_in_the_queue(fleet, store_server):
    async with asking(store_server, shared(a={}, b={})) as operations:
        await operations.scale_up("a", 1, "demand")
        with pytest.raises(Crowded):
            await operations.scale_up("b", 1, "demand")
        await fleet.fail("b", "no")
        assert await operations.scale_up("b", 1, "demand") is None
        assert await fleet.queue() == {}


@contract
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_asked_in_whatever_order_no_more_models_run_than_may(fleet, store_server, seed):
    """Gateways ask at once and displace by judgements that are out of date; replicas come, drain and go meanwhile."""
    dice, names = random.Random(seed), ("a", "b", "c", "d")
    config = shared({"members": 2}, **{name: {} for name in names})
    slots = [(model, slot) for model in names for slot in range(2)]

    async def gateway(operations: Operations) -> None:
        model, other = dice.sample(names, 2)
        ask: Callable[[], Any] = dice.choice(
            [
                lambda: operations.scale_up(model, dice.randint(1, 2), "demand"),
                lambda: operations.scale_up(model, 1, "keep", yields=True),
                lambda: operations.displace(model, asker=other, min_tenure_s=0.0, detail=""),
                lambda: operations.scale_down(model, dice.randint(0, 1), {}),
                lambda: operations.preload(model),
            ]
        )
        with contextlib.suppress(Crowded):
            await ask()

    async def restorer() -> None:
        model, slot = dice.choice(slots)
        if await fleet.store.hexists(fleet.keys.starts(model), str(slot)):
            await (fleet.admit_start if dice.random() < 0.8 else fleet.end_start)(model, slot)
        for job in await fleet.stops():
            record = Replica.model_validate_json(await fleet.store.hget(fleet.keys.replicas, job.replica))
            if record.state is State.DRAINING:
                await fleet.change(record, State.STOPPED)
                await fleet.end_stop(job.id)
            elif record.state is State.ADMITTED:
                await fleet.change(record, State.DRAINING)
            else:
                await fleet.end_stop(job.id)

    async with contextlib.AsyncExitStack() as stack:
        askers = [await stack.enter_async_context(asking(store_server, config)) for _ in range(3)]
        seen = set()
        for _ in range(120):
            await asyncio.gather(*(gateway(one) for one in askers))
            await restorer()
            seated = await fleet.seated(*names)
            assert len(seated) <= 2
            seen |= seated
        assert seen == set(names)


# ---------------------------------------------------------------- the scaler


@contextlib.asynccontextmanager
async def swapping(url: str, config: Config, fleet: Group, model: str = "a", serving_s: float = 60) -> AsyncIterator[Served]:
    """A gateway, and one model that was admitted so long ago."""
    async with replica_server() as fake, serving(url, config) as served:
        await fleet.serve_since(model, serving_s)
        await fleet.admit(fake, model)
        await eventually(lambda: served.gateway.registry.available(model))
        yield served


async def cancel(*requests: asyncio.Task[Any]) -> None:
    for request in requests:
        request.cancel()
    await asyncio.wait(requests)


async def test_a_waiting_request_displaces_the_idle_model_and_is_served_in_its_place(fleet, store_server):
    async with swapping(store_server, shared(a={}, b={}), fleet) as served:
        # Its turn is long, but nobody uses it.
        served.gateway.scaler._cost_s = lambda model: 1000.0
        request = asyncio.create_task(served.chat("b"))
        await eventually(lambda: served.gateway.scaler._places)
        assert served.gateway.scaler.place_s("a") == 0
        stop = (await eventually(fleet.stops))[0]
        assert (stop.model, stop.reason, stop.detail) == ("a", "group", "displaced by b: nobody used it")
        assert served.held("b") == 1
        assert await fleet.jobs() == []
        record = Replica.model_validate_json(await fleet.store.hget(fleet.keys.replicas, "a#0"))
        await fleet.end_stop(stop.id)
        since = asyncio.get_running_loop().time()
        await fleet.change(record, State.STOPPED)
        await eventually(fleet.jobs)
        # The end of a replica wakes who waits for its place.
        assert asyncio.get_running_loop().time() - since < 0.5
        async with replica_server() as fake:
            await fleet.end_start("b")
            await fleet.admit(fake, "b")
            assert (await request).status_code == 200


async def test_a_busy_model_keeps_its_place_for_its_turn(fleet, store_server):
    """Its request is short against looks once a second; that it came is seen all the same."""
    async with swapping(store_server, shared({"min_tenure_s": 30}, a={}, b={}), fleet, serving_s=10) as served:
        waiting = asyncio.create_task(served.chat("b"))
        await eventually(fleet.queue)
        # Its turn ends in 20 s; whoever waits is told.
        assert await eventually(lambda: 15 < served.gateway.scaler.place_s("b") <= 20)
        for _ in range(6):
            assert (await served.chat("a")).status_code == 200
            await asyncio.sleep(0.5)
        assert await fleet.stops() == []
        await fleet.serve_since("a", 31)
        await eventually(fleet.stops)
        await cancel(waiting)


async def test_whoever_waited_for_long_enough_is_let_in_however_busy_the_members_are(fleet, store_server):
    async with swapping(store_server, shared({"max_wait_s": 2}, a={}, b={}), fleet) as served:
        # What starts of them took makes turns long.
        served.gateway.scaler._cost_s = lambda model: 1000.0
        stuck = asyncio.Event()
        stream = asyncio.create_task(_busy(served, stuck))
        waiting = asyncio.create_task(served.chat("b"))
        stop = (await eventually(fleet.stops))[0]
        assert stop.detail.startswith("displaced by b: that had waited for ")
        stuck.set()
        await cancel(waiting)
        await stream


async def _busy(served: Served, end: asyncio.Event) -> None:
    while not end.is_set():
        await served.chat("a")
        await asyncio.sleep(0.05)


async def test_who_leaves_does_not_displace_anybody(fleet, store_server):
    async with swapping(store_server, shared({"min_tenure_s": 1000}, a={}, b={}), fleet) as served:
        waiting = asyncio.create_task(served.chat("b"))
        await eventually(fleet.queue)
        await cancel(waiting)
        await fleet.serve_since("a", 2000)
        await asyncio.sleep(1.5)
        assert await fleet.stops() == []


NOON, MIDNIGHT = schedule.Moment(2, 12 * 60), schedule.Moment(2, 0)
NIGHT = [{"start": "22:00", "end": "06:00"}]


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """From before a gateway starts, whatever the time is where the tests run; they make it night themselves."""
    monkeypatch.setitem(Scaler.__init__.__kwdefaults__, "local", lambda: NOON)


@pytest.mark.parametrize("keep", [0, 1])
async def test_a_schedule_takes_the_place_of_the_idle_but_not_of_who_is_kept(fleet, store_server, keep):
    config = shared(a={"keep": keep}, b={"schedule": NIGHT})
    async with swapping(store_server, config, fleet) as served:
        scaler = served.gateway.scaler
        await asyncio.sleep(2.5)
        assert await fleet.queue() == {}
        scaler._local = lambda: MIDNIGHT
        await eventually(fleet.queue)
        if keep:
            await asyncio.sleep(1.5)
            assert await fleet.stops() == []
        else:
            await eventually(fleet.stops)


async def test_a_schedule_asks_while_it_lasts(fleet, store_server):
    config = parse({"models": {"m": {"engine": ENGINE, "max_replicas": 3, "schedule": [{**NIGHT[0], "replicas": 2}]}}})
    async with serving(store_server, config) as served:
        await store_quiet(fleet)
        served.gateway.scaler._local = lambda: MIDNIGHT
        jobs = await eventually(fleet.jobs)
        assert sorted((job["replica"], job["reason"]) for job in jobs) == [("m#0", "schedule"), ("m#1", "schedule")]


async def store_quiet(fleet: Group) -> None:
    await fleet.store.delete(fleet.keys.jobs)
    await asyncio.sleep(1.2)


async def test_two_gateways_preload_once_and_a_third_that_comes_later_not_again(fleet, store_server):
    config = parse({"models": {"m": {"engine": ENGINE, "preload": True}}})
    async with serving(store_server, config, id="one"), serving(store_server, config, id="two"):
        jobs = await eventually(fleet.jobs)
        assert [(job["replica"], job["reason"]) for job in jobs] == [("m#0", "preload")]
        await fleet.end_start("m")
        async with serving(store_server, config, id="three") as third:
            await eventually(lambda: third.gateway.scaler._preloaded)
            assert await fleet.jobs() == []


async def test_a_second_has_a_look_at_every_model_however_often_one_of_them_is_poked(fleet, store_server):
    """Edges of a busy model come without a pause; what no edge tells of another must not wait for one."""
    config = parse({"models": {name: {"engine": ENGINE, "schedule": NIGHT if name == "b" else []} for name in "ab"}})
    async with serving(store_server, config) as served:
        scaler = served.gateway.scaler

        async def poke() -> None:
            while True:
                scaler.poke("a")
                await asyncio.sleep(0.01)

        poking = asyncio.create_task(poke())
        scaler._local = lambda: MIDNIGHT
        jobs = await eventually(fleet.jobs)
        assert {job["model"] for job in jobs} == {"b"}
        await cancel(poking)
