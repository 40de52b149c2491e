"""One child process, from its start to its last words: how it is started, what it prints, how it ended.

Each runs in a session of its own, so that a Ctrl-C reaches the supervisor alone and the order of the end stays its decision,
and gets a signal from the kernel however the supervisor dies. When and how often a child runs is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from policies.control import Ask, Told
from restorer.installation.channel import Channel
from restorer.installation.rundir import Account

_LINE = 16 << 10
_LAST_WORDS_S = 0.5


@dataclass(frozen=True, slots=True)
class Talk:
    """What is said on the line to a child that has one."""

    first: Callable[[], Told]
    """Asked at each of its starts."""
    on_ask: Callable[[Channel, Ask], None]


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
    listener: socket.socket | None = None
    """A bound socket; its number is added to the arguments as ``--listen-fd``."""
    metrics: socket.socket | None = None
    """Another, as ``--metrics-fd``."""
    talk: Talk | None = None
    """It gets a line to us, as ``--control-fd``."""


Say = Callable[[str, str], None]
"""Takes the child's name and a line it printed, or an empty name and a line of the supervisor's."""


class Life:
    """A child that runs. :attr:`task` is done at its end, and says how it ended.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, child: Child, say: Say) -> None:
        self.child = child
        self._say = say
        self.channel: Channel | None = None
        theirs: socket.socket | None = None
        if child.talk is not None:
            ours, theirs = socket.socketpair()
            self.channel = Channel(ours, on_ask=child.talk.on_ask, complain=lambda text: say("", f"{child.name} {text}"))
        with contextlib.ExitStack() as stack:
            if theirs is not None:
                stack.enter_context(theirs)
                failed = stack.enter_context(contextlib.ExitStack())
                failed.enter_context(ours)
            self.process, self._lifeline = _spawn(child, theirs)
            if theirs is not None:
                failed.pop_all()
        self.task = asyncio.create_task(self._live(), name=child.name)

    async def _live(self) -> str:
        process = self.process
        assert process.stdout is not None
        talk = asyncio.create_task(self._talk())
        pump = asyncio.create_task(self._pump(process.stdout.fileno()))
        try:
            await _exit(process)
            # Its own children may hold the pipe open for as long as they like.
            await asyncio.wait({pump}, timeout=_LAST_WORDS_S)
        finally:
            for task in (talk, pump):
                task.cancel()
            await asyncio.wait({talk, pump})
            process.stdout.close()
            if process.poll() is None:
                process.kill()
                process.wait()
            os.close(self._lifeline)
        code = process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    async def _talk(self) -> None:
        if self.channel is not None and self.child.talk is not None:
            await self.channel.run(self.child.talk.first())

    async def _pump(self, fd: int) -> None:
        """Hand on what the child prints, line by line; a longer line than _LINE comes in pieces."""
        rest = b""
        os.set_blocking(fd, False)
        while data := await _read(fd):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._pass_on(line)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not self.child.muted or self.child.muted not in text:
            self._say(self.child.name, text)


def _spawn(child: Child, control: socket.socket | None) -> tuple[subprocess.Popen[bytes], int]:
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
        for option, passed in (
            ("--listen-fd", child.listener),
            ("--metrics-fd", child.metrics),
            ("--control-fd", control),
        ):
            if passed is not None:
                fds.append(passed.fileno())
                argv = (*argv, option, str(passed.fileno()))
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


async def _exit(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child, and reap it."""
    fd = os.pidfd_open(process.pid)
    try:
        await readable(fd)
    finally:
        os.close(fd)
    process.wait()


async def readable(fd: int) -> None:
    """Wait until there is something to read, or a process has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


async def _read(fd: int) -> bytes:
    while True:
        await readable(fd)
        with contextlib.suppress(BlockingIOError):
            return os.read(fd, _LINE)
