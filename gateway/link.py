"""Keeps the registry equal to the store: applies what is pushed, reads everything again when it might have missed some.

On loss of the store the registry keeps its last view and this module reconnects, for as long as it takes. Knows nothing
of what the view is used for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from gateway import logs
from gateway.errors import StoreUnavailable
from gateway.registry import Registry
from gateway.store import Store, WrongSchema
from policies.wire import Hint

REREAD_S = 5.0
"""Everything is read again this often: a lost event costs at most so long."""
_BACKOFF_S = (0.05, 2.0)


class Link:
    """One per gateway process; :meth:`run` is its life."""

    def __init__(self, store: Store, registry: Registry, models: Sequence[str]) -> None:
        self._store = store
        self._registry = registry
        self._models = models
        self._stale = asyncio.Event()
        self._followers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.connected = asyncio.Event()
        """Set while the store answers and events arrive."""
        self.on_connect: list[Callable[[], Awaitable[None]]] = []
        """Called on each new connection, when the records have been read; may raise StoreUnavailable."""
        self.on_permits: Callable[[str], None] = lambda pool: None
        """Called when somebody waits for permits of a pool, or gave some back."""
        self.on_debtor: Callable[[str], None] = lambda tenant: None
        """Called when a tenant has just used more tokens than it had."""
        self.on_hint: Callable[[Hint], None] = lambda hint: None
        """Called with each hint, when what it says is known."""

    async def run(self) -> None:
        """Stay connected until cancelled."""
        backoff = _BACKOFF_S[0]
        while True:
            try:
                await self._session()
            except (StoreUnavailable, WrongSchema) as failure:
                if self.connected.is_set():
                    backoff = _BACKOFF_S[0]
                self.connected.clear()
                logs.warning("store lost; serving on with what is known", reason=str(failure))
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _BACKOFF_S[1])

    def know(self, models: Sequence[str]) -> None:
        """From now on follow these models; what is in the store about a new one is read at once."""
        self._models = models
        self._stale.set()

    async def refresh(self, *, first: bool = False) -> None:
        """Read all records again; ``first``: before any was pushed on this connection.

        Raises:
            StoreUnavailable: the view stays as it was.
        """
        snapshot = await self._store.snapshot(self._models)
        self._registry.load(snapshot.seq, snapshot.replicas, first=first)
        for model, found in snapshot.failures.items():
            failure, ttl_s = found or (None, 0.0)
            self._registry.load_failure(model, failure, ttl_s)

    @contextlib.contextmanager
    def follow(self, operation: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever something about the operation, or the task, may have changed."""
        changed = asyncio.Event()
        self._followers[operation].add(changed)
        try:
            yield changed
        finally:
            self._followers[operation].discard(changed)
            if not self._followers[operation]:
                del self._followers[operation]

    async def _session(self) -> None:
        """Subscribe first and read then: what changes in between is seen twice, never missed."""
        await self._store.check_schema()
        async with self._store.hints() as hints:
            await self.refresh(first=True)
            for listener in self.on_connect:
                await listener()
            self.connected.set()
            logs.info("store connected", seq=self._registry.seq)
            # Not a TaskGroup: in Python 3.11 it leaves this task marked as being cancelled, for good.
            tasks = [asyncio.create_task(self._listen(hints)), asyncio.create_task(self._reread())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()

    async def _listen(self, hints: AsyncIterator[Hint]) -> None:
        async for hint in hints:
            if hint.replica is not None and not self._registry.apply(hint.replica):
                self._stale.set()
            if hint.model is not None and hint.job is None:
                self._stale.set()
            if hint.permits is not None:
                self.on_permits(hint.permits)
            if hint.debtor is not None:
                self.on_debtor(hint.debtor)
            for changed in self._followers.get(hint.operation or hint.task or "", ()):
                changed.set()
            self.on_hint(hint)

    async def _reread(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REREAD_S):
                    await self._stale.wait()
            self._stale.clear()
            await self.refresh()
