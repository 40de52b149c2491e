"""From a warm donor to a published snapshot: canary, inventory, dump, rehearsal, manifest last.

The donor is left stopped from the dump until the snapshot is published or given up; whatever happens, it is thawed, so a
full disk costs a pause and no engine. Nothing is published that was not once restored and compared, unless the operator
turned the rehearsal off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from policies import reading
from policies.manifest import Exchange, GpuState, Manifest, MappedFile, Profile
from restorer import accounts, canary, gpustate, inventory, pages, prefetch
from restorer.box import Box
from restorer.criu import GHOST_LIMIT
from restorer.errors import CanaryDiffers, EngineDied, SnapshotError
from restorer.files import disk_space
from restorer.host import Host
from restorer.instance import Instance, connect
from restorer.snapshots import Staging, capture_tree
from restorer.stages import Stages

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
        with stages.timed("record canary"):
            async with connect(donor) as client:
                await donor.engine.quiesce(client)
                exchanges, canary_s = await canary.record(client, donor.engine)
                # The canary left its traces too.
                await donor.engine.quiesce(client)
        async with gpustate.asleep(host, donor, stages, keep=keep) as gpu:
            return await _dumped(host, donor, _Draft(profile, exchanges, canary_s, cold_start_s, gpu), stages)


@dataclass(frozen=True, slots=True)
class _Draft:
    """What a manifest will say that is known before the dump."""

    profile: Profile
    exchanges: tuple[Exchange, ...]
    canary_s: float
    cold_start_s: float
    gpu: GpuState | None


async def _dumped(host: Host, donor: Instance, known: _Draft, stages: Stages) -> Manifest:
    backend, box = host.backend(donor.engine.name), donor.box
    private = ("/dev/shm", str(box.mountpoint))
    with stages.timed("inspect"):
        pids, files = await _inspect(host, donor, private)
    with host.snapshots.stage() as staging:
        try:
            with stages.timed("dump") as stage:
                await backend.dump(box, donor.inner_pid, staging.images, donor.engine)
                for number, folder in enumerate(_scratch(box)):
                    await asyncio.to_thread(capture_tree, folder, staging.scratch / str(number))
                stage.bytes = await asyncio.to_thread(_size, staging.path)
            if backend.can.fill and stage.bytes >= _FILL_BYTES:
                rates = await host.speed.measured() if host.speed else None
                with stages.timed("take memory out") as stage, disk_space("moving memory aside", staging.path):
                    stage.bytes = await asyncio.to_thread(pages.take_out, staging.images, huge=reading.huge(rates).on)
            draft = _draft(host, donor, known, pids, files, private)
            if host.model(known.profile.model).snapshot.rehearse:
                with stages.timed("rehearse"):
                    draft = prefetch.noted(draft, await _rehearse(host, donor, staging, draft))
            with stages.timed("publish") as stage:
                manifest = await asyncio.to_thread(host.snapshots.commit, staging, draft)
                stage.bytes = manifest.bytes
        finally:
            await asyncio.shield(backend.thaw(box))
    return manifest


def _scratch(box: Box) -> tuple[Path, Path]:
    """The private folders as the host sees them, in the order of :attr:`Manifest.scratch`."""
    return box.root / "dev/shm", box.private


async def _inspect(host: Host, donor: Instance, private: Sequence[str]) -> tuple[tuple[int, ...], tuple[MappedFile, ...]]:
    """(pids and tids inside the box, files the donor depends on); refuses what CRIU could not dump."""
    backend, deadline = host.backend(donor.engine.name), time.monotonic() + _QUIET_S
    private = (*private, *backend.private)
    while True:
        found = await asyncio.to_thread(inventory.examine, donor.pid, private=private, ghost_limit=GHOST_LIMIT)
        fatal = [finding for finding in found if finding.severity == "fatal"]
        # Our own connections to the donor take a moment to be closed at its end.
        if not fatal or time.monotonic() > deadline or any("tcp" not in finding.code for finding in fatal):
            break
        await asyncio.sleep(0.05)
    if fatal:
        raise SnapshotError("the engine cannot be dumped as it is: " + " | ".join(map(str, fatal)))
    tree = await asyncio.to_thread(inventory.tree, donor.pid)
    paths = await asyncio.to_thread(inventory.mapped_files, donor.pid, private=private)
    return tree.inner, await asyncio.to_thread(_hashed, host, backend.located(donor.engine, paths))


def _hashed(host: Host, paths: Sequence[str]) -> tuple[MappedFile, ...]:
    files = []
    for path, found in host.stamps.sha256_all(map(Path, paths)).items():
        if isinstance(found, OSError):
            raise SnapshotError(f"the engine has {path} open, which cannot be read: {found}; a restore could not rely on it")
        files.append(MappedFile(path=str(path), bytes=path.stat().st_size, sha256=found))
    return tuple(files)


def _draft(
    host: Host, donor: Instance, known: _Draft, pids: tuple[int, ...], files: tuple[MappedFile, ...], private: tuple[str, ...]
) -> Manifest:
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
        bytes_written=0,
        gpu=known.gpu,
        canary_s=round(known.canary_s, 4),
    )


async def _rehearse(host: Host, donor: Instance, staging: Staging, draft: Manifest) -> Mapping[str, int]:
    """Restore what is staged beside the stopped donor, on the GPUs that the donor has left, and compare.

    Returns path -> bytes that the canary touched, of every file that is mapped.
    """
    box, placement, engine = await host.boxes.take(), None, donor.engine
    try:
        if draft.gpu is not None:
            placement = await host.gpus.share(draft.gpu.used)
            box.remember(gpus=list(placement.uuids))
        replica = await gpustate.revive(host, box, engine, draft, staging.path, Stages(), placement)
        async with connect(replica) as client:
            verdict = await canary.check(client, engine, draft.canary)
        touched = await asyncio.to_thread(prefetch.touched, replica.pid)
        await gpustate.settle(replica)
    except EngineDied as error:
        raise SnapshotError(f"the rehearsal's engine died: {error}") from error
    finally:
        await asyncio.shield(host.discard(box))
    if not verdict.equal:
        raise CanaryDiffers(f"the rehearsal did not repeat the donor's answers: {verdict.difference}; nothing was published")
    return touched


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
