"""How many replicas of a model are wanted, and which idle one may be parked."""

from __future__ import annotations

import math
from collections.abc import Mapping


def wanted(*, demand: int, concurrency: int, keep: int, max_replicas: int) -> int:
    """Replicas to run for ``demand`` live requests (held, in flight, or turned away a moment ago).

    Waiting requests are demand, not load: fifty of them while one replica is on its way ask for ``ceil(50 /
    concurrency)`` replicas, at most ``max_replicas``, never for fifty.
    """
    return min(max_replicas, max(keep, math.ceil(max(demand, 0) / concurrency)))


def parkable(*, idle_s: Mapping[str, float], keep: int, held: int, coming: int, idle_park_s: float) -> list[str]:
    """Admitted replicas that may be parked now, longest idle first.

    Args:
        idle_s: admitted replica -> seconds since its last request ended; a replica in use has 0.
        keep: replicas that stay however idle.
        held: requests waiting for this model; while there are any, or a replica is ``coming``, nothing is parked.
    """
    if held or coming:
        return []
    idle = sorted((r for r, seconds in idle_s.items() if seconds >= idle_park_s), key=lambda r: (-idle_s[r], r))
    return idle[: max(0, len(idle_s) - keep)]
