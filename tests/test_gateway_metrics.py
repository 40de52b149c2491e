"""The series: what they are called, what bounds their labels, what they count."""

from __future__ import annotations

import asyncio

import pytest
from conftest import eventually
from fake_replica import Fleet, replica_server, serving
from prometheus_client.parser import text_string_to_metric_families

from gateway.hosts import Hosts
from gateway.metrics import Metrics
from gateway.shared import Shared, _free_place
from gateway.trail import Trail
from policies.replica import Replica, State

FLOOR = {
    *("rewake_requests", "rewake_queue_depth", "rewake_queue_bytes", "rewake_queue_wait_seconds", "rewake_cold_start_seconds"),
    *(
        "rewake_time_to_first_byte_seconds",
        "rewake_inflight_requests",
        "rewake_replica_state",
        "rewake_restores",
        "rewake_canary",
    ),
    *("rewake_scale_up_triggers", "rewake_client_disconnects", "rewake_upstream_retries", "rewake_model_demand"),
    *("rewake_session_expires_at_timestamp_seconds", "rewake_config_last_reload_successful", "rewake_build_info"),
}


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.expose(more=[Hosts(None)]).body.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def record(state: State, **more) -> Replica:
    return Replica(id="m#0", model="m", state=state, fence=1, incarnation="i", start="restored", **more)


def test_the_floor_is_there_and_buckets_reach_ten_minutes():
    metrics = Metrics(["m"], version="1")
    names = {family.name for family in text_string_to_metric_families(metrics.expose(more=[Hosts(None)]).body.decode())}
    assert names >= FLOOR
    metrics.queue_wait.labels("m", "admitted").observe(599)
    assert ("rewake_queue_wait_seconds_bucket", (("le", "600.0"), ("model", "m"), ("outcome", "admitted"))) in samples(metrics)


def test_the_first_span_that_is_lost_is_a_rise():
    found = samples(Metrics(["m"], version="1"))
    assert {found["rewake_spans_total", (("result", result),)] for result in ("exported", "failed", "dropped")} == {0.0}


@pytest.mark.interpreted
def test_a_request_that_cannot_be_counted_takes_no_other_with_it(monkeypatch, caplog):
    def unusual(self: Metrics, trail: Trail) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Metrics, "_unusual", unusual)
    metrics, trails = Metrics(["m"], version="1"), [Trail(f"req_{number}", "/v1/models", 0.0) for number in range(3)]
    for trail in trails:
        trail.status = 200
    trails[1].code = "bad"
    metrics.account(trails)
    metrics.flush()
    assert sum(value for (name, _), value in samples(metrics).items() if name == "rewake_requests_total") == 3
    assert "a bug" in caplog.text


def test_a_slots_state_is_shown_from_its_record():
    metrics = Metrics(["m"], version="1")
    metrics.record(record(State.VERIFYING), record(State.ADMITTED))
    metrics.record(record(State.ADMITTED), record(State.QUARANTINED))
    found = samples(metrics)
    labels = (("model", "m"), ("replica", "m#0"))
    assert found["rewake_replica_state", (*labels, ("state", "quarantined"))] == 1
    assert found["rewake_replica_state", (*labels, ("state", "admitted"))] == 0


def test_an_estimate_is_judged_by_what_it_was():
    metrics = Metrics(["m"], version="1")
    metrics.promised("m", 10.0, 30.0)
    metrics.promised("m", None, 30.0)
    metrics.promised("m", 0.01, 0.02)
    found = samples(metrics)
    assert found["rewake_eta_ratio_count", (("model", "m"),)] == 1
    assert found["rewake_eta_ratio_sum", (("model", "m"),)] == 3


def test_records_of_unknown_models_make_no_series():
    metrics = Metrics(["other"], version="1")
    metrics.record(None, record(State.ADMITTED))
    assert not [name for name, _ in samples(metrics) if name == "rewake_replica_state"]


async def test_requests_are_counted_by_what_became_of_them(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        held = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        assert 'rewake_queue_depth{model="m"} 1.0' in (await served.client.get("/metrics")).text
        await Fleet(store).admit(fake)
        await held
        leaving = asyncio.create_task(served.chat("nobody-ever-heard-of", headers={"x-stainless-retry-count": "1"}))
        await leaving
        found = samples(served.gateway.metrics)
        route = ("route", "/v1/chat/completions")
        assert found["rewake_requests_total", (("code", "200"), ("model", "m"), route, ("start", "restored"))] == 1
        assert found["rewake_requests_total", (("code", "404"), ("model", "_other"), route, ("start", "none"))] == 1
        assert found["rewake_client_retries_total", (("model", "_other"),)] == 1
        assert found["rewake_queue_wait_seconds_count", (("model", "m"), ("outcome", "admitted"))] == 1
        assert found["rewake_time_to_first_byte_seconds_count", (("model", "m"), ("start", "restored"))] == 1
        assert found["rewake_request_seconds_count", (("model", "m"), ("start", "restored"))] == 1
        assert found["rewake_scale_up_triggers_total", (("deduped", "false"), ("model", "m"))] == 1


async def test_a_client_that_leaves_is_499_in_its_phase(store, store_server):
    async with serving(store_server) as served:
        request = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        request.cancel()
        await eventually(lambda: served.held() == 0)
        found = samples(served.gateway.metrics)
        assert found["rewake_client_disconnects_total", (("phase", "held"),)] == 1
        assert found["rewake_queue_wait_seconds_count", (("model", "m"), ("outcome", "cancelled"))] == 1
        assert any(dict(labels).get("code") == "499" for name, labels in found if name == "rewake_requests_total")


def test_a_worker_learns_who_died_in_its_place(tmp_path):
    place, lock = _free_place(tmp_path)
    assert Shared(tmp_path, place, lock).succeed("first") == ""
    other, second_lock = _free_place(tmp_path)
    assert Shared(tmp_path, other, second_lock).succeed("second") == "", "the first one lives"
    lock.close()  # what the kernel does when a process dies
    again, third_lock = _free_place(tmp_path)
    assert (again, Shared(tmp_path, again, third_lock).succeed("third")) == (place, "first")
    second_lock.close()
    third_lock.close()
