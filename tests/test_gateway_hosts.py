"""What restorers count, as any gateway shows it: it outlives restorers, gateways and the store's moments of absence."""

from __future__ import annotations

import asyncio

import redis.asyncio
from conftest import eventually
from fake_replica import ADMIN, configuration, serving
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gateway.errors import StoreUnavailable
from gateway.hosts import HostNumbers, Hosts
from gateway.metrics import Metrics
from gateway.trail import Trace, Trail
from policies.observing import Metrics as Access
from policies.tenancy import key_hash
from policies.tracing import Context
from policies.wire import HostReport
from restorer.coordination.jobs import JobStore
from restorer.records.tally import Tally

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def report(host: str, **gauges: float) -> HostReport:
    return HostReport(host=host, capable=True, capability="", snapshots=(), running=0, parallel_starts=1, gauges=gauges)


def values(page: str, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


async def test_counters_outlive_the_restorer_that_counted(store: redis.asyncio.Redis, store_server: str) -> None:
    async with serving(store_server) as served:
        for _ in range(2):  # kill -9: the next process begins at nothing
            tally, jobs = Tally(), JobStore(store_server, "rewake", "host-a")
            tally.inc("canary", "m", "equal", by=2)
            tally.observe("start_seconds", "m", "cold", seconds=3.0)
            await jobs.report(report("host-a"), tally.take())
            await jobs.close()
        page = (await served.client.get("/metrics")).text
        assert values(page, "rewake_canary_total") == {("host-a", "m", "equal"): 4}
        assert values(page, "rewake_start_seconds_sum") == {("host-a", "m", "cold"): 6}
        assert values(page, "rewake_start_seconds_bucket")["host-a", "2.5", "m", "cold"] == 0
        assert values(page, "rewake_start_seconds_bucket")["host-a", "5.0", "m", "cold"] == 2
        assert values(page, "rewake_start_seconds_count") == {("host-a", "m", "cold"): 2}


async def test_a_host_that_reports_no_more_is_down_and_its_gauges_end(store: redis.asyncio.Redis, store_server: str) -> None:
    jobs = JobStore(store_server, "rewake", "host-a")
    async with serving(store_server) as served:
        await jobs.report(report("host-a", host_replicas=2.0), {"canary\tm\tequal": 1.0})
        page = (await served.client.get("/metrics")).text
        assert values(page, "rewake_host_up") == {("host-a",): 1}
        assert values(page, "rewake_host_replicas") == {("host-a",): 2}
        await store.delete("rewake:host:host-a")
        page = (await served.client.get("/metrics")).text
        assert values(page, "rewake_host_up") == {("host-a",): 0}
        assert values(page, "rewake_host_replicas") == {}
        assert values(page, "rewake_canary_total") == {("host-a", "m", "equal"): 1}
        await store.delete("rewake:tally:host-a")  # as its expiry does, a day later
        assert values((await served.client.get("/metrics")).text, "rewake_host_up") == {}
        assert not await store.sismember("rewake:hosts", "host-a")
    await jobs.close()


async def test_what_is_no_number_of_ours_spoils_nothing(store: redis.asyncio.Redis, store_server: str) -> None:
    await store.sadd("rewake:hosts", "x")
    await store.hset("rewake:tally:x", mapping={"canary\tm\tequal": "many", "bogus": "1", 'leases_lost\ta"b\nc': "2"})
    async with serving(store_server) as served:
        page = (await served.client.get("/metrics")).text
        assert values(page, "rewake_leases_lost_total") == {("x", 'a"b\nc'): 2}
        assert values(page, "rewake_canary_total") == {}


async def test_a_store_that_is_away_takes_no_counter_back() -> None:
    class Numbers:
        away = False

        async def numbers(self):
            if self.away:
                raise StoreUnavailable("gone")
            return {"h": HostNumbers(True, {"leases_lost\tstart": 3.0}, {"host_up": 1.0})}

    numbers = Numbers()
    hosts = Hosts(numbers)
    await hosts.look()
    numbers.away = True
    await hosts.look()
    found = {family.name: [sample.value for sample in family.samples] for family in hosts.collect()}
    assert found["rewake_leases_lost"] == [3.0]
    assert found["rewake_host_up"] == [], "whether it is up is not known"


async def test_a_store_that_hangs_does_not_hang_a_scrape(monkeypatch) -> None:
    class Numbers:
        async def numbers(self):
            await asyncio.Event().wait()

    monkeypatch.setattr("gateway.hosts._WITHIN_S", 0.01)
    await asyncio.wait_for(Hosts(Numbers()).look(), 30)


async def test_metrics_may_need_a_key(store: redis.asyncio.Redis, store_server: str) -> None:
    config = configuration().model_copy(update={"metrics": Access(keys=(key_hash("rk-1"),))})
    async with serving(store_server, config) as served:
        assert (await served.client.get("/metrics")).status_code == 401
        assert (await served.client.get("/metrics", headers={"Authorization": "Bearer rk-2"})).status_code == 401
        assert (await served.client.get("/metrics", headers={"Authorization": "Bearer rk-1"})).status_code == 200
        assert (await served.client.get("/metrics", headers=ADMIN)).status_code == 200
        served.gateway.current.replace(configuration())
        assert (await served.client.get("/metrics")).status_code == 200


def test_openmetrics_names_a_trace_for_a_bucket():
    metrics = Metrics(["m"], version="1")
    own = Context("ab" * 16, "cd" * 8)
    trail = Trail("id", "/v1/chat/completions", 0.0)
    trail.model, trail.start, trail.trace = "m", "cold", Trace(own, None, "", "")
    trail.first_byte_s, trail.seconds, trail.status = 0.3, 700.0, 200
    metrics.first_byte(trail, trail.first_byte_s)
    metrics.account((trail,))
    reply = metrics.expose(OPENMETRICS)
    assert reply.content_type.startswith("application/openmetrics-text")
    found = {
        (sample.name, sample.labels["le"]): sample.exemplar
        for family in openmetrics(reply.body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert {key: (exemplar.labels, exemplar.value) for key, exemplar in found.items()} == {
        ("rewake_time_to_first_byte_seconds_bucket", "0.5"): ({"trace_id": own.trace}, 0.3),
        ("rewake_request_seconds_bucket", "+Inf"): ({"trace_id": own.trace}, 700.0),
    }
    assert "trace_id" not in metrics.expose().body.decode()


async def test_the_whole_page_is_openmetrics(store: redis.asyncio.Redis, store_server: str) -> None:
    async with serving(store_server) as served:
        held = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        answer = await served.client.get("/metrics", headers={"Accept": OPENMETRICS})
        families = {family.name: family for family in openmetrics(answer.text)}
        assert families["rewake_queue_depth"].samples[0].value == 1
        assert families["rewake_queue_limit_requests"].samples[0].value == 1000
        assert answer.text.endswith("# EOF\n")
        held.cancel()
