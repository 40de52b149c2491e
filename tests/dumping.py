"""Small processes in boxes, dumped and restored elsewhere by the real CRIU."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from conftest import eventually
from e2e_installation import a_place, needed, network

from restorer.boxes.box import Box, BoxFactory
from restorer.checkpoint import timers
from restorer.checkpoint.criu import Criu
from restorer.errors import ToolFailed
from restorer.storage.trees import capture_tree, lay_tree


@contextlib.asynccontextmanager
async def some_boxes(second: int) -> AsyncIterator[BoxFactory]:
    """Boxes on a network of their own (see :func:`e2e_installation.network`); all that are left end with the block."""
    with a_place("boxes") as folder:
        factory = BoxFactory(run_dir=folder / "run", state_dir=folder / "state", network=network(second), spare=0)
        try:
            yield factory
        finally:
            for box in await factory.survivors():
                await factory.discard(box)


OPTIONS = ("--tcp-established", "--network-lock", "skip")
PRELUDE = """
import ctypes, fcntl, mmap, os, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.shmat.restype = ctypes.c_void_p
private = os.environ["HOME"]
class Lacking(Exception): pass
def ok(result):
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def child(act):
    if os.fork() == 0:
        act()
        open(private + "/child", "w").close()
        time.sleep(3600)
    while not os.path.exists(private + "/child"): time.sleep(0.01)
try:
"""
POSTLUDE = """
except OSError as error:
    open(private + "/lacking", "w").write(str(error))
open(private + "/ready", "w").close()
while True: time.sleep(3600)
"""


def criu() -> Criu:
    return Criu(Path(needed("REWAKE_CRIU")), 20)


async def started(box: Box, script: str) -> int:
    """Run a script in a box; its host pid. Skips where this kernel has not what the script needs."""
    body = textwrap.indent(textwrap.dedent(script).strip() or "pass", "    ")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(box.mountpoint / "home")}
    inner = await box.spawn([sys.executable, "-I", "-c", PRELUDE + body + POSTLUDE], environment)
    home = box.private / "home"
    await eventually(lambda: (home / "ready").exists() or box.host_pid(inner) is None, what="the process to be as it shall be")
    if (home / "lacking").exists():
        pytest.skip(f"not on this kernel: {(home / 'lacking').read_text()}")
    pid = box.host_pid(inner)
    assert pid is not None, box.log.read_text()
    return pid


async def dumped(box: Box, images: Path) -> None:
    """Its images and private folders; it is left stopped."""
    (images / "i").mkdir(parents=True)
    await criu().dump(box, 1000, images / "i", OPTIONS)
    await asyncio.to_thread(timers.rearm, images / "i")
    for number, place in enumerate((box.root / "dev/shm", box.private)):
        await asyncio.to_thread(capture_tree, place, images / str(number))


async def restored(images: Path, box: Box) -> int:
    """Out of that, into an empty box; its host pid."""
    for number, place in enumerate((box.root / "dev/shm", box.private)):
        await asyncio.to_thread(lay_tree, images / str(number), place)
    await criu().restore(box, images / "i", OPTIONS)
    pid = box.host_pid(1000)
    assert pid is not None
    return pid


async def survives(boxes: BoxFactory, box: Box, images: Path) -> bool:
    """Does it come back out of a dump, elsewhere."""
    other = await boxes.take()
    try:
        await dumped(box, images)
        await restored(images, other)
    except ToolFailed:
        return False
    finally:
        await boxes.discard(other)
    return True
