"""What happens to a request right now: it is sent to a replica, waits, or is rejected.

The caller asks again whenever something that the view shows has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Code = Literal[
    "model_loading",
    "queue_full",
    "queue_bytes_full",
    "capacity_exceeded",
    "cold_start_timeout",
    "restore_failed",
    "shutting_down",
]
"""Why a request was rejected: the ``code`` of the error that the client gets."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An admitted replica as the asking gateway sees it."""

    incarnation: str
    inflight: int
    limit: int


@dataclass(frozen=True, slots=True)
class Room:
    """How full a waiting room is, and its bounds."""

    requests: int
    bytes: int
    max_requests: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class View:
    """Everything the decision needs."""

    candidates: Sequence[Candidate]
    """ADMITTED replicas that are not suspect."""
    rooms: Sequence[Room]
    """The model's waiting room and the gateway's; the request itself counts in neither unless it already waits."""
    size: int
    """Bytes of this request's body."""
    waiting: bool
    """It already holds a place in both rooms."""
    overdue: bool
    """Its deadline has passed."""
    on_cold: Literal["hold", "reject"]
    failure: str | None
    """Why no replica of this model can come, if that is certain."""
    draining: bool
    """This gateway is shutting down."""


@dataclass(frozen=True, slots=True)
class Send:
    """Dispatch to this replica."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Take (or keep) a place in the waiting room."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer with an error."""

    code: Code
    detail: str = ""


def decide(view: View) -> Send | Wait | Reject:
    """The numbered decision, first match wins.

    1. A replica has a free slot: send to the one with the fewest requests in flight, unless earlier requests wait for it
       (the caller asks for waiters first, in order).
    2. The gateway is draining: reject; nothing new may wait.
    3. The deadline has passed: reject.
    4. No replica exists and none can come: reject, finally.
    5. No replica exists and this model does not hold: reject; the client comes back.
    6. It already waits: keep its place.
    7. A room is full in requests or in bytes: reject.
    8. Wait.
    """
    free = [c for c in view.candidates if c.inflight < c.limit]
    if free:
        return Send(min(free, key=lambda c: (c.inflight, c.incarnation)).incarnation)
    if view.draining:
        return Reject("shutting_down")
    if view.overdue:
        return Reject("capacity_exceeded" if view.candidates else "cold_start_timeout")
    if not view.candidates:
        if view.failure is not None:
            return Reject("restore_failed", view.failure)
        if view.on_cold == "reject":
            return Reject("model_loading")
    if view.waiting:
        return Wait()
    for room in view.rooms:
        if room.requests + 1 > room.max_requests:
            return Reject("queue_full")
        if room.bytes + view.size > room.max_bytes:
            return Reject("queue_bytes_full")
    return Wait()
