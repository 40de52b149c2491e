"""How long until a request is served: from what starts and answers took before, to the number that a client is told.

Estimates are 90th percentiles, so that most clients find what they were promised. What was never measured is None, not a
guess: nobody is turned away because of a guess.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping, Sequence

from policies.replica import State

QUANTILE = 0.9
MAX_RETRY_AFTER_S = 60
"""Clients of the OpenAI SDKs ignore, or give up on, a longer ``Retry-After``."""
JITTER = (1.0, 1.25)
"""A promise is stretched by a random factor out of this range, so that those who were sent away do not return as one."""


class Phase(enum.IntEnum):
    """Parts of a start between two writes of its record."""

    QUEUED = 0
    FINDING = 1
    MAKING = 2
    PROVING = 3


_PHASES: Mapping[State, Phase] = {
    State.QUEUED: Phase.QUEUED,
    State.MATCHING: Phase.FINDING,
    State.RESTORING: Phase.MAKING,
    State.STARTING: Phase.MAKING,
    State.VERIFYING: Phase.PROVING,
}
_STAGES: Mapping[str, Phase] = {
    "match": Phase.FINDING,
    "pull": Phase.FINDING,
    "verify bytes": Phase.FINDING,
    "canary": Phase.PROVING,
    "warm up": Phase.PROVING,
}
"""Where a stage belongs; every other one makes the engine."""


def quantile(samples: Sequence[float]) -> float:
    """The nearest-rank 90th percentile of at least one sample."""
    return sorted(samples)[math.ceil(QUANTILE * len(samples)) - 1]


def start_s(usual_s: Mapping[str, float], *, state: State | None, done: Collection[str], elapsed_s: float) -> float:
    """Seconds until a start ends.

    Args:
        usual_s: stage -> what it usually takes, for every stage of such a start.
        state: of the replica on its way; None: nobody has begun.
        done: stages that it has behind it.
        elapsed_s: since its record was last written; spent on the phase that it is in, which cannot take less than nothing.
    """
    phase = _PHASES.get(state, Phase.QUEUED) if state is not None else Phase.QUEUED
    left = {stage: seconds for stage, seconds in usual_s.items() if stage not in done}
    now = sum(seconds for stage, seconds in left.items() if _STAGES.get(stage, Phase.MAKING) == phase)
    later = sum(seconds for stage, seconds in left.items() if _STAGES.get(stage, Phase.MAKING) > phase)
    return max(0.0, now - max(0.0, elapsed_s)) + later


def queue_s(position: int, *, slots: int, service_s: float | None, busy: bool) -> float:
    """Seconds that the ones ahead take.

    Args:
        position: 1 is next.
        slots: requests served at once.
        service_s: what one takes; None: never measured, and nothing is added.
        busy: all slots are taken now; else they are about to open together.
    """
    if service_s is None or position < 1:
        return 0.0
    if busy:
        return position * service_s / max(1, slots)
    return (position - 1) // max(1, slots) * service_s


def retry_after_s(eta_s: float, jitter: float) -> int:
    """Whole seconds for ``Retry-After``: the estimate times ``jitter`` (see :data:`JITTER`), from 1 to 60."""
    return min(max(math.ceil(eta_s * jitter), 1), MAX_RETRY_AFTER_S)
