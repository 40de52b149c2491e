"""What a pull tells of a snapshot before all of it is here, and what it leaves when the rest does not come; with real remotes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually
from places import Place
from s3_server import S3

from policies.manifest import Allocation, GpuState, Manifest, Weights, WeightsPart
from policies.storage import Remote
from restorer.errors import ArrivalFailed, SnapshotError
from restorer.remotes import pulling
from restorer.remotes.catalog import Catalog, open_catalog
from restorer.storage import arrival as arrivals
from restorer.storage import chunks
from restorer.storage.arrival import Arrival
from restorer.storage.chunks import Chunk
from restorer.storage.partial import PREFIX, Busy

PART = 2 << 20


def weights_of(place: Place, seed: int = 9, parts: int = 3) -> Weights:
    """A set in a place."""
    staging, described = place.weights.stage(), []
    for number in range(parts):
        data = random.Random(seed * 100 + number).randbytes(PART)
        name = f"part-{number:05d}"
        (staging / name).write_bytes(data)
        described.append(WeightsPart(name=name, bytes=PART, sha256=hashlib.sha256(data).hexdigest()))
    return place.weights.commit(staging, described, [Allocation(bytes=PART * parts, fingerprint="ab")])


def made(place: Place, *sets: Weights, created_ms: int = 1) -> Manifest:
    """A snapshot of a place that names some sets."""
    state = GpuState(pids=(1,), uuids=("GPU-1",), used=("GPU-1",), state_bytes=1, awake_bytes=1, weights=sets)
    return place.made(pages=1, gpu=state, created_ms=created_ms)


class Gate:
    """Holds back the chunks of some parts of a set, on their way from a remote."""

    def __init__(self, catalog: Catalog, place: Place, weights: Weights) -> None:
        listed = chunks.cut(place.weights.root / weights.digest, [part.name for part in weights.parts])
        self._part = {chunk.id: name for name, pieces in listed.items() for chunk in pieces}
        self._open = {part.name: asyncio.Event() for part in weights.parts}
        self.asked: list[str] = []
        """Parts of which something was asked, and ``images`` for everything else, in order."""
        self.fault: Callable[[str], Exception | None] = lambda _: None
        self._real = catalog.get_chunk
        catalog.get_chunk = self._get  # type: ignore[method-assign]

    def let(self, *numbers: int) -> None:
        for number in numbers:
            self._open[f"part-{number:05d}"].set()

    async def _get(self, chunk: Chunk) -> tuple[bytes, int]:
        part = self._part.get(chunk.id)
        self.asked.append(part or "images")
        if part is not None:
            await self._open[part].wait()
            if (fault := self.fault(part)) is not None:
                raise fault
        return await self._real(chunk)


@pytest.fixture
async def gate(any_remote: Remote, here: Place) -> tuple[Gate, Catalog, Manifest, Weights]:
    """A snapshot with weights of three parts in a remote, none of which come before they are let."""
    weights, catalog = weights_of(here), open_catalog("copies", any_remote)
    manifest = made(here, weights)
    await here.push(catalog, manifest)
    return Gate(catalog, here, weights), catalog, manifest, weights


@pytest.fixture
async def pulls() -> AsyncIterator[Callable[..., asyncio.Task[str]]]:
    """Begins a pull with an arrival; none is left at the end."""
    begun: list[Arrival] = []

    def begin(arrival: Arrival, there: Place, catalog: Catalog, id: str, within_s: float = 90.0) -> asyncio.Task[str]:
        async def work() -> str:
            await there.pull(catalog, id, arrival=arrival)
            return ""

        begun.append(arrival)
        arrival.fits = True
        return arrival.run(work(), within_s)

    yield begin
    for one in begun:
        await one.end()


async def test_everything_else_is_here_and_verified_before_the_weights_and_nothing_is_published(
    gate: tuple[Gate, Catalog, Manifest, Weights], there: Place, pulls: Callable[..., asyncio.Task[str]]
) -> None:
    held, catalog, manifest, weights = gate
    arrival = Arrival()
    task = pulls(arrival, there, catalog, manifest.id)
    await eventually(lambda: arrival.usable)
    assert "images" not in held.asked[held.asked.index("part-00000") :], "weights come last"
    assert arrival.arriving == manifest
    assert arrival.folder is not None
    for item in manifest.objects:
        path = arrival.folder / item.path
        assert path.stat().st_mode & 0o222 == 0
        assert path.stat().st_size == item.bytes
    assert (arrival.left, arrival.published) == (3 * PART, False)
    assert list(there.snapshots.list()) == []
    assert list(there.weights.sets()) == []

    waiting = {n: asyncio.create_task(arrival.part(weights.digest, f"part-{n:05d}")) for n in range(3)}
    held.let(1)
    await waiting[1]
    place = arrival.place(weights)
    assert place is not None
    assert hashlib.sha256((place / "part-00001").read_bytes()).hexdigest() == weights.parts[1].sha256
    assert not waiting[0].done()
    assert not waiting[2].done()
    async with arrival.still:
        held.let(0, 2)
        await arrival.weights()
        await asyncio.gather(*waiting.values())
        folder = arrival.folder
        assert not task.done()
        assert folder.is_dir(), "nothing is renamed while somebody uses it"
        assert list(there.snapshots.list()) == []
        assert (arrival.rest.left, arrival.rest.behind) == (0, 0)
        assert min(arrival.rest.came, arrival.rest.checked) > 0
    await arrival.all()
    assert await task == ""
    assert (arrival.folder, arrival.published, arrival.left) == (there.snapshots.folder(manifest.id), True, 0)
    assert arrival.place(weights) is None
    assert [one.id for one in there.snapshots.list()] == [manifest.id]
    assert list(there.snapshots.verify(manifest.id, full=True)) == []
    assert list(there.weights.verify([weights], full=True)) == []


@pytest.mark.parametrize("any_remote", ["folder"], indirect=True)
async def test_each_worker_has_a_set_that_comes(
    gate: tuple[Gate, Catalog, Manifest, Weights], here: Place, there: Place, pulls: Callable[..., asyncio.Task[str]]
) -> None:
    held, catalog, _, first = gate
    second = weights_of(here, seed=10, parts=2)
    manifest = made(here, first, second, first, created_ms=2)
    await here.push(catalog, manifest)
    arrival = Arrival()
    pulls(arrival, there, catalog, manifest.id)
    await eventually(lambda: arrival.usable)
    assert arrival.left == 5 * PART
    assert arrival.place(first) != arrival.place(second)
    held.let(0, 1, 2)
    await arrival.weights()
    await arrival.all()
    assert arrival.left == 0
    assert list(there.weights.verify([first, second], full=True)) == []


async def test_what_was_pulled_is_hashed_once(
    gate: tuple[Gate, Catalog, Manifest, Weights],
    there: Place,
    pulls: Callable[..., asyncio.Task[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, catalog, manifest, weights = gate
    held.let(0, 1, 2)
    hashed: list[str] = []
    real = there.stamps._hash

    def hash_file(path: str, *rest: Any) -> str:
        hashed.append(Path(path).name)
        return real(path, *rest)

    monkeypatch.setattr(there.stamps, "_hash", hash_file)
    await pulls(Arrival(), there, catalog, manifest.id)
    assert sorted(name for name in hashed if name.startswith("part-")) == [part.name for part in weights.parts]
    assert list(there.weights.verify([weights])) == []
    assert len(hashed) == len(weights.parts) + len(manifest.objects)


async def test_who_waits_is_told_when_the_pull_fails_and_the_next_one_goes_on(
    gate: tuple[Gate, Catalog, Manifest, Weights], there: Place, pulls: Callable[..., asyncio.Task[str]]
) -> None:
    held, catalog, manifest, weights = gate
    arrival = Arrival()
    task = pulls(arrival, there, catalog, manifest.id)
    await eventually(lambda: arrival.usable)
    held.let(0)
    await arrival.part(weights.digest, "part-00000")
    waiting = asyncio.create_task(arrival.weights())
    held.fault = lambda part: SnapshotError("a chunk is damaged") if part == "part-00001" else None
    held.let(1)
    for wait in (waiting, arrival.part(weights.digest, "part-00002"), arrival.all()):
        with pytest.raises(ArrivalFailed, match="the rest of the snapshot did not come: a chunk is damaged") as failed:
            await wait
        assert failed.value.verdict.cls == "environment", "it is no fault of the snapshot"
        assert not failed.value.verdict.certain
    with pytest.raises(SnapshotError, match="a chunk is damaged"):
        await task
    assert list(there.snapshots.list()) == []
    assert list(there.snapshots.sweep(older_than_s=0)) == []


@pytest.mark.parametrize("any_remote", ["folder", "s3"], indirect=True)
async def test_a_pull_that_is_ended_leaves_what_has_come_for_the_next(
    gate: tuple[Gate, Catalog, Manifest, Weights], there: Place, pulls: Callable[..., asyncio.Task[str]]
) -> None:
    held, catalog, manifest, weights = gate
    arrival = Arrival()
    pulls(arrival, there, catalog, manifest.id)
    await eventually(lambda: arrival.usable)
    held.let(0)
    await arrival.part(weights.digest, "part-00000")
    await arrival.end()
    with pytest.raises(ArrivalFailed):
        await arrival.all()
    held.asked.clear()
    again = Arrival()
    pulls(again, there, catalog, manifest.id)
    await eventually(lambda: again.usable)
    assert again.left == 2 * PART
    held.let(1, 2)
    await again.all()
    assert set(held.asked) == {"part-00001", "part-00002"}
    assert list(there.snapshots.verify(manifest.id, full=True)) == []
    assert list(there.weights.verify([weights], full=True)) == []


@pytest.mark.parametrize("any_remote", ["folder"], indirect=True)
async def test_a_rest_that_does_not_come_is_not_waited_for_longer_than_a_gpu_may_wait(
    gate: tuple[Gate, Catalog, Manifest, Weights],
    there: Place,
    pulls: Callable[..., asyncio.Task[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, catalog, manifest, _ = gate
    asked: list[int] = []
    monkeypatch.setattr(arrivals, "patience_s", lambda left: asked.append(left) or 0.2)  # type: ignore[func-returns-value]
    arrival = Arrival()
    task = pulls(arrival, there, catalog, manifest.id, within_s=900.0)
    await eventually(lambda: arrival.usable)
    held.let(0)
    with pytest.raises(ArrivalFailed, match="did not come in time"):
        await arrival.weights()
    assert asked
    assert 2 * PART <= asked[0] <= 3 * PART
    with pytest.raises(TimeoutError):
        await task
    assert [name for name in os.listdir(there.weights.root) if name.startswith(PREFIX)], "what has come stays"


@pytest.mark.parametrize("any_remote", ["folder"], indirect=True)
async def test_a_part_that_is_not_what_its_hash_says_is_never_handed_on(
    gate: tuple[Gate, Catalog, Manifest, Weights],
    there: Place,
    pulls: Callable[..., asyncio.Task[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks that are what their list says, and a list that is not the manifest's."""
    held, catalog, manifest, weights = gate
    real = there.weights.check

    def check(folder: Path, part: WeightsPart) -> None:
        if part.name == "part-00001":
            with (folder / part.name).open("r+b") as file:
                file.write(b"other")
        real(folder, part)

    monkeypatch.setattr(there.weights, "check", check)
    arrival = Arrival()
    task = pulls(arrival, there, catalog, manifest.id)
    held.let(0, 1, 2)
    with pytest.raises(SnapshotError, match="part-00001"):
        await task
    with pytest.raises(ArrivalFailed):
        await arrival.part(weights.digest, "part-00001")
    assert not [name for name in os.listdir(there.weights.root) if name.startswith(PREFIX)], "nothing of it is used again"
    monkeypatch.undo()
    await there.pull(catalog, manifest.id)
    assert list(there.weights.verify([weights], full=True)) == []


@pytest.mark.parametrize("any_remote", ["folder"], indirect=True)
async def test_a_crash_between_the_weights_and_their_manifest_costs_nothing_that_has_come(
    gate: tuple[Gate, Catalog, Manifest, Weights], there: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, catalog, manifest, weights = gate
    held.let(0, 1, 2)

    def publish(*_: object) -> None:
        raise InterruptedError("the restorer ended")

    with monkeypatch.context() as patched:
        patched.setattr(there.snapshots, "publish", publish)
        with pytest.raises(InterruptedError):
            await there.pull(catalog, manifest.id)
    assert list(there.snapshots.list()) == []
    assert list(there.weights.sets()) == [weights]
    held.asked.clear()
    await there.pull(catalog, manifest.id)
    assert held.asked == []
    assert list(there.snapshots.verify(manifest.id, full=True)) == []


@pytest.mark.parametrize("any_remote", ["folder"], indirect=True)
async def test_what_is_here_already_does_not_come(
    gate: tuple[Gate, Catalog, Manifest, Weights], here: Place, there: Place
) -> None:
    held, catalog, manifest, weights = gate
    held.let(0, 1, 2)
    other = made(here, weights, weights, created_ms=2)
    await here.push(catalog, other)
    await there.pull(catalog, manifest.id)
    held.asked.clear()
    arrival = Arrival()
    arrival.fits = True
    await there.pull(catalog, other.id, arrival=arrival)
    assert set(held.asked) <= {"images"}
    assert not arrival.usable
    await arrival.part(weights.digest, "part-00000")


async def test_the_disk_may_fall_behind_by_a_few_parts_and_no_more(
    tmp_path: Path, here: Place, there: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote").mkdir()
    weights, catalog = weights_of(here, parts=9), open_catalog("x", Remote(url=f"file://{tmp_path / 'remote'}", concurrency=1))
    manifest = made(here, weights)
    await here.push(catalog, manifest)
    gate, slow = Gate(catalog, here, weights), asyncio.Event()
    gate.let(*range(9))
    loop, checked = asyncio.get_running_loop(), list[str]()
    real = there.weights.check

    def check(folder: Path, part: WeightsPart) -> None:
        checked.append(part.name)
        asyncio.run_coroutine_threadsafe(slow.wait(), loop).result(60)
        real(folder, part)

    monkeypatch.setattr(there.weights, "check", check)
    pulling_it = asyncio.create_task(there.pull(catalog, manifest.id))
    await eventually(lambda: len(checked) == pulling._BEHIND)
    assert len(set(gate.asked) - {"images"}) == pulling._BEHIND
    slow.set()
    await pulling_it
    assert sorted(checked) == [part.name for part in weights.parts]


async def test_two_at_once_fetch_it_once(s3: S3, tmp_path: Path, here: Place, there: Place) -> None:
    """The second finds the folder taken before it has read anything over."""
    weights, catalog = weights_of(here), open_catalog("copies", s3.remote(tmp_path.name))
    manifest = made(here, weights)
    await here.push(catalog, manifest)
    gate = Gate(catalog, here, weights)
    first = asyncio.create_task(there.pull(catalog, manifest.id))
    await eventually(lambda: "part-00000" in gate.asked)
    with pytest.raises(Busy):
        await there.pull(catalog, manifest.id)
    gate.let(0, 1, 2)
    await first
    assert list(there.snapshots.verify(manifest.id, full=True)) == []
