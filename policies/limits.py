"""Budgets of requests and tokens a minute: how they refill, how long an empty one takes, how much of one to keep at hand.

A budget is a bucket that holds a minute's worth and refills evenly. The bucket itself is shared by all gateways, in the store;
each gateway leases a little of it, so that it can spend without asking. Knows nothing of who holds what.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MINUTE_S = 60.0
SHARE = 8
"""A lease beyond what is needed at once takes at most one part in so many of what is left: the last requests of a minute are
not stranded at a gateway that has no use for them."""


class Claim(NamedTuple):
    """What one gateway tells and asks of a tenant's budgets."""

    tenant: str
    requests: int | None
    """Requests a minute; None: not limited."""
    tokens: int | None
    """Tokens a minute; None: not limited."""
    need: int = 0
    """Requests that wait for this answer."""
    more: int = 0
    """Further requests to lease, if there is plenty."""
    back: float = 0.0
    """Leased requests that are not wanted any more; negative: requests that were spent without a lease."""
    owed: int = 0
    """Tokens used since the last claim."""


class Settled(NamedTuple):
    """The answer to a claim."""

    granted: int
    """Requests leased; the first ``need`` of them for those who wait."""
    requests: float
    """Requests left for all gateways."""
    tokens: float
    """Tokens left; not above 0: the tenant is in debt, and nothing was granted."""


def refilled(balance: float, *, limit: float, seconds: float) -> float:
    """What has become of ``balance`` after so long; never more than a minute's worth."""
    return min(limit, balance + max(seconds, 0.0) * limit / MINUTE_S)


def wait_s(balance: float, *, limit: float, needed: float) -> float:
    """Seconds until ``balance`` has grown to ``needed``."""
    return max(0.0, (needed - balance) * MINUTE_S / limit)


def keep(spent: int, pace: float) -> tuple[int, float]:
    """How many leased requests to have at hand, and the pace to remember, after a period in which ``spent`` were used.

    Enough for two such periods; at least one, so that a calm tenant needs no round trip either.
    """
    pace = max(float(spent), pace / 2)
    return max(1, math.ceil(2 * pace)), pace
