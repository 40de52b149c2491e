"""Mapped files: what was touched of them, and their way into the page cache."""

from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path

import pytest
from conftest import eventually
from test_policies_compat import manifest as any_manifest

from policies.manifest import MappedFile
from policies.reading import LEAST_BYTES, Restore
from restorer.checkpoint import prefetch
from restorer.system import pagecache

MIB = 1 << 20
ON = Restore(prefetch="on")


def mapped(path: Path, touched: int | None = None) -> MappedFile:
    return MappedFile(path=str(path), bytes=path.stat().st_size, sha256="0", touched=touched)


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A big file that is not in the page cache."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(8 * MIB) * (LEAST_BYTES // (8 * MIB)))
    pagecache.evict([path])
    if pagecache.tier([path]) != "disk":
        pytest.skip("this file system keeps its files in memory")
    return path


async def test_files_are_in_the_page_cache_soon_after_the_body_began(cold: Path) -> None:
    async with prefetch.beside([mapped(cold)], ON):
        await eventually(lambda: pagecache.share([cold]) == (LEAST_BYTES, LEAST_BYTES), what="the file in the page cache")


async def test_small_images_are_on_their_way_and_big_ones_are_left(cold: Path, tmp_path: Path) -> None:
    small = tmp_path / "core-7.img"
    await asyncio.to_thread(small.write_bytes, os.urandom(2 * MIB))
    pagecache.evict([small])
    pagecache.evict([cold])
    assert prefetch.begun([small, cold], [], Restore()) == (0, 2 * MIB + LEAST_BYTES)
    await eventually(lambda: pagecache.share([small])[0] == 2 * MIB, what="the small image in the page cache")
    assert pagecache.share([cold])[0] < LEAST_BYTES // 2


async def test_libraries_are_on_their_way_and_of_a_big_file_its_head(cold: Path, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    await asyncio.to_thread(library.write_bytes, os.urandom(3 * MIB + 5000))
    pagecache.evict([library])
    gone = MappedFile(path=str(tmp_path / "gone.so"), bytes=MIB, sha256="0")
    assert prefetch.begun([], [gone, mapped(library), mapped(cold)], Restore()) == (0, 0)
    size = 3 * MIB + 8192
    await eventually(lambda: pagecache.share([library])[0] >= size - mmap.PAGESIZE, what="the library in the page cache")
    await eventually(lambda: pagecache.share([cold])[0] > 0, what="the head of the big file in the page cache")
    assert pagecache.share([cold])[0] < LEAST_BYTES // 2
    other = tmp_path / "other.so"
    await asyncio.to_thread(other.write_bytes, os.urandom(MIB))
    pagecache.evict([other])
    prefetch.begun([], [mapped(other)], Restore(prefetch="off"))
    assert pagecache.share([other])[0] == 0


async def test_nothing_is_read_after_the_body(cold: Path) -> None:
    sizes = [mapped(cold).model_copy(update={"bytes": 1 << 40})]
    async with asyncio.timeout(20):
        async with prefetch.beside(sizes, ON):
            pass


async def test_a_file_that_cannot_be_read_is_left_to_those_who_need_it(tmp_path: Path) -> None:
    gone = MappedFile(path=str(tmp_path / "gone"), bytes=LEAST_BYTES, sha256="0", touched=8 * MIB)
    async with prefetch.beside([gone], ON):
        pass
    assert prefetch.look([gone]) is None


def test_what_a_canary_needs_is_where_its_file_is(cold: Path, tmp_path: Path) -> None:
    warm = tmp_path / "warm"
    warm.write_bytes(bytes(4 * MIB))
    assert prefetch.look([mapped(cold, 3 * MIB), mapped(warm, 1 * MIB), mapped(warm)]) == prefetch.Touched(1 * MIB, 4 * MIB)
    assert prefetch.look([mapped(cold, 0)]) is None


def test_what_a_process_has_touched_of_a_file_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for at in range(0, 4 * MIB, mmap.PAGESIZE):
            view[at]
        found = prefetch.touched(os.getpid())
    assert 4 * MIB <= found[str(path)] < 5 * MIB


def test_a_manifest_says_what_was_touched(cold: Path) -> None:
    draft = any_manifest().model_copy(update={"files": (mapped(cold), MappedFile(path="/lib", bytes=5, sha256="0"))})
    assert [file.touched for file in prefetch.noted(draft, {str(cold): 5 * MIB}).files] == [5 * MIB, 0]
    assert [file.touched for file in prefetch.noted(draft, {}).files] == [None, None]
