"""What happens to a request that no replica has a free slot for: it waits, or is rejected.

Asked when :func:`policies.balance.choose` has found nothing, or the tenant has all the slots it may have; asked again
whenever something that the view shows has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Code = Literal[
    "model_loading",
    "queue_full",
    "queue_bytes_full",
    "capacity_exceeded",
    "cold_start_timeout",
    "restore_failed",
    "shutting_down",
    "rate_limit_exceeded",
    "model_not_found",
]
"""Why a request was rejected: the ``code`` of the error that the client gets."""


class Room(NamedTuple):
    """How full a waiting room is, and its bounds."""

    requests: int
    bytes: int
    max_requests: int
    max_bytes: int


class View(NamedTuple):
    """Everything the decision needs."""

    replicas: int
    """ADMITTED ones that are trusted, however busy."""
    rooms: Sequence[Room]
    """The model's waiting room and the gateway's; the request itself counts in neither unless it already waits."""
    size: int
    """Bytes of this request's body."""
    waiting: bool
    """It already holds a place in both rooms."""
    left_s: float
    """Until its deadline; 0 or less when that has passed."""
    eta_s: float | None
    """Until it would be served if it waited; None: nobody knows."""
    on_cold: Literal["hold", "reject"]
    failure: str | None
    """Why no replica of this model can come, if that is certain."""
    draining: bool
    """This gateway is shutting down."""
    throttled: bool = False
    """Its tenant has all the slots on replicas that it may have, so a free one would not help."""
    places: int | None = None
    """How many more requests its tenant may have waiting; None: any number."""
    gone: bool = False
    """The configuration has this model no more."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Take (or keep) a place in the waiting room."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer with an error."""

    code: Code
    detail: str = ""


def decide(view: View) -> Wait | Reject:
    """The numbered decision, first match wins.

    1. The model is gone: reject, finally.
    2. The gateway is draining: reject; nothing new may wait.
    3. The deadline has passed: reject, by what was waited for.
    4. No replica exists and none can come: reject, finally.
    5. No replica exists and this model does not hold: reject; the client comes back.
    6. It already waits: keep its place.
    7. It cannot be served before its deadline: reject now rather than then.
    8. Its tenant may have no more waiting: reject, whoever else may.
    9. A room is full in requests or in bytes: reject.
    10. Wait.
    """
    if view.gone:
        return Reject("model_not_found")
    if view.draining:
        return Reject("shutting_down")
    if view.left_s <= 0:
        return Reject(_late(view))
    if not view.replicas:
        if view.failure is not None:
            return Reject("restore_failed", view.failure)
        if view.on_cold == "reject":
            return Reject("model_loading")
    if view.waiting:
        return Wait()
    if view.eta_s is not None and view.eta_s > view.left_s:
        return Reject(_late(view), f"it would have been served in {view.eta_s:.1f} s, its deadline is in {view.left_s:.1f} s")
    if view.places is not None and view.places <= 0:
        return Reject("rate_limit_exceeded", "it has as many requests waiting as it may")
    for room in view.rooms:
        if room.requests + 1 > room.max_requests:
            return Reject("queue_full")
        if room.bytes + view.size > room.max_bytes:
            return Reject("queue_bytes_full")
    return Wait()


def _late(view: View) -> Code:
    if view.throttled:
        return "rate_limit_exceeded"
    return "capacity_exceeded" if view.replicas else "cold_start_timeout"
