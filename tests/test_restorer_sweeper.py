"""Copies are removed from a remote, and what no copy is made of is swept: never what somebody needs, whoever pushes meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from pathlib import Path

import pytest
from conftest import eventually
from places import Place
from s3_server import S3

from policies.manifest import Allocation, GpuState, Manifest, WeightsPart
from policies.retention import RemoteRetention
from policies.storage import Remote
from restorer.errors import InUse, RemoteFailed
from restorer.remotes import leases, pulling, sweeper, transfer
from restorer.remotes.catalog import Catalog, open_catalog

NO_GRACE = RemoteRetention(grace_s=0)
GRACE = RemoteRetention(grace_s=3600)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "remote").mkdir()
    return tmp_path / "remote"


@pytest.fixture
def catalog(folder: Path) -> Catalog:
    """A remote that is a folder, so that what lies in it can be made old."""
    return open_catalog("copies", Remote(url=f"file://{folder}"))


async def objects(catalog: Catalog) -> set[str]:
    """What there is besides the mark of the remote."""
    found = set()
    for prefix in ("chunks", "snapshots", "weights", "leases"):
        found |= {one.path async for one in catalog.remote.list(prefix)}
    return found


def aged(folder: Path, *parts: str, by_s: float = 86400.0) -> None:
    """Make what lies under these parts of a folder older."""
    for part in parts or ("",):
        for path in (folder / part).rglob("*"):
            if path.is_file():
                facts = path.stat()
                os.utime(path, (facts.st_atime, facts.st_mtime - by_s))


async def test_what_only_a_removed_copy_was_made_of_goes_and_all_else_stays(
    any_remote: Remote, here: Place, there: Place
) -> None:
    catalog = open_catalog("copies", any_remote)
    first, second = here.made(), here.made(shift=300, created_ms=2)
    await here.push(catalog, first)
    alone = await objects(catalog)
    await here.push(catalog, second)
    both = await objects(catalog)
    assert (await sweeper.collect(catalog, NO_GRACE)).objects == 0
    assert await objects(catalog) == both
    await catalog.withdraw(await catalog.find(second.id))
    assert [copy.id for copy in await catalog.list()] == [first.id]
    done = await sweeper.collect(catalog, NO_GRACE)
    assert done.left == ""
    assert done.objects == len(both - alone)
    assert await objects(catalog) == alone
    assert (await there.pull(catalog, first.id)).chunks_moved > 0
    await here.push(catalog, second)
    assert (await there.pull(catalog, second.id)).chunks_moved > 0


async def test_who_pulls_what_is_removed_meanwhile_can_end(any_remote: Remote, here: Place, there: Place) -> None:
    catalog, manifest = open_catalog("copies", any_remote), here.made()
    await here.push(catalog, manifest)
    copy = await catalog.find(manifest.id)
    await catalog.withdraw(copy)
    assert (await sweeper.collect(catalog, GRACE)).objects == 0
    await pulling.pull(catalog, there.snapshots, there.weights, manifest, copy)
    assert there.snapshots.load(manifest.id) == manifest


async def test_what_a_removal_left_goes_when_its_grace_is_over(catalog: Catalog, folder: Path, here: Place) -> None:
    manifest = here.made()
    await here.push(catalog, manifest)
    aged(folder)
    await catalog.withdraw(await catalog.find(manifest.id))
    assert (await sweeper.collect(catalog, GRACE)).objects == 0, "the grace begins with the removal, not with the push"
    aged(folder)
    done = await sweeper.collect(catalog, GRACE)
    assert done.bytes > 8 << 20
    assert await objects(catalog) == set()


async def test_what_was_half_pushed_stays_for_a_while(catalog: Catalog, folder: Path, here: Place) -> None:
    manifest = here.made()
    await here.push(catalog, manifest)
    (folder / (await catalog.find(manifest.id)).folder / "manifest").unlink()
    before = await objects(catalog)
    assert (await sweeper.collect(catalog, GRACE)).objects == 0
    assert await objects(catalog) == before
    aged(folder)
    assert (await sweeper.collect(catalog, GRACE)).objects == len(before)
    assert await objects(catalog) == set()


async def test_retention_says_which_copies_go(catalog: Catalog, folder: Path, here: Place) -> None:
    made = [here.made(created_ms=n) for n in (1, 2, 3)]
    for manifest in made:
        await here.push(catalog, manifest)
    rules = RemoteRetention(keep_last=2, grace_s=3600)
    assert (await sweeper.collect(catalog, rules)).removed == (), "none that came a moment ago"
    aged(folder)
    for dry in (True, False):
        done = await sweeper.collect(catalog, rules, dry=dry)
        assert [one.id for one in done.removed] == [made[0].id]
        assert "retention.keep_last" in done.removed[0].reason
        left = made if dry else made[1:]
        assert {copy.id for copy in await catalog.list()} == {manifest.id for manifest in left}
    everything = RemoteRetention(max_bytes=0, grace_s=3600)
    assert [one.id for one in (await sweeper.collect(catalog, everything)).removed] == [made[1].id], "the newest is spared"


async def test_a_dry_run_changes_nothing_and_says_all(any_remote: Remote, here: Place) -> None:
    catalog, manifest = open_catalog("copies", any_remote), here.made()
    await here.push(catalog, manifest)
    await catalog.withdraw(await catalog.find(manifest.id))
    before = await objects(catalog)
    dry = await sweeper.collect(catalog, NO_GRACE, dry=True)
    assert await objects(catalog) == before
    assert dry.objects == len(before)
    done = await sweeper.collect(catalog, NO_GRACE)
    assert (done.objects, done.bytes) == (dry.objects, dry.bytes)
    assert await objects(catalog) == set()


async def test_weights_that_no_copy_names_go_with_their_chunks(catalog: Catalog, here: Place, there: Place) -> None:
    manifests = []
    for number in (1, 2):
        staging, data = here.weights.stage(), random.Random(number).randbytes(5 << 20)
        (staging / "part-00000").write_bytes(data)
        part = WeightsPart(name="part-00000", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        weights = here.weights.commit(staging, [part], [Allocation(bytes=len(data), fingerprint="ab")])
        state = GpuState(pids=(1,), uuids=("GPU-1",), used=("GPU-1",), state_bytes=1, awake_bytes=1, weights=(weights,))
        manifests.append(here.made(pages=1, created_ms=number, gpu=state))
        await here.push(catalog, manifests[-1])
    await catalog.withdraw(await catalog.find(manifests[0].id))
    assert (await sweeper.collect(catalog, GRACE)).objects == 0, "who pulls it needs them too"
    done = await sweeper.collect(catalog, NO_GRACE)
    assert done.bytes > 5 << 20
    assert len([path for path in await objects(catalog) if path.endswith("/index")]) == 1
    await there.pull(catalog, manifests[1].id)
    assert list(there.weights.verify(there.weights.sets(), full=True)) == []


@pytest.mark.parametrize("what", ["manifest", "chunks"])
async def test_nothing_is_swept_while_it_is_not_known_what_is_named(
    catalog: Catalog, folder: Path, here: Place, what: str
) -> None:
    first, second = here.made(), here.made(seed=7, created_ms=2)
    for manifest in (first, second):
        await here.push(catalog, manifest)
    await catalog.withdraw(await catalog.find(second.id))
    damaged = folder / (await catalog.find(first.id)).folder / what
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = await objects(catalog)
    done = await sweeper.collect(catalog, NO_GRACE)
    assert done.objects == 0
    assert first.id in done.left
    assert await objects(catalog) == before
    await catalog.withdraw(await catalog.find(first.id))
    assert (await sweeper.collect(catalog, NO_GRACE)).left == "", "a damaged one can be removed"


# ---------------------------------------------------------------- pushes and sweeps at once


async def test_while_somebody_pushes_nothing_is_swept(any_remote: Remote, here: Place) -> None:
    """What a push found there stays until its manifest names it, though nothing named it when it looked."""
    catalog, other = open_catalog("copies", any_remote), open_catalog("copies", any_remote)
    first, second = here.made(), here.made(shift=300, created_ms=2)
    await here.push(catalog, first)
    await catalog.withdraw(await catalog.find(first.id))
    before = await objects(catalog)
    async with leases.pushing(other, "pushes something"):
        done = await sweeper.collect(catalog, NO_GRACE)
        assert done.objects == 0
        assert "which pushes something" in done.left
        assert {path for path in await objects(catalog) if not path.startswith("leases/")} == before
    pushed = await here.push(other, second)
    assert pushed.bytes_reused > 0.7 * pushed.bytes
    assert (await sweeper.collect(catalog, NO_GRACE)).left == ""
    assert not [path for path in await objects(catalog) if path.startswith("leases/")]


async def test_a_sweep_ends_when_somebody_begins_to_push(
    catalog: Catalog, folder: Path, here: Place, there: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push waits, asks for chunks when the sweep has ended, and so finds those that are gone to be missing."""
    monkeypatch.setattr(sweeper, "_BATCH", 1)
    other = open_catalog("copies", catalog.remote.settings)
    manifest = here.made()
    await here.push(catalog, manifest)
    await catalog.withdraw(await catalog.find(manifest.id))
    removals, real = 0, catalog.remote.remove
    pushing: asyncio.Task[transfer.Moved] | None = None

    async def remove(path: str) -> None:
        nonlocal removals, pushing
        if path.startswith("chunks/"):
            removals += 1
            if removals == 2:
                pushing = asyncio.create_task(here.push(other, manifest))
                await eventually(lambda: list(folder.glob("leases/push-*")), what="the push to say that it is there")
        await real(path)

    monkeypatch.setattr(catalog.remote, "remove", remove)
    done = await sweeper.collect(catalog, NO_GRACE)
    assert removals == 2
    assert f"which pushes {manifest.id}" in done.left
    assert pushing is not None
    moved = await pushing
    assert moved.chunks_moved == 2, "what was swept is pushed again, and the rest was there"
    await there.pull(catalog, manifest.id)
    assert list(there.snapshots.verify(manifest.id, full=True)) == []


@pytest.mark.parametrize("order", range(3))
async def test_whatever_the_order_of_a_push_and_a_sweep_the_copy_is_whole(
    s3: S3, tmp_path: Path, here: Place, there: Place, order: int
) -> None:
    """Each request of both is delayed by chance."""
    settings, chance = s3.remote(tmp_path.name), random.Random(order)
    first, second = here.made(pages=4), here.made(pages=4, shift=30, created_ms=2)
    catalogs = [open_catalog("copies", settings) for _ in range(2)]
    await here.push(catalogs[0], first)
    await catalogs[0].withdraw(await catalogs[0].find(first.id))
    for catalog in catalogs:
        _slow(catalog, chance)
    _, done = await asyncio.gather(here.push(catalogs[0], second), sweeper.collect(catalogs[1], NO_GRACE))
    await there.pull(open_catalog("copies", settings), second.id)
    assert list(there.snapshots.verify(second.id, full=True)) == [], done
    await sweeper.collect(open_catalog("copies", settings), NO_GRACE)
    await Place(tmp_path / "third").pull(open_catalog("copies", settings), second.id)


def _slow(catalog: Catalog, chance: random.Random) -> None:
    real = catalog.remote._tried

    async def tried(doing: str, once: object, **more: object) -> object:
        await asyncio.sleep(chance.random() * 0.02)
        return await real(doing, once, **more)  # type: ignore[arg-type]

    catalog.remote._tried = tried  # type: ignore[method-assign, assignment]


async def test_a_lease_of_somebody_who_died_runs_out(
    catalog: Catalog, folder: Path, here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = here.made(pages=1)
    await catalog.check(claim=True)
    for kind in ("push", "sweep"):
        dead = leases.Lease(catalog, kind, "died")  # type: ignore[arg-type]
        await dead.renew()
    assert "which died" in (await sweeper.collect(catalog, NO_GRACE)).left
    monkeypatch.setattr(leases, "_WAIT_S", 0.0)
    monkeypatch.setattr(leases, "_POLL_S", 0.01)
    with pytest.raises(InUse, match=r"is being swept by .*, which died; push again"):
        await here.push(catalog, manifest)
    aged(folder, "leases", by_s=leases.TTL_S + 2 * catalog.remote.settings.timeout_s + 1)
    await here.push(catalog, manifest)
    assert (await sweeper.collect(catalog, NO_GRACE)).left == ""
    assert not [path for path in await objects(catalog) if path.startswith("leases/")], "and is cleared away"


async def test_who_was_stopped_for_too_long_does_nothing_more(
    catalog: Catalog, here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease may have run out, and others have begun."""
    real, manifest = transfer._put, here.made(pages=1)

    async def put(*args: object) -> None:
        await real(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(leases, "_clock", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + leases.TTL_S + 1)

    monkeypatch.setattr(transfer, "_put", put)
    with pytest.raises(RemoteFailed, match="its lease there could not be renewed"):
        await here.push(catalog, manifest)
    assert await catalog.list() == []


async def test_credentials_that_may_not_remove_anything_can_push(s3: S3, tmp_path: Path, here: Place) -> None:
    catalog = open_catalog("copies", s3.remote(tmp_path.name, timeout_s=1))
    s3.fault = lambda method, path: "503" if method == "DELETE" or (method == "POST" and "delete" in path) else None
    manifest: Manifest = here.made(pages=1)
    await here.push(catalog, manifest)
    assert [copy.id for copy in await catalog.list()] == [manifest.id]
