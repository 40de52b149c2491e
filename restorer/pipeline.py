"""One start, from a claimed job to ADMITTED or to nothing: match, restore (or start), verify, admit.

:func:`start` reads top to bottom. The table in :mod:`policies.replica` permits each step, the store refuses each write of a
lost claim, and whatever is raised, the box is killed: a start ends admitted or leaves nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from policies.compat import Mismatch
from policies.manifest import GpuState, Manifest
from policies.replica import Event, Replica, State, advance
from policies.wire import Failure, JobKind, OperationState
from restorer import accounts, canary, gpustate, prefetch
from restorer.box import Box
from restorer.capture import capture
from restorer.engines import HttpEngine, adapter
from restorer.errors import (
    CanaryDiffers,
    Cancelled,
    EngineDied,
    EngineNotReady,
    Environment,
    HostIncompatible,
    RestorerError,
    SnapshotError,
    ToolFailed,
    ToolHung,
)
from restorer.gpus import Placement
from restorer.host import Host, Match, log
from restorer.instance import Instance, connect, ignite, last_words
from restorer.integrity import verify_files
from restorer.jobs import Claim, LeaseLost, Outcome, StoreUnavailable, demand
from restorer.prefetch import Touched
from restorer.reckoning import reckoned, told
from restorer.replicas import Replicas
from restorer.stages import Stages
from restorer.suspended import Suspended

EXIT_FAILED, EXIT_HOST = 1, 3
"""What the command line exits with."""
_RETRY_S = 1.0
_SHOWN = 5
_BROKEN = ("misaligned address", "an illegal memory access", "CUDA_ERROR_ILLEGAL_ADDRESS")
"""What an engine says whose GPU state came back wrong: another try would end the same way."""


class Attempt:
    """One try of a START job: its record and its clock."""

    def __init__(self, host: Host, claim: Claim) -> None:
        self.host, self.claim, self.began = host, claim, time.monotonic()
        self.stages = host.progress.stages(claim.job)
        model = host.model(claim.job.model)
        self.engine = adapter(claim.job.model, model)
        self.source: Manifest | None = None
        self.record = Replica(
            id=claim.job.replica,
            model=claim.job.model,
            state=State.QUEUED,
            fence=claim.fence,
            host=host.name,
            port=model.engine.port,
            concurrency=model.concurrency,
            trace=claim.job.trace,
        )

    def moved(self, event: Event, **changes: Any) -> Replica:
        """The record after an event, not written yet."""
        state = advance(self.record.state, event)
        stamped = {"state": state, "updated_ms": time.time_ns() // 1_000_000, "stages": tuple(self.stages.done), **changes}
        return self.record.model_copy(update=stamped)

    async def advance(self, event: Event, **changes: Any) -> None:
        """Write the record after an event; raises LeaseLost when the claim is gone."""
        record = self.moved(event, **changes)
        await self.host.jobs.write(record, self.claim)
        self.record = record

    async def amend(self, **changes: Any) -> None:
        """Write the record with changes that are no event; raises LeaseLost when the claim is gone."""
        record = self.record.model_copy(update={"updated_ms": time.time_ns() // 1_000_000, **changes})
        await self.host.jobs.write(record, self.claim)
        self.record = record

    async def still_wanted(self) -> None:
        """The last exit before the point of no return; raises Cancelled when demand asked for this and is gone."""
        if self.claim.job.reason == "demand" and demand(await self.host.jobs.gateways(), self.record.model) == 0:
            raise Cancelled("every client that waited for it has left")


async def start(host: Host, claim: Claim, replicas: Replicas) -> None:
    """Bring one replica to ADMITTED and settle its job, or leave nothing and say why.

    Raises:
        LeaseLost: somebody else has the job now; everything was undone.
        StoreUnavailable: the outcome could not be written; everything was undone, the job comes back when the lease ends.
    """
    attempt = Attempt(host, claim)
    model = host.model(claim.job.model)
    try:
        await attempt.advance(Event.CLAIM)
        _bounded(claim, host.config.restorer.max_attempts)
        with attempt.stages.timed("match"):
            match = await asyncio.to_thread(host.match, claim.job.model)
        await attempt.still_wanted()
        await replicas.vacated(claim.job.model)
        obstacle = host.backend(claim.job.model).obstacle()
        if match.manifest is not None and obstacle is None:
            instance = await _resumed(attempt, match, match.manifest, replicas.suspended)
            if instance is None:
                instance = await _restored_or_cold(attempt, match, match.manifest)
        else:
            why = match.why if obstacle is None else obstacle
            if model.on_no_snapshot == "reject":
                raise (
                    HostIncompatible([m for found in match.refused.values() for m in found])
                    if match.refused
                    else SnapshotError(why)
                )
            instance = await _cold(attempt, match, Event.START, why)
        await _admit(attempt, instance, replicas)
    except (LeaseLost, StoreUnavailable):
        raise
    except RestorerError as error:
        await _give_up(attempt, error)


def _bounded(claim: Claim, most: int) -> None:
    """A failed try is counted when it fails; one that took the restorer with it has to be counted here."""
    if claim.attempts > most:
        raise Environment(f"it was begun {most} times, and each time the restorer ended before it; see the restorer's log")


async def _resumed(attempt: Attempt, match: Match, manifest: Manifest, suspended: Suspended) -> Instance | None:
    """The suspended engine of this model, awake on a GPU and proved like a restored one; None: there is none that can."""
    model = attempt.record.model
    resting = await suspended.take(model, match)
    if resting is None:
        return None
    box, instance = resting.box, resting.instance
    try:
        placement = await _placed(attempt, box, resting.state)
    except BaseException:
        suspended.put_back(model, resting)
        raise
    assert placement is not None
    lives = int(box.facts.get("lives", 1)) + 1
    box.remember(lives=lives)
    try:
        await attempt.advance(Event.RESTORE, snapshot=manifest.id, incarnation=f"{box.id}-{lives}", start="resumed")
        await gpustate.resume(attempt.host, instance, resting.state, placement, attempt.stages)
        await _proved(attempt, instance, manifest)
        await attempt.advance(Event.UP)
        return instance
    except (LeaseLost, StoreUnavailable):
        await asyncio.shield(attempt.host.discard(box))
        raise
    except RestorerError as error:
        # Not the snapshot's fault, whatever it was.
        log.warning("the suspended engine of %s cannot be resumed, and is ended: %s", model, error)
        await asyncio.shield(attempt.host.discard(box))
        return None
    except BaseException:
        await asyncio.shield(attempt.host.discard(box))
        raise


async def _proved(attempt: Attempt, instance: Instance, manifest: Manifest, touched: Touched | None = None) -> None:
    """It repeats the donor's answers; raises CanaryDiffers otherwise."""
    with accounts.compared(attempt.host.tally, attempt.record.model), attempt.stages.timed("canary") as stage:
        if touched is not None:
            stage.of(touched.cached, touched.bytes)
        async with connect(instance) as client:
            verdict = await canary.check(client, attempt.engine, manifest.canary)
        if not verdict.equal:
            raise CanaryDiffers(f"the replica does not repeat its donor's answers: {verdict.difference}")


async def _restored_or_cold(attempt: Attempt, match: Match, manifest: Manifest) -> Instance:
    host, claim = attempt.host, attempt.claim
    try:
        return await _restored(attempt, match, manifest)
    except (Cancelled, LeaseLost, StoreUnavailable):
        raise
    except RestorerError as error:
        log.warning("restore of %s from %s failed: %s", claim.job.replica, manifest.id, error)
        if isinstance(error, SnapshotError):
            await asyncio.to_thread(host.snapshots.quarantine, manifest.id, str(error))
        if host.model(claim.job.model).on_restore_failure == "reject":
            raise
        accounts.fell_back(host.tally, attempt.record, error)
        event = Event.START if attempt.record.state is State.MATCHING else Event.FALL_BACK
        return await _cold(attempt, match, event, f"restore of snapshot {manifest.id} failed: {error}")


async def _restored(attempt: Attempt, match: Match, manifest: Manifest) -> Instance:
    """An engine out of a snapshot that has repeated its donor's answers; or nothing, and the reason raised."""
    host = attempt.host
    for mismatch in match.allowed:
        log.warning("snapshot %s is restored all the same: %s", manifest.id, mismatch)
    with await asyncio.to_thread(host.snapshots.use, manifest.id):
        return await _restored_from(attempt, manifest)


async def _restored_from(attempt: Attempt, manifest: Manifest) -> Instance:
    host = attempt.host
    await _verify_bytes(attempt, manifest)
    box = await host.boxes.take()
    try:
        # From here on the box says what it needs, to whoever would remove it.
        box.remember(snapshot=manifest.id)
        placement = await _placed(attempt, box, manifest.gpu)
        changes = {"snapshot": manifest.id, "incarnation": box.id, "start": "restored"}
        if attempt.record.state is State.MATCHING:
            await attempt.still_wanted()
            await attempt.advance(Event.RESTORE, **changes)
        else:
            # A suspended engine was tried first, and the point of no return is passed.
            await attempt.amend(**changes)
        folder = host.snapshots.folder(manifest.id)
        async with prefetch.beside(manifest.files, attempt.engine.model.restore) as touched:
            instance = await gpustate.revive(host, box, attempt.engine, manifest, folder, attempt.stages, placement)
            await attempt.advance(Event.UP)
            await _proved(attempt, instance, manifest, touched)
        attempt.source = manifest
        return instance
    except (EngineDied, EngineNotReady) as error:
        words = last_words(box)
        await asyncio.shield(host.discard(box))
        if sign := next((sign for sign in _BROKEN if sign in f"{error} {words}"), None):
            raise SnapshotError(f"what was restored is broken ({sign}): {error}") from error
        raise
    except BaseException:
        await asyncio.shield(host.discard(box))
        raise


async def _placed(attempt: Attempt, box: Box, state: GpuState | None) -> Placement | None:
    """The GPUs that a box gets, if its engine wants any; they are its own until it is discarded.

    Args:
        state: of the snapshot to restore; None: the engine starts cold, and takes what it finds.
    """
    # Whose logs these are, should it fail; see restorer/remains.py.
    box.facts.update(model=attempt.record.model, replica=attempt.record.id)
    gpu = attempt.engine.model.engine.gpu
    if gpu.count == 0:
        return None
    with attempt.stages.timed("lease GPU"):
        need, prefer = (0, ()) if state is None else (gpustate.need_bytes(state), state.used)
        placement = await attempt.host.gpus.lease(box.id, gpu.count, need_bytes=need, wait_s=gpu.wait_s, prefer=prefer)
        box.remember(gpus=list(placement.uuids))
    return placement


async def _verify_bytes(attempt: Attempt, manifest: Manifest) -> None:
    """Every byte that CRIU would trust is what it was at the dump.

    Raises:
        SnapshotError: an object changed. HostIncompatible: a file of this host that the engine maps has changed.
    """
    host, model = attempt.host, attempt.record.model
    with attempt.stages.timed("verify bytes") as stage:
        stage.bytes = manifest.bytes
        faults = accounts.faulty(host.tally, model, "bytes", await asyncio.to_thread(host.snapshots.verify, manifest, full=False))
        if manifest.gpu is not None:
            wrong = await asyncio.to_thread(host.weights.verify, manifest.gpu.weights)
            faults += accounts.faulty(host.tally, model, "weights", wrong)
        if faults:
            raise SnapshotError(f"snapshot {manifest.id} was changed: " + "; ".join(map(str, faults[:_SHOWN])))
        changed = accounts.faulty(host.tally, model, "file", await asyncio.to_thread(verify_files, manifest, host.stamps))
    if changed:
        remedy = "bring the donor's version back, or make a new snapshot with `rewake snapshot create`"
        raise HostIncompatible([Mismatch(f"file {fault.path}", fault.expected, fault.found, remedy) for fault in changed])


async def _cold(attempt: Attempt, match: Match, event: Event, why: str) -> Instance:
    """A cold engine; captured on its way, where the policy wants a snapshot and there is none."""
    host = attempt.host
    policy, backend = host.model(attempt.record.model).snapshot, host.backend(attempt.record.model)
    box = await host.boxes.take()
    try:
        placement = await _placed(attempt, box, None)
        await attempt.advance(event, incarnation=box.id, start="cold", snapshot=None, reason=why)
        with attempt.stages.timed("start engine"):
            instance, cold_start_s = await ignite(backend, box, attempt.engine, placement.indices if placement else ())
        if policy.create == "auto" and backend.obstacle() is None and match.manifest is None:
            try:
                manifest = await capture(host, instance, match.profile, cold_start_s, attempt.stages)
                log.info("snapshot %s of %s was made", manifest.id, attempt.record.model)
            except EngineDied:
                raise
            except RestorerError as error:
                # The engine serves all the same; the next start is cold too, and says why.
                log.warning("no snapshot of %s: %s", attempt.record.model, error)
                attempt.record = attempt.record.model_copy(update={"reason": f"{why}; no snapshot was made: {error}"})
        await attempt.advance(Event.UP)
        with attempt.stages.timed("warm up"):
            async with connect(instance) as client:
                await attempt.engine.warm(client)
        return instance
    except BaseException:
        await asyncio.shield(host.discard(box))
        raise


async def _admit(attempt: Attempt, instance: Instance, replicas: Replicas) -> None:
    """Open traffic: one write makes the record ADMITTED and the job settled."""
    changes = reckoned(attempt.stages, attempt.source, attempt.engine.model.restore, attempt.host.rates)
    admitted = attempt.moved(Event.ADMIT, address=instance.box.address, **changes)
    told(admitted)
    try:
        # First on this host's disk, so that a restorer that dies here finds an engine that it may or may not adopt.
        instance.box.remember(record=admitted.model_dump(mode="json"), inner_pid=instance.inner_pid)
        await attempt.host.jobs.settle(attempt.claim, Outcome(OperationState.SUCCEEDED), admitted)
    except BaseException:
        await asyncio.shield(attempt.host.discard(instance.box))
        raise
    accounts.admitted(attempt.host.tally, admitted, attempt.began)
    replicas.adopt(instance, admitted)


async def _give_up(attempt: Attempt, error: RestorerError) -> None:
    """Settle or release the job of a start that failed; everything it made is gone already."""
    host, claim = attempt.host, attempt.claim
    if isinstance(error, Cancelled):
        cancelled = attempt.moved(Event.CANCEL, reason=str(error))
        await host.jobs.settle(claim, Outcome(OperationState.CANCELLED, str(error)), cancelled)
        accounts.failed(host.tally, cancelled, error)
        return
    passing = isinstance(error, ToolFailed | ToolHung | EngineDied | EngineNotReady) or error.kind == "environment"
    if passing and claim.attempts < host.config.restorer.max_attempts:
        log.warning("start of %s failed, to be tried again: %s", claim.job.replica, error)
        await attempt.advance(Event.LEASE_LOST, incarnation="", start=None, reason=str(error))
        await host.jobs.release(claim, _RETRY_S * claim.attempts)
        accounts.given_back(host.tally, attempt.record, error)
        return
    log.error("start of %s failed: %s", claim.job.replica, error)
    differs = isinstance(error, CanaryDiffers) and attempt.record.state is State.VERIFYING
    ended = attempt.moved(Event.DIFFER if differs else Event.FAIL, reason=str(error))
    await host.jobs.settle(
        claim,
        Outcome(
            OperationState.FAILED,
            str(error),
            EXIT_HOST if isinstance(error, HostIncompatible) else EXIT_FAILED,
            failure=Failure(code="restore_failed", detail=error.brief, operation=claim.job.operation),
            failure_s=host.config.restorer.failure_backoff_s,
        ),
        ended,
    )
    accounts.failed(host.tally, ended, error)


async def make_snapshot(host: Host, claim: Claim) -> None:
    """Start a donor, capture it, publish, let it go; settles the job.

    Raises:
        LeaseLost, StoreUnavailable: as for :func:`start`.
    """
    assert claim.job.kind is JobKind.SNAPSHOT
    name = claim.job.model
    try:
        _bounded(claim, host.config.restorer.max_attempts)
        if (obstacle := host.backend(name).obstacle()) is not None:
            raise SnapshotError(f"no snapshot can be made on this host: {obstacle}")
        match = await asyncio.to_thread(host.match, name)
        manifest = await _captured(host, adapter(name, host.model(name)), match, host.progress.stages(claim.job))
        log.info("snapshot %s of %s was made", manifest.id, name)
        outcome = Outcome(OperationState.SUCCEEDED, snapshot=manifest.id)
    except (LeaseLost, StoreUnavailable):
        raise
    except RestorerError as error:
        log.error("no snapshot of %s: %s", name, error)
        outcome = Outcome(OperationState.FAILED, str(error), EXIT_FAILED)
    await host.jobs.settle(claim, outcome)


async def _captured(host: Host, engine: HttpEngine, match: Match, stages: Stages) -> Manifest:
    """A snapshot of a donor that is started for it, and ends with it."""
    gpu = engine.model.engine.gpu
    box = await host.boxes.take()
    try:
        visible: tuple[int, ...] = ()
        if gpu.count:
            placement = await host.gpus.lease(box.id, gpu.count, need_bytes=0, wait_s=gpu.wait_s)
            box.remember(gpus=list(placement.uuids))
            visible = placement.indices
        with stages.timed("start engine"):
            donor, cold_start_s = await ignite(host.backend(engine.name), box, engine, visible)
        return await capture(host, donor, match.profile, cold_start_s, stages, keep=False)
    finally:
        await asyncio.shield(host.discard(box))
