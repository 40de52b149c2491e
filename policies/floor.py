"""What a restore takes at the least on one host, and where the rest of its time went.

Arithmetic over rates that the host was measured at (:class:`Rates`) and over the stages of a start, each with its bytes and
the share of them that lay in the page cache. A floor is a bound, not a forecast: the slowest of what has to happen, with
everything else done beside it. Knows neither who measures nor who shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from policies.manifest import Manifest
from policies.replica import Replica, Stage

_TOLD = 0.02
"""Losses of less than this share of a start are told together."""


class Rates(BaseModel):
    """How fast one host is, in bytes a second unless the name says otherwise: the best of what was measured."""

    model_config = ConfigDict(frozen=True)
    measured_ms: int
    """Wall-clock time of the last measurement."""
    disk: float
    """From the disk past the page cache, with as many readers as are fastest, over a second and more."""
    disk_cached: float
    """The same through the page cache, where mapped files have to be."""
    cache: float
    """From the page cache into fresh memory, on all processors."""
    fill: float
    """Into fresh memory, on all processors."""
    fill_huge: float
    """The same in huge pages; what a kernel without them makes of it."""
    spawn_s: float
    """Seconds for a process in fresh namespaces."""
    pcie: float | None = None
    """From pinned memory to the slowest GPU."""

    def best(self, other: Rates) -> Rates:
        """The faster of the two in each respect: a busy moment makes a host look slow, never fast."""
        mine, others = self.model_dump(), other.model_dump()
        found = {name: max(filter(None, (value, others[name])), default=None) for name, value in mine.items()}
        return Rates(**{**found, "spawn_s": min(self.spawn_s, other.spawn_s)})


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds that a stage keeps the disk busy, and seconds of everything else that it has to do."""

    disk_s: float = 0.0
    rest_s: float = 0.0

    @property
    def floor_s(self) -> float:
        return max(self.disk_s, self.rest_s)


def judged(stages: Sequence[Stage], rates: Rates, *, canary_s: float | None, apart_bytes: int = 0) -> tuple[list[Stage], float]:
    """(a restore's stages, each with its floor; the floor of all of it, in seconds).

    Args:
        canary_s: what the donor itself took for its canary; None: unknown, and a floor of 0.
        apart_bytes: of the largest share of weights that goes to one GPU beside everything else.
    """
    works = [_work(stage, rates, canary_s or 0.0) for stage in stages]
    found = [stage.model_copy(update={"floor_s": round(work.floor_s, 6)}) for stage, work in zip(stages, works, strict=True)]
    apart_s = apart_bytes / rates.pcie if rates.pcie else 0.0
    return found, round(max(sum(work.disk_s for work in works), sum(work.rest_s for work in works), apart_s), 6)


def forecast_s(manifest: Manifest, rates: Rates, *, cached: float) -> float:
    """The floor of a restore that nobody has made yet, in seconds.

    Args:
        cached: share of what it reads that lies in the page cache.
    """
    touched = sum(file.touched or 0 for file in manifest.files)
    gpu = manifest.gpu
    stages = [
        Stage(name="restore processes", seconds=0.0),
        Stage(name="fill memory", seconds=0.0, bytes=manifest.bytes, cached=cached),
        Stage(name="restore GPU", seconds=0.0, bytes=gpu.state_bytes if gpu else 0),
        Stage(name="canary", seconds=0.0, bytes=touched, cached=cached),
    ]
    return judged(stages, rates, canary_s=manifest.canary_s, apart_bytes=apart_bytes(manifest))[1]


def lead_s(manifest: Manifest, rates: Rates) -> float:
    """The floor of what a restore out of the page cache does before it wants its weights, in seconds."""
    stages = (
        Stage(name="restore processes", seconds=0.0),
        Stage(name="fill memory", seconds=0.0, bytes=manifest.bytes, cached=1.0),
        Stage(name="restore GPU", seconds=0.0, bytes=manifest.gpu.state_bytes if manifest.gpu else 0),
    )
    return judged(stages, rates, canary_s=None)[1]


def foretold(manifest: Manifest, rates: Rates) -> str:
    """:func:`forecast_s` in words."""
    cold, warm = (forecast_s(manifest, rates, cached=cached) for cached in (0.0, 1.0))
    return f"{cold:.2f} s from the disk, {warm:.2f} s from the page cache, at the least"


def apart_bytes(manifest: Manifest) -> int:
    """Of the largest share of weights that goes to one GPU beside everything else."""
    return max((weights.bytes for weights in manifest.gpu.weights), default=0) if manifest.gpu else 0


def _work(stage: Stage, rates: Rates, canary_s: float) -> _Work:
    cold = (stage.bytes or 0) * (1.0 - (1.0 if stage.cached is None else stage.cached))
    kind = _KINDS.get(stage.name)
    return _Work() if kind is None else kind(stage, rates, cold, canary_s)


def _memory(stage: Stage, rates: Rates, cold: float, _: float) -> _Work:
    warm = (stage.bytes or 0) - cold
    return _Work(cold / rates.disk, cold / max(rates.fill, rates.fill_huge) + warm / rates.cache)


def _processes(stage: Stage, rates: Rates, cold: float, _: float) -> _Work:
    memory = _memory(stage, rates, cold, 0.0)
    return _Work(memory.disk_s, memory.rest_s + rates.spawn_s)


def _gpu(stage: Stage, rates: Rates, *_: float) -> _Work:
    return _Work(rest_s=(stage.bytes or 0) / rates.pcie if rates.pcie else 0.0)


def _canary(stage: Stage, rates: Rates, cold: float, canary_s: float) -> _Work:
    """Its bytes are those of mapped files, which it can use where they lie. One that is faster than ever refutes that bound."""
    return _Work(cold / rates.disk_cached, min(canary_s, stage.seconds or canary_s))


_KINDS: Mapping[str, Callable[[Stage, Rates, float, float], _Work]] = {
    "lay scratch": _memory,
    "restore processes": _processes,
    "fill memory": _memory,
    "restore GPU": _gpu,
    "canary": _canary,
}
"""Stages that move something. Every other one could be done without, or before."""


@dataclass(frozen=True, slots=True)
class Account:
    """Where a restore's time went."""

    floor_s: float
    took_s: float
    lost: tuple[tuple[str, float], ...]
    """(in what, seconds), the largest first; with the floor they add up to what it took."""

    @property
    def ratio(self) -> float:
        """How many times its floor it took."""
        return self.took_s / self.floor_s if self.floor_s else 0.0

    @property
    def text(self) -> str:
        """In one line, for people."""
        told = [f"{name} {_short(seconds)}" for name, seconds in self.lost if seconds >= _TOLD * self.took_s]
        if (rest := sum(seconds for _, seconds in self.lost if seconds < _TOLD * self.took_s)) > 0:
            told.append(f"the rest {_short(rest)}")
        where = f", lost in: {', '.join(told)}" if told else ""
        return f"floor {self.floor_s:.2f} s, took {self.took_s:.2f} s ({self.ratio:.1f} x){where}"


def account(record: Replica) -> Account | None:
    """Where the time of a restored replica went; None when it was not restored, or its host not measured."""
    if record.floor_s is None or record.took_s is None:
        return None
    floors = sum(stage.floor_s or 0.0 for stage in record.stages)
    lost = _summed((stage.name, stage.seconds - (stage.floor_s or 0.0)) for stage in record.stages)
    lost["disk and processors in turn"] = floors - record.floor_s
    lost["between stages"] = record.took_s - sum(stage.seconds for stage in record.stages)
    ordered = sorted(lost.items(), key=lambda item: -item[1])
    return Account(record.floor_s, record.took_s, tuple((name, round(seconds, 6)) for name, seconds in ordered))


def _summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in pairs:
        found[name] = found.get(name, 0.0) + seconds
    return found


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"
