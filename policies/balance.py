"""Which of several replicas gets a request.

A policy is a function over the replicas that are admitted and trusted; :data:`BALANCES` has one for each name that the
configuration knows. None of them sends more to a replica than its limit, and none waits for a particular one: what a
session or a prefix is worth is less than a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

Balance = Literal["least_outstanding", "power_of_two", "session", "prefix"]

_SLACK = 1.25
"""With affinity, a replica may have this many times its even part of the load before its requests go to their second
choice: so one hot session cannot drown a replica while others idle."""


class Candidate(NamedTuple):
    """An admitted replica as the asking gateway sees it."""

    incarnation: str
    inflight: int
    """Requests that this gateway has on it."""
    limit: int
    """How many it may have."""

    @property
    def free(self) -> bool:
        return self.inflight < self.limit

    @property
    def load(self) -> tuple[float, str]:
        """For comparing: the part of its limit in use; equal ones by name, so that idle replicas stay idle."""
        return self.inflight / self.limit if self.limit else 1.0, self.incarnation


def choose(balance: Balance, candidates: Sequence[Candidate], *, affinity: str, draw: float) -> Candidate | None:
    """The replica for a request, or None when all are at their limits.

    Args:
        affinity: what requests that belong together share; empty when this one belongs to none.
        draw: a random number in [0, 1).
    """
    if len(candidates) == 1:
        return candidates[0] if candidates[0].free else None
    free = [candidate for candidate in candidates if candidate.free]
    if len(free) < 2:
        return free[0] if free else None
    return BALANCES[balance](free, candidates, affinity, draw)


def _least(free: Sequence[Candidate], candidates: Sequence[Candidate], affinity: str, draw: float) -> Candidate:
    return min(free, key=lambda candidate: candidate.load)


def _two(free: Sequence[Candidate], candidates: Sequence[Candidate], affinity: str, draw: float) -> Candidate:
    """The less loaded of two drawn at random: gateways that know little of each other do not all choose the same one."""
    pairs = len(free) * (len(free) - 1)
    first, second = divmod(min(int(draw * pairs), pairs - 1), len(free) - 1)
    return min(free[first], free[second + (second >= first)], key=lambda candidate: candidate.load)


def _affine(free: Sequence[Candidate], candidates: Sequence[Candidate], affinity: str, draw: float) -> Candidate:
    """The first in the key's own order of replicas (rendezvous hashing) that is not over its part of the load. A replica
    that comes or goes moves only the keys that prefer it."""
    if not affinity:
        return _least(free, candidates, affinity, draw)
    bound = _SLACK * (1 + sum(candidate.inflight for candidate in candidates)) / len(candidates)
    fair = [candidate for candidate in free if candidate.inflight < bound]
    return max(fair or free, key=lambda candidate: _score(affinity, candidate.incarnation))


def _score(affinity: str, incarnation: str) -> bytes:
    return blake2b(affinity.encode(errors="surrogatepass"), key=incarnation.encode()[:64], digest_size=8).digest()


BALANCES: Mapping[Balance, Callable[[Sequence[Candidate], Sequence[Candidate], str, float], Candidate]] = {
    "least_outstanding": _least,
    "power_of_two": _two,
    "session": _affine,
    "prefix": _affine,
}
"""Name -> choice among at least two free candidates; all candidates are given too, for what a fair part is."""
