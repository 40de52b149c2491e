"""Chunks of real files: cut by content alone, wherever it lies and however its zeros are stored."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from restorer.errors import SnapshotError
from restorer.storage import chunks
from restorer.storage.chunks import MAX_BYTES, MIN_BYTES, Chunk, Chunker
from restorer.system.files import HOLE_BYTES, PAGE, data_extents, hash_fd, hash_file


def cut(path: Path) -> tuple[Chunk, ...]:
    """The chunks of a file, as a commit finds them: while it is hashed."""
    chunker = Chunker()
    fd = os.open(path, os.O_RDONLY)
    try:
        assert hash_fd(fd, chunker.feed) == hash_file(path)
    finally:
        os.close(fd)
    return chunker.finish()


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def names(found: tuple[Chunk, ...]) -> set[str]:
    return {chunk.name for chunk in found}


def test_chunks_and_zeros_are_the_whole_file(tmp_path: Path) -> None:
    data = noise(1, 9 << 20) + bytes(3 << 20) + noise(2, 100) + bytes(8 * PAGE) + noise(3, 5 << 20) + b"tail"
    path = tmp_path / "f"
    path.write_bytes(data)
    found, at = cut(path), 0
    for chunk in found:
        assert chunk.offset >= at
        assert not any(data[at : chunk.offset])
        assert blake3(data[chunk.offset : chunk.offset + chunk.size]).digest() == chunk.id
        assert chunk.offset % PAGE == 0
        assert chunk.size <= MAX_BYTES
        at = chunk.offset + chunk.size
    assert not any(data[at:])
    assert max(chunk.size for chunk in found) >= MIN_BYTES


def test_memory_that_moved_by_pages_is_the_same_chunks(tmp_path: Path) -> None:
    weights = noise(4, 24 << 20)
    (tmp_path / "a").write_bytes(noise(5, 7 * PAGE) + weights)
    (tmp_path / "b").write_bytes(noise(6, 1000 * PAGE) + weights + noise(7, 3 * PAGE))
    before, after = cut(tmp_path / "a"), cut(tmp_path / "b")
    again = sum(chunk.size for chunk in after if chunk.name in names(before))
    assert again > 0.85 * len(weights)


def test_what_never_marks_a_boundary_is_cut_at_the_most(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\1" * (10 << 20))
    sizes = [chunk.size for chunk in cut(tmp_path / "f")]
    assert sum(sizes) == 10 << 20
    assert set(sizes[:-1]) <= {MAX_BYTES, MIN_BYTES}


@pytest.mark.parametrize("zeros", [PAGE, HOLE_BYTES, HOLE_BYTES + PAGE])
def test_long_runs_of_zeros_are_in_no_chunk(tmp_path: Path, zeros: int) -> None:
    (tmp_path / "f").write_bytes(noise(8, 40 * PAGE) + bytes(zeros) + noise(9, 40 * PAGE))
    found = cut(tmp_path / "f")
    assert sum(chunk.size for chunk in found) == 80 * PAGE + (zeros if zeros <= HOLE_BYTES else 0)


def test_a_file_of_zeros_and_an_empty_one_have_no_chunks(tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(1 << 20) + bytes(100))
    (tmp_path / "empty").write_bytes(b"")
    assert cut(tmp_path / "zeros") == cut(tmp_path / "empty") == ()


@settings(max_examples=40, deadline=None)
@given(
    runs=st.lists(st.tuples(st.booleans(), st.integers(1, 90)), min_size=1, max_size=12),
    tail=st.integers(0, PAGE - 1),
    seed=st.integers(0, 9),
)
def test_however_zeros_are_stored_the_chunks_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[bool, int]], tail: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("f")
    data = b"".join(noise(seed + n, pages * PAGE) if full else bytes(pages * PAGE) for n, (full, pages) in enumerate(runs))
    data += noise(seed, tail)
    (folder / "dense").write_bytes(data)
    with (folder / "sparse").open("wb") as file:
        for at in range(0, len(data), PAGE):
            if any(page := data[at : at + PAGE]):
                file.seek(at)
                file.write(page)
        file.truncate(len(data))
    assert cut(folder / "dense") == cut(folder / "sparse")


def test_a_sparse_file_of_20_gb_costs_what_is_in_it(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        for at in range(0, 20_000_000_000, 2_000_000_000):
            file.seek(at & -PAGE)
            file.write(noise(at, 1 << 20))
        file.truncate(20_000_000_000)
    began, chunker = time.process_time(), Chunker()
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        for start, end in data_extents(fd, 20_000_000_000):
            chunker.feed(start, memoryview(os.pread(fd, end - start, start)))
    finally:
        os.close(fd)
    found = chunker.finish()
    assert sum(chunk.size for chunk in found) == 10 << 20
    assert time.process_time() - began < 5
    assert len(chunks.encode({"f": found})[0]) < 4096


def test_a_list_is_stored_compactly_and_read_back(tmp_path: Path) -> None:
    many = tuple(Chunk(n << 20, 1 << 20, noise(n, 32)) for n in range(20_000))
    data, index = chunks.encode({"images/pages-1.img": many, "images/core-1.img": ()})
    assert len(data) < 50 * len(many), "20 GiB of data have a list below 1 MB"
    sizes = {"images/pages-1.img": 20_000 << 20, "images/core-1.img": 0}
    assert chunks.decode(data, sizes, index)["images/pages-1.img"] == many


@pytest.mark.parametrize(
    ("objects", "sizes"),
    [
        ({"a": (Chunk(0, 10, bytes(32)), Chunk(5, 10, bytes(32)))}, {"a": 15}),
        ({"a": (Chunk(0, 10, bytes(32)),)}, {"a": 9}),
        ({"a": (Chunk(0, 0, bytes(32)),)}, {"a": 9}),
        ({"a": (Chunk(0, MAX_BYTES + 1, bytes(32)),)}, {"a": MAX_BYTES * 2}),
        ({"a": (Chunk(-1, 5, bytes(32)),)}, {"a": 9}),
        ({"a": (Chunk(0, 5, bytes(31)),)}, {"a": 9}),
        ({"a": ()}, {"b": 9}),
    ],
)
def test_a_list_that_does_not_fit_its_objects_is_refused(objects: chunks.Chunks, sizes: dict[str, int]) -> None:
    with pytest.raises(SnapshotError, match="list of chunks"):
        chunks.decode(chunks.encode(objects)[0], sizes)


def test_another_list_than_the_manifests_is_refused() -> None:
    data, index = chunks.encode({"a": ()})
    for other in (b"", b"\xc1", data + b"x", msgspec.msgpack.encode([2, [["a", []]]])):
        with pytest.raises(SnapshotError, match="list of chunks"):
            chunks.decode(other, {"a": 0}, index)
