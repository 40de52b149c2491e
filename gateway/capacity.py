"""How many requests this gateway may have on one replica.

Today a fixed share of the replica's concurrency; a limit shared through the store can take its place without anyone
else noticing.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.replica import Replica


class Slices:
    """Each live gateway worker gets an equal share, at least one.

    With more workers than a replica has slots the least share lets them exceed it together, by one each.
    """

    def __init__(self, gateways: Callable[[], int]) -> None:
        self._gateways = gateways

    def limit(self, replica: Replica) -> int:
        return max(1, replica.concurrency // max(1, self._gateways()))

    def tenant_limit(self, tenant: str) -> int | None:
        return None

    def places(self, tenant: str) -> int | None:
        return None

    def wanted(self) -> None: ...

    def released(self, incarnation: str, tenant: str) -> None: ...
