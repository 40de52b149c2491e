"""When a start asks the remote, for how long, and what becomes of it; the pull itself is tested with real copies elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually
from places import Place
from test_restorer_arrival import PART, Gate, made, weights_of
from test_restorer_snapshots import PROFILE, draft

from policies import verdicts
from policies.floor import Rates
from policies.manifest import Manifest, Weights
from policies.storage import Remote, Storage
from restorer.errors import ArrivalFailed, Cancelled, Environment
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


# ---------------------------------------------------------------- before all of it is here


RATES = Rates(measured_ms=1, disk=1e9, disk_cached=1e9, cache=1e9, fill=1e9, fill_huge=1e9, spawn_s=600.0)


@dataclass
class Away:
    """A snapshot with weights in a remote, none of which come before they are let; and a host that has none."""

    gate: Gate
    manifest: Manifest
    weights: Weights
    place: Place
    host: Any
    doubts: list[str] = field(default_factory=list)

    def published(self) -> bool:
        return bool(self.place.snapshots.list())


@pytest.fixture
async def away(tmp_path: Path, here: Place, there: Place, monkeypatch: pytest.MonkeyPatch) -> Away:
    (tmp_path / "remote").mkdir()
    remote = Remote(url=f"file://{tmp_path / 'remote'}")
    catalog, weights = open_catalog("team", remote), weights_of(here)
    manifest = made(here, weights)
    await here.push(catalog, manifest)

    async def fitting(*_: object) -> tuple[Any, dict[str, Any]]:
        return (manifest, await catalog.find(manifest.id)), {}

    monkeypatch.setattr(supply, "chosen", lambda *_: catalog)
    monkeypatch.setattr(supply, "_fitting", fitting)
    monkeypatch.setattr(supply, "verify_files", lambda *_: [])
    storage = STORAGE.model_copy(update={"reserve_bytes": 0, "pull_timeout_s": 90.0})
    parts = {"snapshots": there.snapshots, "weights": there.weights, "judge": SimpleNamespace(keys=None), "tally": Tally()}
    found = Away(Gate(catalog, here, weights), manifest, weights, there, None)
    found.host = host(
        storage, **parts, stamps=there.stamps, rates=RATES, facts_now=lambda: None, distrust=lambda *_: found.doubts,
        allowed=lambda *_: (),
    )  # fmt: skip
    found.host.match = lambda _: dataclasses.replace(NONE, manifest=manifest)
    return found


async def test_a_start_goes_on_when_the_rest_will_be_here_in_time(away: Away) -> None:
    async with supply.supplied(away.host, "m", NONE, stages := Stages(), wanted) as match:
        assert match.manifest == away.manifest
        assert match.arrival is not None
        assert not away.published()
        assert "weights are wanted after about 1200." in match.arrival.early
        assert [(stage.name, stage.tier) for stage in stages.done] == [("pull", "network")]
        away.gate.let(0, 1, 2)
        await match.arrival.all()
        assert away.published()


async def test_a_start_that_ends_before_the_rest_is_here_ends_the_pull(away: Away) -> None:
    async with supply.supplied(away.host, "m", NONE, Stages(), wanted) as match:
        assert match.arrival is not None
    with pytest.raises(ArrivalFailed):
        await match.arrival.all()
    with Partial(away.place.snapshots.root, away.manifest.id, {}):
        assert not away.published()


@pytest.mark.parametrize("why", ["too long", "not measured", "not trusted", "failed before"])
async def test_no_gpu_is_taken_for_what_takes_long_or_must_not_be_restored(away: Away, why: str) -> None:
    if why == "too long":
        away.host.rates = RATES.model_copy(update={"spawn_s": 0.0, "cache": 1e18})
    elif why == "not measured":
        away.host.rates = None
    elif why == "not trusted":
        away.doubts.append("nobody signed it")
    else:
        note = verdicts.Note(what="restored", host=away.place.snapshots.verdicts.host, at_ms=1)
        bad = note.model_copy(update={"what": "failed", "cls": "snapshot", "certain": True, "reason": "it was changed"})
        away.place.snapshots.verdicts.note(away.manifest.id, bad)
    looked = asyncio.Event()
    real = supply._lead_s

    def lead_s(*args: Any) -> float | None:
        found = real(*args)
        loop.call_soon_threadsafe(looked.set)
        return found

    async def let() -> None:
        await looked.wait()
        away.gate.let(0, 1, 2)

    loop, letting = asyncio.get_running_loop(), asyncio.create_task(let())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supply, "_lead_s", lead_s)
        async with supply.supplied(away.host, "m", NONE, Stages(), wanted) as match:
            assert letting.done()
            assert match.manifest == away.manifest
            if why == "too long":  # the last moment may be worth it
                assert match.arrival is None or match.arrival.left < 3 * PART
            else:
                assert match.arrival is None
                assert away.published()
    await letting
