"""The folder in which the workers of one host keep their series, so that each answers a scrape for all.

Workers are separate processes behind one port, and a scrape reaches any one of them. Owns the workers' places there; knows no
series.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

import prometheus_client.values
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

_MAX_WORKERS = 256


class Shared:
    """This worker's place in the common folder; kept for the life of the process.

    A worker takes the first place that no living process holds, goes on with the counters of the one that had it before
    and drops its gauges. So counters never go back, and the folder does not grow with restarts.
    """

    def __init__(self, folder: Path, place: int, lock: IO[bytes]) -> None:
        self.folder = folder
        self.place = place
        self._lock = lock

    def succeed(self, id: str) -> str:
        """Leave this process's id here for the next one; the id of the one before, which is dead, or nothing."""
        note = self.folder / f"{self.place}.lock"
        before = note.read_text(errors="replace").strip()
        note.write_text(id)
        return before

    def all(self) -> CollectorRegistry:
        """The series of all workers, added up."""
        self.forget_dead()
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self.folder))  # type: ignore[no-untyped-call]
        return registry

    def forget_dead(self) -> None:
        """Remove the gauges of workers that are gone."""
        for file in self.folder.glob("gauge_live*.db"):
            place = int(file.stem.rpartition("_")[2])
            if place == self.place:
                continue
            lock = _hold(self.folder, place)
            if lock is not None:
                with lock:
                    file.unlink(missing_ok=True)


def share(folder: Path) -> Shared:
    """Keep the values of all series made from now on in ``folder``. Call once, before :class:`Metrics` is made.

    Raises:
        OSError: the folder cannot be written.
    """
    place, lock = _free_place(folder)
    for file in folder.glob(f"gauge_*_{place}.db"):
        file.unlink(missing_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values = prometheus_client.values
    values.ValueClass = values.MultiProcessValue(lambda: place)  # type: ignore[no-untyped-call]
    return Shared(folder, place, lock)


def _free_place(folder: Path) -> tuple[int, IO[bytes]]:
    for place in range(_MAX_WORKERS):
        lock = _hold(folder, place)
        if lock is not None:
            return place, lock
    raise OSError(f"all {_MAX_WORKERS} places in {folder} are taken; does something else write there?")


def _hold(folder: Path, place: int) -> IO[bytes] | None:
    """The lock of a place, or None when a living process has it."""
    lock = (folder / f"{place}.lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
