"""Memory to read into past the page cache: in one piece for the device too.

A request of a device names each piece of memory that it fills, a few hundred at most. In small pages two MiB are five hundred
pieces, in a huge page one: that made a virtual disk read two and a half times as fast. Knows nothing of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator

HUGE = 2 << 20


@contextlib.contextmanager
def whole(size: int) -> Iterator[memoryview]:
    """``size`` bytes that begin at the beginning of a huge page, in huge pages where the kernel gives any."""
    with mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        # Kernels without huge pages refuse; small ones do as well, only slower.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE
        with memoryview(mapping) as view, view[start : start + size] as part:
            yield part
