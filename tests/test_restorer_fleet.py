"""Several restorers at one store: who takes what, who gives up whose replicas, and that nobody fights a later fence."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from conftest import eventually

from gateway.operations import Operations
from gateway.registry import Registry
from gateway.store import Store
from policies.config import parse
from policies.placement import Rank
from policies.replica import Replica, State
from policies.wire import GatewayReport, HostReport, JobKind, Operation, OperationState, SnapshotSummary
from restorer.coordination.fleet import Fleet
from restorer.coordination.jobs import Claim, JobStore, Outcome, Ranking
from restorer.errors import LeaseLost

pytestmark = pytest.mark.contract

DONE = Outcome(OperationState.SUCCEEDED)
CONFIG = parse({"models": {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}, "max_replicas": 4}}})
Named = Callable[[str], JobStore]


@pytest.fixture
async def hosts(store: Any, store_server: str) -> AsyncIterator[Named]:
    """Restorers by name."""
    made: dict[str, JobStore] = {}

    def named(name: str) -> JobStore:
        return made.setdefault(name, JobStore(store_server, "rewake", name))

    yield named
    for one in made.values():
        await one.close()


@pytest.fixture
async def operations(store: Any, store_server: str) -> AsyncIterator[Operations]:
    client = Store(store_server, "rewake")
    yield Operations(client, Registry(["m"]))
    await client.close()


def ranked(*ranks: tuple[str, float]) -> Ranking:
    return {(JobKind.START, "m"): [Rank(host, lag_s) for host, lag_s in ranks]}


async def reports(jobs: JobStore, **more: Any) -> None:
    usual: dict[str, Any] = {"capable": True, "capability": "", "snapshots": (), "running": 0, "parallel_starts": 3}
    await jobs.report(HostReport(host=jobs.host, **(usual | more)))
    # However long a test takes on a busy machine.
    await jobs._client.persist(jobs.keys.host(jobs.host))


async def gateway(store: Any, id: str, **knocked: bool) -> None:
    report = GatewayReport(id=id, seq=1, models={}, replicas={}, knocked=knocked)
    await store.set(f"rewake:gateway:{id}", report.model_dump_json())
    await store.sadd("rewake:gateways", id)


async def started(operations: Operations, target: int = 1) -> Operation:
    outcome = await operations.scale_up("m", target, "admin")
    assert outcome is not None
    return outcome.operation


def record(claim: Claim, host: str, state: State = State.ADMITTED) -> Replica:
    return Replica(id=claim.job.replica, model="m", state=state, fence=claim.fence, incarnation=f"i{claim.fence}", host=host)


async def admitted(jobs: JobStore, operations: Operations, target: int = 1) -> Replica:
    await started(operations, target)
    claim = await jobs.claim(10.0)
    assert claim is not None
    await jobs.settle(claim, DONE, record(claim, jobs.host))
    return record(claim, jobs.host)


async def silent(jobs: JobStore, store: Any) -> None:
    """It has reported, and does not any more."""
    await reports(jobs)
    await store.delete(f"rewake:host:{jobs.host}")


# ---------------------------------------------------------------- who takes what


async def test_a_job_is_left_to_the_best_host_for_a_while_and_no_longer(hosts: Named, operations: Operations) -> None:
    await started(operations)
    waits: list[float] = []
    ranking = ranked(("a", 0.0), ("b", 60.0))
    assert await hosts("b").claim(10.0, ranking=ranking, later=waits.append) is None
    assert 0 < waits[0] <= 60.0
    short = ranked(("a", 0.0), ("b", 0.05))
    late = await eventually(lambda: hosts("b").claim(10.0, ranking=short), what="the job that the best host does not take")
    assert late.job.replica == "m#0"


async def test_the_best_host_takes_it_at_once(hosts: Named, operations: Operations) -> None:
    await started(operations)
    claim = await hosts("a").claim(10.0, ranking=ranked(("a", 0.0), ("b", 60.0)))
    assert claim is not None
    assert claim.anywhere


async def test_two_that_both_think_they_are_best_do_not_both_get_it(hosts: Named, operations: Operations) -> None:
    await started(operations)
    found = await asyncio.gather(*(hosts(name).claim(10.0, ranking=ranked((name, 0.0), ("c", 1.0))) for name in ("a", "b")))
    assert sorted(claim is None for claim in found) == [False, True]


async def test_who_is_not_in_the_order_takes_nothing(hosts: Named, operations: Operations) -> None:
    await started(operations)
    waits: list[float] = []
    assert await hosts("c").claim(10.0, ranking=ranked(("a", 0.0)), later=waits.append) is None
    assert await hosts("c").claim(10.0, ranking={}, later=waits.append) is None
    assert waits == []
    assert await hosts("c").claim(10.0) is not None, "alone, nobody is left anything"


async def test_a_job_behind_many_that_are_others_is_found(hosts: Named, store: Any, operations: Operations) -> None:
    client = operations._store
    for n in range(40):
        await Operations(client, Registry([f"x{n}"])).scale_up(f"x{n}", 1, "admin")
    await started(operations)
    ranking: dict[tuple[JobKind, str], list[Rank]] = {(JobKind.START, f"x{n}"): [Rank("a", 0.0)] for n in range(40)}
    claim = await hosts("b").claim(10.0, ranking={**ranking, **ranked(("b", 0.0))})
    assert claim is not None
    assert claim.job.model == "m"
    assert sorted(await hosts("b").open()) == sorted([(JobKind.START, "m"), *ranking])


async def test_a_host_at_which_it_failed_leaves_it_to_another_that_could(hosts: Named, operations: Operations) -> None:
    await started(operations)
    a, b = hosts("a"), hosts("b")
    ranking = ranked(("a", 0.0), ("b", 60.0))
    first = await a.claim(10.0, ranking=ranking)
    assert first is not None
    await a.release(first, 0.0, avoid=True)
    waits: list[float] = []
    assert await a.claim(10.0, ranking=ranking, later=waits.append) is None
    assert waits[0] > 20
    second = await b.claim(10.0, ranking=ranking)
    assert second is not None, "it does not wait for one that leaves it alone"
    assert (second.attempts, second.avoid) == (2, frozenset({"a"}))
    await b.release(second, 0.0, avoid=True)
    third = await a.claim(10.0, ranking=ranking)
    assert third is not None, "where it failed everywhere, everybody may try again"
    assert third.avoid == {"a", "b"}


async def test_a_host_at_which_it_failed_takes_it_again_when_it_is_alone(hosts: Named, operations: Operations) -> None:
    await started(operations)
    a = hosts("a")
    first = await a.claim(10.0)
    assert first is not None
    await a.release(first, 0.0, avoid=True)
    assert await a.claim(10.0, ranking=ranked(("a", 0.0))) is not None


async def test_the_lease_of_a_host_lost_in_mid_restore_passes_on(hosts: Named, operations: Operations) -> None:
    await started(operations)
    a, b = hosts("a"), hosts("b")
    dead = await a.claim(0.0, ranking=ranked(("a", 0.0), ("b", 0.0)))
    assert dead is not None
    await a.write(record(dead, "a", State.RESTORING), dead)
    heir = await eventually(lambda: b.claim(10.0, ranking=ranked(("b", 0.0))), what="the lease to end")
    await b.write(record(heir, "b", State.RESTORING), heir)
    # It was only paused, and wakes up now.
    for late in (a.write(record(dead, "a", State.VERIFYING), dead), a.settle(dead, DONE, record(dead, "a"))):
        with pytest.raises(LeaseLost):
            await late
    assert not await a.renew(dead, 10.0)
    await b.settle(heir, DONE, record(heir, "b"))
    assert (await b.replicas())["m#0"].host == "b"


# ---------------------------------------------------------------- lost hosts


async def test_what_was_on_a_lost_host_is_given_up_when_every_gateway_knocked_in_vain(
    hosts: Named, store: Any, operations: Operations
) -> None:
    a, b = hosts("a"), hosts("b")
    known = await admitted(a, operations)
    await silent(a, store)
    for id in ("g1", "g2"):
        await gateway(store, id, **{known.incarnation: False})
    assert await b.bury("a", [known], "it is lost") == ["m#0"]
    buried = (await b.replicas())["m#0"]
    assert (buried.state, buried.reason, buried.incarnation) == (State.FAILED, "it is lost", known.incarnation)
    assert buried.fence > known.fence
    assert buried.seq == await b.seq()
    # The host that comes back has nothing to say against it.
    with pytest.raises(LeaseLost):
        await a.write(known)
    assert await b.bury("a", [known], "again") == [], "twice is once"
    operation = await started(operations)
    assert operation.state is OperationState.RUNNING, "the slot is free again"


@pytest.mark.parametrize("second", [{"reached": True}, {"knocked": False}, {"gone": True}], ids=str)
async def test_the_suspicion_of_one_gateway_buries_nobody_whom_another_may_reach(
    hosts: Named, store: Any, operations: Operations, second: dict[str, bool]
) -> None:
    a, b = hosts("a"), hosts("b")
    known = await admitted(a, operations)
    await silent(a, store)
    await gateway(store, "alone", **{known.incarnation: False})
    # The other one reaches it; or has not tried yet; or is dead itself, so that nobody waits for its word.
    await gateway(store, "other", **({known.incarnation: True} if second.get("reached") else {}))
    if second.get("gone"):
        await store.delete("rewake:gateway:other")
    assert await b.bury("a", [known], "it is lost") == (["m#0"] if second.get("gone") else [])


async def test_nobody_is_given_up_who_reports_or_whom_no_gateway_was_asked_about(
    hosts: Named, store: Any, operations: Operations
) -> None:
    a, b = hosts("a"), hosts("b")
    known = await admitted(a, operations)
    await silent(a, store)
    assert await b.bury("a", [known], "no gateway lives") == []
    await gateway(store, "g", **{known.incarnation: False})
    await reports(a)
    assert await b.bury("a", [known], "it reports again") == []
    await a.write(known)
    assert (await b.replicas())["m#0"].state is State.ADMITTED


async def test_a_record_that_was_written_since_it_was_read_is_not_given_up(
    hosts: Named, store: Any, operations: Operations
) -> None:
    a, b = hosts("a"), hosts("b")
    known = await admitted(a, operations)
    newer = known.model_copy(update={"fence": known.fence + 7, "incarnation": "new"})
    await a.write(newer)
    await silent(a, store)
    await gateway(store, "g", **{known.incarnation: False, "new": False})
    assert await b.bury("a", [known], "as it was") == []
    assert await b.bury("a", [newer], "as it is") == ["m#0"]


async def test_a_drain_on_a_lost_host_ends_with_it(hosts: Named, store: Any, operations: Operations) -> None:
    a, b = hosts("a"), hosts("b")
    known = await admitted(a, operations)
    outcome = await operations.scale_down("m", 0, {})
    assert outcome is not None
    stop = await a.claim(0.0, stops_only=True)
    assert stop is not None
    draining = known.model_copy(update={"state": State.DRAINING})
    await a.write(draining)
    await silent(a, store)
    assert await b.bury("a", [draining], "lost") == [], "no gateway has spoken yet"
    still = await operations.get(outcome.operation.id)
    assert still is not None
    assert still.state is OperationState.RUNNING, "it may be draining there"
    await gateway(store, "g", **{known.incarnation: False})
    assert await b.bury("a", [draining], "lost") == ["m#0"]
    ended = await operations.get(outcome.operation.id)
    assert ended is not None
    assert (ended.state, ended.jobs) == (OperationState.SUCCEEDED, ())
    assert await store.zcard("rewake:jobs:a") == 0
    with pytest.raises(LeaseLost):
        await a.settle(stop, DONE)


async def test_after_a_store_that_forgot_a_later_fence_still_wins(hosts: Named, store: Any, operations: Operations) -> None:
    a, b = hosts("a"), hosts("b")
    known = await admitted(a, operations)
    await silent(a, store)
    await gateway(store, "g", **{known.incarnation: False})
    assert await b.bury("a", [known], "lost") == ["m#0"]
    await started(operations)
    claim = await b.claim(10.0)
    assert claim is not None
    successor = record(claim, "b")
    await b.settle(claim, DONE, successor)
    await store.flushall()
    # Both write again what runs on them, the outranked one first.
    await a.write(known)
    await b.write(successor)
    with pytest.raises(LeaseLost):
        await a.write(known)
    assert (await a.replicas())["m#0"].incarnation == successor.incarnation


async def test_only_who_is_silent_for_long_enough_is_lost(hosts: Named, store: Any) -> None:
    fleet, now = Fleet("b"), 1000.0
    report = HostReport(host="a", capable=True, capability="", snapshots=(), running=0, parallel_starts=1)
    fleet.mine = lambda: report
    fleet.see({"a": report, "b": None}, now)
    assert (fleet.alone, fleet.lost(now + 3600, 10.0)) == (False, [])
    fleet.see({"a": None, "b": None}, now + 1)
    # Its report was six seconds old when it was missed.
    assert fleet.alone
    assert (fleet.lost(now + 4.9, 10.0), fleet.lost(now + 5, 10.0)) == ([], ["a"])
    fleet.see({"a": report}, now + 5)
    assert fleet.lost(now + 3600, 10.0) == []


async def test_a_look_gives_up_what_is_lost_and_nothing_else(hosts: Named, store: Any, operations: Operations) -> None:
    a, b, c = hosts("a"), hosts("b"), hosts("c")
    lost = await admitted(a, operations)
    kept = await admitted(c, operations, target=2)
    await silent(a, store)
    await reports(c)
    await gateway(store, "g", **{lost.incarnation: False, kept.incarnation: False})
    fleet = Fleet("b")
    await fleet.look(b, 6.0)
    states = {id: one.state for id, one in (await b.replicas()).items()}
    assert states == {lost.id: State.FAILED, kept.id: State.ADMITTED}


# ---------------------------------------------------------------- keep, over hosts


async def test_two_hosts_do_not_both_park_below_what_is_kept(hosts: Named, operations: Operations) -> None:
    a, b = hosts("a"), hosts("b")
    first, second = await admitted(a, operations), await admitted(b, operations, target=2)
    drains = [one.model_copy(update={"state": State.DRAINING}) for one in (first, second)]
    found = await asyncio.gather(a.park(drains[0], 1), b.park(drains[1], 1))
    assert sorted(seq is None for seq in found) == [False, True]
    states = sorted(one.state for one in (await a.replicas()).values())
    assert states == [State.ADMITTED, State.DRAINING]
    assert await (a if found[0] is None else b).park(drains[0] if found[0] is None else drains[1], 0) is not None


async def test_what_was_given_up_is_not_parked(hosts: Named, store: Any, operations: Operations) -> None:
    a, b = hosts("a"), hosts("b")
    known = await admitted(a, operations)
    await silent(a, store)
    await gateway(store, "g", **{known.incarnation: False})
    await b.bury("a", [known], "lost")
    with pytest.raises(LeaseLost):
        await a.park(known.model_copy(update={"state": State.DRAINING}), 0)


# ---------------------------------------------------------------- move


async def moving(operations: Operations, replica: str = "m#0", to: str = "b") -> Operation:
    outcome = await operations.move("m", replica, to)
    assert outcome is not None
    assert outcome.operation.kind == "move"
    return outcome.operation


async def test_a_move_starts_there_and_only_then_stops_here(hosts: Named, operations: Operations) -> None:
    a, b = hosts("a"), hosts("b")
    old = await admitted(a, operations)
    operation = await moving(operations)
    again = await operations.move("m", "m#0", "b")
    assert again is not None
    assert (again.created, again.operation.id) == (False, operation.id), "asked for again, it is the same one"
    assert await a.claim(10.0) is None, "it is the other host's alone"
    start = await b.claim(10.0)
    assert start is not None
    assert (start.job.replica, start.anywhere, start.job.replaces and start.job.replaces.replica) == ("m#1", False, "m#0")
    assert await a.claim(10.0) is None, "nothing is stopped before the new one serves"
    await b.settle(start, DONE, record(start, "b"))
    found = await operations.get(operation.id)
    assert found is not None
    assert (found.state, len(found.jobs)) == (OperationState.RUNNING, 1)
    stop = await a.claim(10.0)
    assert stop is not None
    assert (stop.job.kind, stop.job.replica, stop.job.incarnation) == (JobKind.STOP, "m#0", old.incarnation)
    assert stop.job.detail == "moved to b"
    await a.settle(stop, DONE)
    ended = await operations.get(operation.id)
    assert ended is not None
    assert (ended.state, ended.jobs) == (OperationState.SUCCEEDED, ())


async def test_a_move_that_fails_leaves_the_old_one_alone(hosts: Named, store: Any, operations: Operations) -> None:
    a, b = hosts("a"), hosts("b")
    await admitted(a, operations)
    operation = await moving(operations)
    start = await b.claim(10.0)
    assert start is not None
    await b.settle(start, Outcome(OperationState.FAILED, "it does not fit", 3), record(start, "b", State.FAILED))
    ended = await operations.get(operation.id)
    assert ended is not None
    assert (ended.state, ended.detail, ended.code) == (OperationState.FAILED, "it does not fit", 3)
    assert await store.zcard("rewake:jobs:a") == 0
    assert (await a.replicas())["m#0"].state is State.ADMITTED
    assert await store.hlen("rewake:starts:m") == 0


async def test_a_move_to_a_host_that_is_lost_fails_and_frees_its_slot(hosts: Named, store: Any, operations: Operations) -> None:
    a, b = hosts("a"), hosts("b")
    await admitted(a, operations)
    operation = await moving(operations)
    start = await b.claim(0.0)
    assert start is not None
    half = record(start, "b", State.RESTORING)
    await b.write(half, start)
    await silent(b, store)

    async def buried() -> list[str]:
        return await a.bury("b", [half], "host b is lost")

    assert await eventually(buried, what="the lease to end") == ["m#1"]
    ended = await operations.get(operation.id)
    assert ended is not None
    assert (ended.state, ended.detail) == (OperationState.FAILED, "host b is lost")
    states = {id: one.state for id, one in (await a.replicas()).items()}
    assert states == {"m#0": State.ADMITTED, "m#1": State.FAILED}
    assert await store.hlen("rewake:starts:m") == 0
    with pytest.raises(LeaseLost):
        await b.settle(start, DONE, record(start, "b"))


async def test_what_does_not_serve_cannot_be_moved(hosts: Named, operations: Operations) -> None:
    a = hosts("a")
    assert await operations.move("m", "m#0", "b") is None
    await admitted(a, operations)
    await operations.scale_down("m", 0, {})
    assert await operations.move("m", "m#0", "b") is None, "it is about to stop"


async def test_while_it_moves_nobody_asks_for_another(hosts: Named, operations: Operations) -> None:
    await admitted(hosts("a"), operations)
    await moving(operations)
    outcome = await operations.scale_up("m", 2, "demand")
    assert outcome is not None
    assert not outcome.operation.jobs or not outcome.created, "the one on its way counts"


async def test_a_full_host_takes_stops_but_no_move(hosts: Named, operations: Operations) -> None:
    await admitted(hosts("a"), operations)
    await moving(operations)
    assert await hosts("b").claim(10.0, stops_only=True) is None
    assert await hosts("b").claim(10.0) is not None


# ---------------------------------------------------------------- scale down


async def test_who_goes_first_is_where_nobody_reports_then_where_there_are_most(
    hosts: Named, store: Any, operations: Operations
) -> None:
    for n, name in enumerate(("a", "b", "b", "c")):
        await admitted(hosts(name), operations, target=n + 1)
    for name in ("a", "b"):
        await reports(hosts(name))
    gone = []
    for target in (3, 2, 1):
        outcome = await operations.scale_down("m", target, {})
        assert outcome is not None
        for name in "abc":
            while (stop := await hosts(name).claim(10.0, stops_only=True)) is not None:
                gone.append(name)
                known = (await hosts(name).replicas())[stop.job.replica]
                await hosts(name).settle(stop, DONE)
                await hosts(name).write(known.model_copy(update={"state": State.STOPPED}))
    assert gone == ["c", "b", "b"]


async def test_ranking_counts_what_is_on_its_way_elsewhere(hosts: Named, store: Any, operations: Operations) -> None:
    """Two starts at once go to two hosts, though no report tells yet of the first."""
    a, b = hosts("a"), hosts("b")
    await reports(a)
    await reports(b)
    fleets = {name: Fleet(name) for name in "ab"}
    for name, fleet in fleets.items():
        mine = HostReport(host=name, capable=True, capability="", snapshots=(), running=0, parallel_starts=3)
        fleet.mine = functools.partial(lambda report: report, mine)
        await fleet.look(hosts(name), 10.0)
    await started(operations, 2)

    async def take(name: str) -> Claim | None:
        jobs = hosts(name)
        ranking = fleets[name].ranking(await jobs.open(), CONFIG, list((await jobs.replicas()).values()))
        return await jobs.claim(10.0, ranking=ranking)

    first = await take("a")
    assert first is not None
    await a.write(record(first, "a", State.MATCHING), first)
    second = await take("b")
    assert second is not None
    assert {first.job.replica, second.job.replica} == {"m#0", "m#1"}


async def test_what_is_worth_a_try_elsewhere_and_what_is_not() -> None:
    fleet, model = Fleet("a"), CONFIG.models["m"]
    usual: dict[str, Any] = {"capable": True, "capability": "", "running": 0, "parallel_starts": 1}
    assert not fleet.elsewhere("m", model, "host", ()), "there is nobody else"
    assert fleet.nobody("m", model) == ""
    fits = SnapshotSummary(id="s", model="m", created_ms=0, bytes=1, fits=True)
    fleet.see({"b": HostReport(host="b", snapshots=(), **usual), "c": HostReport(host="c", snapshots=(fits,), **usual)}, 0.0)
    assert all(fleet.elsewhere("m", model, fault, ()) for fault in ("host", "tool", "environment", "snapshot"))
    assert not any(fleet.elsewhere("m", model, fault, ()) for fault in ("transient", "cancelled"))
    assert not fleet.elsewhere("m", model, "snapshot", {"c"}), "no other has a copy that it has not failed with"
    assert fleet.elsewhere("m", model, "tool", {"c"})
    assert not fleet.elsewhere("m", model, "tool", {"b", "c"}), "it has failed everywhere"
