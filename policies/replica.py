"""The life of a replica, as one table.

Rule 1: every legal change of state is a row of :data:`TRANSITIONS`; an absent row raises and changes nothing.
Rule 2: this file does not know who drives the table, nor how: it is given events and the time.

::

    QUEUED -claim-> MATCHING -restore-> RESTORING -up-> VERIFYING -admit-> ADMITTED -drain-> DRAINING -stop-> STOPPED
                        `----start----> STARTING --up----^   `-differ-> QUARANTINED
    A failed restore may FALL_BACK to STARTING, by policy, in a box and an incarnation of its own.
    Any state before ADMITTED may fail, be cancelled (before the point of no return) or go back to QUEUED when the
    restorer that held its lease is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict


class State(enum.StrEnum):
    """Where a replica stands. Clients' bytes reach it in ADMITTED only, and finish in DRAINING."""

    QUEUED = "queued"
    MATCHING = "matching"
    RESTORING = "restoring"
    STARTING = "starting"
    VERIFYING = "verifying"
    ADMITTED = "admitted"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"


class Event(enum.StrEnum):
    """What can happen to a replica."""

    CLAIM = "claim"
    RESTORE = "restore"
    START = "start"
    UP = "up"
    ADMIT = "admit"
    DRAIN = "drain"
    STOP = "stop"
    FAIL = "fail"
    DIFFER = "differ"
    CANCEL = "cancel"
    LEASE_LOST = "lease_lost"
    FALL_BACK = "fall_back"


_S, _E = State, Event

TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (_S.QUEUED, _E.CLAIM): _S.MATCHING,
        (_S.QUEUED, _E.CANCEL): _S.CANCELLED,
        (_S.QUEUED, _E.FAIL): _S.FAILED,
        (_S.MATCHING, _E.RESTORE): _S.RESTORING,
        (_S.MATCHING, _E.START): _S.STARTING,
        (_S.MATCHING, _E.FAIL): _S.FAILED,
        (_S.MATCHING, _E.CANCEL): _S.CANCELLED,
        (_S.MATCHING, _E.LEASE_LOST): _S.QUEUED,
        (_S.RESTORING, _E.UP): _S.VERIFYING,
        (_S.RESTORING, _E.FAIL): _S.FAILED,
        (_S.RESTORING, _E.FALL_BACK): _S.STARTING,
        (_S.RESTORING, _E.LEASE_LOST): _S.QUEUED,
        (_S.STARTING, _E.UP): _S.VERIFYING,
        (_S.STARTING, _E.FAIL): _S.FAILED,
        (_S.STARTING, _E.CANCEL): _S.CANCELLED,
        (_S.STARTING, _E.LEASE_LOST): _S.QUEUED,
        (_S.VERIFYING, _E.ADMIT): _S.ADMITTED,
        (_S.VERIFYING, _E.DIFFER): _S.QUARANTINED,
        (_S.VERIFYING, _E.FAIL): _S.FAILED,
        (_S.VERIFYING, _E.FALL_BACK): _S.STARTING,
        (_S.VERIFYING, _E.LEASE_LOST): _S.QUEUED,
        (_S.ADMITTED, _E.DRAIN): _S.DRAINING,
        (_S.ADMITTED, _E.FAIL): _S.FAILED,
        (_S.DRAINING, _E.STOP): _S.STOPPED,
        (_S.DRAINING, _E.FAIL): _S.FAILED,
    }
)

TERMINAL = frozenset({State.STOPPED, State.FAILED, State.CANCELLED, State.QUARANTINED})
"""States nothing follows; the slot may be used again."""
RUNNING = frozenset({State.ADMITTED, State.DRAINING})
"""States in which an engine may hold clients' requests; it outlives the restorer that started it."""
COMING = frozenset({State.QUEUED, State.MATCHING, State.RESTORING, State.STARTING, State.VERIFYING})
"""States on the way to ADMITTED."""


class IllegalTransition(Exception):
    """An event that the table does not allow in this state: a bug in the caller."""


def advance(state: State, event: Event) -> State:
    """The state that follows.

    Raises:
        IllegalTransition: the table has no such row.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event} is not possible for a replica that is {state}") from None


class Stage(BaseModel):
    """One timed step of a start."""

    model_config = ConfigDict(frozen=True)
    name: str
    seconds: float
    bytes: int | None = None
    tier: str | None = None
    """What the bytes were read from or written to: ``memory``, ``page cache``, ``disk``, ``mixed``."""
    cached: float | None = None
    """Share of them that lay in the page cache when it began."""
    floor_s: float | None = None
    """Seconds that it takes at the least on its host; 0: it could be done without. None: unknown."""
    begun_ms: int = 0
    """Wall-clock time of its beginning, for people; 0 when nobody noted it."""


class Replica(BaseModel):
    """The shared record of one replica slot. Its one writer is the restorer that holds its fence."""

    model_config = ConfigDict(frozen=True)
    id: str
    """``model#slot``: stable, so that it can be a metric's label."""
    model: str
    state: State
    fence: int
    """The number of the claim this record was written under; a write with a smaller one is refused."""
    seq: int = 0
    """Position of this write among all replica writes; the store assigns it."""
    host: str = ""
    incarnation: str = ""
    """Changes at every start; traffic, pools and headers go by it."""
    address: str = ""
    """Of its box; leads to it from its own host's network namespace only."""
    port: int = 0
    door: str = ""
    """``address:port`` at which it is reached from other hosts; empty: it is not."""
    place: str = ""
    """Where :attr:`address` leads to it from; see :mod:`policies.reach`."""
    start: Literal["restored", "resumed", "woken", "cold"] | None = None
    """From a snapshot, from suspension in the host's memory, from a sleep of its own, or by its command."""
    snapshot: str | None = None
    concurrency: int = 1
    reason: str = ""
    """Why it is cold, failed, stopped or quarantined."""
    stages: tuple[Stage, ...] = ()
    took_s: float | None = None
    """From its job's claim to its admission, in seconds."""
    choices: tuple[str, ...] = ()
    """How its snapshot was read, and why so."""
    floor_s: float | None = None
    """What a restore of it takes at the least on its host, in seconds; see :mod:`policies.floor`. None: unknown."""
    trace: str = ""
    """``traceparent`` of its start, when somebody traces that."""
    updated_ms: int = 0
    """Wall-clock time of the write, for people; nothing is decided by it."""
