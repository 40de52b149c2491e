"""Snapshots for a start that has none: the newest that fits out of the remote that the configuration names.

Asked only when nothing on this host fits. Whatever goes wrong there, the start goes on as it would have without: the reason is
logged, and is part of why it was cold. What has come by then stays for the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from policies import compat
from policies.compat import Mismatch
from policies.manifest import Manifest
from policies.storage import Storage
from restorer.errors import Environment, HostIncompatible, RemoteFailed, SnapshotError
from restorer.machine.host import Host, Match, log
from restorer.records.stages import Stages, Timed
from restorer.remotes import transfer
from restorer.remotes.catalog import Catalog, Copy, chosen
from restorer.remotes.transfer import Moved
from restorer.storage.integrity import verify_files
from restorer.storage.partial import Busy

Wanted = Callable[[], Awaitable[None]]
"""Raises when nobody waits any more."""
_LOOK_AT = 32
"""Snapshots of a model, the ones pushed last, whose manifests are read."""
_ASK_S = 2.0
_BUSY_S = 0.5


async def supplied(host: Host, name: str, match: Match, stages: Stages, wanted: Wanted) -> Match:
    """What serves a model here, after the remote was asked for it where nothing of this host's does.

    Raises:
        whatever ``wanted`` raises.
    """
    storage = host.config.storage
    if match.manifest is not None or storage.pull is None or host.backend(name).obstacle() is not None:
        return match
    with stages.timed("pull") as stage:
        stage.tier = "network"
        try:
            async with asyncio.timeout(storage.pull_timeout_s):
                why = await _while(wanted, _pulled(host, storage, name, match, stage))
        except TimeoutError:
            why = (
                f"the pull did not end within {storage.pull_timeout_s:g} s (storage.pull_timeout_s); the next one goes on with it"
            )
        except (RemoteFailed, SnapshotError, HostIncompatible, Environment) as error:
            why = str(error)
    if why:
        log.warning("nothing was pulled for %s: %s", name, why)
        return dataclasses.replace(match, remote=why)
    return await asyncio.to_thread(host.match, name)


async def copied(host: Host, catalog: Catalog, manifest: Manifest, copy: Copy, report: transfer.Report) -> Moved:
    """A snapshot of a remote, on this host; by whoever gets it here first. Raises as :func:`restorer.remotes.transfer.pull`."""
    while True:
        if any(one.id == manifest.id for one in await asyncio.to_thread(host.snapshots.list)):
            return Moved()
        with contextlib.suppress(Busy):
            moved = await transfer.pull(
                catalog,
                host.snapshots,
                host.weights,
                manifest,
                copy,
                keys=host.judge.keys,
                reserve_bytes=host.config.storage.reserve_bytes,
                report=report,
            )
            noted(host, "pull", moved)
            return moved
        await asyncio.sleep(_BUSY_S)


def noted(host: Host, direction: str, moved: Moved) -> None:
    """Count what passed the network."""
    host.tally.inc("remote_bytes", direction, by=moved.bytes_moved)
    host.tally.observe("remote_seconds", direction, seconds=moved.seconds)


async def _pulled(host: Host, storage: Storage, name: str, match: Match, stage: Timed) -> str:
    """Pull the newest that fits; why that was not done, empty when it was."""
    catalog = await asyncio.to_thread(chosen, storage, storage.pull)
    found, refused = await _fitting(host, catalog, name, match)
    if found is None:
        reasons = [f"snapshot {id} does not fit: " + " | ".join(map(str, why)) for id, why in refused.items()]
        return f"{catalog.what} has no snapshot of this model that fits" + "".join(f"; {reason}" for reason in reasons)
    manifest, copy = found

    def report(done: int, _total: int) -> None:
        stage.bytes = done

    log.info("snapshot %s of %s is pulled from %s", manifest.id, name, catalog.what)
    try:
        async with asyncio.TaskGroup() as group:
            # The files that it needs besides are hashed meanwhile; there is no use for it if they are others here.
            group.create_task(_files(host, manifest))
            moving = group.create_task(copied(host, catalog, manifest, copy, report))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    stage.bytes = moving.result().bytes_moved
    return ""


async def _fitting(
    host: Host, catalog: Catalog, name: str, match: Match
) -> tuple[tuple[Manifest, Copy] | None, dict[str, list[Mismatch]]]:
    here = {*match.quarantined, *match.held, *match.refused}
    copies = [copy for copy in await catalog.list(name) if copy.id not in here][:_LOOK_AT]
    found: dict[str, tuple[Manifest, Copy]] = {}
    for copy in copies:
        try:
            found[copy.id] = await catalog.manifest(copy), copy
        except SnapshotError as error:
            log.warning("a copy is damaged: %s", error)
    manifests = [manifest for manifest, _ in found.values()]
    facts = await asyncio.to_thread(host.facts_now)
    best, refused = compat.newest_fit(manifests, match.profile, facts, host.config.matching)
    return None if best is None else found[best.id], refused


async def _files(host: Host, manifest: Manifest) -> None:
    changed = await asyncio.to_thread(verify_files, manifest, host.stamps)
    if changed:
        remedy = "bring the donor's version to this host, or make a snapshot here"
        raise HostIncompatible([Mismatch(f"file {one.path}", one.expected, one.found, remedy) for one in changed])


async def _while(wanted: Wanted, work: Coroutine[Any, Any, str]) -> str:
    """The result of ``work``, which is ended when it is not wanted any more."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_ASK_S))[0]:
            await wanted()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
