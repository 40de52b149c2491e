"""When a start asks the remote, for how long, and what becomes of it; the pull itself is tested with real copies elsewhere."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually
from places import Place
from test_restorer_snapshots import PROFILE, draft

from policies.storage import Remote, Storage
from restorer.errors import Cancelled, Environment
from restorer.machine.host import Match
from restorer.operations import supply
from restorer.records.stages import Stages
from restorer.records.tally import Tally
from restorer.remotes.catalog import open_catalog
from restorer.storage.partial import Partial

STORAGE = Storage(remotes={"team": Remote(url="file:///nowhere")}, pull="team", pull_timeout_s=0.05)
NONE = Match(PROFILE, None, {}, {})


def host(storage: Storage = STORAGE, obstacle: str | None = None, **parts: Any) -> Any:
    """As much of one as is asked here."""
    backend = SimpleNamespace(obstacle=lambda: obstacle)
    return SimpleNamespace(config=SimpleNamespace(storage=storage), backend=lambda _: backend, match=lambda _: NONE, **parts)


async def wanted() -> None:
    """Somebody waits."""


@pytest.mark.parametrize(
    ("match", "at"),
    [
        (Match(PROFILE, draft(), {}, {}), host()),
        (NONE, host(Storage())),
        (NONE, host(obstacle="CRIU is missing")),
    ],
    ids=["a snapshot here fits", "no remote to pull from", "nothing could be restored"],
)
async def test_the_remote_is_not_asked(match: Match, at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply, "_pulled", lambda *_: pytest.fail("it was asked"))
    stages = Stages()
    async with supply.supplied(at, "m", match, stages, wanted) as found:
        assert found is match
    assert stages.done == []


async def test_a_pull_that_takes_too_long_is_given_up_and_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pulled(*_: object) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(supply, "_pulled", pulled)
    stages = Stages()
    async with supply.supplied(host(), "m", NONE, stages, wanted) as match:
        assert match.manifest is None
    assert "did not end within 0.05 s (storage.pull_timeout_s)" in match.why
    assert [(stage.name, stage.tier) for stage in stages.done] == [("pull", "network")]


async def test_a_full_disk_costs_the_pull_and_not_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pulled(*_: object) -> str:
        raise Environment("disk full while pulling a snapshot")

    monkeypatch.setattr(supply, "_pulled", pulled)
    async with supply.supplied(host(), "m", NONE, Stages(), wanted) as match:
        assert "disk full" in match.why


async def test_a_pull_that_nobody_wants_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def pulled(*_: object) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async def unwanted() -> None:
        raise Cancelled("every client that waited for it has left")

    monkeypatch.setattr(supply, "_pulled", pulled)
    monkeypatch.setattr(supply, "_ASK_S", 0.01)
    slow = host(STORAGE.model_copy(update={"pull_timeout_s": 60.0}))
    with pytest.raises(Cancelled):
        async with supply.supplied(slow, "m", NONE, Stages(), unwanted):
            pytest.fail("nobody wants it")
    assert ended.is_set()


async def test_a_pull_waits_for_another_process_that_is_at_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply, "_BUSY_S", 0.01)
    here, there = Place(tmp_path / "here"), Place(tmp_path / "there")
    (tmp_path / "remote").mkdir()
    catalog, manifest = open_catalog("team", Remote(url=f"file://{tmp_path / 'remote'}")), here.made(pages=1)
    await here.push(catalog, manifest)
    copy = await catalog.find(manifest.id)
    parts = {"snapshots": there.snapshots, "weights": there.weights, "judge": SimpleNamespace(keys=None), "tally": Tally()}
    at = host(STORAGE.model_copy(update={"reserve_bytes": 0}), **parts)
    with Partial(there.snapshots.root, manifest.id, {}):
        waiting = asyncio.create_task(supply.copied(at, catalog, manifest, copy, lambda _done, _total: None))
        await asyncio.wait({waiting}, timeout=0.2)
        assert not waiting.done()
    moved = await eventually(lambda: waiting.done() and waiting.result())
    assert moved.chunks_moved
    assert list(there.snapshots.verify(manifest.id, full=True)) == []
    again = await supply.copied(at, catalog, manifest, copy, lambda _done, _total: None)
    assert again.chunks_moved == 0, "it is here"
