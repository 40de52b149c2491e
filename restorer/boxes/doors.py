"""Doors of boxes, from the restorer's side: bound, started, let clients in, started again when they die, ended.

A door is made with its box and stays shut until clients may ask the engine in it; :mod:`restorer.boxes.door` is the process
itself. Its port is bound here, so that it is certain before anybody is told, and so that who connects waits rather than being
refused while the process is on its way. Without ``restorer.expose`` there are none. Knows nothing of replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies import reach
from policies.expose import Expose
from restorer.boxes import door
from restorer.errors import Environment, RestorerError, ToolHung
from restorer.procfs.processes import readable, start_time, watch

if TYPE_CHECKING:
    from restorer.boxes.box import Box

USER = "nobody"
COUNTED = ("passed", "barred", "full", "refused")
"""What becomes of connections, as they are counted."""
_BACKLOG = 1024
_START_S = 20.0
_END_S = 20.0
_ITSELF_S = 5.0
"""A door whose box has ended ends by itself well within this."""
_TRIES = 20
_PAUSE_S = 0.5
_COUNTS = "door.counts"


@dataclass(slots=True)
class Door:
    """One of them."""

    address: str
    port: int
    pid: int
    start_time: int | None
    counts: Path
    """Where it counts its connections."""
    process: subprocess.Popen[bytes] | None = None
    """None: an earlier restorer has started it."""
    watching: asyncio.Task[None] | None = None
    counted: tuple[int, ...] = (0,) * len(COUNTED)
    """What of its connections was told already."""

    @property
    def text(self) -> str:
        return reach.door(self.address, self.port)

    @property
    def facts(self) -> dict[str, Any]:
        return {"address": self.address, "port": self.port, "pid": self.pid, "start_time": self.start_time}

    @property
    def alive(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        return self.start_time is not None and start_time(self.pid) == self.start_time

    def admit(self, port: int) -> None:
        """Let clients in, to this port of the box. Nothing if it has died; who watches it will know."""
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as gate:
            gate.write(str(port).encode())

    def dismiss(self) -> bool:
        """Nobody is to come in any more. False: clients were let in, so it has to be killed."""
        gate = None if self.process is None else self.process.stdin
        if gate is None or gate.closed:
            return False
        gate.close()
        return True


class Doors:
    """All doors of one host. Methods are called from one event loop.

    Args:
        expose: None: there are none, and every method does nothing.
    """

    def __init__(self, expose: Expose | None, log: Callable[[str], None]) -> None:
        self._expose, self._log = expose, log
        self._doors: dict[str, Door] = {}
        self._next = 0 if expose is None else random.randrange(len(expose.range))
        self.on_lost: Callable[[str, str], None] = lambda box, reason: None
        """Called with a box's id when its door cannot be had again at its port, and why."""

    async def make(self, box: Box) -> None:
        """Give a box a door that is shut still, if it has none; its port is bound when this returns.

        Raises:
            Environment: it cannot be made on this host.
        """
        if self._expose is None or ((known := self._doors.get(box.id)) is not None and known.alive):
            return
        await self.shut(box)
        self._doors[box.id] = await self._made(box, self._fresh())

    def open(self, box: Box, port: int) -> None:
        """Let clients in to a port of the box, and keep it so for as long as the box lives."""
        known = self._doors.get(box.id)
        if known is not None:
            known.admit(port)
            known.watching = asyncio.create_task(self._watch(box, known, port))

    def text(self, box: Box) -> str:
        """Where the box is reached from other hosts; empty: it is not."""
        known = self._doors.get(box.id)
        return "" if known is None else known.text

    async def adopt(self, box: Box, port: int) -> str:
        """Go on with the door of a box that an earlier restorer has left, or make one; its text."""
        facts = box.facts.get("door")
        if facts is not None:
            found = _remembered(box, facts)
            self._doors[box.id] = found
            found.watching = asyncio.create_task(self._watch(box, found, port))
            return found.text
        try:
            await self.make(box)
            self.open(box, port)
        except RestorerError as error:
            self._log(f"box {box.id} has no door, so no other host reaches it: {error}")
        return self.text(box)

    async def renew(self, box: Box) -> None:
        """Cut off whoever is connected; from now on there is another door, which is shut.

        Raises:
            Environment: as for :meth:`make`; then there is none.
        """
        if box.facts.get("door") is not None:
            await self.shut(box)
            await self.make(box)

    async def shut(self, box: Box) -> None:
        """End the door of a box and wait until its port is free. Idempotent.

        Raises:
            ToolHung: it does not end. Environment: it may not be ended.
        """
        facts, known = box.facts.pop("door", None), self._doors.pop(box.id, None)
        if known is None and facts is not None:
            known = _remembered(box, facts)
        if known is None:
            return
        if known.watching is not None:
            known.watching.cancel()
        ends_itself = known.dismiss() or not box.alive
        await _ended(known, _ITSELF_S if ends_itself else 0.0)

    def counts(self) -> tuple[dict[str, int], int]:
        """What became of connections since the last call, by :data:`COUNTED`, and how many are open now."""
        found, now = dict.fromkeys(COUNTED, 0), 0
        for known in self._doors.values():
            passed, open_now, *others = _read(known.counts)
            for number, (name, total) in enumerate(zip(COUNTED, (passed, *others), strict=True)):
                found[name] += total - known.counted[number]
            known.counted = (passed, *others)
            now += open_now
        return found, now

    def _fresh(self) -> socket.socket:
        """A socket at a port that was not another box's a moment ago, if there is one."""
        assert self._expose is not None
        ports = self._expose.range
        for reuse in (False, True):
            # Without reuse the kernel refuses a port that has connections still, however nearly ended.
            for _ in ports:
                port = ports[self._next]
                self._next = (self._next + 1) % len(ports)
                with contextlib.suppress(Taken):
                    return bound(self._expose.address, port, reuse=reuse)
        raise Environment(f"all ports {self._expose.ports} of {self._expose.address} are in use; widen restorer.expose.ports")

    async def _made(self, box: Box, listener: socket.socket) -> Door:
        with listener:
            address, port = listener.getsockname()[:2]
            process = await self._started(box, listener)
        counts = box.folder / _COUNTS
        made = Door(address, port, process.pid, start_time(process.pid), counts, process, counted=_told(counts))
        box.remember(door=made.facts)
        return made

    async def _started(self, box: Box, listener: socket.socket) -> subprocess.Popen[bytes]:
        """A door's process, when it has become somebody without rights."""
        process = self._spawned(box, listener)
        assert process.stdout is not None
        said = b""
        try:
            with process.stdout as out, contextlib.suppress(ToolHung):
                await readable(out.fileno(), _START_S, "it did not start in time")
                said = out.read(16)
            if said == b"ready\n":
                return process
        finally:
            if said != b"ready\n":
                process.kill()
                process.wait()
        told = (box.folder / "box.log").read_text(errors="replace").strip()[-300:]
        raise Environment(
            f"this host cannot make a door: {told or 'it said nothing'}; give the restorer CAP_SETUID, CAP_SETGID and CAP_KILL, "
            "or leave restorer.expose out"
        )

    def _spawned(self, box: Box, listener: socket.socket) -> subprocess.Popen[bytes]:
        """Takes milliseconds."""
        assert self._expose is not None
        with contextlib.ExitStack() as held:
            counts = held.enter_context((box.folder / _COUNTS).open("a+b"))
            counts.truncate(door.COUNTS.size)
            log = held.enter_context((box.folder / "box.log").open("ab"))
            pidfd = os.pidfd_open(box.init_pid)
            held.callback(os.close, pidfd)
            passed = (listener.fileno(), pidfd, counts.fileno())
            allow, most = ",".join(self._expose.allow), str(self._expose.connections)
            return subprocess.Popen(
                [sys.executable, "-I", "-S", door.__file__, box.address, allow, most, USER, *map(str, passed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=passed,
                cwd="/",
                env={},
                bufsize=0,
                start_new_session=True,
            )

    async def _watch(self, box: Box, known: Door, port: int) -> None:
        """Start it again at the same port whenever it dies before its box does."""
        while True:
            await _end_of(known)
            if not box.alive or self._doors.get(box.id) is not known:
                return
            self._log(f"the door of box {box.id} at {known.text} has died, and is opened again")
            try:
                known = await self._again(box, known, port)
            except RestorerError as error:
                self.on_lost(box.id, f"its door at {known.text} cannot be opened again: {error}")
                return

    async def _again(self, box: Box, lost: Door, port: int) -> Door:
        for left in reversed(range(_TRIES)):
            try:
                listener = bound(lost.address, lost.port, reuse=True)
                made = await self._made(box, listener)
            except RestorerError:
                if not left or not box.alive:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                made.watching = lost.watching
                self._doors[box.id] = made
                made.admit(port)
                return made
        raise AssertionError


class Taken(Environment):
    """Somebody has this port."""


def bound(address: str, port: int, *, reuse: bool) -> socket.socket:
    """A listening socket.

    Raises:
        Taken: somebody has it. Environment: nobody could listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        listener.bind((address, port))
        # Of its connections too: what a door that died leaves of them must not keep the next one from its port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Taken(f"{reach.door(address, port)} is in use") from None
        said = error.strerror or str(error)
        raise Environment(f"cannot listen on {reach.door(address, port)}: {said}; see restorer.expose") from None
    return listener


def _remembered(box: Box, facts: Mapping[str, Any]) -> Door:
    counts = box.folder / _COUNTS
    address, port, pid = str(facts["address"]), int(facts["port"]), int(facts["pid"])
    return Door(address, port, pid, facts["start_time"], counts, counted=_told(counts))


def _read(counts: Path) -> tuple[int, ...]:
    """As :data:`restorer.boxes.door.COUNTS`; zeros once its folder is gone."""
    data = b""
    with contextlib.suppress(OSError):
        data = counts.read_bytes()
    return door.COUNTS.unpack(data) if len(data) == door.COUNTS.size else (0,) * (len(COUNTED) + 1)


def _told(counts: Path) -> tuple[int, ...]:
    passed, _, *others = _read(counts)
    return passed, *others


async def _end_of(known: Door) -> None:
    """Until it has ended by itself."""
    if known.alive:
        with contextlib.suppress(ProcessLookupError):
            async with watch(known.pid) as ended:
                await ended
    if known.process is not None:
        known.process.wait()


async def _ended(known: Door, patience_s: float) -> None:
    """Kill it, if it has not ended by itself within ``patience_s`` seconds, and wait for its end."""
    if known.alive:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(known.pid)
            try:
                with contextlib.suppress(ToolHung):
                    await readable(pidfd, patience_s, "")
                    return
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                await readable(pidfd, _END_S, f"the door at {known.text} did not die within {_END_S:g} s of SIGKILL")
            except PermissionError:
                raise Environment(f"the door at {known.text} may not be ended: give the restorer CAP_KILL") from None
            finally:
                os.close(pidfd)
                if known.process is not None:
                    known.process.poll()
