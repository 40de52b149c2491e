"""When a held request may be expected to be served, and what a refused one is promised.

Owns what was measured: the stages of starts by model, host and origin (a snapshot, or ``cold``), and how long answers take.
The arithmetic is :mod:`policies.eta`'s; nothing is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from policies import eta
from policies.replica import COMING, Replica, State
from policies.wire import COLD, STAGE_SAMPLES, StageKey

UNKNOWN_S = 5.0
"""Promised when nothing was ever measured."""
_WEIGHT = 0.1
"""Of the latest answer in the mean duration of answers."""


class Fleet(Protocol):
    """The replicas as this gateway sees them."""

    def available(self, model: str) -> Sequence[Replica]: ...

    def replicas(self) -> Sequence[Replica]: ...


class Eta:
    """Estimates of one gateway process.

    Args:
        slots: model -> requests that this gateway may expect to have on its replicas at once, also while there is none.
        clock: seconds, monotonic.
        random: a number out of a range; stretches promises.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        slots: Callable[[str], int],
        clock: Callable[[], float],
        random: Callable[[float, float], float],
    ) -> None:
        self._fleet = fleet
        self._slots = slots
        self._clock = clock
        self._random = random
        self._samples: dict[str, dict[StageKey, deque[float]]] = {}
        self._usual: dict[tuple[str, str, str], Mapping[str, float]] = {}
        """What was made of the samples, until there are new ones; a burst of requests asks for the same."""
        self._latest: dict[str, tuple[str, str]] = {}
        self._since: dict[str, float] = {}
        self._service_s: dict[str, float] = {}
        self.place_s: Callable[[str], float] = lambda model: 0.0
        """How long a model that shares a GPU waits for its turn, before anything is started."""

    def load(self, model: str, samples: Mapping[StageKey, Iterable[float]]) -> None:
        """Take in what the store remembers of a model, in place of what was learnt here."""
        self._samples[model] = {key: deque(seconds, STAGE_SAMPLES) for key, seconds in samples.items()}
        self._usual.clear()
        if model not in self._latest and samples:
            restored = [key for key in samples if key.origin != COLD]
            key = (restored or list(samples))[-1]
            self._latest[model] = (key.host, key.origin)

    def learn(self, replica: Replica) -> None:
        """Take in a record that became known: the moment of its last change, and what its start took when it has ended."""
        self._since[replica.id] = self._clock()
        if replica.state is not State.ADMITTED or not replica.stages:
            return
        known = self._samples.setdefault(replica.model, {})
        origin = _origin(replica)
        for stage in replica.stages:
            known.setdefault(StageKey(replica.host, origin, stage.name), deque(maxlen=STAGE_SAMPLES)).append(stage.seconds)
        self._latest[replica.model] = (replica.host, origin)
        self._usual.clear()

    def served(self, model: str, seconds: float) -> None:
        """A request had its slot for so long."""
        before = self._service_s.get(model, seconds)
        self._service_s[model] = before + _WEIGHT * (seconds - before)

    def seconds(self, model: str) -> float | None:
        """Until the first replica is there: 0 when there is one, None when no start of the model was ever measured."""
        if self._fleet.available(model):
            return 0.0
        coming = [replica for replica in self._fleet.replicas() if replica.model == model and replica.state in COMING]
        if not coming:
            start_s = self.start_s(model)
            return None if start_s is None else self.place_s(model) + start_s
        known = [seconds for replica in coming if (seconds := self._left_s(replica)) is not None]
        return min(known) if known else None

    def start_s(self, model: str) -> float | None:
        """What a start from nothing usually takes, also while replicas run; None: never measured."""
        usual_s = self._usual_s(model, None)
        return eta.start_s(usual_s, state=None, done=(), elapsed_s=0.0) if usual_s else None

    def kinds_s(self, model: str) -> Mapping[str, Mapping[str, float]]:
        """What the stages of a ``restored`` and of a ``cold`` start usually take, as far as they were measured."""
        known, found = self._samples.get(model, {}), {}
        for kind, cold in (("restored", False), ("cold", True)):
            samples: dict[str, list[float]] = {}
            for key, seconds in known.items():
                if (key.origin == COLD) == cold:
                    samples.setdefault(key.stage, []).extend(seconds)
            found[kind] = {stage: eta.quantile(seconds) for stage, seconds in samples.items()}
        return found

    def wait_s(self, model: str, position: int) -> float | None:
        """Until the request at ``position`` (1 is next) has a slot; None as for :meth:`seconds`."""
        first_s = self.seconds(model)
        if first_s is None:
            return None
        busy = bool(self._fleet.available(model))
        service_s = self._service_s.get(model)
        return first_s + eta.queue_s(position, slots=self._slots(model), service_s=service_s, busy=busy)

    def retry_after_s(self, model: str, position: int = 1) -> int:
        """Seconds after which a refused client should come back, from 1 to 60."""
        expected_s = self.wait_s(model, position)
        if expected_s is None:
            expected_s = UNKNOWN_S
        return eta.retry_after_s(expected_s, self._random(*eta.JITTER))

    def _left_s(self, replica: Replica) -> float | None:
        usual_s = self._usual_s(replica.model, replica)
        if not usual_s:
            return None
        done = [stage.name for stage in replica.stages]
        elapsed_s = self._clock() - self._since.get(replica.id, self._clock())
        return eta.start_s(usual_s, state=replica.state, done=done, elapsed_s=elapsed_s)

    def _usual_s(self, model: str, replica: Replica | None) -> Mapping[str, float]:
        """Stage -> usual seconds, of the start closest to this one."""
        key = (model, *self._expected(model, replica))
        if key not in self._usual:
            self._usual[key] = self._closest(*key)
        return self._usual[key]

    def _closest(self, model: str, host: str, origin: str) -> Mapping[str, float]:
        """Of the same host and origin; else of the same origin; else of the same kind."""
        known = self._samples.get(model, {})
        kinds: tuple[Callable[[StageKey], bool], ...] = (
            lambda key: key.host == host and key.origin == origin,
            lambda key: key.origin == origin,
            lambda key: (key.origin == COLD) == (origin == COLD),
        )
        for fits in kinds:
            found: dict[str, list[float]] = {}
            for key, seconds in known.items():
                if fits(key):
                    found.setdefault(key.stage, []).extend(seconds)
            if found:
                return {stage: eta.quantile(seconds) for stage, seconds in found.items()}
        return self._rehearsed_s(known)

    def _rehearsed_s(self, known: Mapping[StageKey, Sequence[float]]) -> Mapping[str, float]:
        """A snapshot that was never restored was rehearsed when it was made: a restore with its canary."""
        rehearsed = [seconds for key, samples in known.items() if key.stage == "rehearse" for seconds in samples]
        return {"rehearse": eta.quantile(rehearsed)} if rehearsed else {}

    def _expected(self, model: str, replica: Replica | None) -> tuple[str, str]:
        """Host and origin of a start: as its record says, else as the last one's, whose snapshot may be new."""
        host, origin = self._latest.get(model, ("", ""))
        if replica is not None and replica.start is not None:
            return replica.host, _origin(replica)
        if origin == COLD and any(key.stage == "publish" for key in self._samples.get(model, {})):
            origin = "its snapshot"
        return (replica.host if replica is not None and replica.host else host), origin


def _origin(replica: Replica) -> str:
    if replica.start in ("resumed", "woken"):
        return replica.start
    return replica.snapshot or "restored" if replica.start == "restored" else COLD
