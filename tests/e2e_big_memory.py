"""A process that does with a big sparse snapshot what a restorer does, and prints what it took: bytes at its most, bytes filled.

Usage: e2e_big_memory.py FOLDER GIB MIB: an engine's memory of so many GiB, of which so many MiB are not zero.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from pathlib import Path

from restorer.checkpoint import images, pages
from restorer.checkpoint.filling import Filling
from restorer.checkpoint.images import Field, Image
from restorer.system import pagecache

HEAD = bytes.fromhex("19435654") + b"test"
PAGE, MIB = mmap.PAGESIZE, 1 << 20
NO_RESERVE = 0x4000
"""MAP_NORESERVE: a host need not have as much memory as the area is large."""


def message(values: dict[int, int]) -> bytes:
    return images.encoded(Field(number, 0, value) for number, value in values.items())


def dump(folder: Path, start: int, size: int, data: int) -> None:
    """What CRIU would have written: one area, wholly dumped, data in pieces of 1 MiB that are spread over it."""
    area = message({1: start, 2: start + size, 3: 0, 4: 0, 5: 3, 6: 0x22, 7: 1 | 1 << 9, 8: 2**64 - 1})
    Image(HEAD, [images.encoded([Field(1, 0, 5), Field(14, 2, area)])]).write(folder / "mm-7.img")
    Image(HEAD, [message({1: 3}), message({1: start, 2: size // PAGE, 4: 4})]).write(folder / "pagemap-7.img")
    with (folder / "pages-3.img").open("wb") as file:
        for number in range(data // MIB):
            file.seek(number * (size // (data // MIB)) // PAGE * PAGE)
            file.write((number % 255 + 1).to_bytes(1, "big") * MIB)
        file.truncate(size)


def checked(memory: mmap.mmap, size: int, data: int) -> bool:
    """The beginning of each piece is what it was, and what is between them is zero."""
    step = size // (data // MIB)
    starts = [number * step // PAGE * PAGE for number in range(data // MIB)]
    return all(memory[at] == number % 255 + 1 and memory[at + MIB] == 0 for number, at in enumerate(starts))


def main() -> None:
    folder, size, data = Path(sys.argv[1]), int(sys.argv[2]) << 30, int(sys.argv[3]) << 20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0 if checked(memory, size, data) else 1)
    os.waitpid(pid, os.WUNTRACED)
    dump(folder, start, size, data)
    pages.take_out(folder, huge=False)
    bulk = pages.taken_out(folder)
    assert bulk is not None
    filling = Filling(bulk, direct=True)
    pagecache.share(bulk.paths)
    filling.prepare()
    filling.put_back({7: pid})
    filling.close()
    os.kill(pid, signal.SIGCONT)
    _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == 0
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(peak) << 10, bulk.bytes)


main()
