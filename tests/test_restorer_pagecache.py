"""Which tier a file would be read from."""

from __future__ import annotations

from pathlib import Path

import pytest

from restorer.system import pagecache

MIB = 1 << 20


def forget(path: Path) -> None:
    """Take a file out of the page cache; skips where the file system is one that lives there."""
    pagecache.evict([path])
    if pagecache.tier([path]) != "disk":
        pytest.skip("this file system keeps its files in memory")


def test_what_was_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * MIB)
    assert pagecache.tier([path]) == "page cache"


def test_what_was_forgotten_is_on_disk_and_half_of_it_is_mixed(tmp_path: Path) -> None:
    cold, warm = tmp_path / "cold", tmp_path / "warm"
    for path in (cold, warm):
        path.write_bytes(b"x" * MIB)
    forget(cold)
    assert pagecache.tier([cold, warm]) == "mixed"
    assert pagecache.tier([warm]) == "page cache"


def test_holes_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x" * MIB)
        file.truncate(100 * MIB)
    assert pagecache.tier([path]) == "page cache"
    forget(path)
    assert pagecache.tier([path]) == "disk"


def test_no_data_needs_no_disk(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert pagecache.tier([path]) == "page cache"
    assert pagecache.tier([]) == "page cache"
