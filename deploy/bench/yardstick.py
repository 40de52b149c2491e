"""What a restore is measured by: its very bytes read from the disk, and as many put into fresh memory, with nothing else done.

``yardstick.py disk,mapped,fill,cache,zstd FILE...`` prints seconds as JSON, of what it is asked for: ``disk`` past the page
cache, ``mapped`` through it,
``fill`` from a buffer in the processor's cache into memory that nobody has touched, ``cache`` from the page cache into such
memory, ``zstd`` what the longer of reading and unpacking would be if they were packed. A restore from the disk cannot end before
the longer of ``disk`` and ``fill``. Takes as much memory as the files have data, and ``disk`` puts them out of the page cache.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zstandard

from restorer.system import buffers, pagecache
from restorer.system.files import data_extents

BLOCK = 2 << 20
READERS, CACHED_READERS = (4, 8), (1, 2)
SAMPLE = 48
"""Blocks that are packed and unpacked."""
CPUS = os.cpu_count() or 1


def blocks(fd: int) -> list[tuple[int, int, int]]:
    """(file, offset, size) of all data, in pieces."""
    found = []
    for start, end in data_extents(fd, os.fstat(fd).st_size):
        found += [(fd, at, min(BLOCK, end - at)) for at in range(start & ~4095, end, BLOCK)]
    return found


def timed(threads: int, count: int, work: Callable[[int, int], object]) -> float:
    """Seconds of ``work(thread, number)`` for all numbers."""

    def share(thread: int) -> None:
        for number in range(thread, count, threads):
            work(thread, number)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        list(pool.map(share, range(threads)))
        return time.perf_counter() - begun


def disk(paths: list[Path], readers: int, flags: int) -> float:
    pagecache.evict(paths)
    fds = [os.open(path, os.O_RDONLY | flags) for path in paths]
    jobs = [job for fd in fds for job in blocks(fd)]
    with contextlib.ExitStack() as kept:
        into = [kept.enter_context(buffers.whole(BLOCK)) for _ in range(readers)]
        seconds = timed(readers, len(jobs), lambda thread, n: os.preadv(jobs[n][0], [into[thread]], jobs[n][1]))
    for fd in fds:
        os.close(fd)
    return seconds


def into_fresh_memory(total: int, work: Callable[[int, memoryview], object]) -> float:
    """Seconds of ``work(number, part)`` for all parts of so much memory."""
    count = -(-total // BLOCK)
    with mmap.mmap(-1, count * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory, memoryview(memory) as view:
        memory.madvise(mmap.MADV_NOHUGEPAGE)

        def part(_: int, number: int) -> None:
            with view[number * BLOCK : (number + 1) * BLOCK] as piece:
                work(number, piece)

        return timed(CPUS, count, part)


def packed(jobs: list[tuple[int, int, int]]) -> tuple[float, float]:
    """(how much smaller zstd makes the bytes, how many bytes a second all processors unpack), by a sample of them."""
    sample = jobs[:: max(1, len(jobs) // SAMPLE)]
    plain = [os.pread(fd, size, at) for fd, at, size in sample]
    frames = [zstandard.ZstdCompressor(level=1).compress(data) for data in plain]
    total = sum(map(len, plain))
    seconds = timed(CPUS, len(frames), lambda _, number: zstandard.ZstdDecompressor().decompress(frames[number]))
    return total / sum(map(len, frames)), total / seconds


def filled(total: int) -> float:
    hot = bytearray(os.urandom(BLOCK))
    source = (ctypes.c_char * BLOCK).from_buffer(hot)

    def copied(_: int, part: memoryview) -> None:
        ctypes.memmove((ctypes.c_char * BLOCK).from_buffer(part), source, BLOCK)

    return into_fresh_memory(total, copied)


def from_cache(jobs: list[tuple[int, int, int]]) -> float:
    for fd, at, size in jobs:
        os.pread(fd, size, at)
    return into_fresh_memory(sum(BLOCK for _ in jobs), lambda number, part: os.preadv(jobs[number][0], [part], jobs[number][1]))


def main() -> None:
    wanted, paths = sys.argv[1].split(","), [Path(name) for name in sys.argv[2:]]
    jobs = [job for path in paths for job in blocks(os.open(path, os.O_RDONLY))]
    found: dict[str, float] = {"bytes": sum(size for _, _, size in jobs)}
    if "disk" in wanted:
        found["disk"] = min(disk(paths, readers, os.O_DIRECT) for readers in READERS)
    if "mapped" in wanted:
        found["mapped"] = min(disk(paths, readers, 0) for readers in CACHED_READERS)
    if "fill" in wanted:
        found["fill"] = filled(int(found["bytes"]))
    if "cache" in wanted:
        found["cache"] = from_cache(jobs)
    if "zstd" in wanted:
        found["zstd_ratio"], unpacking = packed(jobs)
        # The disk would have less to do, the processors more, beside what they do anyway.
        found["zstd"] = max(found["disk"] / found["zstd_ratio"], found["fill"] + found["bytes"] / unpacking)
    print(json.dumps(found))


main()
