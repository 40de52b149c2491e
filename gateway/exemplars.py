"""Exemplars: the trace of one request for each bucket of a histogram, the last one, over all workers of this host.

The files that workers share have no room for them, so each worker leaves its own in a file beside those, once a second if there
is news. Knows no series, and not how they are written for whoever scrapes them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client.samples import Exemplar


class Bucket(NamedTuple):
    """One bucket of one series."""

    series: str
    labels: tuple[str, ...]
    """Their values, in the order of the series' labels."""
    bound: str


class _Last(NamedTuple):
    """The last request that fell into one."""

    trace_id: str
    value: float
    at: float
    """Seconds since the epoch."""


class Exemplars:
    """This worker's, and those of the others as they left them.

    Args:
        file: where this worker leaves its own; None: there are no others.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._own: dict[tuple[str, tuple[str, ...], str], tuple[str, float, float]] = {}
        self._news = False

    @classmethod
    def shared(cls, folder: Path, place: int) -> Exemplars:
        """Those of the worker that has this place in the common folder."""
        return cls(folder / f"exemplars_{place}.json")

    def note(self, bucket: tuple[str, tuple[str, ...], str], trace_id: str, value: float, now: float) -> None:
        """A request fell into a bucket, which is what :class:`Bucket` says, as a plain tuple: to make it costs a tenth.
        ``now``: seconds since the epoch."""
        self._own[bucket] = (trace_id, value, now)
        self._news = True

    def flush(self) -> None:
        """Leave them for the other workers, if there is news. A disk that takes no more loses them, and nothing else."""
        if self._file is None or not self._news:
            return
        self._news = False
        with contextlib.suppress(OSError):
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps([*self._own.items()]))
            new.replace(self._file)

    def all(self) -> Mapping[Bucket, Exemplar]:
        """For each bucket the last one, whoever served it."""
        found = {Bucket(*bucket): _Last(*last) for bucket, last in self._own.items()}
        for file in [] if self._file is None else self._file.parent.glob("exemplars_*.json"):
            for bucket, last in _left(file).items():
                if bucket not in found or last.at > found[bucket].at:
                    found[bucket] = last
        return {bucket: Exemplar({"trace_id": last.trace_id}, last.value, last.at) for bucket, last in found.items()}


def _left(file: Path) -> dict[Bucket, _Last]:
    """What a worker has left; nothing of another version's, which is not understood and not needed."""
    try:
        rows = json.loads(file.read_text())
        return {Bucket(series, tuple(labels), bound): _Last(*last) for (series, labels, bound), last in rows}
    except (OSError, ValueError, TypeError):
        return {}
