"""Removes what :mod:`policies.retention` says may go, and the weights that nothing names then.

Mark and sweep, one snapshot at a time and each under its own lock: what somebody begins to use between the look and the removal
stays. A crash in between leaves whole snapshots, and at most one folder without a manifest, which the next sweep takes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from policies.manifest import Manifest
from policies.retention import Kept, Removal, Retention, plan
from restorer.errors import Environment, InUse, RestorerError, SnapshotError
from restorer.machine.host import Host, log
from restorer.storage import holds
from restorer.storage.integrity import MANIFEST
from restorer.storage.sharing import Sharer
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.weights import WeightsStore

_DEBRIS_S = 3600.0
_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Collected:
    """What one round did, or would have done."""

    removed: tuple[Removal, ...]
    kept: Mapping[str, str]
    """Snapshots that were to go and stay: id -> who uses them, or what went wrong."""
    debris: tuple[str, ...] = ()
    """What had been left half-made or half-removed."""
    weights: tuple[str, ...] = ()
    """Weights sets that no snapshot names any more."""


async def run(host: Host) -> None:
    """A round each minute, for as long as it is not cancelled; beside all else, since large files take their time to go."""
    sharer = await asyncio.to_thread(Sharer, host.snapshots)
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            _report(await asyncio.to_thread(collect_on, host))
            for id, size in (await asyncio.to_thread(sharer.round)).items():
                log.info("snapshot %s shares %d bytes on the disk with others", id, size)
        except (OSError, RestorerError) as error:
            log.warning("snapshots could not be looked through for what may go: %s", error)


def collect_on(host: Host, *, dry: bool = False) -> Collected:
    """One round of :func:`collect` as a host's configuration says. Blocks."""
    usable = {summary.id: summary.fits for summary in host.summaries()}
    users = holds.users_of(Path(host.config.run_dir))
    return collect(host.snapshots, host.weights, host.config.retention, usable=usable, users=users, dry=dry)


def _report(done: Collected) -> None:
    for removal in done.removed:
        log.info("snapshot %s was removed (%s), %d bytes", removal.id, removal.reason, removal.bytes)
    for name in (*done.debris, *done.weights):
        log.info("%s was removed: no snapshot is made of it, or needs it", name)
    for id, why in done.kept.items():
        log.warning("snapshot %s was to go and stays: %s", id, why)


def survey(store: SnapshotStore, usable: Mapping[str, bool], users: Mapping[str, str]) -> list[Kept]:
    """Every snapshot as far as its keeping is concerned.

    Args:
        usable: by id; what is not named is not usable.
        users: what runs from a snapshot, by its id.
    """
    found = []
    for manifest in store.list():
        folder = store.folder(manifest.id)
        try:
            since_ms = (folder / MANIFEST).stat().st_mtime_ns // 1_000_000
            in_use = manifest.id in users or holds.is_held(folder)
        except (OSError, Environment):
            continue  # removed just now
        found.append(
            Kept(
                id=manifest.id,
                model=manifest.profile.model,
                profile=manifest.profile.digest,
                created_ms=manifest.created_ms,
                since_ms=since_ms,
                bytes=manifest.bytes,
                usable=usable.get(manifest.id, False),
                quarantined=store.verdicts.standing(manifest.id).quarantined is not None,
                in_use=in_use,
                weights=_weights(manifest),
            )
        )
    return found


def collect(
    store: SnapshotStore,
    weights: WeightsStore,
    rules: Retention,
    *,
    usable: Mapping[str, bool],
    users: Mapping[str, str],
    dry: bool = False,
) -> Collected:
    """One round. Blocks.

    Args:
        dry: remove nothing, and say what would go.
    """
    planned = plan(survey(store, usable, users), rules, time.time_ns() // 1_000_000)
    if dry:
        return Collected(tuple(planned), {})
    removed, kept = [], {}
    for removal in planned:
        try:
            store.remove(removal.id)
        except (InUse, SnapshotError, Environment, OSError) as error:
            kept[removal.id] = str(error)
        else:
            removed.append(removal)
    return Collected(
        tuple(removed), kept, tuple(store.sweep(older_than_s=_DEBRIS_S)), tuple(sweep_weights(store, weights, rules.grace_s))
    )


def sweep_weights(store: SnapshotStore, weights: WeightsStore, older_than_s: float) -> Sequence[str]:
    """Remove weights sets that no snapshot names; none where a manifest cannot be read, since it may name any of them."""
    found = store.list()
    if len(found) < sum(1 for path in store.root.iterdir() if os.path.lexists(path / MANIFEST)):
        return ()
    return weights.sweep({digest for manifest in found for digest in _weights(manifest)}, older_than_s=older_than_s)


def _weights(manifest: Manifest) -> dict[str, int]:
    return {one.digest: one.bytes for one in manifest.gpu.weights} if manifest.gpu else {}
