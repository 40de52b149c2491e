"""Memory that a device fills: where it begins, what it is, and that it goes."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from restorer.system import buffers


@pytest.mark.parametrize("size", [mmap.PAGESIZE, buffers.HUGE, 3 * buffers.HUGE])
def test_it_begins_at_a_huge_page_and_holds_what_is_read(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "f").write_bytes(content)
    with (tmp_path / "f").open("rb", buffering=0) as file, buffers.whole(size) as buffer:
        assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % buffers.HUGE == 0
        assert len(buffer) == size
        assert file.readinto(buffer) == size
        assert buffer == content


def test_a_kernel_without_huge_pages_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(buffers.mmap, "mmap", Small)
    with buffers.whole(4096) as buffer:
        buffer[:] = b"x" * 4096
