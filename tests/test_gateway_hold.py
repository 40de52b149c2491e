"""Held requests, seen from outside: the gateway, a real store, scripted upstreams, records written as a restorer would."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time

import httpx
import openai
import pytest
from conftest import eventually
from fake_replica import ADMIN, CHAT, Exchange, Fleet, answer, completion, configuration, delta, replica_server, serving

from gateway import report as report_module
from policies.replica import Stage, State
from policies.wire import GatewayReport


async def reported(store, id: str = "gw") -> GatewayReport:
    text = await store.get(f"rewake:gateway:{id}")
    return GatewayReport.model_validate_json(text)


async def test_case_01_burst_at_zero_is_held_and_served(store, store_server):
    """100 POSTs, then one replica: 100 x 200, never more at once than it may have."""
    async with replica_server() as fake, serving(store_server) as served:
        requests = [asyncio.create_task(served.chat()) for _ in range(100)]
        await eventually(lambda: served.held() == 100)
        await Fleet(store).admit(fake, concurrency=8)
        answers = await asyncio.gather(*requests)
        assert [response.status_code for response in answers] == [200] * 100
        assert fake.most_inflight <= 8
        assert served.counts() == (0, 0, 0)


async def test_case_02_burst_over_replicas_admitted_one_by_one(store, store_server):
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await gate.wait()
        await answer(exchange)

    config = configuration(model__max_replicas=3)
    async with (
        replica_server(slow) as a,
        replica_server(slow) as b,
        replica_server(slow) as c,
        serving(store_server, config) as served,
    ):
        fleet = Fleet(store)
        requests = [asyncio.create_task(served.chat()) for _ in range(30)]
        await eventually(lambda: served.held() == 30)
        for slot, fake in enumerate((a, b, c)):
            await fleet.admit(fake, slot=slot, concurrency=4)
            await eventually(lambda slot=slot: served.held() == 30 - 4 * (slot + 1))
        gate.set()
        assert {response.status_code for response in await asyncio.gather(*requests)} == {200}
        assert max(fake.most_inflight for fake in (a, b, c)) == 4


async def test_case_03_terminal_failure_answers_all_waiters_long_before_their_hold_ends(store, store_server):
    async with serving(store_server) as served:
        requests = [asyncio.create_task(served.chat()) for _ in range(5)]
        await eventually(lambda: served.held() == 5)
        await Fleet(store).fail("m", "incompatible_host: host.arch: expected arm64, found x86_64")
        for response in await asyncio.gather(*requests):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "restore_failed")
            assert response.headers["x-should-retry"] == "false"
            assert "retry-after" not in response.headers
            assert "incompatible_host" in response.json()["error"]["message"]
        assert (await served.chat()).status_code == 503


async def test_a_failure_ends_with_its_key_and_requests_are_held_again(store, store_server):
    async with serving(store_server) as served:
        await Fleet(store).fail("m", "gone", ttl_ms=200)
        await eventually(lambda: served.gateway.registry.failure("m"))
        await eventually(lambda: served.gateway.registry.failure("m") is None)
        held = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        held.cancel()
        await asyncio.wait([held])


async def test_case_04_queue_full_is_503_with_retry_after(store, store_server):
    async with replica_server() as fake, serving(store_server, configuration(model__hold={"max_requests": 5})) as served:
        requests = [asyncio.create_task(served.chat()) for _ in range(8)]
        refused = await eventually(lambda: [task for task in requests if task.done()] if served.held() == 5 else [])
        await Fleet(store).admit(fake)
        answers = await asyncio.gather(*requests)
        assert sorted(response.status_code for response in answers) == [200] * 5 + [503] * 3
        for task in refused:
            response = task.result()
            assert response.json()["error"]["code"] == "queue_full"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert int(response.headers["retry-after-ms"]) == 1000 * int(response.headers["retry-after"])
            assert response.headers["x-should-retry"] == "true"


async def test_case_16_the_limit_holds_when_warm_too(store, store_server):
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await gate.wait()
        await answer(exchange)

    async with replica_server(slow) as fake, serving(store_server, configuration(model__hold={"max_requests": 2})) as served:
        await Fleet(store).admit(fake, concurrency=1)
        await eventually(lambda: served.gateway.registry.available("m"))
        requests = [asyncio.create_task(served.chat()) for _ in range(5)]
        await eventually(lambda: sum(task.done() for task in requests) == 2)
        assert (served.held(), served.inflight()) == (2, 1)
        gate.set()
        assert sorted(response.status_code for response in await asyncio.gather(*requests)) == [200, 200, 200, 503, 503]


async def test_case_05_abandoned_holders_leave_nothing(store, store_server):
    async with serving(store_server) as served:
        request = b'POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 13\r\n\r\n{"model":"m"}'

        async def hold_and_leave(count: int) -> None:
            opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", served.port) for _ in range(count)))
            for _, writer in opened:
                writer.write(request)
            await eventually(lambda: served.held() == count)
            for _, writer in opened:
                writer.transport.abort()
            await eventually(lambda: served.counts() == (0, 0, 0))

        await hold_and_leave(200)
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(4):
            await hold_and_leave(200)
        gc.collect()
        assert len(gc.get_objects()) < before * 1.1


async def test_case_07_queued_requests_ask_for_one_replica_not_for_fifty(store, store_server):
    async with serving(store_server, configuration(model__max_replicas=9, model__concurrency=50)) as served:
        requests = [asyncio.create_task(served.chat()) for _ in range(50)]
        await eventually(lambda: served.held() == 50)
        fleet = Fleet(store)
        await eventually(fleet.jobs)
        await asyncio.sleep(1.2)
        assert [job["replica"] for job in await fleet.jobs()] == ["m#0"]
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)


async def test_case_07_more_demand_than_one_replica_serves_asks_for_ceil(store, store_server):
    async with serving(store_server, configuration(model__max_replicas=9, model__concurrency=20)) as served:
        requests = [asyncio.create_task(served.chat()) for _ in range(50)]
        fleet = Fleet(store)

        async def slots() -> list[str]:
            return sorted(job["replica"] for job in await fleet.jobs())

        await eventually(lambda: served.held() == 50)
        await eventually(lambda: _equal(slots, ["m#0", "m#1", "m#2"]))
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)


async def _equal(ask, expected) -> bool:
    return await ask() == expected


async def test_case_08_byte_budget_of_the_waiting_room(store, store_server):
    config = configuration(model__hold={"max_bytes": "64 MiB"})
    async with serving(store_server, config) as served:
        body = b'{"model":"m","x":"' + b"A" * (10 << 20) + b'"}'
        requests = [asyncio.create_task(served.client.post(CHAT, content=body)) for _ in range(10)]
        refused = await eventually(lambda: [task for task in requests if task.done()] if served.held() == 6 else [])
        await eventually(lambda: sum(task.done() for task in requests) == 4)
        for task in refused:
            assert (task.result().status_code, task.result().json()["error"]["code"]) == (503, "queue_bytes_full")
        assert served.gateway.ledger.total_bytes == 6 * len(body)
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_case_10_first_upstream_byte_within_50_ms_of_admission(store, store_server):
    """Pushed, not polled. The least of several, for the machine is shared."""
    delays = []
    async with replica_server() as fake, serving(store_server) as served:
        fleet = Fleet(store)
        for _ in range(5):
            request = asyncio.create_task(served.chat())
            await eventually(lambda: served.held() == 1)
            since = time.monotonic()
            replica = await fleet.admit(fake)
            await request
            delays.append(time.monotonic() - since)
            await fleet.change(replica, State.STOPPED)
            await eventually(lambda: not served.gateway.registry.available("m"))
    assert min(delays) < 0.05


async def test_case_18_restorer_dies_and_waiters_go_on_with_the_next_attempt(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        fleet = Fleet(store)
        request = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        record = await fleet.admit(fake, state=State.RESTORING, incarnation="first")
        await eventually(lambda: served.gateway.registry.state("m") == "restoring")
        await fleet.change(record, State.QUEUED, incarnation="")
        await eventually(lambda: served.gateway.registry.state("m") == "queued")
        assert served.held() == 1
        await fleet.admit(fake, incarnation="second")
        response = await request
        assert (response.status_code, response.headers["x-rewake-incarnation"]) == (200, "second")


async def test_case_21_fifty_first_requests_on_three_gateways_are_one_restore(store, store_server):
    async with replica_server() as fake, contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(serving(store_server, id=f"gw{n}")) for n in range(3)]
        requests = [asyncio.create_task(gateways[n % 3].chat()) for n in range(50)]
        await eventually(lambda: sum(served.held() for served in gateways) == 50)
        fleet = Fleet(store)
        await eventually(fleet.jobs)
        await asyncio.sleep(1.2)
        jobs = await fleet.jobs()
        assert len(jobs) == 1
        assert len(await store.keys("rewake:operation:*")) == 1
        await fleet.admit(fake)
        assert {response.status_code for response in await asyncio.gather(*requests)} == {200}


async def test_case_22_the_report_falls_to_zero_when_the_sole_waiter_leaves(store, store_server, monkeypatch):
    monkeypatch.setattr(report_module, "PERIOD_S", 3600.0)  # an edge tells, no period
    async with serving(store_server) as served, store.pubsub() as pubsub:
        request = asyncio.create_task(served.chat())
        fleet = Fleet(store)
        await eventually(fleet.jobs)
        assert (await reported(store)).models["m"].held == 1
        await pubsub.subscribe(fleet.keys.events)
        request.cancel()

        async def nobody() -> bool:
            return (await reported(store)).models["m"].demand == 0

        await eventually(nobody)

        async def told() -> bool:
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=0.1)
            return message is not None and json.loads(message["data"])["gateway"] == "gw"

        assert await eventually(told)
        assert (await reported(store)).models["m"].arrivals == 1


async def test_report_is_written_before_the_job(store, store_server):
    """A restorer that takes the job at once must find the demand that it is for."""
    async with serving(store_server) as served, store.pubsub() as pubsub:
        await pubsub.subscribe("rewake:events")
        request = asyncio.create_task(served.chat())
        async with asyncio.timeout(30):
            async for message in pubsub.listen():
                if message["type"] == "message" and json.loads(message["data"])["job"]:
                    assert (await reported(store)).models["m"].held == 1
                    break
        request.cancel()
        await asyncio.wait([request])


async def test_case_43_only_admitted_records_get_traffic(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        fleet = Fleet(store)
        request = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        for state in set(State) - {State.ADMITTED}:
            record = await fleet.admit(fake, state=state)
            await eventually(lambda record=record: served.gateway.registry.seq == record.seq)
            assert served.held() == 1
        assert fake.requests == []
        await fleet.admit(fake)
        assert (await request).status_code == 200


async def test_case_46_waiters_stay_demand_while_their_replica_is_restored(store, store_server):
    """What keeps a restorer from parking or cancelling: demand in the report, renewed."""
    async with replica_server() as fake, serving(store_server) as served:
        fleet = Fleet(store)
        request = asyncio.create_task(served.chat())
        await fleet.admit(fake, state=State.RESTORING)
        await eventually(lambda: served.gateway.registry.state("m") == "restoring")

        async def wanted() -> bool:
            return (await reported(store)).models["m"].demand == 1

        await eventually(wanted)
        await asyncio.sleep(1.2)
        assert await wanted()
        assert await store.pttl("rewake:gateway:gw") > 3000
        request.cancel()
        await asyncio.wait([request])


async def test_case_60_looking_never_wakes(store, store_server):
    async with serving(store_server) as served:
        client = served.client
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/m"),
            ("HEAD", "/v1/models"),
            ("GET", "/health"),
            ("GET", "/ready"),
            ("GET", "/metrics"),
            ("HEAD", CHAT),
            ("OPTIONS", CHAT),
            ("GET", CHAT),
            ("GET", "/admin/v1/models"),
        ):
            await client.request(method, path)
        await client.get("/admin/v1/replicas", headers=ADMIN)
        await served.chat("unknown")
        await client.post(CHAT, content=b"{")
        await client.post("/admin/v1/scale-up", json={"model": "m"})
        await asyncio.sleep(1.2)
        assert await Fleet(store).jobs() == []
        load = (await reported(store)).models["m"]
        assert (load.demand, load.arrivals) == (0, 0)


async def test_deadline_of_the_client_is_used(store, store_server):
    """An SDK that says how long it reads is answered before that; ours is exact; nonsense of ours is refused."""
    async with serving(store_server) as served:
        for headers in ({"x-rewake-deadline-s": "0.2"}, {"x-stainless-read-timeout": "0.2"}, {"X-Stainless-Timeout": "0.2"}):
            since = time.monotonic()
            response = await served.chat(headers=headers)
            assert 0.1 < time.monotonic() - since < 10
            assert (response.status_code, response.json()["error"]["code"]) == (503, "cold_start_timeout")
            assert response.headers["x-should-retry"] == "true"
            assert 1 <= int(response.headers["retry-after"]) <= 60
        refused = await served.chat(headers={"x-rewake-deadline-s": "soon"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_deadline")
        # Who was promised a replica still counts, or its start would be cancelled under the client's feet.
        assert served.gateway.ledger.load("m").rejected == 3


async def test_busy_replica_until_the_deadline_is_429(store, store_server):
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await gate.wait()
        await answer(exchange)

    async with replica_server(slow) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake, concurrency=1)
        await eventually(lambda: served.gateway.registry.available("m"))
        first = asyncio.create_task(served.chat())
        await eventually(lambda: served.inflight() == 1)
        response = await served.chat(headers={"x-rewake-deadline-s": "0.2"})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "capacity_exceeded")
        assert response.headers["retry-after"] == "1"
        gate.set()
        assert (await first).status_code == 200


async def test_case_72_two_gateways_share_one_replicas_limit(store, store_server):
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.02)
        await answer(exchange)

    async with replica_server(slow) as fake, serving(store_server, id="a") as a, serving(store_server, id="b") as b:
        await eventually(lambda: a.gateway.reporter.gateways == 2 and b.gateway.reporter.gateways == 2)
        requests = [asyncio.create_task((a, b)[n % 2].chat()) for n in range(40)]
        await Fleet(store).admit(fake, concurrency=4)
        assert {response.status_code for response in await asyncio.gather(*requests)} == {200}
        assert fake.most_inflight <= 4


async def test_on_cold_reject_says_when_and_asks_for_a_replica(store, store_server):
    async with serving(store_server, configuration(model__on_cold="reject")) as served:
        response = await served.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_loading")
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert response.headers["x-should-retry"] == "true"
        assert response.headers["x-rewake-error"] == "model_loading"
        fleet = Fleet(store)
        await eventually(fleet.jobs)
        assert (await reported(store)).models["m"].rejected == 1


async def test_draining_record_is_acknowledged_and_keeps_its_streams(store, store_server):
    """Case 42: the report says that the drain is known, in the same breath as how much is still in flight."""
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await gate.wait()
        await answer(exchange)

    async with replica_server(slow) as fake, serving(store_server) as served:
        fleet = Fleet(store)
        replica = await fleet.admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        request = asyncio.create_task(served.chat())
        await eventually(lambda: served.inflight() == 1)
        draining = await fleet.change(replica, State.DRAINING)

        async def known(count: int) -> bool:
            report = await reported(store)
            return report.seq >= draining.seq and report.replicas.get(replica.incarnation, 0) == count

        await eventually(lambda: known(1))
        held = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        gate.set()
        assert (await request).status_code == 200
        await eventually(lambda: known(0))
        held.cancel()
        await asyncio.wait([held])


async def test_openai_client_chats_and_streams(store, store_server):
    async def events(exchange: Exchange) -> None:
        if not json.loads(exchange.body).get("stream"):
            return await exchange.json(completion("whole"))
        await exchange.begin_events()
        for text in ("a", "b", "c"):
            await exchange.event(delta(text))
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    async with replica_server(events) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
            whole = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            assert whole.choices[0].message.content == "whole"
            assert whole._request_id
            stream = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
            assert [chunk.choices[0].delta.content async for chunk in stream] == ["a", "b", "c"]
            assert [model.id async for model in client.models.list()] == ["m"]


async def test_openai_client_gets_an_error_from_a_stream_that_broke(store, store_server):
    async def breaking(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event(delta("a"))
        await asyncio.sleep(0.05)
        exchange.reset()

    async with replica_server(breaking) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
            stream = await client.chat.completions.create(model="m", messages=[], stream=True)
            with pytest.raises(openai.APIError, match="broke off"):
                _ = [chunk async for chunk in stream]


async def test_openai_client_comes_back_when_told_and_succeeds(store, store_server):
    """on_cold: reject. The last start took 0.4 s, so the client is sent away for one second; its own retry succeeds."""
    async with replica_server() as fake, serving(store_server, configuration(model__on_cold="reject")) as served:
        fleet = Fleet(store)
        before = await fleet.admit(fake, stages=(Stage(name="restore", seconds=0.4),))
        await fleet.change(before, State.STOPPED)
        await eventually(lambda: served.gateway.registry.state("m") == "cold")
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
            request = asyncio.create_task(client.chat.completions.create(model="m", messages=[]))
            await eventually(fleet.jobs)
            await fleet.admit(fake)
            since = time.monotonic()
            assert (await request).choices[0].message.content == "hello"
            assert 0.5 < time.monotonic() - since < 20
        assert served.gateway.ledger.load("m").rejected == 1


async def test_drain_refuses_waiters_and_lets_streams_finish(store, store_server):
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.begin_events()
        await gate.wait()
        await exchange.event(delta("late"))
        await exchange.end()

    async with replica_server(slow) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake, concurrency=1)
        await eventually(lambda: served.gateway.registry.available("m"))
        async with served.client.stream("POST", CHAT, json={"model": "m"}) as stream:
            held = asyncio.create_task(served.chat())
            await eventually(lambda: served.held() == 1)
            served.gateway.life.drain()
            assert (await served.client.get("/ready")).status_code == 503
            assert served.held() == 1
            served.gateway.life.refuse()
            response = await held
            assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
            assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("1", "true")
            assert response.headers["connection"] == "close"
            assert not await served.gateway.life.quiet(0.05)
            gate.set()
            assert b"late" in await stream.aread()
        assert await served.gateway.life.quiet(1)

        async def told() -> bool:
            return (await reported(store)).draining

        await eventually(told)


async def test_gateway_that_left_is_forgotten_at_once(store, store_server):
    async with serving(store_server) as served:
        assert isinstance(served.client, httpx.AsyncClient)
        await eventually(lambda: store.sismember("rewake:gateways", "gw"))
    assert not await store.sismember("rewake:gateways", "gw")
    assert not await store.exists("rewake:gateway:gw")
