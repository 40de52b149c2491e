"""When a replica of a cold model may be expected: as long as its last start took."""

from __future__ import annotations

from policies.replica import Replica

UNKNOWN_S = 5.0
"""Promised for a model whose start has never been seen."""


class Eta:
    """Remembers the last start of each model, from the stages in its replicas' records."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def learn(self, replica: Replica) -> None:
        if replica.stages:
            self._last_s[replica.model] = sum(stage.seconds for stage in replica.stages)

    def seconds(self, model: str) -> float:
        return self._last_s.get(model, UNKNOWN_S)
