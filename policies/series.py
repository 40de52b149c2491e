"""The series that restorers feed, as one table, and how their values travel through the store.

A restorer serves nothing over HTTP: what it counts it adds to a hash of the store, and any gateway shows it. So counters outlive
both, and one address is scraped however many hosts there are. Knows neither who counts nor who shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
"""Upper bounds of every histogram of times."""
_SUM = "sum"
_BUCKET = "le="


class Series(NamedTuple):
    """One of them. ``host`` comes before its labels, wherever it is shown."""

    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


SERIES: Mapping[str, Series] = MappingProxyType(
    {
        # starts
        "restores": Series(
            "counter", "Starts that ended, and why they did not end well.", ("model", "result", "start", "reason")
        ),
        "start_seconds": Series("histogram", "Whole starts that were admitted.", ("model", "start")),
        "cold_start_seconds": Series("histogram", "Stages of starts that were admitted.", ("model", "start", "stage")),
        "restore_bytes": Series("counter", "Bytes that starts moved, by where they were read.", ("model", "stage", "tier")),
        "restore_floor_ratio": Series("gauge", "The last restore's time by the least that this host allows.", ("model",)),
        "restore_lost_seconds": Series("gauge", "What each stage of the last restore took beyond that.", ("model", "stage")),
        "canary": Series("counter", "Canaries by result.", ("model", "result")),
        # snapshots
        "captures": Series("counter", "Snapshots that were to be made, by result.", ("model", "result")),
        "snapshots": Series("gauge", "Snapshots on the local disk, by state.", ("model", "state")),
        "snapshot_bytes": Series("gauge", "Bytes of a model's snapshots.", ("model",)),
        "snapshot_newest_timestamp_seconds": Series("gauge", "When the newest that fits was made.", ("model",)),
        "snapshot_faults": Series("counter", "Faults found in snapshots before CRIU saw them.", ("model", "kind")),
        "remote_bytes": Series("counter", "Bytes exchanged with the remote store.", ("direction",)),
        "remote_seconds": Series("histogram", "Pushes and pulls of whole snapshots.", ("direction",)),
        "storage_free_bytes": Series("gauge", "Free on the disk that has the snapshots."),
        "storage_size_bytes": Series("gauge", "Size of the disk that has the snapshots."),
        # jobs and the process
        "leases": Series("gauge", "Jobs that are worked on.", ("kind",)),
        "lease_age_seconds": Series("gauge", "How long the oldest of them has been held.", ("kind",)),
        "lease_takeovers": Series("counter", "Jobs claimed whose holder had vanished.", ("kind",)),
        "leases_lost": Series("counter", "Jobs given up since another might have them.", ("kind",)),
        "host_up": Series("gauge", "1 while the host's restorer reports, 0 when it has stopped to."),
        "host_capable": Series("gauge", "1: CRIU works here; 0: every start is a cold one."),
        "host_replicas": Series("gauge", "Engines that run here."),
        "door_connections": Series("counter", "Connections from other hosts, by what became of them.", ("result",)),
        "door_connections_open": Series("gauge", "Connections through this host's doors."),
        "restorer_memory_bytes": Series("gauge", "Resident memory of the restorer itself."),
        "restorer_start_timestamp_seconds": Series("gauge", "When the restorer's process began."),
        # GPUs
        "gpu_memory_free_bytes": Series("gauge", "Free device memory.", ("gpu",)),
        "gpu_memory_size_bytes": Series("gauge", "All device memory.", ("gpu",)),
        "gpu_leased": Series("gauge", "1 while a box has the GPU.", ("gpu",)),
    }
)


class Point(NamedTuple):
    """One number of one series: a counter's or a gauge's value, or a histogram's sum or the count of one bucket."""

    series: str
    labels: tuple[str, ...] = ()
    part: str = ""
    """Histograms only: ``sum``, or ``le=`` and the bucket's upper bound; not cumulative."""

    @property
    def field(self) -> str:
        """As a field of the store's hash."""
        return "\t".join((self.series, *self.labels, *((self.part,) if self.part else ())))

    @classmethod
    def of(cls, field: str) -> Point | None:
        """The point of a field; None for one that this version does not know."""
        name, *rest = field.split("\t")
        known = SERIES.get(name)
        if known is None or len(rest) != len(known.labels) + (known.kind == "histogram"):
            return None
        return cls(name, tuple(rest[: len(known.labels)]), rest[-1] if known.kind == "histogram" else "")


def observed(series: str, labels: tuple[str, ...], seconds: float) -> tuple[Point, Point]:
    """What one observation adds to: the count of its bucket (by 1), and the sum (by its value)."""
    bound = next((f"{bound:g}" for bound in SECONDS if seconds <= bound), "+Inf")
    return Point(series, labels, f"{_BUCKET}{bound}"), Point(series, labels, _SUM)


def buckets(parts: Mapping[str, float]) -> tuple[list[tuple[str, float]], float]:
    """A histogram's cumulative buckets, and its sum, out of its parts."""
    total, found = 0.0, list[tuple[str, float]]()
    for bound in (*(f"{bound:g}" for bound in SECONDS), "+Inf"):
        total += parts.get(f"{_BUCKET}{bound}", 0.0)
        found.append((bound if bound == "+Inf" else str(float(bound)), total))
    return found, parts.get(_SUM, 0.0)
