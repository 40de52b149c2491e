"""The waiting room alone: order, exact waking, deadlines in virtual time, and any interleaving that ends at zero."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from fake_replica import configuration
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.claim import Claim, Refused, Ticket
from gateway.current import Current
from gateway.ledger import Ledger
from gateway.waitroom import Waitroom
from policies.config import Config, parse
from policies.replica import Replica, State
from policies.wire import Failure


class FakeFleet:
    """Replicas by hand."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self.why: Failure | None = None
        self.on_trial: set[str] = set()
        self.tried: list[str] = []

    def available(self, model: str) -> list[Replica]:
        return [r for r in self.replicas.values() if r.model == model and r.incarnation not in self.tried]

    def failure(self, model: str) -> Failure | None:
        return self.why

    def dispatch(self, replica: Replica) -> bool:
        if replica.incarnation in self.on_trial:
            self.tried.append(replica.incarnation)
        return replica.incarnation in self.on_trial

    def end_trial(self, replica: Replica) -> None:
        self.tried.remove(replica.incarnation)

    def admit(self, incarnation: str, concurrency: int = 1, model: str = "m") -> None:
        self.replicas[incarnation] = Replica(
            id=f"{model}#0", model=model, state=State.ADMITTED, fence=1, incarnation=incarnation, concurrency=concurrency
        )


class FakeCapacity:
    """All of it is this gateway's, unless a test says otherwise."""

    def __init__(self, current: Current) -> None:
        self._current = current
        self.limits: dict[str, int] = {}
        self.asked = 0
        self.given_back: list[tuple[str, str]] = []

    def limit(self, replica: Replica) -> int:
        return self.limits.get(replica.incarnation, replica.concurrency)

    def tenant_limit(self, tenant: str) -> int | None:
        return self._limits(tenant, "concurrency")

    def places(self, tenant: str) -> int | None:
        return self._limits(tenant, "max_held")

    def wanted(self) -> None:
        self.asked += 1

    def released(self, incarnation: str, tenant: str) -> None:
        self.given_back.append((incarnation, tenant))

    def _limits(self, tenant: str, name: str) -> int | None:
        spec = self._current.config.tenants.get(tenant)
        return None if spec is None else getattr(spec.limits, name)


class Rig:
    """A waiting room with everything around it by hand."""

    def __init__(self, config: Config, **options: Any) -> None:
        self.current = Current(config)
        self.fleet = FakeFleet()
        self.ledger = Ledger(config.models, asyncio.get_running_loop().time)
        self.capacity = FakeCapacity(self.current)
        self.room = Waitroom(self.current, fleet=self.fleet, capacity=self.capacity, ledger=self.ledger, **options)
        self.got: list[tuple[object, str]] = []

    def start(self, name: object, mine: Ticket, leave: asyncio.Event | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(use(self.room, mine, self.got, name, leave))


def room(**changes: Any) -> tuple[Waitroom, FakeFleet, Ledger]:
    rig = Rig(configuration(**changes))
    return rig.room, rig.fleet, rig.ledger


def tenants(models: tuple[str, ...] = ("m",), **specs: dict[str, Any]) -> Config:
    model = {"engine": {"kind": "http", "command": ["/bin/true"]}}
    return parse({"models": dict.fromkeys(models, model), "tenants": specs})


def ticket(wait_s: float = 100.0, size: int = 1, tenant: str = "", model: str = "m") -> Ticket:
    return Ticket(model, size, asyncio.get_running_loop().time() + wait_s, tenant)


async def use(waitroom: Waitroom, mine: Ticket, got: list, name: object, leave: asyncio.Event | None = None) -> None:
    with waitroom.claim(mine) as claim:
        replica = claim.replica or await claim.granted()
        assert replica is not None
        got.append((name, replica.incarnation))
        if leave is not None:
            await leave.wait()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waiters_go_in_order_and_only_as_many_as_there_are_slots():
    waitroom, fleet, ledger = room()
    got: list = []
    leave = asyncio.Event()
    tasks = [asyncio.create_task(use(waitroom, ticket(), got, n, leave)) for n in range(5)]
    await settle()
    assert ledger.held("m") == 5
    fleet.admit("a", concurrency=2)
    waitroom.pump("m")
    assert (ledger.held("m"), ledger.inflight("a")) == (3, 2), "counts move with the grant, not when the task runs"
    await settle()
    assert got == [(0, "a"), (1, "a")]
    leave.set()
    await asyncio.gather(*tasks)
    assert [name for name, _ in got] == [0, 1, 2, 3, 4]
    assert (ledger.total_held, ledger.total_bytes, ledger.replicas()) == (0, 0, {})


async def test_newcomers_do_not_overtake():
    waitroom, fleet, _ = room()
    got: list = []
    first = asyncio.create_task(use(waitroom, ticket(), got, "first"))
    await settle()
    fleet.admit("a")
    # Nobody has pumped yet; the newcomer's own arrival must serve the waiter before itself.
    second = asyncio.create_task(use(waitroom, ticket(), got, "second"))
    await asyncio.gather(first, second)
    assert [name for name, _ in got] == ["first", "second"]


async def test_a_request_that_had_its_turn_goes_to_the_head():
    """Its replica was unreachable and is suspected now; the next one is for it, not for those who came later."""
    waitroom, fleet, ledger = room()
    fleet.admit("dead")
    with waitroom.claim(ticket()) as claim:
        assert claim.replica is not None
        got: list = []
        tasks = [asyncio.create_task(use(waitroom, ticket(), got, n)) for n in range(2)]
        await settle()
        del fleet.replicas["dead"]
        claim.again()
        assert (claim.replica, claim.position, ledger.held("m"), ledger.replicas()) == (None, 1, 3, {})
        assert claim.ticket.turns == 2
        fleet.admit("a")
        waitroom.pump("m")
        assert (await claim.granted()).incarnation == "a"
    await asyncio.gather(*tasks)
    assert [name for name, _ in got] == [0, 1]


async def test_a_returned_request_gets_another_replica_at_once_or_a_refusal_that_leaves_nothing():
    waitroom, fleet, ledger = room(model__on_cold="reject")
    fleet.admit("dead")
    fleet.admit("alive")
    with waitroom.claim(ticket()) as claim:
        first = claim.replica.incarnation
        del fleet.replicas[first]
        claim.again()
        assert {first, claim.replica.incarnation} == {"dead", "alive"}
        fleet.replicas.clear()
        with pytest.raises(Refused, match="model_loading"):
            claim.again()
    assert (ledger.total_held, ledger.replicas(), ledger.load("m").inflight) == (0, {}, 0)


async def test_a_returned_request_does_not_lose_its_place_to_a_room_that_filled_meanwhile():
    waitroom, fleet, _ = room(model__hold={"max_requests": 1})
    fleet.admit("dead")
    with waitroom.claim(ticket()) as claim, waitroom.claim(ticket()):
        fleet.replicas.clear()
        claim.again()
        with pytest.raises(Refused, match="queue_full"):
            waitroom.claim(ticket()).__enter__()


async def test_decided_at_once_without_a_task_or_told_by_a_callback():
    """What a bare protocol uses: no await anywhere."""
    waitroom, fleet, ledger = room()
    fleet.admit("a")
    told: list[str] = []
    with waitroom.claim(ticket()) as first:
        assert first.replica is not None
        second, third = waitroom.claim(ticket()), waitroom.claim(ticket())
        for claim, name in ((second, "second"), (third, "third")):
            claim.__enter__()
            claim.on_decided = lambda name=name: told.append(name)
        assert (second.replica, second.position, third.position) == (None, 1, 2)
    assert told == ["second"]
    assert second.replica is not None
    waitroom.drain()
    assert (told, third.refused.reject.code) == (["second", "third"], "shutting_down")
    second.__exit__(None, None, None)
    third.__exit__(None, None, None)
    assert (ledger.total_held, ledger.replicas()) == (0, {})


@pytest.mark.looptime
async def test_waiting_in_steps_tells_positions_and_counts_the_time():
    waitroom, fleet, _ = room()
    loop = asyncio.get_running_loop()
    with waitroom.claim(ticket()) as ahead, waitroom.claim(ticket()) as claim:
        assert await claim.granted(20.0) is None
        assert claim.position == 2
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ahead.granted(), 10)
        fleet.admit("a", concurrency=2)
        loop.call_later(5.0, waitroom.pump, "m")
        assert (await claim.granted(20.0)).incarnation == "a"
        assert (claim.position, claim.ticket.waited_s) == (0, pytest.approx(35.0, abs=0.1))


async def test_a_grant_to_someone_who_leaves_in_that_moment_is_passed_on():
    """Cancelled after the grant, before its task ran: the slot goes to the next, nothing leaks."""
    waitroom, fleet, ledger = room()
    got: list = []
    first = asyncio.create_task(use(waitroom, ticket(), got, 0))
    second = asyncio.create_task(use(waitroom, ticket(), got, 1))
    await settle()
    fleet.admit("a")
    waitroom.pump("m")
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert got == [(1, "a")]
    assert (ledger.total_held, ledger.replicas()) == (0, {})


async def test_a_waiter_that_left_is_never_granted():
    waitroom, fleet, ledger = room()
    got: list = []
    first = asyncio.create_task(use(waitroom, ticket(), got, 0))
    await settle()
    first.cancel()
    fleet.admit("a")
    waitroom.pump("m")
    assert ledger.replicas() == {}
    await asyncio.gather(first, return_exceptions=True)
    assert got == []
    assert ledger.load("m").demand == 0


@pytest.mark.looptime
async def test_deadlines_are_each_requests_own():
    waitroom, _, ledger = room()
    loop = asyncio.get_running_loop()

    async def refused(wait_s: float) -> tuple[str, float]:
        with pytest.raises(Refused) as caught:
            await use(waitroom, ticket(wait_s), [], 0)
        return caught.value.reject.code, round(loop.time() - since)

    since = loop.time()
    assert await asyncio.gather(refused(300), refused(10)) == [("cold_start_timeout", 300), ("cold_start_timeout", 10)]
    assert ledger.total_held == 0
    assert ledger.load("m").demand == 1, "whom a replica was promised stays demand for a while"
    await asyncio.sleep(31)
    assert ledger.load("m").demand == 0


@pytest.mark.looptime
async def test_busy_and_cold_deadlines_differ():
    waitroom, fleet, _ = room()
    fleet.admit("a")
    leave = asyncio.Event()
    holder = asyncio.create_task(use(waitroom, ticket(), [], 0, leave))
    await settle()
    with pytest.raises(Refused) as caught:
        await use(waitroom, ticket(5), [], 1)
    assert caught.value.reject.code == "capacity_exceeded"
    leave.set()
    await holder


async def test_bounds_count_requests_and_bytes_of_the_model_and_of_all():
    waitroom, _, ledger = room(model__hold={"max_bytes": 10}, gateway__hold={"max_requests": 3})
    tasks = [asyncio.create_task(use(waitroom, ticket(size=4), [], n)) for n in range(2)]
    await settle()
    with pytest.raises(Refused, match="queue_bytes_full"):
        await use(waitroom, ticket(size=4), [], 2)
    tasks.append(asyncio.create_task(use(waitroom, ticket(size=2), [], 3)))
    await settle()
    with pytest.raises(Refused, match="queue_full"):
        await use(waitroom, ticket(size=0), [], 4)
    assert (ledger.total_held, ledger.total_bytes) == (3, 10)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (ledger.total_held, ledger.total_bytes) == (0, 0)


async def test_failure_and_drain_refuse_all_waiters():
    waitroom, fleet, ledger = room()
    for code in ("restore_failed", "shutting_down"):
        tasks = [asyncio.create_task(use(waitroom, ticket(), [], n)) for n in range(3)]
        await settle()
        if code == "restore_failed":
            fleet.why = Failure(code="restore_failed", detail="why", operation="op")
            waitroom.pump("m")
            fleet.why = None
        else:
            waitroom.drain()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [result.reject.code for result in results] == [code] * 3
        assert ledger.total_held == 0
    fleet.admit("a")
    got: list = []
    await use(waitroom, ticket(), got, "a free slot is still used while draining")
    assert got


# ---------------------------------------------------------------- tenants


async def test_gateway_case_66_a_flood_leaves_the_next_tenants_first_request_the_first_round():
    rig = Rig(tenants(a={}, b={}))
    tasks = [rig.start("a", ticket(tenant="a")) for _ in range(999)]
    tasks.append(rig.start("b", ticket(tenant="b")))
    await settle()
    rig.fleet.admit("r")
    rig.room.pump("m")
    await asyncio.gather(*tasks)
    assert "b" in [name for name, _ in rig.got[:2]]
    assert len(rig.got) == 1000


async def test_weights_and_priorities_come_from_the_configuration_in_force():
    rig = Rig(tenants(a={"weight": 1}, b={"weight": 3}, vip={"priority": 1}))
    tasks = [rig.start(name, ticket(tenant=name)) for name in ("a", "b") for _ in range(40)]
    await settle()
    tasks.append(rig.start("vip", ticket(tenant="vip")))
    await settle()
    leave = asyncio.Event()
    rig.fleet.admit("r", concurrency=21)
    rig.capacity.limits["r"] = 21
    rig.room.pump("m")
    await settle()
    leave.set()
    assert rig.got[0][0] == "vip"
    assert Counter(name for name, _ in rig.got[1:21]) == {"a": 5, "b": 15}
    rig.fleet.replicas.clear()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_reload_changes_the_order_of_those_who_wait():
    rig = Rig(tenants(a={}, b={}))
    tasks = [rig.start(name, ticket(tenant=name)) for name in "aabb"]
    await settle()
    rig.current.replace(tenants(a={}, b={"priority": 9}))
    rig.fleet.admit("r")
    rig.room.pump("m")
    await asyncio.gather(*tasks)
    assert [name for name, _ in rig.got] == ["b", "b", "a", "a"]


async def test_a_tenant_at_its_concurrency_waits_and_others_pass_it():
    rig = Rig(tenants(a={"limits": {"concurrency": 2}}, b={}))
    rig.fleet.admit("r", concurrency=10)
    leave = asyncio.Event()
    tasks = [rig.start("a", ticket(tenant="a"), leave) for _ in range(5)]
    await settle()
    assert (rig.ledger.tenant_inflight("a"), rig.ledger.tenant_held("a")) == (2, 3)
    tasks.append(rig.start("b", ticket(tenant="b"), leave))
    await settle()
    assert [name for name, _ in rig.got] == ["a", "a", "b"]
    leave.set()
    await asyncio.gather(*tasks)
    assert (rig.ledger.tenant_inflight("a"), rig.ledger.tenant_held("a"), rig.ledger.replicas()) == (0, 0, {})


async def test_a_slot_that_a_tenant_gives_back_on_one_model_serves_its_waiter_on_another():
    rig = Rig(tenants(("m", "n"), a={"limits": {"concurrency": 1}}))
    rig.fleet.admit("rm", 5)
    rig.fleet.admit("rn", 5, model="n")
    leave = asyncio.Event()
    first = rig.start("m", ticket(tenant="a"), leave)
    await settle()
    second = rig.start("n", ticket(tenant="a", model="n"))
    await settle()
    assert [name for name, _ in rig.got] == ["m"]
    leave.set()
    await asyncio.wait_for(asyncio.gather(first, second), 30)
    assert [name for name, _ in rig.got] == ["m", "n"]


@pytest.mark.looptime
async def test_a_tenants_own_limits_refuse_in_its_own_name():
    rig = Rig(tenants(a={"limits": {"concurrency": 1, "max_held": 1}}))
    rig.fleet.admit("r", 5)
    leave = asyncio.Event()
    first = rig.start(0, ticket(tenant="a"), leave)
    await settle()
    late = rig.start(1, ticket(10, tenant="a"))
    await settle()
    with pytest.raises(Refused, match="rate_limit_exceeded"):
        await rig.start(2, ticket(tenant="a"))
    with pytest.raises(Refused, match="rate_limit_exceeded"):
        await late
    leave.set()
    await first


# ---------------------------------------------------------------- what is known beforehand, reloads, trials


async def test_who_cannot_make_its_deadline_is_refused_now():
    asked: list[tuple[str, int]] = []

    def expected(model: str, position: int) -> float | None:
        asked.append((model, position))
        return 10.0 * position

    rig = Rig(configuration(), expected=expected)
    with rig.room.claim(ticket(15)), pytest.raises(Refused, match="cold_start_timeout") as caught, rig.room.claim(ticket(15)):
        pass
    assert "served in 20.0 s" in caught.value.reject.detail
    assert asked == [("m", 1), ("m", 2)]
    assert (rig.ledger.total_held, rig.ledger.load("m").rejected) == (0, 1), "it comes back for the replica on its way"


async def test_a_model_that_a_reload_takes_away_refuses_its_waiters_and_keeps_its_streams():
    both = configuration(models={"n": {"engine": {"kind": "http", "command": ["/bin/true"]}}})
    rig = Rig(both)
    rig.fleet.admit("r", model="n")
    leave = asyncio.Event()
    stream = rig.start("stream", ticket(model="n"), leave)
    waiters = [rig.start(n, ticket(model="n")) for n in range(3)] + [rig.start("other", ticket())]
    await settle()
    rig.current.replace(configuration())
    rig.ledger.know(["m"])
    results = await asyncio.gather(*waiters[:3], return_exceptions=True)
    assert {result.reject.code for result in results} == {"model_not_found"}
    with pytest.raises(Refused, match="model_not_found"):
        await rig.start("late", ticket(model="n"))
    assert (rig.ledger.held("m"), rig.ledger.inflight("r")) == (1, 1)
    assert set(rig.ledger.loads()) == {"m", "n"}, "what is still in flight is still demand"
    leave.set()
    await stream
    assert (rig.ledger.replicas(), set(rig.ledger.loads())) == ({}, {"m"})
    waiters[3].cancel()
    await asyncio.gather(waiters[3], return_exceptions=True)


async def test_a_replica_on_trial_gets_one_request_at_a_time():
    rig = Rig(configuration())
    rig.fleet.admit("r", 5)
    rig.fleet.on_trial.add("r")
    leave = asyncio.Event()
    tasks = [rig.start(n, ticket(), leave) for n in range(3)]
    await settle()
    assert [name for name, _ in rig.got] == [0]
    rig.fleet.on_trial.clear()
    leave.set()
    await asyncio.gather(*tasks)
    assert len(rig.got) == 3


async def test_the_slot_is_given_back_before_the_next_one_is_chosen_and_capacity_hears_of_both():
    rig = Rig(configuration())
    rig.fleet.admit("r")
    with rig.room.claim(ticket()), rig.room.claim(ticket()) as second:
        assert rig.capacity.asked == 1
        rig.capacity.limits["r"] = 2
        rig.room.pump_all()
        assert second.replica is not None
    assert rig.capacity.given_back == [("r", ""), ("r", "")]


async def test_ten_thousand_held_requests_take_a_few_kilobytes_each_and_leave_nothing():
    rig = Rig(configuration(model__hold={"max_requests": 10_000}))
    mine = [ticket() for _ in range(10_000)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tasks = [rig.start(n, each) for n, each in enumerate(mine)]
        await settle()
        assert rig.ledger.held("m") == 10_000
        assert (tracemalloc.get_traced_memory()[0] - before) / 10_000 < 5_000, "tasks included"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks, task
        gc.collect()
        await settle()
        assert rig.ledger.total_held == 0
        assert (tracemalloc.get_traced_memory()[0] - before) / 10_000 < 200
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- any interleaving


ACTIONS = st.lists(
    st.sampled_from(
        [
            *("enter", "enter", "enter", "leave", "cancel", "return_", "admit", "eject", "trial", "fail", "clear"),
            *("pump", "yield_", "expire", "reload", "shrink"),
        ]
    ),
    max_size=80,
)
CONFIGS = [
    {"a": {"limits": {"concurrency": 1, "max_held": 3}}, "b": {"weight": 3}},
    {"a": {"priority": 2}, "b": {"limits": {"concurrency": 2}}},
]


@given(actions=ACTIONS, seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_gateway_case_25_any_interleaving_ends_at_zero_and_is_never_negative(actions, seed):
    """Success, failure, cancel in each state, replicas that come, fail and go, reloads: the ledger asserts that nothing
    goes below zero, and in the end all is zero."""
    asyncio.run(_Interleaving(random.Random(seed)).run(actions))


class _Interleaving:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.tasks: list[asyncio.Task[None]] = []
        self.gates: list[asyncio.Event] = []
        self.claims: list[Claim] = []
        self.incarnations = 0

    async def run(self, actions: list[str]) -> None:
        self.rig = rig = Rig(self.config())
        for action in actions:
            getattr(self, action)()
            if action == "yield_" or self.chance.random() < 0.3:
                await asyncio.sleep(0)
            self.check()
        for gate in self.gates:
            gate.set()
        rig.room.drain()
        for task in self.tasks:
            if not task.done() and self.chance.random() < 0.5:
                task.cancel()
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 30)
        assert all(task.cancelled() or isinstance(task.exception(), Refused | None) for task in self.tasks)
        ledger = rig.ledger
        assert (ledger.total_held, ledger.total_bytes, ledger.replicas()) == (0, 0, {})
        assert {(load.held, load.inflight) for load in ledger.loads().values()} == {(0, 0)}
        assert [(ledger.tenant_held(t), ledger.tenant_inflight(t)) for t in "ab"] == [(0, 0)] * 2
        assert not rig.fleet.tried
        assert not rig.room._queues

    def check(self) -> None:
        ledger = self.rig.ledger
        for replica in self.rig.fleet.replicas.values():
            assert ledger.inflight(replica.incarnation) <= replica.concurrency
        for tenant, spec in self.rig.current.config.tenants.items():
            held = spec.limits.max_held
            # A reload may set a limit below what is there; and who returns has its place.
            assert held is None or ledger.tenant_held(tenant) <= held + self.incarnations + 80 * self.reloaded

    reloaded = False

    def config(self) -> Config:
        model: dict[str, Any] = {"engine": {"kind": "http", "command": ["/bin/true"]}, "hold": {"max_requests": 6}}
        models = {"m": model, "n": model} if self.chance.random() < 0.7 else {"m": model}
        return parse({"models": models, "tenants": self.chance.choice(CONFIGS)})

    def enter(self, wait_s: float = 100.0) -> None:
        gate = asyncio.Event()
        self.gates.append(gate)
        mine = ticket(wait_s, self.chance.randint(0, 9), self.chance.choice(["", "a", "b"]), self.chance.choice(["m", "n"]))
        self.tasks.append(asyncio.create_task(self.serve(mine, gate)))

    async def serve(self, mine: Ticket, gate: asyncio.Event) -> None:
        with self.rig.room.claim(mine) as claim:
            self.claims.append(claim)
            try:
                while True:
                    replica = claim.replica or await claim.granted(self.chance.choice([None, 0.0, 5.0]))
                    if replica is None:
                        assert claim.position >= 1
                        continue
                    await gate.wait()
                    if not self.returning(claim):
                        return
            finally:
                self.claims.remove(claim)

    def returning(self, claim: Claim) -> bool:
        """Half of those whose replica is gone find it unreachable."""
        gone = claim.replica.incarnation not in self.rig.fleet.replicas
        if gone and claim.ticket.turns < 5 and self.chance.random() < 0.5:
            claim.again()
            return True
        return False

    def leave(self) -> None:
        if self.gates:
            self.gates.pop(self.chance.randrange(len(self.gates))).set()

    def cancel(self) -> None:
        if self.tasks:
            self.chance.choice(self.tasks).cancel()

    def admit(self) -> None:
        self.incarnations += 1
        self.rig.fleet.admit(str(self.incarnations), self.chance.randint(1, 3), self.chance.choice(["m", "n"]))
        self.pump()

    def eject(self) -> None:
        fleet = self.rig.fleet
        if fleet.replicas:
            gone = self.chance.choice(sorted(fleet.replicas))
            del fleet.replicas[gone]
            fleet.on_trial.discard(gone)
        self.pump()

    def trial(self) -> None:
        if self.rig.fleet.replicas:
            self.rig.fleet.on_trial.add(self.chance.choice(sorted(self.rig.fleet.replicas)))

    def fail(self) -> None:
        self.rig.fleet.why = Failure(code="restore_failed", detail="", operation="op")
        self.pump()

    def clear(self) -> None:
        self.rig.fleet.why = None

    def pump(self) -> None:
        for model in ("m", "n"):
            self.rig.room.pump(model)

    def reload(self) -> None:
        self.reloaded = True
        self.rig.current.replace(self.config())

    def shrink(self) -> None:
        """Another gateway takes part of a replica."""
        for replica in self.rig.fleet.replicas.values():
            self.rig.capacity.limits[replica.incarnation] = self.chance.randint(0, replica.concurrency)
        self.rig.room.pump_all()

    def expire(self) -> None:
        self.enter(0.0)

    def return_(self) -> None:
        """A replica is found unreachable by the next request that leaves it."""
        self.eject()
        self.leave()

    def yield_(self) -> None: ...
