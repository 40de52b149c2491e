"""The life of one gateway process: what is open, whether it drains, whether it is well, and what runs as long as it does.

Knows nothing of how requests are served, nor of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from gateway import errors, logs
from gateway.errors import GatewayError
from gateway.exchange import Call, Reply, reply

_END_S = 5.0


class Life:
    """One per process. Needs a running event loop.

    Args:
        reachable: set while the store is reached.
    """

    def __init__(self, reachable: asyncio.Event) -> None:
        self._reachable = reachable
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self.crashed = asyncio.Event()
        """Set when a part that must live as long as the process has died."""
        self.draining = False
        self.on_drain: list[Callable[[], None]] = []
        """Called once, when the drain begins."""
        self.on_refuse: list[Callable[[], None]] = []
        """Called at the end of the drain: whoever still waits will not be served here."""
        self.on_cut: list[Callable[[], None]] = []
        """Called after that: whose answer is not complete by now is told so, and cut."""
        self.open = 0
        """Requests being answered."""

    def opened(self) -> None:
        self.open += 1
        if self.open == 1:
            self._idle.clear()

    def closed(self) -> None:
        self.open -= 1
        if not self.open:
            self._idle.set()

    def drain(self) -> None:
        """Not ready any more; what is open or held goes on, and each answer closes its connection."""
        if not self.draining:
            self.draining = True
            for listener in self.on_drain:
                listener()

    def refuse(self) -> None:
        """The drain is over: what is held is refused, so that its client can come back to another process."""
        for listener in self.on_refuse:
            listener()

    def cut(self) -> None:
        """Nothing more may finish: what is still being answered ends here, and not as if its client had left."""
        for listener in self.on_cut:
            listener()

    async def quiet(self, within_s: float) -> bool:
        """Wait until no request is open; False when ``within_s`` seconds were not enough."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def start(self, jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run these until :meth:`stop`; the end of any of them before that is a crash."""
        for job in jobs:
            task = asyncio.create_task(job)
            self._tasks.append(task)
            task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Cancel what :meth:`start` started."""
        self._ending = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)

    async def health(self, call: Call) -> Reply:
        """The process is alive, and so are all its parts."""
        if self.crashed.is_set():
            raise GatewayError("A part of the gateway has died; see its log.")
        return reply({"status": "ok"})

    async def ready(self, call: Call) -> Reply:
        """New requests may be sent here."""
        if self.draining:
            raise errors.ShuttingDown("This gateway is shutting down.", retry_after_s=1.0)
        if not self._reachable.is_set():
            raise errors.StoreUnavailable("The store is not reached.", retry_after_s=1.0)
        return reply({"status": "ready"})

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self._ending:
            logs.error("a part of the gateway has died", None if task.cancelled() else task.exception())
            self.crashed.set()


Handler = Callable[[Call], Awaitable[Reply]]
"""Answers a plain request; raises GatewayError."""
