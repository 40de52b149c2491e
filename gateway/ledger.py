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
        models: the configured models; only those are reported, but whatever is held or in flight is counted.
        clock: seconds, monotonic.
    """

    def __init__(self, models: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: defaultdict[str, int] = defaultdict(int)
        self._bytes: defaultdict[str, int] = defaultdict(int)
        # Plain dictionaries where every request counts: in compiled code they cost half.
        self._inflight: dict[str, int] = {}
        self._arrivals: dict[str, int] = {}
        self._rejected: defaultdict[str, _Recent] = defaultdict(lambda: _Recent(REJECTED_DEMAND_S))
        self._by_incarnation: dict[str, int] = {}
        self._tenant_held: dict[str, int] = {}
        self._tenant_inflight: dict[str, int] = {}
        self.total_held = 0
        self.total_bytes = 0
        self.on_edge: Callable[[str], None] = lambda model: None
        """Called with the model when its demand, or one of its replicas, turns to or from zero."""

        self.know(models)

    def know(self, models: Iterable[str]) -> None:
        """These are the models now; what is still held or in flight for another one stays counted until it ends."""
        self._models = list(models)

    def held(self, model: str) -> int:
        return self._held.get(model, 0)

    def held_bytes(self, model: str) -> int:
        return self._bytes.get(model, 0)

    def tenant_held(self, tenant: str) -> int:
        """Requests that a tenant has waiting, over all models."""
        return self._tenant_held.get(tenant, 0)

    def tenant_inflight(self, tenant: str) -> int:
        """Requests that a tenant has on replicas, over all models."""
        return self._tenant_inflight.get(tenant, 0)

    def inflight(self, incarnation: str) -> int:
        """Requests that this gateway has on one replica."""
        return self._by_incarnation.get(incarnation, 0)

    def load(self, model: str) -> ModelLoad:
        recent = self._rejected.get(model)
        rejected = 0 if recent is None else recent.count(self._clock())
        return ModelLoad(
            held=self.held(model), inflight=self._inflight.get(model, 0), rejected=rejected, arrivals=self._arrivals.get(model, 0)
        )

    def loads(self) -> Mapping[str, ModelLoad]:
        live = [model for model in (*self._held, *self._inflight) if self._held.get(model) or self._inflight.get(model)]
        return {model: self.load(model) for model in dict.fromkeys((*self._models, *live))}

    def replicas(self) -> Mapping[str, int]:
        """incarnation -> requests in flight, without zeros."""
        return dict(self._by_incarnation)

    def arrive(self, model: str) -> None:
        """A valid request for this model came in."""
        _more(self._arrivals, model)

    def turn_away(self, model: str) -> None:
        """A request was refused with the promise that coming back will help."""
        recent = self._rejected[model]
        first = recent.count(self._clock()) == 0
        recent.add(self._clock())
        if first:
            self.on_edge(model)

    def hold(self, model: str, size: int, tenant: str = "") -> None:
        self._place(model, size, tenant, 1)
        if self._held[model] + self._inflight.get(model, 0) == 1:
            self.on_edge(model)

    def unhold(self, model: str, size: int, tenant: str = "") -> None:
        self._place(model, size, tenant, -1)
        if self._held[model] + self._inflight.get(model, 0) == 0:
            self.on_edge(model)

    def grant(self, model: str, size: int, incarnation: str, tenant: str = "") -> None:
        """From held to in flight, in one step: demand does not change."""
        self._place(model, size, tenant, -1)
        self.begin(model, incarnation, tenant)

    def begin(self, model: str, incarnation: str, tenant: str = "") -> None:
        """In flight without having been held."""
        _more(self._inflight, model)
        if tenant:
            _more(self._tenant_inflight, tenant)
        if _more(self._by_incarnation, incarnation) == 1:
            self.on_edge(model)

    def end(self, model: str, incarnation: str, tenant: str = "") -> None:
        self._inflight[model] -= 1
        if tenant:
            _less(self._tenant_inflight, tenant)
        if not _less(self._by_incarnation, incarnation):
            self.on_edge(model)

    def _place(self, model: str, size: int, tenant: str, sign: int) -> None:
        self._held[model] += sign
        self._bytes[model] += sign * size
        self.total_held += sign
        self.total_bytes += sign * size
        assert self._held[model] >= 0, f"more requests left the waiting room of {model} than entered"
        if not tenant:
            return
        if sign > 0:
            _more(self._tenant_held, tenant)
        else:
            _less(self._tenant_held, tenant)


def _more(counts: dict[str, int], name: str) -> int:
    """One more of these."""
    now = counts.get(name, 0) + 1
    counts[name] = now
    return now


def _less(counts: dict[str, int], name: str) -> int:
    """One less of these; what is 0 is not kept."""
    left = counts.get(name, 0) - 1
    assert left >= 0, f"more of {name!r} ended than began"
    if left:
        counts[name] = left
    else:
        del counts[name]
    return left
