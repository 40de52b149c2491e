"""What became of starts and captures, and how this host stands, as numbers for its tally.

Reads records and parts and calls :mod:`restorer.records.tally`; decides nothing and writes nothing itself.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from policies import floor
from policies.compat import Mismatch
from policies.replica import Replica
from policies.wire import JobKind, SnapshotSummary
from restorer.boxes.doors import Doors
from restorer.errors import CanaryDiffers, Cancelled, RestorerError
from restorer.machine.host import Host
from restorer.records.tally import Tally

T = TypeVar("T")
_BEGUN = time.time()
_UNKNOWN_TIER = "unknown"
_STATES = ("fits", "unfit", "quarantined")


class Held(NamedTuple):
    """A job that is worked on."""

    kind: JobKind
    since: float
    """Monotonic time at which it was claimed."""


def admitted(tally: Tally, record: Replica, began: float) -> None:
    """A start has ended well; ``began``: the monotonic time of its claim."""
    start = record.start or "none"
    tally.inc("restores", record.model, record.state, start, "")
    tally.observe("start_seconds", record.model, start, seconds=time.monotonic() - began)
    for stage in record.stages:
        tally.observe("cold_start_seconds", record.model, start, stage.name, seconds=stage.seconds)
    _moved(tally, record)
    found = floor.account(record)
    if found is not None:
        tally.gauge("restore_floor_ratio", record.model, value=found.ratio)
        for what, seconds in found.lost:
            tally.gauge("restore_lost_seconds", record.model, what, value=max(0.0, seconds))


def failed(tally: Tally, record: Replica, error: RestorerError) -> None:
    """A start has ended in this record, which is not admitted, for this reason."""
    tally.inc("restores", record.model, record.state, record.start or "none", reason(error))
    _moved(tally, record)


def fell_back(tally: Tally, record: Replica, error: RestorerError) -> None:
    """A restore failed, and its start goes on cold; the record is as the restore left it."""
    tally.inc("restores", record.model, "fell_back", record.start or "none", reason(error))


def given_back(tally: Tally, record: Replica, error: RestorerError) -> None:
    """A try failed and another will be made."""
    tally.inc("restores", record.model, "retried", record.start or "none", reason(error))


def reason(error: RestorerError) -> str:
    """A bounded word for what went wrong."""
    return "canary" if isinstance(error, CanaryDiffers) else error.kind


def _moved(tally: Tally, record: Replica) -> None:
    for stage in record.stages:
        if stage.bytes:
            tally.inc("restore_bytes", record.model, stage.name, stage.tier or _UNKNOWN_TIER, by=stage.bytes)


def faulty(tally: Tally, model: str, kind: str, faults: Iterable[T]) -> list[T]:
    """The faults of one kind that were found in a snapshot, counted."""
    found = list(faults)
    if found:
        tally.inc("snapshot_faults", model, kind, by=len(found))
    return found


def distrusted(tally: Tally, model: str, refused: Mapping[str, Iterable[Mismatch]]) -> None:
    """Count what a start was refused for a snapshot's signature, or because others could have changed it."""
    for mismatch in (one for found in refused.values() for one in found):
        # An owner's fault is filed under the path.
        kind = "owner" if mismatch.field.startswith("/") else mismatch.field
        if kind in ("owner", "signature"):
            tally.inc("snapshot_faults", model, kind)


@contextmanager
def compared(tally: Tally, model: str) -> Iterator[None]:
    """Count what the canary of a restored engine says."""
    try:
        yield
    except CanaryDiffers:
        tally.inc("canary", model, "different")
        raise
    except RestorerError:
        tally.inc("canary", model, "failed")
        raise
    tally.inc("canary", model, "equal")


@contextmanager
def captured(tally: Tally, model: str) -> Iterator[None]:
    """Count a snapshot that is made in this block."""
    try:
        yield
    except Cancelled:
        raise
    except RestorerError as error:
        tally.inc("captures", model, reason(error))
        raise
    tally.inc("captures", model, "published")


def observe(host: Host, held: Iterable[Held], running: int, summaries: Iterable[SnapshotSummary]) -> Mapping[str, float]:
    """This host's gauges, by field. Blocks for a look at the disk."""
    tally = host.tally
    _begin(tally, list(host.config.models))
    _leases(tally, list(held))
    _snapshots(tally, list(host.config.models), list(summaries))
    _storage(tally, host.config.state_dir)
    tally.gauge("host_capable", value=host.criu is not None)
    tally.gauge("host_replicas", value=running)
    _doors(tally, host.boxes.doors)
    tally.gauge("restorer_memory_bytes", value=_resident())
    tally.gauge("restorer_start_timestamp_seconds", value=_BEGUN)
    return tally.gauges()


async def observe_gpus(host: Host) -> None:
    """What the driver says of this host's GPUs; nothing where there are none."""
    facts = host.gpus.facts
    if facts is None or not facts.gpus:
        return
    try:
        memory = await host.cuda.memory()
    except RestorerError:
        memory = {}  # what is not known now is not shown
    names = {gpu.uuid: str(number) for number, gpu in enumerate(facts.gpus)}
    tally, known = host.tally, {uuid: one for uuid, one in memory.items() if uuid in names}
    tally.replace("gpu_memory_free_bytes", {(names[uuid],): float(one["free"]) for uuid, one in known.items()})
    tally.replace("gpu_memory_size_bytes", {(names[uuid],): float(one["total"]) for uuid, one in known.items()})
    tally.replace("gpu_leased", {(name,): float(host.gpus.taken(uuid)) for uuid, name in names.items()})


def _begin(tally: Tally, models: Iterable[str]) -> None:
    """Counters begin at 0: of one that is first seen at 1, nobody could tell that it has just risen."""
    for kind in JobKind if tally.first("") else ():
        tally.inc("lease_takeovers", kind, by=0)
        tally.inc("leases_lost", kind, by=0)
    for model in filter(tally.first, models):
        for result in ("equal", "different", "failed"):
            tally.inc("canary", model, result, by=0)
        for fault in ("bytes", "file", "weights", "signature", "owner"):
            tally.inc("snapshot_faults", model, fault, by=0)
        tally.inc("captures", model, "published", by=0)


def _doors(tally: Tally, doors: Doors) -> None:
    found, open_now = doors.counts()
    for result, count in found.items():
        tally.inc("door_connections", result, by=count)
    tally.gauge("door_connections_open", value=open_now)


def _storage(tally: Tally, folder: str) -> None:
    free, size = dict[tuple[str, ...], float](), dict[tuple[str, ...], float]()
    with suppress(OSError):  # what is not known is not shown
        disk = shutil.disk_usage(folder)
        free[()], size[()] = disk.free, disk.total
    tally.replace("storage_free_bytes", free)
    tally.replace("storage_size_bytes", size)


def _leases(tally: Tally, held: list[Held]) -> None:
    now = time.monotonic()
    tally.replace("leases", {(kind,): float(sum(one.kind is kind for one in held)) for kind in JobKind})
    ages = {kind: max((now - one.since for one in held if one.kind is kind), default=0.0) for kind in JobKind}
    tally.replace("lease_age_seconds", {(kind,): age for kind, age in ages.items()})


def _snapshots(tally: Tally, models: list[str], summaries: list[SnapshotSummary]) -> None:
    counts: Counter[tuple[str, str]] = Counter({(model, state): 0 for model in models for state in _STATES})
    sizes, newest = Counter({model: 0 for model in models}), dict[str, float]()
    for one in summaries:
        state = "quarantined" if one.quarantined is not None else "fits" if one.fits else "unfit"
        counts[one.model, state] += 1
        sizes[one.model] += one.bytes
        if state == "fits":
            newest[one.model] = max(newest.get(one.model, 0.0), one.created_ms / 1000)
    tally.replace("snapshots", {key: float(count) for key, count in counts.items()})
    tally.replace("snapshot_bytes", {(model,): float(size) for model, size in sizes.items()})
    tally.replace("snapshot_newest_timestamp_seconds", {(model,): moment for model, moment in newest.items()})


def _resident() -> float:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return float(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
