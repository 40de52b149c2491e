"""What this restorer has counted, until it is added to the store.

Counting is plain arithmetic, from any thread; :mod:`restorer.operations.worker` adds it to the store once a second. Which
series there are is :mod:`policies.series`' to say. Knows nothing of the store.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

from policies.series import SERIES, Kind, Point, observed

MAX_POINTS = 10_000
"""Numbers kept for a store that is away; labels are bounded, so that only a bug could make more."""


class Tally:
    """The numbers of one host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[Point, float] = defaultdict(float)
        self._gauges: dict[Point, float] = {}
        self._begun: set[str] = set()

    def first(self, name: str) -> bool:
        """Nobody has asked this of ``name`` before."""
        with self._lock:
            known = name in self._begun
            self._begun.add(name)
        return not known

    def inc(self, series: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter."""
        self._add((self._point("counter", series, labels), by))

    def observe(self, series: str, *labels: str, seconds: float) -> None:
        """Add one observation to a histogram."""
        self._point("histogram", series, labels)
        bucket, total = observed(series, labels, seconds)
        self._add((bucket, 1.0), (total, seconds))

    def gauge(self, series: str, *labels: str, value: float) -> None:
        """Set a gauge, for as long as this process lives."""
        point = self._point("gauge", series, labels)
        with self._lock:
            if len(self._gauges) < MAX_POINTS or point in self._gauges:
                self._gauges[point] = value

    def replace(self, series: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Set all of a gauge's values: what is not named any more is gone."""
        found = {self._point("gauge", series, labels): value for labels, value in values.items()}
        with self._lock:
            self._gauges = {point: value for point, value in self._gauges.items() if point.series != series} | found

    def gauges(self) -> dict[str, float]:
        """Field -> value, as they are now."""
        with self._lock:
            return {point.field: value for point, value in self._gauges.items()}

    def take(self) -> dict[str, float]:
        """Field -> what was counted since the last call."""
        with self._lock:
            taken, self._counts = self._counts, defaultdict(float)
        return {point.field: value for point, value in taken.items()}

    def put_back(self, taken: Mapping[str, float]) -> None:
        """It could not be added to the store."""
        self._add(*((point, value) for field, value in taken.items() if (point := Point.of(field)) is not None))

    def _add(self, *increments: tuple[Point, float]) -> None:
        with self._lock:
            for point, by in increments:
                if len(self._counts) < MAX_POINTS or point in self._counts:
                    self._counts[point] += by

    def _point(self, kind: Kind, series: str, labels: tuple[str, ...]) -> Point:
        known = SERIES[series]
        if known.kind != kind or len(known.labels) != len(labels):
            raise ValueError(f"{series} is a {known.kind} of {known.labels}, not a {kind} of {labels}")
        return Point(series, labels)
