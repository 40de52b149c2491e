"""When replicas are asked for, and what the report says meanwhile."""

from __future__ import annotations

import asyncio

from conftest import eventually
from fake_replica import Exchange, FakeReplica, Fleet, answer, configuration, replica_server, serving

from gateway import scaling as scaling_module
from policies.replica import State


async def test_keep_asks_without_any_request(store, store_server):
    async with serving(store_server, configuration(model__keep=2, model__max_replicas=3)):
        fleet = Fleet(store)

        async def asked() -> list[tuple[str, str]]:
            return sorted((job["replica"], job["reason"]) for job in await fleet.jobs())

        await eventually(lambda: _equal(asked, [("m#0", "keep"), ("m#1", "keep")]))


async def _equal(ask, expected) -> bool:
    return await ask() == expected


async def test_nothing_is_asked_while_a_failure_stands_and_again_after(store, store_server):
    async with serving(store_server, configuration(model__keep=1)) as served:
        fleet = Fleet(store)
        await eventually(fleet.jobs)
        operation = (await fleet.jobs())[0]["operation"]
        await store.delete(fleet.keys.jobs, fleet.keys.starts("m"), fleet.keys.active("m"), fleet.keys.operation(operation))
        await fleet.fail("m", "no", ttl_ms=1500)
        await eventually(lambda: served.gateway.registry.failure("m"))
        await store.delete(fleet.keys.jobs, fleet.keys.starts("m"), fleet.keys.active("m"))
        await asyncio.sleep(1.1)
        assert await fleet.jobs() == []
        await eventually(fleet.jobs)


async def test_an_edge_asks_at_once(store, store_server, monkeypatch):
    monkeypatch.setattr(scaling_module, "PERIOD_S", 3600.0)
    async with serving(store_server) as served:
        request = asyncio.create_task(served.chat())
        await eventually(Fleet(store).jobs)
        request.cancel()
        await asyncio.wait([request])


async def test_a_lost_replica_is_asked_for_again_while_somebody_waits(store, store_server):
    async with serving(store_server) as served:
        fleet = Fleet(store)
        replica = await fleet.admit(FakeReplica(), concurrency=1, state=State.VERIFYING)
        request = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        await asyncio.sleep(1.1)
        assert await fleet.jobs() == []
        await fleet.change(replica, State.FAILED)
        await eventually(fleet.jobs)
        request.cancel()
        await asyncio.wait([request])


async def test_who_is_served_by_a_replica_that_drains_asks_for_no_other_and_who_waits_does(store, store_server):
    gate = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        await gate.wait()
        await answer(exchange)

    async with replica_server(late) as fake, serving(store_server) as served:
        fleet = Fleet(store)
        replica = await fleet.admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        under_way = asyncio.create_task(served.chat())
        await eventually(lambda: fake.inflight == 1)
        await fleet.change(replica, State.DRAINING)
        await eventually(lambda: not served.gateway.registry.available("m"))
        # Longer than the look at all models that comes once a second.
        await asyncio.sleep(1.2)
        assert await fleet.jobs() == []
        waiting = asyncio.create_task(served.chat())
        await eventually(fleet.jobs)
        assert [job["replica"] for job in await fleet.jobs()] == ["m#1"]
        gate.set()
        assert (await under_way).status_code == 200
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_demand_of_all_gateways_counts_together(store, store_server):
    """Two gateways with three waiters each and replicas for four: two replicas, though each alone would ask for one."""
    config = configuration(model__concurrency=4, model__max_replicas=9)
    async with serving(store_server, config, id="a") as a, serving(store_server, config, id="b") as b:
        requests = [asyncio.create_task(served.chat()) for served in (a, b) for _ in range(3)]
        fleet = Fleet(store)

        async def slots() -> list[str]:
            return sorted(job["replica"] for job in await fleet.jobs())

        await eventually(lambda: _equal(slots, ["m#0", "m#1"]))
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)


async def test_a_gateway_that_died_counts_no_more(store, store_server):
    """Its report expires; its demand, its requests and its share of the slots go with it."""
    async with serving(store_server, id="alive") as served:
        report = served.gateway.reporter
        dead = '{"id":"dead","seq":0,"models":{"m":{"held":3,"inflight":0,"rejected":0,"arrivals":3}},"replicas":{"i":2}}'
        await store.set("rewake:gateway:dead", dead, px=1500)
        await store.sadd("rewake:gateways", "dead")
        await eventually(lambda: report.gateways == 2)
        assert (report.demand("m"), report.inflight()) == (3, {"i": 2})
        await eventually(lambda: report.gateways == 1)
        assert (report.demand("m"), report.inflight()) == (0, {})
        assert not await store.sismember("rewake:gateways", "dead")


async def test_what_the_others_say_is_heard_however_busy_this_gateway_is(store, store_server):
    """Edges of its own come without a pause."""
    async with serving(store_server, id="busy") as served:
        reporter = served.gateway.reporter

        async def kick() -> None:
            while True:
                reporter.kick()
                await asyncio.sleep(0.005)

        kicking = asyncio.create_task(kick())
        await asyncio.sleep(0.1)
        other = '{"id":"other","seq":0,"models":{"m":{"held":3,"inflight":0,"rejected":0,"arrivals":3}},"replicas":{}}'
        await store.set("rewake:gateway:other", other)
        await store.sadd("rewake:gateways", "other")
        await eventually(lambda: reporter.demand("m") == 3)
        kicking.cancel()


async def test_a_busy_replica_does_not_mean_a_busy_store(store, store_server):
    """Hundreds of edges a second share few reports."""
    async with replica_server() as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        before = (await store.info("commandstats"))["cmdstat_set"]["calls"]
        since = asyncio.get_running_loop().time()
        for _ in range(150):
            await served.chat()
        seconds = asyncio.get_running_loop().time() - since
        reports = (await store.info("commandstats"))["cmdstat_set"]["calls"] - before
        assert reports < 60 * seconds + 5
