"""Snapshots for a start that has none: the newest that fits out of the remote that the configuration names.

Asked only when nothing on this host fits. Whatever goes wrong there, the start goes on as it would have without: the reason is
logged, and is part of why it was cold. What has come by then stays for the next start. The start need not wait for all of it:
:mod:`policies.arrival` says when a restore may begin beside the rest of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from policies import compat, floor
from policies.arrival import begin
from policies.compat import Mismatch
from policies.manifest import Manifest
from policies.reading import Choice
from policies.storage import Storage
from restorer.errors import Environment, HostIncompatible, RemoteFailed, SnapshotError
from restorer.machine.host import Host, Match, log
from restorer.records.stages import Stages, Timed
from restorer.remotes.catalog import Catalog, Copy, chosen
from restorer.remotes.pulling import pull
from restorer.remotes.transfer import Moved, Report
from restorer.storage.arrival import Arrival
from restorer.storage.integrity import verify_files
from restorer.storage.partial import Busy

Wanted = Callable[[], Awaitable[None]]
"""Raises when nobody waits any more."""
_LOOK_AT = 32
"""Snapshots of a model, the ones pushed last, whose manifests are read."""
_ASK_S = 2.0
_LOOK_S = 0.05
"""How soon it is seen that what still comes will be here soon enough."""
_BUSY_S = 0.5


@contextlib.asynccontextmanager
async def supplied(host: Host, name: str, match: Match, stages: Stages, wanted: Wanted) -> AsyncIterator[Match]:
    """What serves a model here, after the remote was asked for it where nothing of this host's does.

    Yields a match whose ``arrival`` is set when weights of its snapshot still come; they do so as long as the block lasts.

    Raises:
        whatever ``wanted`` raises.
    """
    storage = host.config.storage
    if match.manifest is not None or storage.pull is None or host.backend(name).obstacle() is not None:
        yield match
        return
    arrival = Arrival()
    try:
        with stages.timed("pull") as stage:
            stage.tier = "network"
            task = arrival.run(_pulled(host, storage, name, match, stage, arrival), storage.pull_timeout_s)
            why, early = await _result(host, arrival, task, wanted)
        if early is not None:
            log.info("%s is restored while the rest of its weights comes: %s", name, early.why)
            yield await asyncio.to_thread(_arriving, host, match, arrival, early)
        elif why:
            log.warning("nothing was pulled for %s: %s", name, why)
            yield dataclasses.replace(match, remote=why)
        else:
            yield await asyncio.to_thread(host.match, name)
    finally:
        await arrival.end()


async def _result(host: Host, arrival: Arrival, task: asyncio.Task[str], wanted: Wanted) -> tuple[str, Choice | None]:
    """(why nothing was pulled, empty if it was; the choice not to wait for all of it, if that was made)."""
    storage = host.config.storage
    try:
        early = await _early(host, arrival, task, wanted)
        return ("" if early else task.result()), early
    except TimeoutError:
        limit = f"{storage.pull_timeout_s:g} s (storage.pull_timeout_s)"
        return f"the pull did not end within {limit}; the next one goes on with it", None
    except (RemoteFailed, SnapshotError, HostIncompatible, Environment) as error:
        return str(error), None


async def _early(host: Host, arrival: Arrival, task: asyncio.Task[str], wanted: Wanted) -> Choice | None:
    """Wait until the pull has ended; or until a restore may begin beside it, and the choice to do so."""
    asked, lead_s = time.monotonic(), None
    looked = False
    while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
        if arrival.usable:
            if not looked:
                looked, lead_s = True, await asyncio.to_thread(_lead_s, host, arrival)
            if (choice := begin(arrival.rest, lead_s=lead_s)).on:
                return choice
        if time.monotonic() - asked > _ASK_S:
            asked = time.monotonic()
            await wanted()
    return None


def _lead_s(host: Host, arrival: Arrival) -> float | None:
    """What a restore of it takes before it wants weights; None: not known, or it is not to be restored at all. Blocks."""
    manifest, rates = arrival.arriving, host.rates
    standing = host.snapshots.verdicts.standing(manifest.id)
    if rates is None or standing.quarantined is not None or standing.held is not None:
        return None
    return None if host.distrust(manifest, arrival.folder) else floor.lead_s(manifest, rates)


def _arriving(host: Host, match: Match, arrival: Arrival, early: Choice) -> Match:
    """The match of a snapshot that still comes. Blocks."""
    manifest = arrival.arriving
    arrival.early = f"it was restored while the last of its weights came: {early.why}"
    return dataclasses.replace(
        match, manifest=manifest, allowed=host.allowed(manifest, host.facts_now(), arrival.folder), arrival=arrival
    )


async def copied(
    host: Host, catalog: Catalog, manifest: Manifest, copy: Copy, report: Report, arrival: Arrival | None = None
) -> Moved:
    """A snapshot of a remote, on this host; by whoever gets it here first. As :func:`restorer.remotes.pulling.pull`."""
    while True:
        if any(one.id == manifest.id for one in await asyncio.to_thread(host.snapshots.list)):
            return Moved()
        with contextlib.suppress(Busy):
            moved = await pull(
                catalog,
                host.snapshots,
                host.weights,
                manifest,
                copy,
                keys=host.judge.keys,
                reserve_bytes=host.config.storage.reserve_bytes,
                report=report,
                arrival=arrival,
            )
            noted(host, "pull", moved)
            return moved
        await asyncio.sleep(_BUSY_S)


def noted(host: Host, direction: str, moved: Moved) -> None:
    """Count what passed the network."""
    host.tally.inc("remote_bytes", direction, by=moved.bytes_moved)
    host.tally.observe("remote_seconds", direction, seconds=moved.seconds)


async def _pulled(host: Host, storage: Storage, name: str, match: Match, stage: Timed, arrival: Arrival) -> str:
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
            group.create_task(_files(host, manifest, arrival))
            moving = group.create_task(copied(host, catalog, manifest, copy, report, arrival))
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


async def _files(host: Host, manifest: Manifest, arrival: Arrival) -> None:
    changed = await asyncio.to_thread(verify_files, manifest, host.stamps)
    if changed:
        remedy = "bring the donor's version to this host, or make a snapshot here"
        raise HostIncompatible([Mismatch(f"file {one.path}", one.expected, one.found, remedy) for one in changed])
    arrival.fits = True
