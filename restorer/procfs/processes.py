"""Processes as /proc and pidfds show them: told apart by start time, waited for without being their parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from restorer.errors import ToolHung


@contextlib.asynccontextmanager
async def watch(pid: int) -> AsyncIterator[asyncio.Future[None]]:
    """A future that is done when the process ``pid`` has ended, be it a child or not.

    Raises:
        ProcessLookupError: there is no such process.
    """
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(pid)
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, _finish, ended)
    try:
        yield ended
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def readable(fd: int, timeout_s: float, complaint: str) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ready.wait()
    except TimeoutError:
        raise ToolHung(complaint) from None
    finally:
        loop.remove_reader(fd)


def proceed(pids: Iterable[int]) -> None:
    """Let stopped processes run on; those that have ended are left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def status(pid: int, name: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    raise OSError(f"/proc/{pid}/status has no {name}")


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat: tells a process from a later one with the same pid. None when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return None
