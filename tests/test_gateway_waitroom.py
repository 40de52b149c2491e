"""The waiting room alone: order, exact waking, deadlines in virtual time, and random interleavings that end at zero."""

from __future__ import annotations

import asyncio
import random

import pytest
from fake_replica import configuration
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.capacity import Slices
from gateway.current import Current
from gateway.ledger import Ledger
from gateway.waitroom import Refused, Ticket, Waitroom
from policies.replica import Replica, State
from policies.wire import Failure


class FakeFleet:
    """Replicas by hand."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self.why: Failure | None = None

    def available(self, model: str) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.model == model]

    def failure(self, model: str) -> Failure | None:
        return self.why

    def admit(self, incarnation: str, concurrency: int = 1) -> None:
        self.replicas[incarnation] = Replica(
            id="m#0", model="m", state=State.ADMITTED, fence=1, incarnation=incarnation, concurrency=concurrency
        )


def room(**changes) -> tuple[Waitroom, FakeFleet, Ledger]:
    config = configuration(**changes)
    fleet = FakeFleet()
    ledger = Ledger(config.models, asyncio.get_running_loop().time)
    return Waitroom(Current(config), fleet=fleet, capacity=Slices(lambda: 1), ledger=ledger), fleet, ledger


def ticket(wait_s: float = 100.0, size: int = 1) -> Ticket:
    return Ticket("m", size, asyncio.get_running_loop().time() + wait_s)


async def use(waitroom: Waitroom, mine: Ticket, got: list, name: object, leave: asyncio.Event | None = None) -> None:
    async with waitroom.slot(mine) as replica:
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
    waitroom, fleet, _ = room()
    got: list = []
    returned = ticket()
    returned.turns = 1
    tasks = [asyncio.create_task(use(waitroom, ticket(), got, n)) for n in range(2)]
    await settle()
    tasks.append(asyncio.create_task(use(waitroom, returned, got, "returned")))
    await settle()
    fleet.admit("a")
    waitroom.pump("m")
    await asyncio.gather(*tasks)
    assert [name for name, _ in got] == ["returned", 0, 1]


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


ACTIONS = st.lists(
    st.sampled_from(["enter", "enter", "leave", "cancel", "admit", "eject", "fail", "clear", "pump", "yield", "expire"]),
    max_size=80,
)


@given(actions=ACTIONS, seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_case_25_any_interleaving_ends_at_zero_and_is_never_negative(actions, seed):
    """Success, failure, cancel in each state, replicas that come and go: the ledger asserts that nothing goes below zero."""
    asyncio.run(_interleave(actions, random.Random(seed)))


async def _interleave(actions: list[str], chance: random.Random) -> None:
    waitroom, fleet, ledger = room(model__hold={"max_requests": 6})
    tasks: list[asyncio.Task[None]] = []
    gates: list[asyncio.Event] = []
    incarnations = 0

    def most() -> None:
        for replica in fleet.available("m"):
            assert ledger.inflight(replica.incarnation) <= replica.concurrency

    for action in actions:
        if action == "enter":
            gates.append(asyncio.Event())
            tasks.append(asyncio.create_task(use(waitroom, ticket(size=chance.randint(0, 9)), [], 0, gates[-1])))
        elif action == "expire":
            gates.append(asyncio.Event())
            tasks.append(asyncio.create_task(use(waitroom, ticket(0.0), [], 0, gates[-1])))
        elif action == "leave" and gates:
            gates.pop(chance.randrange(len(gates))).set()
        elif action == "cancel" and tasks:
            chance.choice(tasks).cancel()
        elif action == "admit":
            incarnations += 1
            fleet.admit(str(incarnations), chance.randint(1, 3))
        elif action == "eject" and fleet.replicas:
            del fleet.replicas[chance.choice(sorted(fleet.replicas))]
        elif action == "fail":
            fleet.why = Failure(code="restore_failed", detail="", operation="op")
        elif action == "clear":
            fleet.why = None
        if action in ("admit", "eject", "fail", "clear", "pump"):
            waitroom.pump("m")
        if action == "yield" or chance.random() < 0.3:
            await asyncio.sleep(0)
        most()
    for gate in gates:
        gate.set()
    waitroom.drain()
    for task in tasks:
        if not task.done() and chance.random() < 0.5:
            task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert all(task.cancelled() or isinstance(task.exception(), Refused | None) for task in tasks)
    assert (ledger.total_held, ledger.total_bytes, ledger.held("m"), ledger.held_bytes("m")) == (0, 0, 0, 0)
    assert ledger.replicas() == {}
    assert ledger.load("m").inflight == 0
