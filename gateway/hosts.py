"""What restorers have counted, as a scrape of this gateway shows it: read from the store when somebody asks.

Every gateway shows every host, so that it does not matter which of them is scraped; who scrapes several sees the same numbers
several times. Which series there are is :mod:`policies.series`' to say.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from gateway import logs
from gateway.errors import StoreUnavailable
from policies.series import SERIES, Point, buckets

_WITHIN_S = 1.0
"""A scrape waits no longer for the store; it shows what was known before."""


@dataclass(frozen=True, slots=True)
class HostNumbers:
    """One host's numbers, by the fields that :class:`policies.series.Point` spells."""

    up: bool
    counts: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


class Numbers(Protocol):
    """The store, as far as it is asked here."""

    async def numbers(self) -> Mapping[str, HostNumbers]:
        """Of every host that is known. Raises StoreUnavailable."""


class Hosts:
    """A source of series."""

    def __init__(self, store: Numbers) -> None:
        self._store = store
        self._known: Mapping[str, HostNumbers] = {}

    async def look(self) -> None:
        """Read what there is now; without an answer in time counters stay as they were, and gauges are not shown."""
        try:
            async with asyncio.timeout(_WITHIN_S):
                self._known = await self._store.numbers()
        except (StoreUnavailable, TimeoutError) as error:
            logs.warning("what hosts count was not read", reason=str(error) or "it took too long")
            # Whether they are up is not known: that is shown as nothing, not as their being down.
            self._known = {name: HostNumbers(one.up, one.counts) for name, one in self._known.items()}

    def collect(self) -> Iterator[Metric]:
        """Every series, those of which there is nothing included."""
        found: defaultdict[str, dict[tuple[str, ...], dict[str, float]]] = defaultdict(dict)
        for host, numbers in self._known.items():
            for name, value in (*numbers.counts.items(), *numbers.gauges.items()):
                point = Point.of(name)
                if point is not None:
                    found[point.series].setdefault((host, *point.labels), {})[point.part] = value
        for name in SERIES:
            yield _family(name, found[name])


def _family(name: str, values: Mapping[tuple[str, ...], Mapping[str, float]]) -> Metric:
    series = SERIES[name]
    labels = ("host", *series.labels)
    if series.kind == "histogram":
        histogram = HistogramMetricFamily(f"rewake_{name}", series.text, labels=labels)
        for key, parts in values.items():
            counts, total = buckets(parts)
            histogram.add_metric(key, counts, total)
        return histogram
    kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
    family = kind(f"rewake_{name}", series.text, labels=labels)
    for key, parts in values.items():
        family.add_metric(key, parts[""])
    return family
