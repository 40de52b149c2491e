"""Asking for replicas to come or go, and for snapshots: one operation per wish, however many ask for it.

The decision is atomic in operations.lua; here are its typed calls, and how to follow an operation to its end. Knows
nothing of demand, nor of who may ask.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import Busy
from gateway.store import Store
from policies.wire import OPERATION_TTL_S, Operation, OperationState, Reason

_REREAD_S = 5.0
"""An operation that is followed is read again after this long even without an event: one may have been lost."""


class Events(Protocol):
    """Tells when something about an operation may have changed."""

    def follow(self, operation: str) -> AbstractContextManager[asyncio.Event]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """An operation, and whether this call created it or joined one that was running."""

    operation: Operation
    created: bool


class Operations:
    """Every method raises :class:`gateway.errors.StoreUnavailable`; repeating a call is always safe."""

    def __init__(self, store: Store, events: Events) -> None:
        self._store = store
        self._events = events

    async def scale_up(self, model: str, target: int, reason: Reason) -> Outcome | None:
        """At least ``target`` replicas of ``model``, admitted or on their way.

        Returns None when a failure stands against the model; only ``admin`` may try in spite of it.
        """
        return await self._run("scale_up", model, reason, target=target)

    async def scale_down(self, model: str, target: int, inflight: Mapping[str, int], replica: str = "") -> Outcome | None:
        """At most ``target`` admitted replicas of ``model``: the idlest drain and stop; or just ``replica`` (a slot id).

        Args:
            inflight: incarnation -> requests in flight on it, over all gateways.

        Returns None when ``replica`` is given and is neither admitted nor already stopping.
        """
        return await self._run("scale_down", model, "admin", target=target, inflight=inflight, replica=replica)

    async def create_snapshot(self, model: str) -> Outcome:
        """Start a donor, capture it, publish the snapshot."""
        outcome = await self._run("snapshot", model, "admin")
        if outcome is None:
            raise Busy(f"No snapshot of {model!r} can be made now.")
        return outcome

    async def get(self, id: str) -> Operation | None:
        return await self._store.operation(id)

    async def wait(self, id: str, timeout_s: float) -> Operation | None:
        """The operation once it has ended, or as it is after ``timeout_s`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        with self._events.follow(id) as changed:
            while True:
                changed.clear()
                operation = await self.get(id)
                left = deadline - loop.time()
                if operation is None or operation.state is not OperationState.RUNNING or left <= 0:
                    return operation
                try:
                    async with asyncio.timeout(min(left, _REREAD_S)):
                        await changed.wait()
                except TimeoutError:
                    continue

    async def _run(
        self,
        command: str,
        model: str,
        reason: Reason,
        *,
        target: int = 0,
        inflight: Mapping[str, int] | None = None,
        replica: str = "",
    ) -> Outcome | None:
        arguments = {
            "operation": f"op-{secrets.token_hex(8)}",
            "reason": reason,
            "target": target,
            "replica": replica,
            "inflight": dict(inflight or {}),
            "ttl_s": OPERATION_TTL_S,
        }
        verdict, operation = await self._store.run(command, model, arguments)
        return None if operation is None else Outcome(operation, verdict == "created")
