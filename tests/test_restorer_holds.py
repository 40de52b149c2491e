"""Locks on snapshots, across threads and processes, and what is collected around them: real files, real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_restorer_snapshots import committed

from policies.manifest import Manifest
from policies.retention import Retention
from policies.verdicts import Note
from restorer.errors import Environment, InUse
from restorer.operations import collector
from restorer.operations.collector import collect
from restorer.procfs.processes import start_time
from restorer.storage import holds
from restorer.storage import snapshots as module
from restorer.storage.holds import users_of
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.stamps import Stamps
from restorer.storage.weights import WeightsStore

ROOT = Path(__file__).resolve().parents[1]
NOTHING = Retention(keep_last=1, grace_s=0, spare_newest=False)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    boxes = tmp_path / "run"
    (boxes / "boxes").mkdir(parents=True)
    return SnapshotStore(tmp_path / "snapshots", Stamps(tmp_path / "stamps.json"), users=lambda: users_of(boxes))


@pytest.fixture
def weights(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights", Stamps(tmp_path / "stamps.json"))


@contextmanager
def user(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that uses a folder."""
    code = "from restorer.storage import holds; from pathlib import Path; "
    code += f"h = holds.use(Path({str(folder)!r})); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def running(tmp_path: Path, snapshot: str, *, alive: bool = True, **facts: object) -> Path:
    """A state file of a box of this process."""
    path = tmp_path / "run/boxes/b1.json"
    started = start_time(os.getpid()) if alive else 1
    record = {"id": "b1", "init_pid": os.getpid(), "index": 0}
    path.write_text(json.dumps(record | {"facts": {"init_start_time": started, "snapshot": snapshot, **facts}}))
    return path


def test_users_share_and_a_removal_says_who_they_are(store: SnapshotStore) -> None:
    manifest = committed(store)
    with store.use(manifest.id), user(store.folder(manifest.id)) as other:
        with pytest.raises(InUse) as refused:
            store.remove(manifest.id)
        assert f"pid {other.pid} (" in str(refused.value)
        assert f"pid {os.getpid()} (" in str(refused.value)
        assert "import holds" in str(refused.value)
        assert store.verify(manifest.id, full=True) == []
    store.remove(manifest.id)
    assert store.list() == []


def test_a_lock_ends_with_its_process_however_it_ends(store: SnapshotStore) -> None:
    manifest = committed(store)
    with user(store.folder(manifest.id)) as other:
        other.kill()
        other.wait()
        store.remove(manifest.id)


def test_a_removal_under_way_lets_nobody_in_and_says_so(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = committed(store)
    entered, go_on = threading.Event(), threading.Event()
    real = shutil.rmtree

    def slow(path: Path) -> None:
        entered.set()
        go_on.wait(20)
        real(path)

    monkeypatch.setattr(module.shutil, "rmtree", slow)
    remover = threading.Thread(target=store.remove, args=(manifest.id,))
    remover.start()
    try:
        assert entered.wait(20)
        with pytest.raises(InUse, match="is being made or removed by pid"):
            holds.use(store.folder(manifest.id), wait_s=0.05)
    finally:
        go_on.set()
        remover.join()
    with pytest.raises(Environment, match="is not there"):
        store.use(manifest.id)


def test_who_waited_for_a_snapshot_that_went_does_not_get_its_ghost(store: SnapshotStore) -> None:
    manifest = committed(store)
    folder = store.folder(manifest.id)
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(holds.use(folder, wait_s=20))
        except Environment as error:
            outcome.append(str(error))

    with holds.alone(folder):
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.1)  # long enough to be in the loop; a later start sees no folder at all, which is as good
        folder.rename(folder.with_name("gone"))
    waiter.join()
    assert isinstance(outcome[0], str)


def test_what_a_box_was_restored_from_stays_while_the_box_lives(store: SnapshotStore, tmp_path: Path) -> None:
    manifest = committed(store)
    running(tmp_path, manifest.id, record={"id": "m#0"})
    with pytest.raises(InUse, match=r"used by replica m#0 \(box b1\); drain that first"):
        store.remove(manifest.id)
    running(tmp_path, manifest.id)
    with pytest.raises(InUse, match="started or suspended"):
        store.remove(manifest.id)
    running(tmp_path, manifest.id, alive=False)
    store.remove(manifest.id)


def test_torn_state_files_hide_nothing_else(store: SnapshotStore, tmp_path: Path) -> None:
    manifest = committed(store)
    running(tmp_path, manifest.id)
    for name, text in {
        "a0": "",
        "a1": "[]",
        "a2": '{"facts": {}, "init_pid": "x"}',
        "a3": '{"facts": null, "init_pid": 1}',
    }.items():
        (tmp_path / f"run/boxes/{name}.json").write_text(text)
    assert list(users_of(tmp_path / "run")) == [manifest.id]


def test_a_collection_takes_what_may_go_and_leaves_what_is_used(
    store: SnapshotStore, weights: WeightsStore, tmp_path: Path
) -> None:
    first, second, third, fourth = (committed(store, created_ms=n) for n in range(1, 5))
    running(tmp_path, first.id)
    with store.use(second.id):
        users = users_of(tmp_path / "run")
        dry = collect(store, weights, NOTHING, usable={}, users=users, dry=True)
        assert [removal.id for removal in dry.removed] == [third.id]
        assert len(store.list()) == 4
        done = collect(store, weights, NOTHING, usable={}, users=users)
    assert [removal.id for removal in done.removed] == [third.id]
    assert {one.id for one in store.list()} == {first.id, second.id, fourth.id}
    assert done.removed[0].bytes == third.bytes


def test_what_is_taken_up_between_the_look_and_the_removal_stays(
    store: SnapshotStore, weights: WeightsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = committed(store, created_ms=1), committed(store, created_ms=2)
    real, held = collector.plan, []

    def plan_then_use(*args: object) -> object:
        removals = real(*args)  # type: ignore[arg-type]
        held.append(store.use(first.id))
        return removals

    monkeypatch.setattr(collector, "plan", plan_then_use)
    done = collect(store, weights, NOTHING, usable={}, users={})
    held[0].close()
    assert done.removed == ()
    assert "is used by pid" in done.kept[first.id]
    assert len(store.list()) == 2


def test_a_crash_in_mid_collection_leaves_no_half_snapshot(
    store: SnapshotStore, weights: WeightsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = [committed(store, created_ms=n) for n in range(1, 5)]
    real, calls = shutil.rmtree, []

    def crash(path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            (path / "images/inventory.img").unlink()
            raise KeyboardInterrupt
        real(path)

    monkeypatch.setattr(module.shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        collect(store, weights, NOTHING, usable={}, users={})
    monkeypatch.undo()
    # What is listed is whole; the half-removed one is none, and goes with the next sweep.
    assert [one.id for one in store.list()] == [snapshots[3].id, snapshots[2].id]
    assert all(store.verify(one.id, full=True) == [] for one in store.list())
    assert list(store.sweep(older_than_s=0)) == [snapshots[1].id]


def test_weights_go_with_the_last_that_names_them_but_not_while_any_are_made(weights: WeightsStore, store: SnapshotStore) -> None:
    for name in ("a" * 64, ".staging-x"):
        (weights.root / name).mkdir()
    with weights.busy():
        assert collector.sweep_weights(store, weights, 0.0) == []
    assert collector.sweep_weights(store, weights, 3600.0) == []
    assert sorted(collector.sweep_weights(store, weights, 0.0)) == [".staging-x", "a" * 64]


def test_weights_stay_where_a_manifest_cannot_be_read(weights: WeightsStore, store: SnapshotStore) -> None:
    (weights.root / ("a" * 64)).mkdir()
    later = store.root / ("b" * 16)
    later.mkdir()
    (later / "manifest.json").write_text('{"format": 99}')
    assert collector.sweep_weights(store, weights, 0.0) == ()


def test_survey_says_what_each_is(store: SnapshotStore, tmp_path: Path) -> None:
    good, bad = committed(store, created_ms=1), committed(store, created_ms=2)
    store.verdicts.note(
        bad.id, Note(what="failed", host=store.verdicts.host, at_ms=1, cls="snapshot", certain=True, reason="why")
    )
    with store.use(good.id):
        found = {one.id: one for one in collector.survey(store, {good.id: True}, {})}
    assert (found[good.id].usable, found[good.id].in_use, found[good.id].quarantined) == (True, True, False)
    assert (found[bad.id].usable, found[bad.id].in_use, found[bad.id].quarantined) == (False, False, True)
    assert abs(found[good.id].since_ms - time.time() * 1000) < 60_000
    assert isinstance(store.load(good.id), Manifest)
