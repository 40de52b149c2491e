"""Asking for replicas to come or go, and for snapshots: one operation per wish, however many ask for it.

The decision is atomic in operations.lua; here are its typed calls, and how to follow an operation to its end. Knows
nothing of demand, nor of who may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import ValidationError

from gateway import logs
from gateway.errors import Busy
from gateway.store import Store
from policies.config import Config
from policies.wire import OPERATION_TTL_S, WAITING_TTL_MS, Operation, OperationState, Reason

T = TypeVar("T")
_REREAD_S = 5.0
"""What is followed is read again after this long even without an event: one may have been lost."""


class Events(Protocol):
    """Tells when something about an operation, or a task, may have changed."""

    def follow(self, id: str) -> AbstractContextManager[asyncio.Event]: ...


async def settled(
    events: Events, id: str, read: Callable[[], Awaitable[T | None]], running: Callable[[T], bool], timeout_s: float
) -> T | None:
    """What ``read`` says once it runs no more, or as it is after ``timeout_s`` seconds; None: there is none, or not any more."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    with events.follow(id) as changed:
        while True:
            changed.clear()
            found = await read()
            left = deadline - loop.time()
            if found is None or not running(found) or left <= 0:
                return found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _REREAD_S)):
                    await changed.wait()


@dataclass(frozen=True, slots=True)
class Outcome:
    """An operation, and whether this call created it or joined one that was running."""

    operation: Operation
    created: bool


class Sharing(NamedTuple):
    """The group of a model, as the store needs it to keep its bound."""

    name: str
    members: int
    models: Sequence[str]
    pinned: bool

    @classmethod
    def of(cls, config: Config, model: str) -> Sharing | None:
        """None: the model is in no group, or in no configuration."""
        spec = config.models.get(model)
        if spec is None or spec.group is None:
            return None
        models = [name for name, other in config.models.items() if other.group == spec.group]
        return cls(spec.group, config.groups[spec.group].members, models, spec.pinned)


class Seated(NamedTuple):
    """A model that has a place in a group, as the store sees it."""

    model: str
    leaving: bool
    serving_s: float | None
    """None: a start, or a snapshot, of it is under way."""


class Queued(NamedTuple):
    """A model that waits for one."""

    model: str
    yields: bool
    waited_s: float


class Crowded(Busy):
    """The model's group has no place for it now. Unless an operator asked, it queues for one while it is asked again."""

    def __init__(self, model: str, group: str, seated: Sequence[Seated], queue: Sequence[Queued]) -> None:
        self.seated, self.queue = seated, queue
        others = [repr(one.model) for one in seated if one.model != model]
        taken = ", ".join(others) or "those that wait for one"
        super().__init__(
            f"Group {group!r} has no place for {model!r}: {taken} come{'s' * (len(others) == 1)} first. Scale down what runs, or "
            "send a request: models that requests wait for take turns."
        )


class Operations:
    """Every method raises :class:`gateway.errors.StoreUnavailable`; repeating a call is always safe.

    Args:
        sharing: the group that a model is in.
    """

    def __init__(self, store: Store, events: Events, sharing: Callable[[str], Sharing | None] = lambda model: None) -> None:
        self._store = store
        self._events = events
        self._sharing = sharing

    async def scale_up(self, model: str, target: int, reason: Reason, *, yields: bool = False, trace: str = "") -> Outcome | None:
        """At least ``target`` replicas of ``model``, admitted or on their way.

        Args:
            yields: nobody waits for them; whom somebody waits for comes first.
            trace: ``traceparent`` of the operation, when somebody traces it.

        Returns None when a failure stands against the model; only ``admin`` may try in spite of it.

        Raises:
            Crowded: the model's group is full.
        """
        return await self._run("scale_up", model, reason, target=target, yields=yields, trace=trace)

    async def preload(self, model: str) -> Outcome | None:
        """One replica of ``model``, if nobody has called this since the installation started; else None.

        Raises:
            Crowded: the model's group is full; it will not be preloaded any more.
        """
        return await self._run("preload", model, "preload", target=1, yields=True)

    async def displace(self, victim: str, *, asker: str, min_tenure_s: float, detail: str) -> Outcome | None:
        """Stop all replicas of ``victim``, for ``asker`` to have its place; None when that is not (or no longer) right."""
        return await self._run("displace", victim, "group", asker=asker, min_tenure_ms=int(min_tenure_s * 1000), detail=detail)

    async def scale_down(self, model: str, target: int, inflight: Mapping[str, int], replica: str = "") -> Outcome | None:
        """At most ``target`` admitted replicas of ``model``: the idlest drain and stop; or just ``replica`` (a slot id).

        Args:
            inflight: incarnation -> requests in flight on it, over all gateways.

        Returns None when ``replica`` is given and is neither admitted nor already stopping.
        """
        return await self._run("scale_down", model, "admin", target=target, inflight=dict(inflight), replica=replica)

    async def move(self, model: str, replica: str, to: str) -> Outcome | None:
        """Start one on the host ``to`` and stop ``replica`` (a slot id) once that serves; None when it is not admitted, or stops.

        Meanwhile there may be one more than the model's ``max_replicas``.
        """
        return await self._run("move", model, "admin", replica=replica, to=to)

    async def create_snapshot(self, model: str) -> Outcome:
        """Start a donor, capture it, publish the snapshot.

        Raises:
            Crowded: the model's group is full.
        """
        outcome = await self._run("snapshot", model, "admin")
        if outcome is None:
            raise Busy(f"No snapshot of {model!r} can be made now.")
        return outcome

    async def get(self, id: str) -> Operation | None:
        return await self._store.operation(id)

    async def wait(self, id: str, timeout_s: float) -> Operation | None:
        """The operation once it has ended, or as it is after ``timeout_s`` seconds."""
        return await settled(
            self._events, id, lambda: self.get(id), lambda operation: operation.state is OperationState.RUNNING, timeout_s
        )

    async def _run(self, command: str, model: str, reason: Reason, **arguments: Any) -> Outcome | None:
        sharing = self._sharing(model)
        usual: dict[str, Any] = {"target": 0, "replica": "", "inflight": {}, "ttl_s": OPERATION_TTL_S}
        usual |= {"reason": reason, "trace": ""}
        group: dict[str, Any] = {} if sharing is None else {"group": {**sharing._asdict(), "ttl_ms": WAITING_TTL_MS}}
        verdict, text = await self._store.run(
            command,
            model,
            {"operation": f"op-{secrets.token_hex(8)}", **usual, **group, **arguments},
            group="" if sharing is None else sharing.name,
        )
        if verdict == "crowded" and sharing is not None:
            raise _crowded(model, sharing.name, json.loads(text))
        operation = _decoded(text) if text else None
        if operation is None:
            return None
        if verdict == "created":
            await self._store.note(operation.id, operation.created_ms)
        return Outcome(operation, verdict == "created")


def _decoded(text: str) -> Operation | None:
    """An operation that this call joined may be another version's: it is none of ours then, and no reason to fail."""
    try:
        return Operation.model_validate_json(text)
    except ValidationError as error:
        logs.warning("unreadable operation", reason=str(error).splitlines()[0])
        return None


def _crowded(model: str, group: str, found: Mapping[str, Any]) -> Crowded:
    """What the script tells; an empty list of its language reads as a mapping, and is as empty."""
    seated = [Seated(one["model"], one["leaving"], _seconds(one.get("serving_ms"))) for one in found["members"]]
    queue = [Queued(one["model"], one["yields"], one["waited_ms"] / 1000) for one in found["waiting"]]
    return Crowded(model, group, seated, queue)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
