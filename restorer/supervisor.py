"""Keeps child processes running: starts, restarts with backoff, passes on what they print, stops them.

A child is an argv; what it does is not known here. Each runs in a session of its own, so that a Ctrl-C reaches the
supervisor alone and the order of the end stays its decision, and gets a signal from the kernel however the supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from restorer.rundir import Account

_LINE = 16 << 10
_LAST_WORDS_S = 0.5


@dataclass(frozen=True, slots=True)
class Child:
    """How one process is run."""

    name: str
    argv: tuple[str, ...]
    stop_s: float
    """How long it may take to end after SIGTERM before it is killed."""
    orphan_signal: signal.Signals = signal.SIGTERM
    """What the kernel sends it when the supervisor dies."""
    account: Account | None = None
    """Who it runs as, without supplementary groups; None: whoever runs the supervisor."""
    cwd: Path = Path("/")
    env: Mapping[str, str] | None = None
    """Its whole environment; None: the supervisor's."""
    program: Path | None = None
    """A file to run in place of ``argv[0]`` although its account cannot reach it by path."""
    muted: str = ""
    """Lines that contain this are not passed on."""


@dataclass(slots=True)
class _Kept:
    child: Child
    task: asyncio.Task[None]
    process: subprocess.Popen[bytes] | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """A set of children. Belongs to one event loop; every child is started by it and reaped by it.

    Args:
        say: called with the child's name and a line it printed, or with an empty name and a line of the supervisor's.
        changed: called with name -> pid whenever a child has begun or ended.
        first_delay_s, longest_delay_s: the pause before a restart, doubling between these.
        healthy_s: a child that ran this long begins again at ``first_delay_s``.
    """

    def __init__(
        self,
        *,
        say: Callable[[str, str], None],
        changed: Callable[[Mapping[str, int]], None] = lambda _: None,
        first_delay_s: float = 0.1,
        longest_delay_s: float = 5.0,
        healthy_s: float = 30.0,
    ) -> None:
        self._say = say
        self._changed = changed
        self._first_delay_s = first_delay_s
        self._longest_delay_s = longest_delay_s
        self._healthy_s = healthy_s
        self._kept: dict[str, _Kept] = {}

    def start(self, child: Child) -> None:
        """Run it, and run it again whenever it ends, until :meth:`stop`."""
        if child.name in self._kept:
            raise ValueError(f"there is a child {child.name} already")
        self._kept[child.name] = _Kept(child, asyncio.create_task(self._keep(child.name), name=child.name))

    @property
    def pids(self) -> dict[str, int]:
        """The children that run now."""
        return {name: kept.process.pid for name, kept in self._kept.items() if kept.process is not None}

    async def stop(self, *names: str, hurry: asyncio.Event | None = None) -> list[str]:
        """SIGTERM to these children at once; wait for each until its deadline, or until ``hurry``; then SIGKILL.

        Returns:
            The names of those that had to be killed. Nobody of ``names`` runs any more, and none will be restarted.
        """
        ended = await asyncio.gather(*(self._stop(self._kept[name], hurry) for name in names if name in self._kept))
        for name in names:
            self._kept.pop(name, None)
        return [name for name in ended if name]

    async def _stop(self, kept: _Kept, hurry: asyncio.Event | None) -> str:
        kept.stopping.set()
        if kept.process is not None:
            kept.process.terminate()
        waits: set[asyncio.Task[object]] = {asyncio.create_task(_wait(kept.task))}
        if hurry is not None:
            waits.add(asyncio.create_task(hurry.wait()))
        await asyncio.wait(waits, timeout=kept.child.stop_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        killed = kept.process is not None and not kept.task.done()
        if kept.process is not None:
            kept.process.kill()
        await kept.task
        return kept.child.name if killed else ""

    async def _keep(self, name: str) -> None:
        await asyncio.sleep(0)  # until start() has filed the record of this task
        kept, delay_s = self._kept[name], self._first_delay_s
        while not kept.stopping.is_set():
            began = time.monotonic()
            try:
                how = await self._run(kept)
            except OSError as error:
                how = f"could not be started: {error.strerror} ({error.filename or kept.child.argv[0]})"
            if kept.stopping.is_set():
                return
            ran_s = time.monotonic() - began
            delay_s = self._first_delay_s if ran_s >= self._healthy_s else delay_s
            self._say("", f"{name} {how} after {ran_s:.1f} s; starting it again in {delay_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(kept.stopping.wait(), delay_s)
            delay_s = min(delay_s * 2, self._longest_delay_s)

    async def _run(self, kept: _Kept) -> str:
        """One life of a child; how it ended."""
        child = kept.child
        process, lifeline = _spawn(child)
        kept.process = process
        assert process.stdout is not None
        self._changed(self.pids)
        pump = asyncio.create_task(self._pump(child, process.stdout.fileno()))
        try:
            await _exit(process)
            # Its own children may hold the pipe open for as long as they like.
            await asyncio.wait({pump}, timeout=_LAST_WORDS_S)
        finally:
            pump.cancel()
            await asyncio.wait({pump})
            process.stdout.close()
            if process.poll() is None:
                process.kill()
                process.wait()
            os.close(lifeline)
            kept.process = None
            self._changed(self.pids)
        code = process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    async def _pump(self, child: Child, fd: int) -> None:
        """Hand on what the child prints, line by line; a longer line than _LINE comes in pieces."""
        rest = b""
        os.set_blocking(fd, False)
        while data := await _read(fd):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._pass_on(child, line)
        if rest:
            self._pass_on(child, rest)

    def _pass_on(self, child: Child, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not child.muted or child.muted not in text:
            self._say(child.name, text)


def _spawn(child: Child) -> tuple[subprocess.Popen[bytes], int]:
    """Start it; the process, and our end of its lifeline: while that is open, it is not orphaned.

    Raises:
        OSError: it could not be started.
    """
    argv, who = child.argv, child.account
    with contextlib.ExitStack() as stack:
        ours, theirs = _lifeline(child.orphan_signal)
        stack.callback(os.close, theirs)
        on_failure = stack.enter_context(contextlib.ExitStack())
        on_failure.callback(os.close, ours)
        fds = [theirs]
        if child.program is not None:
            fds.append(os.open(child.program, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, fds[1])
            argv = (f"/proc/self/fd/{fds[1]}", *argv[1:])
        process = subprocess.Popen(
            argv if who is None else ("setpriv", "--no-new-privs", "--", *argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=child.cwd,
            env=child.env,
            start_new_session=True,
            pass_fds=fds,
            user=None if who is None else who.uid,
            group=None if who is None else who.gid,
            extra_groups=None if who is None else [],
        )
        fcntl.fcntl(theirs, fcntl.F_SETOWN, process.pid)
        on_failure.pop_all()
    return process, ours


def _lifeline(number: signal.Signals) -> tuple[int, int]:
    """A pipe whose reading end sends a signal to its owner when the writing end is gone.

    The parent-death signal of prctl would do for most children, but the kernel forgets it when a process changes its user,
    as the gateway does after it was started.
    """
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(theirs, fcntl.F_SETSIG, number)
    fcntl.fcntl(theirs, fcntl.F_SETFL, os.O_ASYNC)
    return ours, theirs


async def _wait(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


async def _exit(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child, and reap it."""
    fd = os.pidfd_open(process.pid)
    try:
        await _readable(fd)
    finally:
        os.close(fd)
    process.wait()


async def end(pid: int, *, within: float) -> bool:
    """SIGTERM to a process that is no child of ours, SIGKILL after ``within`` seconds; True if it needed that."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            try:
                await asyncio.wait_for(_readable(fd), within)
            except TimeoutError:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                await _readable(fd)
                return True
        return False
    finally:
        os.close(fd)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


async def _read(fd: int) -> bytes:
    while True:
        await _readable(fd)
        with contextlib.suppress(BlockingIOError):
            return os.read(fd, _LINE)
