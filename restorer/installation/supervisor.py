"""Keeps child processes running: starts, restarts with backoff, replaces without a gap, stops them.

A child is an argv; what it does is not known here. Its successor is started while it still runs, and only when that says that
it is ready is the old one told to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from restorer.installation.channel import Channel
from restorer.installation.child import Child, Life, Say, readable

__all__ = ["Child", "Supervisor", "end"]


@dataclass(slots=True, eq=False)
class _Kept:
    child: Child
    life: Life | None = None
    """The one that is kept running."""
    coming: Life | None = None
    """Its successor, which is not ready yet."""
    ending: dict[Life, asyncio.Task[None]] = field(default_factory=dict)
    """Predecessors, which were told to end, and what sees to that."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and renewed, when :attr:`life` is another one."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    replacing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def follow(self, life: Life | None) -> None:
        self.life = life
        self.changed.set()
        self.changed = asyncio.Event()

    def lives(self) -> list[Life]:
        return [life for life in (self.life, self.coming, *self.ending) if life is not None]


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
        say: Say,
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
        kept = self._kept[child.name] = _Kept(child)
        kept.task = asyncio.create_task(self._keep(kept), name=child.name)

    def amend(self, name: str, *, stop_s: float) -> None:
        """From now on it may take so long to end."""
        kept = self._kept[name]
        kept.child = dataclasses.replace(kept.child, stop_s=stop_s)

    @property
    def pids(self) -> dict[str, int]:
        """The processes that run now; one that is not, or no longer, the kept one has its pid in its name."""
        found = {}
        for name, kept in self._kept.items():
            for life in kept.lives():
                if not life.task.done():
                    found[name if life is kept.life else f"{name}/{life.process.pid}"] = life.process.pid
        return found

    def channel(self, name: str) -> Channel | None:
        """The line to a child that runs now; None when it does not, or has none."""
        kept = self._kept.get(name)
        return None if kept is None or kept.life is None else kept.life.channel

    async def ready(self, name: str, *, within_s: float) -> bool:
        """Wait until a child says that it serves, over as many lives as that takes."""
        kept = self._kept[name]
        try:
            async with asyncio.timeout(within_s):
                while True:
                    channel, changed = self.channel(name), kept.changed
                    waits = [changed.wait()] if channel is None else [changed.wait(), channel.ready.wait()]
                    await _first(*waits)
                    if channel is not None and channel.ready.is_set():
                        return True
        except TimeoutError:
            return False

    async def replace(self, name: str, *, within_s: float) -> str:
        """Start a successor; when it is ready, let the old one drain. Why there is none, or nothing.

        Whatever goes wrong with the successor, the old one goes on as if nothing had been.
        """
        kept = self._kept[name]
        async with kept.replacing:
            if kept.stopping.is_set():
                return f"{name} is being stopped"
            try:
                life = kept.coming = self._begin(kept)
            except OSError as error:
                return f"{name} could not be started: {error.strerror}"
            try:
                why = await self._readiness(kept, life, within_s)
                if why:
                    return f"{name} {why}; the old one goes on"
                old = kept.life
                kept.follow(life)
                if old is not None and not old.task.done():
                    old.process.terminate()
                    kept.ending[old] = asyncio.create_task(self._see_off(kept, old))
                return ""
            finally:
                kept.coming = None
                if kept.life is not life:
                    life.process.kill()
                    await asyncio.wait({life.task})

    async def _readiness(self, kept: _Kept, life: Life, within_s: float) -> str:
        """Why a successor cannot take over, or nothing."""
        assert life.channel is not None, "a child that never says that it is ready cannot be replaced"
        ready = life.channel.ready
        await _first(kept.stopping.wait(), ready.wait(), life=life, within_s=within_s)
        if kept.stopping.is_set():
            return "is being stopped"
        if life.task.done():
            return life.task.result()
        if not ready.is_set():
            return f"was not ready within {within_s:g} s"
        return "" if life.channel.connected else "does not reach the store"

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
        for life in kept.lives():
            life.process.terminate()
        waits = [self._ended(kept)] if hurry is None else [self._ended(kept), hurry.wait()]
        await _first(*waits, within_s=kept.child.stop_s)
        killed = [life for life in kept.lives() if not life.task.done()]
        for life in killed:
            life.process.kill()
        await self._ended(kept)
        return kept.child.name if killed else ""

    async def _ended(self, kept: _Kept) -> None:
        assert kept.task is not None
        await asyncio.wait({kept.task, *(life.task for life in kept.lives()), *kept.ending.values()})

    async def _see_off(self, kept: _Kept, life: Life) -> None:
        await asyncio.wait({life.task}, timeout=life.child.stop_s)
        if not life.task.done():
            self._say("", f"the old {life.child.name} (pid {life.process.pid}) did not end in time and is killed")
            life.process.kill()
            await asyncio.wait({life.task})
        kept.ending.pop(life, None)

    async def _keep(self, kept: _Kept) -> None:
        delay_s, name = self._first_delay_s, kept.child.name
        while not kept.stopping.is_set():
            began = time.monotonic()
            try:
                if kept.life is None:
                    kept.follow(self._begin(kept))
                how = await self._follow(kept)
            except OSError as error:
                how = f"could not be started: {error.strerror} ({error.filename or kept.child.argv[0]})"
            if kept.stopping.is_set():
                return
            if kept.life is not None:
                continue  # replaced
            ran_s = time.monotonic() - began
            delay_s = self._first_delay_s if ran_s >= self._healthy_s else delay_s
            self._say("", f"{name} {how} after {ran_s:.1f} s; starting it again in {delay_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(kept.stopping.wait(), delay_s)
            delay_s = min(delay_s * 2, self._longest_delay_s)

    async def _follow(self, kept: _Kept) -> str:
        """Until the kept life ends, and how; or until another one has taken its place."""
        life = kept.life
        assert life is not None
        await _first(kept.changed.wait(), life=life)
        if kept.life is not life:
            return ""
        await asyncio.wait({life.task})
        kept.follow(None)
        return life.task.result()

    def _begin(self, kept: _Kept) -> Life:
        """Raises OSError: it could not be started."""
        life = Life(kept.child, self._say)
        life.task.add_done_callback(lambda _: self._changed(self.pids))
        # Its record is filed by the caller, in this same step.
        asyncio.get_running_loop().call_soon(lambda: self._changed(self.pids))
        return life


async def _first(*waits: Coroutine[Any, Any, object], life: Life | None = None, within_s: float | None = None) -> None:
    """Until one of these is over, or the life is."""
    tasks: set[asyncio.Task[Any]] = {asyncio.create_task(wait) for wait in waits}
    watched = tasks if life is None else {*tasks, life.task}
    try:
        await asyncio.wait(watched, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


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
                await asyncio.wait_for(readable(fd), within)
            except TimeoutError:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                await readable(fd)
                return True
        return False
    finally:
        os.close(fd)
