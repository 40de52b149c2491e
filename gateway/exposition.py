"""How series are written for whoever scrapes them: Prometheus' text, or OpenMetrics with exemplars where that is asked for.

Knows no series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Exemplar

from gateway.exchange import Reply
from gateway.exemplars import Bucket


class Source(Protocol):
    """Whatever has series: a registry, or what hosts report."""

    def collect(self) -> Iterable[Metric]: ...


class _Together:
    """Several sources as one, with exemplars."""

    def __init__(self, sources: Iterable[Source], exemplars: Mapping[Bucket, Exemplar]) -> None:
        self._sources = sources
        self._exemplars = exemplars
        self._named = {bucket.series for bucket in exemplars}

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for family in source.collect():
                if family.name in self._named:
                    self._illustrate(family)
                yield family

    def _illustrate(self, family: Metric) -> None:
        for at, sample in enumerate(family.samples):
            *labels, bound = sample.labels.values() if sample.name.endswith("_bucket") else ("",)
            found = self._exemplars.get(Bucket(family.name, tuple(labels), bound))
            if found is not None:
                family.samples[at] = sample._replace(exemplar=found)


def render(sources: Iterable[Source], exemplars: Mapping[Bucket, Exemplar], accept: str) -> Reply:
    """All series of the sources, as ``accept`` (an ``Accept`` header) asks for them."""
    encode, content_type = choose_encoder(accept)
    return Reply(200, encode(_Together(sources, exemplars)), content_type=content_type)
