"""One start, from a claimed job to ADMITTED or to nothing: match, restore (or start), verify, admit.

:func:`start` reads top to bottom. The table in :mod:`policies.replica` permits each step, the store refuses each write of a
lost claim, and whatever is raised, the journal is unwound: a start ends admitted or leaves nothing.
"""

from __future__ import annotations

import asyncio
import time

from policies import placement
from policies.compat import Mismatch
from policies.journal import Undo
from policies.manifest import Manifest
from policies.replica import Event, State
from policies.wire import Failure, JobKind, OperationState
from restorer.adapters.engines import HttpEngine, adapter
from restorer.boxes.box import Box
from restorer.checkpoint import prefetch
from restorer.coordination.jobs import Claim, Outcome
from restorer.errors import (
    ArrivalFailed,
    CanaryDiffers,
    Cancelled,
    EngineDied,
    Environment,
    HeldBack,
    HostIncompatible,
    LeaseLost,
    NotNamed,
    RestorerError,
    SnapshotError,
    StoreUnavailable,
)
from restorer.gpu.gpus import Need, Placement
from restorer.machine.host import Host, Match, log
from restorer.operations import accounts, gpustate, proof, sleeping, undo
from restorer.operations.attempt import Attempt, Work
from restorer.operations.capture import capture
from restorer.operations.instance import Instance, connect, ignite
from restorer.operations.replicas import Replicas
from restorer.operations.supply import supplied
from restorer.operations.suspended import Suspended
from restorer.operations.undo import fresh_box, unwinding
from restorer.records.reckoning import reckoned, told
from restorer.records.stages import Stages
from restorer.storage.arrival import Arrival
from restorer.storage.integrity import verify_files

EXIT_FAILED, EXIT_HOST = 1, 3
"""What the command line exits with."""
_RETRY_S = 1.0
_SHOWN = 5
_PASSING = ("tool", "transient", "environment")
"""Failures that another try may not meet."""


async def start(host: Host, claim: Claim, replicas: Replicas) -> None:
    """Bring one replica to ADMITTED and settle its job, or leave nothing and say why.

    Raises:
        LeaseLost: somebody else has the job now; everything was undone.
        StoreUnavailable: the outcome could not be written; everything was undone, the job comes back when the lease ends.
    """
    attempt = Attempt(host, claim)
    try:
        async with attempt.journaled():
            await attempt.advance(Event.CLAIM)
            await attempt.bounded()
            instance = await _started(attempt, replicas)
            await _admit(attempt, instance, replicas)
    except (LeaseLost, StoreUnavailable):
        raise
    except RestorerError as error:
        await _give_up(attempt, error)


async def _started(attempt: Attempt, replicas: Replicas) -> Instance:
    """An engine that may be admitted: resumed, restored or cold, by what there is and what the policy says."""
    host, name = attempt.host, attempt.claim.job.model
    _check_named(host, name)
    with attempt.stages.timed("match"):
        match = await asyncio.to_thread(host.match, name)
    accounts.distrusted(host.tally, name, match.refused)
    async with supplied(host, name, match, attempt.stages, attempt.still_wanted) as match:
        await attempt.still_wanted()
        await replicas.vacated(name)
        return await _engine(attempt, match, replicas)


async def _engine(attempt: Attempt, match: Match, replicas: Replicas) -> Instance:
    host, name = attempt.host, attempt.claim.job.model
    backend, model = host.backend(name), host.model(name)
    if (instance := await _resumed(attempt, match, replicas.suspended)) is not None:
        return instance
    if match.manifest is not None and (obstacle := backend.obstacle()) is None:
        return await _restored_or_cold(attempt, match, match.manifest)
    if attempt.lost is not None:
        if model.on_restore_failure == "reject":
            raise SnapshotError(f"the engine that rested did not wake: {attempt.lost}")
        return await _cold(attempt, match, f"it did not wake: {attempt.lost}")
    if not backend.can.snapshot:
        return await _cold(attempt, match, backend.obstacle() or "")
    why = match.why if (obstacle := backend.obstacle()) is None else obstacle
    if match.held and model.on_restore_failure == "reject":
        raise HeldBack(why)
    if model.on_no_snapshot == "reject":
        if match.refused:
            raise HostIncompatible([m for found in match.refused.values() for m in found])
        raise SnapshotError(why)
    return await _cold(attempt, match, why)


async def _resumed(attempt: Attempt, match: Match, suspended: Suspended) -> Instance | None:
    """The engine of this model that rests here, awake and proved like a restored one; None: there is none that can."""
    model = attempt.record.model
    resting = await suspended.take(model, match)
    if resting is None:
        return None
    box, instance = resting.box, resting.instance
    try:
        placement = await _placed(attempt, box, resting.rest.need(attempt.host))
    except BaseException:
        suspended.put_back(model, resting)
        raise
    start, lives = resting.rest.start, int(box.facts.get("lives", 1)) + 1
    try:
        async with unwinding(attempt.host, attempt.journal):
            with attempt.stages.timed("resume", Undo(what="box", name=box.id)):
                box.remember(lives=lives)
            await attempt.advance(Event.RESTORE, snapshot=match.newest, incarnation=f"{box.id}-{lives}", start=start)
            await resting.rest.wake(attempt.host, instance, placement, attempt.stages)
            await proof.proved(attempt.host, instance, resting.exchanges(match), attempt.stages)
            await attempt.advance(Event.UP)
            return instance
    except (LeaseLost, StoreUnavailable):
        raise
    except RestorerError as error:
        # Not the snapshot's fault, whatever it was.
        log.warning("the engine of %s that rested cannot be %s, and is ended: %s", model, start, error)
        suspended.failed(resting, error)
        attempt.lost = error
        return None


async def _restored_or_cold(attempt: Attempt, match: Match, manifest: Manifest) -> Instance:
    host, claim = attempt.host, attempt.claim
    try:
        async with unwinding(host, attempt.journal):
            return await _restored(attempt, match, manifest)
    except (Cancelled, LeaseLost, StoreUnavailable):
        raise
    except RestorerError as error:
        attempt.verdict = verdict = error.verdict
        log.warning("restore of %s from %s failed: %s (%s)", claim.job.replica, manifest.id, error, verdict)
        if match.arrival is not None:
            await match.arrival.end()
        if not isinstance(error, ArrivalFailed):
            await asyncio.to_thread(host.blame, manifest.id, error)
        model = host.model(claim.job.model)
        # A restore elsewhere beats a cold start here.
        better = await _elsewhere(host, claim, error) and host.fleet.restores(claim.job.model, model, claim.avoid)
        if model.on_restore_failure == "reject" or better:
            raise
        accounts.fell_back(host.tally, attempt.record, error)
        return await _cold(attempt, match, f"restore of snapshot {manifest.id} failed: {error}")


async def _restored(attempt: Attempt, match: Match, manifest: Manifest) -> Instance:
    """An engine out of a snapshot that has repeated its donor's answers, in a box of its own."""
    host = attempt.host
    for mismatch in match.allowed:
        log.warning("snapshot %s is restored all the same: %s", manifest.id, mismatch)
    if match.arrival is not None:
        # It was verified as it came; whoever pulls it keeps it from being removed, and then the box does.
        return await _restored_from(attempt, manifest, match.arrival)
    with await asyncio.to_thread(host.snapshots.use, manifest.id):
        await _verify_bytes(attempt, manifest)
        return await _restored_from(attempt, manifest)


async def _restored_from(attempt: Attempt, manifest: Manifest, arrival: Arrival | None = None) -> Instance:
    host = attempt.host
    box = await fresh_box(host, attempt.stages)
    # From here on the box says what it needs, to whoever would remove it.
    box.remember(snapshot=manifest.id)
    placement = await _placed(attempt, box, Need() if manifest.gpu is None else gpustate.need(host, manifest.gpu))
    changes = {"snapshot": manifest.id, "incarnation": box.id, "start": "restored"}
    if attempt.record.state is State.MATCHING:
        await attempt.still_wanted()
        await attempt.advance(Event.RESTORE, **changes)
    else:
        # A suspended engine was tried first, and the point of no return is passed.
        await attempt.amend(**changes)
    folder = host.snapshots.folder(manifest.id)

    async def up() -> None:
        await attempt.advance(Event.UP)

    async with prefetch.beside(manifest.files, attempt.engine.model.restore) as touched:
        instance = await proof.revived(
            *(host, box, attempt.engine, manifest, folder, attempt.stages, placement, up), touched=touched, arrival=arrival
        )
    if arrival is not None:
        with attempt.stages.timed("publish"):
            await arrival.all()
        attempt.choices = (arrival.early,)
    attempt.source = manifest
    return instance


async def _placed(attempt: Attempt, box: Box, need: Need) -> Placement | None:
    """The GPUs that a box gets, if its engine wants any; they are its own until it is discarded."""
    # Whose logs these are, should it fail; see restorer/boxes/remains.py.
    box.facts.update(model=attempt.record.model, replica=attempt.record.id)
    return await _leased(attempt.host, box, attempt.engine, attempt.stages, need)


async def _leased(host: Host, box: Box, engine: HttpEngine, stages: Stages, need: Need) -> Placement | None:
    gpu = engine.model.engine.gpu
    if gpu.count == 0:
        return None
    with stages.timed("lease GPU"):
        placement = await host.gpus.lease(
            box.id, gpu.count, need_bytes=need.bytes, wait_s=gpu.wait_s, prefer=need.prefer, only=need.only
        )
        box.remember(gpus=list(placement.uuids))
    return placement


async def _verify_bytes(attempt: Attempt, manifest: Manifest) -> None:
    """Every byte that CRIU would trust is what it was at the dump; raises SnapshotError, HostIncompatible for a mapped file."""
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


async def _cold(attempt: Attempt, match: Match, why: str) -> Instance:
    """A cold engine; captured on its way, where the policy wants a snapshot and there is none."""
    host = attempt.host
    policy, backend = host.model(attempt.record.model).snapshot, host.backend(attempt.record.model)
    box = await fresh_box(host, attempt.stages)
    placement = await _placed(attempt, box, Need())
    event = Event.START if attempt.record.state is State.MATCHING else Event.FALL_BACK
    await attempt.advance(event, incarnation=box.id, start="cold", snapshot=None, reason=why)
    with attempt.stages.timed("start engine"):
        instance, cold_start_s = await ignite(backend, box, attempt.engine, placement.indices if placement else ())
    try:
        if backend.can.sleep:
            await sleeping.vow(instance, match.profile.digest, attempt.stages)
        elif policy.create == "auto" and backend.obstacle() is None and match.manifest is None:
            async with unwinding(host, attempt.journal):
                manifest = await capture(host, instance, match.profile, cold_start_s, attempt.stages)
            log.info("snapshot %s of %s was made", manifest.id, attempt.record.model)
    except EngineDied:
        raise
    except RestorerError as error:
        # The engine serves all the same; the next start is cold too, and says why.
        what = "it will not be kept asleep" if backend.can.sleep else "no snapshot was made"
        log.warning("%s: %s: %s", attempt.record.model, what, error)
        attempt.record = attempt.record.model_copy(update={"reason": f"{why}; {what}: {error}"})
    await attempt.advance(Event.UP)
    with attempt.stages.timed("warm up"):
        async with connect(instance) as client:
            await attempt.engine.warm(client)
    return instance


async def _admit(attempt: Attempt, instance: Instance, replicas: Replicas) -> None:
    """Open traffic: one write makes the record ADMITTED and the job settled."""
    interrupted = await attempt.interrupted()
    number = attempt.journal.step("admit")
    begun = time.perf_counter()
    changes = reckoned(attempt.stages, attempt.source, attempt.engine.model.restore, attempt.host.rates, attempt.choices)
    doors, box = attempt.host.boxes.doors, instance.box
    await doors.make(box)
    admitted = attempt.moved(Event.ADMIT, address=box.address, door=doors.text(box), **changes)
    told(admitted)
    # First on this host's disk, so that a restorer that dies here finds an engine that it may or may not adopt.
    box.remember(record=admitted.model_dump(mode="json"), inner_pid=instance.inner_pid)
    await attempt.host.jobs.settle(attempt.claim, Outcome(OperationState.SUCCEEDED, interrupted), admitted)
    doors.open(box, instance.port)
    accounts.admitted(attempt.host.tally, admitted, attempt.began)
    replicas.adopt(instance, admitted)
    if admitted.start == "restored" and admitted.snapshot is not None:
        await asyncio.to_thread(attempt.host.praise, admitted.snapshot)
    attempt.detail = admitted.reason
    attempt.journal.done(number, time.perf_counter() - begun)


async def _give_up(attempt: Attempt, error: RestorerError) -> None:
    """Settle or release the job of a start that failed; everything it made is gone already."""
    host, claim = attempt.host, attempt.claim
    if isinstance(error, Cancelled):
        cancelled = attempt.moved(Event.CANCEL, reason=str(error))
        await host.jobs.settle(claim, Outcome(OperationState.CANCELLED, str(error)), cancelled)
        accounts.failed(host.tally, cancelled, error)
        return
    elsewhere = await _elsewhere(host, claim, error)
    if elsewhere or (error.verdict.cls in _PASSING and claim.attempts < host.config.restorer.max_attempts):
        log.warning("start of %s failed, to be tried again%s: %s", claim.job.replica, " elsewhere" * elsewhere, error)
        if attempt.record.state is not State.QUEUED:
            await attempt.advance(Event.LEASE_LOST, incarnation="", start=None, reason=str(error))
        await host.jobs.release(claim, 0.0 if elsewhere else _RETRY_S * claim.attempts, avoid=elsewhere)
        accounts.given_back(host.tally, attempt.record, error)
        return
    log.error("start of %s failed: %s", claim.job.replica, error)
    differs = isinstance(error, CanaryDiffers) and attempt.record.state is State.VERIFYING
    detail = f"{error}{_no_other(host, claim)}"
    ended = attempt.moved(Event.DIFFER if differs else Event.FAIL, reason=detail)
    # A move that fails leaves a replica that serves.
    failure = None if claim.job.replaces else Failure(code="restore_failed", detail=error.brief, operation=claim.job.operation)
    await host.jobs.settle(
        claim,
        Outcome(
            OperationState.FAILED,
            detail,
            EXIT_HOST if error.verdict.cls == "host" else EXIT_FAILED,
            failure=failure,
            failure_s=host.config.restorer.failure_backoff_s,
        ),
        ended,
    )
    accounts.failed(host.tally, ended, error)


def _check_named(host: Host, name: str) -> None:
    """Raises NotNamed: the model's settings bind it to other hosts."""
    if not placement.named(host.model(name), host.name):
        raise NotNamed(f"engine.hosts of {name} does not name {host.name}")


async def _elsewhere(host: Host, claim: Claim, error: RestorerError) -> bool:
    """It failed for this host's sake, and is to be tried on another one. Raises StoreUnavailable: nobody knows of others."""
    model, kind = host.model(claim.job.model), claim.job.kind
    if not claim.anywhere or claim.attempts >= host.config.restorer.max_attempts or error.verdict.cls == "cancelled":
        return False
    await host.fleet.read(host.jobs)
    return host.fleet.elsewhere(claim.job.model, model, error.verdict.cls, claim.avoid, kind)


def _no_other(host: Host, claim: Claim) -> str:
    """Why none of the other hosts could do it either, if that is so."""
    lacking = host.fleet.nobody(claim.job.model, host.model(claim.job.model), claim.job.kind) if claim.anywhere else ""
    return f"; no other host can: {lacking}" if lacking else ""


async def make_snapshot(host: Host, claim: Claim) -> None:
    """Start a donor, capture it, publish, let it go; settles the job.

    Raises:
        LeaseLost, StoreUnavailable: as for :func:`start`.
    """
    assert claim.job.kind is JobKind.SNAPSHOT
    name, work = claim.job.model, Work(host, claim)
    try:
        async with work.journaled():
            await work.bounded()
            _check_named(host, name)
            if (obstacle := host.backend(name).obstacle()) is not None:
                raise Environment(f"no snapshot can be made on this host: {obstacle}")
            if faults := adapter(name, host.model(name)).obstacles():
                raise SnapshotError("; ".join(faults))
            with work.stages.timed("match"):
                match = await asyncio.to_thread(host.match, name)
            manifest = await _captured(host, adapter(name, host.model(name)), match, work.stages)
            # The donor has done its work.
            await asyncio.shield(undo.unwind(host, work.journal))
            work.detail = f"snapshot {manifest.id}"
        log.info("snapshot %s of %s was made", manifest.id, name)
        outcome = Outcome(OperationState.SUCCEEDED, await work.interrupted(), snapshot=manifest.id)
    except (LeaseLost, StoreUnavailable):
        raise
    except RestorerError as error:
        log.error("no snapshot of %s: %s", name, error)
        if await _elsewhere(host, claim, error):
            await host.jobs.release(claim, 0.0, avoid=True)
            return
        outcome = Outcome(OperationState.FAILED, f"{error}{_no_other(host, claim)}", EXIT_FAILED)
    await host.jobs.settle(claim, outcome)


async def _captured(host: Host, engine: HttpEngine, match: Match, stages: Stages) -> Manifest:
    """A snapshot of a donor that is started for it, and ends with it."""
    box = await fresh_box(host, stages)
    placement = await _leased(host, box, engine, stages, Need())
    with stages.timed("start engine"):
        donor, cold_start_s = await ignite(host.backend(engine.name), box, engine, placement.indices if placement else ())
    return await capture(host, donor, match.profile, cold_start_s, stages, keep=False)
