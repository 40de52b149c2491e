"""The store of weights that lie apart from snapshots, on a real file system."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from policies.manifest import Allocation, Weights, WeightsPart
from restorer.errors import Environment, SnapshotError
from restorer.storage import weights as module
from restorer.storage.stamps import Stamps
from restorer.storage.weights import INDEX, WeightsStore

RUNS = (Allocation(bytes=5, fingerprint="0a"), Allocation(bytes=3, fingerprint="0b"))


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights", Stamps(tmp_path / "stamps.json"))


def part(folder: Path, name: str, data: bytes) -> WeightsPart:
    (folder / name).write_bytes(data)
    return WeightsPart(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def committed(store: WeightsStore, data: bytes = b"abcdefgh", runs: tuple[Allocation, ...] = RUNS) -> Weights:
    staging = store.stage()
    parts = [part(staging, "part-00000", data[:6]), part(staging, "part-00001", data[6:])]
    return store.commit(staging, parts, runs)


def test_a_set_is_found_by_its_content(store: WeightsStore) -> None:
    weights = committed(store)
    assert weights.bytes == 8
    assert store.find(RUNS) == weights
    assert store.find(RUNS[:1]) is None
    assert store.sets() == [weights]
    assert [(path.read_bytes(), size) for path, size in store.files(weights)] == [(b"abcdef", 6), (b"gh", 2)]
    assert store.verify([weights]) == []
    assert sorted(os.listdir(store.root)) == [weights.digest]


def test_equal_weights_are_stored_once(store: WeightsStore) -> None:
    first = committed(store)
    inode = (store.root / first.digest / "part-00000").stat().st_ino
    assert committed(store) == first
    assert (store.root / first.digest / "part-00000").stat().st_ino == inode
    assert committed(store, b"ABCDEFGH").digest != first.digest
    assert len(store.sets()) == 2


def test_parts_are_sealed_and_the_index_is_last(store: WeightsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def write(path: Path, data: bytes) -> None:
        seen.append(
            (path.name, sorted(os.listdir(path.parent)), [oct(p.stat().st_mode & 0o777) for p in sorted(path.parent.iterdir())])
        )
        raise OSError(28, "full")

    monkeypatch.setattr(module, "write_durable", write)
    with pytest.raises(Environment, match="disk full while storing weights"):
        committed(store)
    assert seen == [(INDEX, ["part-00000", "part-00001"], ["0o400", "0o400"])]
    # What has no index is none, and the next commit takes its place.
    assert store.sets() == []
    monkeypatch.undo()
    assert store.verify([committed(store)]) == []


def test_a_part_that_is_not_what_the_engine_says_is_refused(store: WeightsStore) -> None:
    staging = store.stage()
    wrong = part(staging, "part-00000", b"abcdefgh").model_copy(update={"sha256": "0" * 64})
    with pytest.raises(SnapshotError, match="exported weights are not what the engine says: part-00000: expected sha256 0000"):
        store.commit(staging, [wrong], RUNS)
    store.discard(staging)
    staging = store.stage()
    with pytest.raises(SnapshotError, match="not what the engine says"):
        store.commit(staging, [part(staging, "part-00000", b"short")], RUNS)
    store.discard(staging)
    assert os.listdir(store.root) == []


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda path: path.write_bytes(b"abcdeF"), "part-00000: expected sha256 "),
        (lambda path: path.write_bytes(b"abcde"), "part-00000: expected a file of 6 bytes, found -r-------- of 5 bytes"),
        (lambda path: path.unlink(), "part-00000: expected 6 bytes, found No such file"),
        (lambda path: path.chmod(0o666), "part-00000: expected writable by its owner alone"),
        (lambda path: (path.parent / INDEX).unlink(), "expected the set that the manifest names, found none, or another"),
        (lambda path: (path.parent / INDEX).write_text("{}"), "expected the set that the manifest names, found none, or another"),
    ],
)
def test_every_fault_is_found(store: WeightsStore, spoil: object, found: str) -> None:
    weights = committed(store)
    path = store.root / weights.digest / "part-00000"
    for file in path.parent.iterdir():
        file.chmod(0o600)
    spoil(path)  # type: ignore[operator]
    if path.exists() and path.stat().st_mode & 0o777 == 0o600:
        path.chmod(0o400)
    (fault,) = store.verify([weights])
    assert found in str(fault)
    assert store.find(RUNS) is None


def test_a_full_verification_reads_what_was_believed(store: WeightsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = committed(store)
    forgotten: list[Path] = []
    monkeypatch.setattr(store._stamps, "forget", forgotten.append)
    store.verify([weights])
    assert forgotten == []
    store.verify([weights], full=True)
    assert len(forgotten) == 2


def test_a_manifest_that_leads_out_of_the_set_is_refused(store: WeightsStore) -> None:
    weights = committed(store)
    evil = weights.model_copy(update={"parts": (weights.parts[0].model_copy(update={"name": "../x"}),)})
    assert "the set that the manifest names" in str(store.verify([evil])[0])
    assert "a path that leads out of it" in str(module._shape(store.root / "x", evil.parts[0]))


def test_what_no_manifest_names_is_swept_and_nothing_else(store: WeightsStore) -> None:
    kept, gone = committed(store), committed(store, b"ABCDEFGH")
    left = store.stage()
    (store.root / "notes.txt").write_text("mine")
    assert set(store.sweep({kept.digest})) == {gone.digest, left.name}
    assert sorted(os.listdir(store.root)) == sorted([kept.digest, "notes.txt"])
    assert store.verify([kept]) == []
