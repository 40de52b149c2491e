"""From a warm donor to a published snapshot: canary, inventory, dump, rehearsal, manifest last.

The donor is left stopped from the dump until the snapshot is published or given up; whatever happens, it is thawed, so a
full disk costs a pause and no engine. Nothing is published that was not once restored and compared, unless the operator
turned the rehearsal off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from policies import reading
from policies.journal import Undo
from policies.manifest import Exchange, GpuState, Manifest, MappedFile, Profile
from restorer.adapters import canary, warmup
from restorer.boxes.box import Box
from restorer.checkpoint import donor as facts
from restorer.checkpoint import pages, prefetch, timers
from restorer.checkpoint.criu import GHOST_LIMIT
from restorer.checkpoint.donor import Donor
from restorer.errors import CanaryDiffers, EngineDied, SnapshotError
from restorer.machine.host import Host
from restorer.operations import accounts, gpustate, proof
from restorer.operations.instance import Instance, connect
from restorer.operations.undo import fresh_box
from restorer.procfs import inventory
from restorer.records.stages import Stages
from restorer.storage.snapshots import Staging, capture_tree
from restorer.system.elf import build_id
from restorer.system.files import disk_space

_QUIET_S = 10.0
_FILL_BYTES = 64 << 20
"""Dumps that are smaller are left to CRIU whole; from here on, threads that fill memory are worth it."""


async def capture(
    host: Host, donor: Instance, profile: Profile, cold_start_s: float, stages: Stages, *, keep: bool = True
) -> Manifest:
    """Snapshot ``donor``, which is warm and serves nobody. It runs on afterwards, whatever happens.

    Args:
        keep: it is to serve afterwards. Otherwise its GPU state may stay where it is: it is about to be ended.

    Raises:
        SnapshotError: the donor is not stable, cannot be dumped as it is, or did not survive its rehearsal.
        Environment: the disk is full. ToolFailed, ToolHung: CRIU failed. EngineDied: the donor cannot serve any more.
    """
    with accounts.captured(host.tally, profile.model):
        if faults := donor.engine.obstacles():
            raise SnapshotError("; ".join(faults))
        with stages.timed("warm up shapes"):
            async with connect(donor) as client:
                await warmup.run(client, donor.engine)
        with stages.timed("record canary"):
            async with connect(donor) as client:
                await donor.engine.quiesce(client)
                exchanges, canary_s = await canary.record(client, donor.engine)
                version = await facts.version(client, profile.engine)
                # The canary left its traces too.
                await donor.engine.quiesce(client)
        async with gpustate.asleep(host, donor, stages, keep=keep) as gpu:
            return await _dumped(host, donor, _Draft(profile, exchanges, canary_s, cold_start_s, gpu, version), stages)


@dataclass(frozen=True, slots=True)
class _Draft:
    """What a manifest will say that is known before the dump."""

    profile: Profile
    exchanges: tuple[Exchange, ...]
    canary_s: float
    cold_start_s: float
    gpu: GpuState | None
    version: str | None


async def _dumped(host: Host, donor: Instance, known: _Draft, stages: Stages) -> Manifest:
    backend, box = host.backend(donor.engine.name), donor.box
    private = ("/dev/shm", str(box.mountpoint))
    with stages.timed("inspect"):
        pids, files, found = await _inspect(host, donor, known.profile, private)
    name = Staging.fresh_name()
    with stages.timed("stage", Undo(what="staging", name=name)):
        await stages.durable()
        staging = await asyncio.to_thread(host.snapshots.stage, name)
    with staging:
        try:
            with stages.timed("dump", Undo(what="thaw", name=box.id)) as stage:
                await backend.dump(box, donor.inner_pid, staging.images, donor.engine)
                await asyncio.to_thread(timers.rearm, staging.images)
                stage.bytes = dumped = await asyncio.to_thread(_size, staging.path)
            with stages.timed("copy scratch") as stage:
                stage.bytes = 0
                for number, folder in enumerate(_scratch(box)):
                    stage.bytes += await asyncio.to_thread(capture_tree, folder, staging.scratch / str(number))
            dug = 0
            if backend.can.fill and dumped >= _FILL_BYTES:
                rates = await host.speed.measured() if host.speed else None
                with stages.timed("take memory out") as stage, disk_space("moving memory aside", staging.path):
                    stage.bytes, dug = await asyncio.to_thread(pages.take_out, staging.images, huge=reading.huge(rates).on)
            draft = _draft(host, donor, known, pids, files, private, found, dug)
            if host.model(known.profile.model).snapshot.rehearse:
                with stages.timed("rehearse"):
                    parts = stages.parts("rehearse")
                    draft = await _rehearse(host, donor, staging, draft, parts)
            with stages.timed("publish") as stage:
                manifest = await asyncio.to_thread(host.snapshots.commit, staging, draft)
                stage.bytes = manifest.bytes
        finally:
            await asyncio.shield(asyncio.to_thread(box.let_run))
    return manifest


def _scratch(box: Box) -> tuple[Path, Path]:
    """The private folders as the host sees them, in the order of :attr:`Manifest.scratch`."""
    return box.root / "dev/shm", box.private


async def _inspect(
    host: Host, donor: Instance, profile: Profile, private: Sequence[str]
) -> tuple[tuple[int, ...], tuple[MappedFile, ...], Donor]:
    """(pids and tids inside the box, files the donor depends on, what else there is to say of it); refuses what CRIU could not
    dump, and what the operator wants no snapshot of."""
    backend, deadline = host.backend(donor.engine.name), time.monotonic() + _QUIET_S
    private = (*private, *backend.private)
    while True:
        found = await asyncio.to_thread(
            inventory.examine, donor.pid, private=private, ghost_limit=GHOST_LIMIT, contained=backend.can.contain
        )
        fatal = [finding for finding in found if finding.severity == "fatal"]
        # Our own connections to the donor take a moment to be closed at its end.
        if not fatal or time.monotonic() > deadline or any("tcp" not in finding.code for finding in fatal):
            break
        await asyncio.sleep(0.05)
    if fatal:
        raise SnapshotError("the engine cannot be dumped as it is: " + " | ".join(map(str, fatal)))
    tree = await asyncio.to_thread(inventory.tree, donor.pid)
    paths = await asyncio.to_thread(inventory.mapped_files, donor.pid, private=private)
    shm = _scratch(donor.box)[0]
    seen = await asyncio.to_thread(facts.look, tree.pids, shm, profile, host.config.trust)
    return tree.inner, await asyncio.to_thread(_hashed, host, backend.located(donor.engine, paths)), seen


def _hashed(host: Host, paths: Sequence[str]) -> tuple[MappedFile, ...]:
    files = []
    for path, found in host.stamps.sha256_all(map(Path, paths)).items():
        if isinstance(found, OSError):
            raise SnapshotError(f"the engine has {path} open, which cannot be read: {found}; a restore could not rely on it")
        files.append(MappedFile(path=str(path), bytes=path.stat().st_size, sha256=found, build_id=build_id(path)))
    return tuple(files)


def _draft(
    host: Host,
    donor: Instance,
    known: _Draft,
    pids: tuple[int, ...],
    files: tuple[MappedFile, ...],
    private: tuple[str, ...],
    found: Donor,
    dug: int,
) -> Manifest:
    """Args: dug: bytes that were written and are holes by now."""
    return Manifest(
        created_ms=time.time_ns() // 1_000_000,
        profile=known.profile,
        host=host.facts,
        objects=(),
        files=files,
        canary=known.exchanges,
        root_pid=donor.inner_pid,
        pids=pids,
        scratch=private,
        criu_options=donor.engine.restore_options,
        cold_start_s=round(known.cold_start_s, 3),
        bytes=0,
        bytes_written=dug,
        gpu=known.gpu,
        needs=found.needs,
        secrets=found.secrets,
        engine_version=known.version,
        model_revision=found.model_revision,
        canary_s=round(known.canary_s, 4),
    )


async def _rehearse(host: Host, donor: Instance, staging: Staging, draft: Manifest, stages: Stages) -> Manifest:
    """Restore what is staged beside the stopped donor, on the GPUs that the donor has left, and compare.

    Returns the draft with what was measured: the canary's time, and what it touched of mapped files.
    """
    box = await fresh_box(host, stages)
    try:
        placement = None
        if draft.gpu is not None:
            placement = await host.gpus.share(draft.gpu.used)
            box.remember(gpus=list(placement.uuids))
        replica = await proof.revived(host, box, donor.engine, draft, staging.path, stages, placement, _nobody_is_told)
        touched = await asyncio.to_thread(prefetch.touched, replica.pid)
        await gpustate.settle(replica)
    except EngineDied as error:
        raise SnapshotError(f"the rehearsal's engine died: {error}") from error
    except CanaryDiffers as error:
        raise CanaryDiffers(f"rehearsal: {error}; nothing was published") from error
    finally:
        await asyncio.shield(host.discard(box))
    known_s = [stage.seconds for stage in stages.done if stage.name.endswith("canary")]
    return prefetch.noted(draft, touched).model_copy(
        update={"canary_s": min(filter(None, (draft.canary_s, *known_s)), default=None)}
    )


async def _nobody_is_told() -> None:
    """A rehearsal has no record."""


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
