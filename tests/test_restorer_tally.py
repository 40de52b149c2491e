"""Counting in the restorer: from any thread, bounded, and never lost to a store that is away for a moment."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from policies.manifest import GpuFacts
from policies.replica import Replica, Stage, State
from policies.series import Point
from policies.wire import JobKind, SnapshotSummary
from restorer.boxes.doors import Doors
from restorer.errors import CanaryDiffers, Environment, ToolFailed
from restorer.operations import accounts
from restorer.records import tally
from restorer.records.tally import Tally


def test_what_was_taken_and_put_back_is_taken_again():
    counts = Tally()
    counts.inc("canary", "m", "equal")
    taken = counts.take()
    assert taken == {"canary\tm\tequal": 1.0}
    assert counts.take() == {}
    counts.inc("canary", "m", "equal", by=2)
    counts.put_back(taken)
    assert counts.take() == {"canary\tm\tequal": 3.0}


def test_nothing_is_lost_between_threads():
    counts, total = Tally(), 0.0

    def count() -> None:
        for _ in range(500):
            counts.inc("leases_lost", "start")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        total += counts.take().get("leases_lost\tstart", 0.0)
    total += counts.take().get("leases_lost\tstart", 0.0)
    assert total == 2000


def test_a_series_is_used_as_the_table_says():
    with pytest.raises(ValueError, match="counter"):
        Tally().gauge("canary", "m", "equal", value=1)
    with pytest.raises(ValueError, match="not a counter"):
        Tally().inc("canary", "m")
    with pytest.raises(KeyError):
        Tally().inc("never_heard_of")


def test_it_is_bounded(monkeypatch):
    monkeypatch.setattr(tally, "MAX_POINTS", 3)
    counts = Tally()
    for number in range(10):
        counts.inc("canary", f"m{number}", "equal")
        counts.gauge("snapshot_bytes", f"m{number}", value=1)
    assert len(counts.take()) == len(counts.gauges()) == 3


def test_gauges_that_are_not_named_any_more_are_gone():
    counts = Tally()
    counts.replace("leases", {("start",): 2.0, ("stop",): 0.0})
    counts.replace("leases", {("start",): 1.0})
    assert counts.gauges() == {"leases\tstart": 1.0}


def record(state: State = State.ADMITTED, **more) -> Replica:
    stages = (Stage(name="verify bytes", seconds=0.2, bytes=10, tier="disk"), Stage(name="restore", seconds=0.4))
    return Replica(id="m#0", model="m", state=state, fence=1, start="restored", stages=stages, **more)


def test_restore_case_77_every_start_is_counted_by_how_it_was_started_and_why_it_failed():
    counts = Tally()
    accounts.admitted(counts, record(), began=0.0)
    accounts.failed(counts, record(State.QUARANTINED), CanaryDiffers("x"))
    accounts.fell_back(counts, record(State.RESTORING), ToolFailed("criu", 1, ""))
    accounts.given_back(counts, record(State.RESTORING), Environment("no room"))
    taken = counts.take()
    assert {field: value for field, value in taken.items() if field.startswith("restores")} == {
        "restores\tm\tadmitted\trestored\t": 1,
        "restores\tm\tquarantined\trestored\tcanary": 1,
        "restores\tm\tfell_back\trestored\ttool": 1,
        "restores\tm\tretried\trestored\tenvironment": 1,
    }
    assert taken["restore_bytes\tm\tverify bytes\tdisk"] == 20, "of the start that was admitted and of the one that was not"
    assert taken["cold_start_seconds\tm\trestored\trestore\tle=0.5"] == 1
    assert taken["cold_start_seconds\tm\trestored\trestore\tsum"] == 0.4
    assert all(Point.of(field) is not None for field in taken)


def test_canaries_and_captures_are_counted_by_result():
    counts = Tally()
    with accounts.compared(counts, "m"):
        pass
    with pytest.raises(CanaryDiffers), accounts.compared(counts, "m"):
        raise CanaryDiffers("x")
    with pytest.raises(ToolFailed), accounts.captured(counts, "m"):
        raise ToolFailed("criu", 1, "")
    with accounts.captured(counts, "m"):
        pass
    assert counts.take() == {
        "canary\tm\tequal": 1,
        "canary\tm\tdifferent": 1,
        "captures\tm\ttool": 1,
        "captures\tm\tpublished": 1,
    }


class _Host:
    """As much of a host as is looked at."""

    def __init__(self, folder) -> None:
        self.tally, self.criu, self.boxes = Tally(), None, SimpleNamespace(doors=Doors(None, print))
        self.config = type("C", (), {"models": {"m": None, "n": None}, "state_dir": str(folder)})()


def test_the_hosts_gauges(tmp_path):
    host = _Host(tmp_path)
    summaries = [
        SnapshotSummary(id="a", model="m", created_ms=5000, bytes=3, fits=True),
        SnapshotSummary(id="b", model="m", created_ms=7000, bytes=4, fits=True),
        SnapshotSummary(id="c", model="m", created_ms=9000, bytes=5, fits=False, quarantined="canary"),
    ]
    held = [accounts.Held(JobKind.START, -1000.0), accounts.Held(JobKind.START, 0.0)]
    gauges = accounts.observe(host, held, 2, summaries)
    assert gauges["snapshots\tm\tfits"] == 2
    assert gauges["snapshots\tm\tquarantined"] == 1
    assert gauges["snapshots\tn\tfits"] == 0, "a model without one is seen to have none"
    assert gauges["snapshot_bytes\tm"] == 12
    assert gauges["snapshot_newest_timestamp_seconds\tm"] == 7
    assert "snapshot_newest_timestamp_seconds\tn" not in gauges
    assert gauges["leases\tstart"] == 2
    assert gauges["lease_age_seconds\tstart"] > 1000
    assert gauges["lease_age_seconds\tstop"] == 0
    assert 0 < gauges["storage_free_bytes"] < gauges["storage_size_bytes"]
    assert gauges["restorer_memory_bytes"] > 1 << 20
    assert all(Point.of(field) is not None for field in gauges)


async def test_what_the_driver_says_of_gpus_is_shown_and_what_it_does_not_is_not():
    class Cuda:
        async def memory(self):
            return {"one": {"free": 5, "total": 9, "pids": []}}

    class Gpus:
        facts = GpuFacts.model_construct(gpus=(type("G", (), {"uuid": "one"})(), type("G", (), {"uuid": "two"})()))

        def taken(self, uuid):
            return uuid == "two"

    host = type("H", (), {"tally": Tally(), "gpus": Gpus(), "cuda": Cuda()})()
    await accounts.observe_gpus(host)
    assert host.tally.gauges() == {
        "gpu_memory_free_bytes\t0": 5,
        "gpu_memory_size_bytes\t0": 9,
        "gpu_leased\t0": 0,
        "gpu_leased\t1": 1,
    }
