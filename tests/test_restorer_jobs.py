"""Leases, fences and settling, against a real store: who no longer holds the right changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conftest import eventually

from gateway.operations import Operations
from gateway.registry import Registry
from gateway.store import Store
from policies.replica import Replica, Stage, State
from policies.series import Point
from policies.wire import STAGE_SAMPLES, Failure, JobKind, Operation, OperationState, StageKey
from restorer.coordination.jobs import Claim, JobStore, Outcome
from restorer.errors import LeaseLost, StoreUnavailable

pytestmark = pytest.mark.contract

DONE = Outcome(OperationState.SUCCEEDED)


@pytest.fixture
async def jobs(store: Any, store_server: str) -> AsyncIterator[JobStore]:
    client = JobStore(store_server, "rewake", "host-a")
    yield client
    await client.close()


@pytest.fixture
async def other(store: Any, store_server: str) -> AsyncIterator[JobStore]:
    client = JobStore(store_server, "rewake", "host-b")
    yield client
    await client.close()


@contextlib.asynccontextmanager
async def asking(url: str) -> AsyncIterator[Operations]:
    """The gateway's half: what puts jobs into the store."""
    client = Store(url, "rewake")
    try:
        yield Operations(client, Registry(["m"]))
    finally:
        await client.close()


async def scale_up(url: str, target: int = 1) -> Operation:
    async with asking(url) as operations:
        outcome = await operations.scale_up("m", target, "admin")
    assert outcome is not None
    return outcome.operation


async def operation_of(store: Any, id: str) -> Operation:
    return Operation.model_validate_json(await store.get(f"rewake:operation:{id}"))


def record(claim: Claim, state: State = State.ADMITTED) -> Replica:
    return Replica(id=claim.job.replica, model="m", state=state, fence=claim.fence, incarnation=f"i{claim.fence}")


async def claimed(jobs: JobStore, lease_s: float = 10.0) -> Claim:
    claim = await jobs.claim(lease_s)
    assert claim is not None
    return claim


async def test_one_job_is_claimed_by_one_restorer(jobs: JobStore, other: JobStore, store_server: str) -> None:
    await scale_up(store_server)
    claim = await claimed(jobs)
    assert (claim.job.replica, claim.attempts) == ("m#0", 1)
    assert await other.claim(10.0) is None


async def test_a_lease_that_ended_passes_the_job_on_and_the_old_fence_can_do_nothing(
    jobs: JobStore, other: JobStore, store: Any, store_server: str
) -> None:
    operation = await scale_up(store_server)
    old = await claimed(jobs, lease_s=0.0)
    new = await eventually(lambda: other.claim(10.0), what="the job to be due again")
    assert (new.attempts, new.fence) == (2, old.fence + 1)
    assert await takeovers(store, "host-a") == 0 < await takeovers(store, "host-b")
    assert not await jobs.renew(old, 10.0)
    with pytest.raises(LeaseLost):
        await jobs.write(record(old, State.RESTORING), old)
    with pytest.raises(LeaseLost):
        await jobs.settle(old, DONE, record(old))
    assert await store.hgetall("rewake:replicas") == {}
    assert (await operation_of(store, operation.id)).state is OperationState.RUNNING
    await other.settle(new, DONE, record(new))
    assert (await other.replicas())["m#0"].incarnation == f"i{new.fence}"


async def test_a_record_refuses_an_older_fence_even_without_a_job(jobs: JobStore, store_server: str) -> None:
    await scale_up(store_server)
    old = await claimed(jobs, lease_s=0.0)
    new = await eventually(lambda: jobs.claim(10.0))
    first = await jobs.write(record(new))
    with pytest.raises(LeaseLost):
        await jobs.write(record(old, State.FAILED))
    assert await jobs.write(record(new, State.DRAINING)) == first + 1
    assert (await jobs.replicas())["m#0"].seq == first + 1 == await jobs.seq()


async def test_settling_admits_and_ends_the_operation_in_one_step(jobs: JobStore, store: Any, store_server: str) -> None:
    operation = await scale_up(store_server)
    claim = await claimed(jobs)
    await jobs.settle(claim, DONE, record(claim))
    ended = await operation_of(store, operation.id)
    assert (ended.state, ended.jobs) == (OperationState.SUCCEEDED, ())
    assert await store.ttl(f"rewake:operation:{operation.id}") > 0
    for key in ("rewake:active:m", "rewake:starts:m", f"rewake:job:{claim.job.id}"):
        assert not await store.exists(key)
    assert await store.zcard("rewake:jobs") == 0


async def test_an_operation_of_three_ends_with_the_last_and_one_failure_fails_it(
    jobs: JobStore, store: Any, store_server: str
) -> None:
    operation = await scale_up(store_server, 3)
    claims = [await claimed(jobs) for _ in range(3)]
    await jobs.settle(claims[0], DONE, record(claims[0]))
    failure = Failure(code="restore_failed", detail="why", operation=operation.id)
    await jobs.settle(claims[1], Outcome(OperationState.FAILED, "why", 3, failure=failure, failure_s=30.0))
    assert (await operation_of(store, operation.id)).state is OperationState.RUNNING
    await jobs.settle(claims[2], DONE, record(claims[2]))
    ended = await operation_of(store, operation.id)
    assert (ended.state, ended.detail, ended.code) == (OperationState.FAILED, "why", 3)


async def test_a_final_failure_is_told_for_a_while_and_a_later_success_clears_it(
    jobs: JobStore, store: Any, store_server: str
) -> None:
    operation = await scale_up(store_server)
    claim = await claimed(jobs)
    failure = Failure(code="restore_failed", detail="why", operation=operation.id)
    await jobs.settle(claim, Outcome(OperationState.FAILED, "why", 1, failure=failure, failure_s=30.0))
    assert Failure.model_validate_json(await store.get("rewake:failure:m")) == failure
    assert 0 < await store.pttl("rewake:failure:m") <= 30_000
    await scale_up(store_server)
    claim = await claimed(jobs)
    await jobs.settle(claim, DONE, record(claim))
    assert not await store.exists("rewake:failure:m")


async def test_an_overtaken_operation_does_not_clear_the_active_one(jobs: JobStore, store: Any, store_server: str) -> None:
    await scale_up(store_server, 1)
    second = await scale_up(store_server, 2)
    first = await claimed(jobs)
    await jobs.settle(first, DONE, record(first))
    assert await store.get("rewake:active:m") == second.id


async def test_the_lease_of_a_job_that_is_settled_is_not_missed(jobs: JobStore, store_server: str) -> None:
    """Whoever settled it may have work left, which a lost lease would undo: the engine was just admitted."""
    await scale_up(store_server)
    claim = await claimed(jobs)
    await jobs.settle(claim, DONE, record(claim))
    assert await jobs.renew(claim, 10.0)
    jobs.over(claim)
    assert not await jobs.renew(claim, 10.0)


async def test_a_job_ends_once(jobs: JobStore, store: Any, store_server: str) -> None:
    operation = await scale_up(store_server)
    claim = await claimed(jobs)
    await jobs.settle(claim, DONE, record(claim))
    with pytest.raises(LeaseLost):
        await jobs.settle(claim, Outcome(OperationState.FAILED, "late", 1), record(claim, State.FAILED))
    assert not await jobs.renew(claim, 10.0)
    await jobs.release(claim, 0.0)
    assert await jobs.claim(10.0) is None
    assert (await jobs.replicas())["m#0"].state is State.ADMITTED
    assert (await operation_of(store, operation.id)).state is OperationState.SUCCEEDED


async def test_a_claim_that_a_later_record_overtook_cannot_settle(jobs: JobStore, store: Any, store_server: str) -> None:
    """Admitting is one step: either the record is written and the operation has ended, or neither."""
    operation = await scale_up(store_server)
    claim = await claimed(jobs)
    await jobs.write(record(claim).model_copy(update={"fence": claim.fence + 1, "incarnation": "later"}))
    with pytest.raises(LeaseLost):
        await jobs.settle(claim, DONE, record(claim))
    assert (await jobs.replicas())["m#0"].incarnation == "later"
    assert (await operation_of(store, operation.id)).state is OperationState.RUNNING
    assert await store.exists(f"rewake:job:{claim.job.id}")


async def test_fences_go_on_from_what_a_store_that_forgot_is_told(jobs: JobStore, store: Any, store_server: str) -> None:
    await scale_up(store_server)
    survivor = record(await claimed(jobs)).model_copy(update={"fence": 7})
    await store.flushall()
    await jobs.write(survivor)
    await scale_up(store_server, 2)
    assert (await claimed(jobs)).fence == 8


async def test_a_restorer_without_a_free_place_still_claims_stops(jobs: JobStore, store_server: str) -> None:
    await scale_up(store_server)
    claim = await claimed(jobs)
    await jobs.settle(claim, DONE, record(claim).model_copy(update={"host": "host-a"}))
    await scale_up(store_server, 2)
    assert await jobs.claim(10.0, stops_only=True) is None
    async with asking(store_server) as operations:
        await operations.scale_down("m", 0, {})
    stop = await jobs.claim(10.0, stops_only=True)
    assert stop is not None
    assert (stop.job.kind, stop.job.incarnation) == (JobKind.STOP, f"i{claim.fence}")


async def takeovers(store: Any, host: str = "host-a") -> float:
    return float(await store.hget(f"rewake:tally:{host}", Point("lease_takeovers", ("start",)).field) or 0)


async def test_a_released_job_is_due_again_after_its_delay(jobs: JobStore, store: Any, store_server: str) -> None:
    await scale_up(store_server)
    claim = await claimed(jobs)
    await jobs.release(claim, 60.0)
    assert await jobs.claim(10.0) is None
    await jobs.release(claim, 0.0)
    again = await claimed(jobs)
    assert again.attempts == 2
    assert await takeovers(store) == 0


async def test_a_restarted_restorer_recovers_its_own_jobs_at_once_and_no_others(
    jobs: JobStore, other: JobStore, store: Any, store_server: str
) -> None:
    await scale_up(store_server, 2)
    mine, theirs = await claimed(jobs, 600.0), await claimed(other, 600.0)
    for taken_over in (1, 2):
        await jobs.recover()
        again = await claimed(jobs)
        assert again.job.id == mine.job.id != theirs.job.id
        assert await takeovers(store) == taken_over, "also of one that could report nothing in between"
    assert await jobs.claim(10.0) is None


async def admitted(jobs: JobStore, store_server: str, *, snapshot: str | None, seconds: float) -> None:
    """One start, admitted and gone again, that took so long in each of two stages."""
    await scale_up(store_server)
    claim = await claimed(jobs)
    stages = (Stage(name="lay scratch", seconds=seconds), Stage(name="canary", seconds=2 * seconds))
    one = record(claim).model_copy(
        update={"host": "host-a", "start": "restored" if snapshot else "cold", "snapshot": snapshot, "stages": stages}
    )
    await jobs.settle(claim, DONE, one)
    await jobs.write(one.model_copy(update={"state": State.STOPPED}))


async def durations(store: Any) -> dict[StageKey | None, list[float]]:
    return {StageKey.of(field): json.loads(text) for field, text in (await store.hgetall("rewake:stages:m")).items()}


async def test_what_a_start_took_is_kept_by_snapshot_host_and_stage(jobs: JobStore, store: Any, store_server: str) -> None:
    await admitted(jobs, store_server, snapshot="s1", seconds=0.25)
    await admitted(jobs, store_server, snapshot="s1", seconds=0.5)
    await admitted(jobs, store_server, snapshot=None, seconds=8.0)
    assert await durations(store) == {
        StageKey("host-a", "s1", "lay scratch"): [0.25, 0.5],
        StageKey("host-a", "s1", "canary"): [0.5, 1.0],
        StageKey("host-a", "cold", "lay scratch"): [8.0],
        StageKey("host-a", "cold", "canary"): [16.0],
    }


async def test_only_the_latest_durations_are_kept(jobs: JobStore, store: Any, store_server: str) -> None:
    for number in range(STAGE_SAMPLES + 2):
        await admitted(jobs, store_server, snapshot="s1", seconds=float(number))
    kept = (await durations(store))[StageKey("host-a", "s1", "lay scratch")]
    assert kept == [float(number) for number in range(2, STAGE_SAMPLES + 2)]


async def test_a_start_that_failed_teaches_no_durations(jobs: JobStore, store: Any, store_server: str) -> None:
    await scale_up(store_server)
    claim = await claimed(jobs)
    failed = record(claim, State.FAILED).model_copy(update={"stages": (Stage(name="match", seconds=1.0),)})
    await jobs.settle(claim, Outcome(OperationState.FAILED, "why", 1), failed)
    assert await durations(store) == {}


async def test_durations_of_a_snapshot_that_is_gone_are_forgotten_on_its_host(
    jobs: JobStore, other: JobStore, store: Any, store_server: str
) -> None:
    for snapshot in ("s1", "s2", None):
        await admitted(jobs, store_server, snapshot=snapshot, seconds=1.0)
    await store.sadd("rewake:hosts", "host-a", "host-b")
    await other.forget_stages("m", [])
    assert len(await durations(store)) == 6
    await jobs.forget_stages("m", ["s2"])
    assert {key.origin for key in await durations(store) if key} == {"s2", "cold"}
    await store.srem("rewake:hosts", "host-a")
    await other.forget_stages("m", [])
    assert await durations(store) == {}, "the host itself was forgotten"


async def test_suspects_are_taken_by_the_restorer_that_runs_them(jobs: JobStore, other: JobStore, store: Any) -> None:
    common: dict[str, Any] = {"model": "m", "state": State.ADMITTED, "fence": 1}
    await jobs.write(Replica(id="m#0", host="host-a", incarnation="here", **common))
    await jobs.write(Replica(id="m#1", host="host-b", incarnation="there", **common))
    await store.hset("rewake:suspects", mapping={"here": "silent", "there": "reset", "long gone": "refused"})
    assert await jobs.suspects(["here"]) == {"here": "silent"}
    assert await jobs.suspects(["here"]) == {}
    assert await store.hgetall("rewake:suspects") == {"there": "reset"}
    assert await other.suspects(["there"]) == {"there": "reset"}


async def test_a_cancellation_that_the_client_swallows_is_heeded(jobs: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time-outs can do so; a job whose lease was lost would go on."""
    begun = asyncio.Event()

    async def swallowing(key: str) -> dict[str, str]:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(jobs._client, "hgetall", swallowing)
    asking = asyncio.create_task(jobs.replicas())
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_store_that_is_away_is_one_error_of_ours(store_server: str) -> None:
    gone = JobStore("unix:///nonexistent/store.sock", "rewake", "h")
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await gone.claim(1.0)
    await gone.close()
