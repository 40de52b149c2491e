"""The one place where requests are counted: held, in flight, turned away, arrived.

Every gauge, report and decision reads these numbers, so they cannot disagree. Single-threaded and synchronous; it tells
when a count turns to or from zero, and knows nothing of why.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from policies.wire import REJECTED_DEMAND_S, ModelLoad


class _Recent:
    """How many things happened within the last ``window_s``, to the second, in bounded memory."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seconds: Counter[int] = Counter()

    def add(self, now: float) -> None:
        self._seconds[int(now)] += 1

    def count(self, now: float) -> int:
        for second in [s for s in self._seconds if s + self._window_s <= now]:
            del self._seconds[second]
        return self._seconds.total()


class Ledger:
    """Counts of one gateway process.

    Args:
        models: the configured models; others are never counted.
        clock: seconds, monotonic.
    """

    def __init__(self, models: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, int] = dict.fromkeys(models, 0)
        self._bytes = dict.fromkeys(self._held, 0)
        self._inflight = dict.fromkeys(self._held, 0)
        self._arrivals = dict.fromkeys(self._held, 0)
        self._rejected = {model: _Recent(REJECTED_DEMAND_S) for model in self._held}
        self._by_incarnation: defaultdict[str, int] = defaultdict(int)
        self.total_held = 0
        self.total_bytes = 0
        self.on_edge: Callable[[str], None] = lambda model: None
        """Called with the model when its demand, or one of its replicas, turns to or from zero."""

    def held(self, model: str) -> int:
        return self._held[model]

    def held_bytes(self, model: str) -> int:
        return self._bytes[model]

    def inflight(self, incarnation: str) -> int:
        """Requests that this gateway has on one replica."""
        return self._by_incarnation.get(incarnation, 0)

    def load(self, model: str) -> ModelLoad:
        rejected = self._rejected[model].count(self._clock())
        return ModelLoad(
            held=self._held[model], inflight=self._inflight[model], rejected=rejected, arrivals=self._arrivals[model]
        )

    def loads(self) -> Mapping[str, ModelLoad]:
        return {model: self.load(model) for model in self._held}

    def replicas(self) -> Mapping[str, int]:
        """incarnation -> requests in flight, without zeros."""
        return dict(self._by_incarnation)

    def arrive(self, model: str) -> None:
        """A valid request for this model came in."""
        self._arrivals[model] += 1

    def turn_away(self, model: str) -> None:
        """A request was refused with the promise that coming back will help."""
        recent = self._rejected[model]
        first = recent.count(self._clock()) == 0
        recent.add(self._clock())
        if first:
            self.on_edge(model)

    def hold(self, model: str, size: int) -> None:
        self._place(model, size, 1)
        if self._held[model] + self._inflight[model] == 1:
            self.on_edge(model)

    def unhold(self, model: str, size: int) -> None:
        self._place(model, size, -1)
        if self._held[model] + self._inflight[model] == 0:
            self.on_edge(model)

    def grant(self, model: str, size: int, incarnation: str) -> None:
        """From held to in flight, in one step: demand does not change."""
        self._place(model, size, -1)
        self._begin(model, incarnation)

    def begin(self, model: str, incarnation: str) -> None:
        """In flight without having been held."""
        self._begin(model, incarnation)

    def end(self, model: str, incarnation: str) -> None:
        self._inflight[model] -= 1
        left = self._by_incarnation[incarnation] - 1
        assert left >= 0, f"more requests ended than began on {incarnation}"
        if left:
            self._by_incarnation[incarnation] = left
            return
        del self._by_incarnation[incarnation]
        self.on_edge(model)

    def _begin(self, model: str, incarnation: str) -> None:
        self._inflight[model] += 1
        self._by_incarnation[incarnation] += 1
        if self._by_incarnation[incarnation] == 1:
            self.on_edge(model)

    def _place(self, model: str, size: int, sign: int) -> None:
        self._held[model] += sign
        self._bytes[model] += sign * size
        self.total_held += sign
        self.total_bytes += sign * size
        assert self._held[model] >= 0, f"more requests left the waiting room of {model} than entered"
