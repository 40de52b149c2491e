"""Replicas over HTTP: which one gets a request, what failures make of it, and limits that several gateways share."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any

import pytest
from conftest import eventually
from fake_replica import ADMIN, CHAT, Exchange, FakeReplica, Fleet, answer, completion, configuration, replica_server, serving

from policies import health
from policies.config import Config, parse
from policies.replica import State
from policies.tenancy import key_hash


def replying(status: str, head: str = "") -> Any:
    async def script(exchange: Exchange) -> None:
        await exchange.json({"error": {"message": "no"}}, status, head)

    return script


class Gate:
    """A script that answers when it is let."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        await self.open.wait()
        await answer(exchange)


# ---------------------------------------------------------------- health


@pytest.mark.parametrize("status", ["422 Unprocessable Entity", "429 Too Many Requests", "503 Service Unavailable"])
async def test_gateway_case_31_what_a_replica_refuses_does_not_make_it_suspect(store, store_server, status):
    async with replica_server(replying(status)) as one, replica_server(replying(status)) as two, serving(store_server) as served:
        fleet = Fleet(store)
        for slot, fake in enumerate((one, two)):
            await fleet.admit(fake, slot=slot)
        await eventually(lambda: len(served.gateway.registry.available("m")) == 2)
        assert {(await served.chat()).status_code for _ in range(100)} == {int(status[:3])}
        assert len(served.gateway.registry.available("m")) == 2
        assert await store.hgetall(fleet.keys.suspects) == {}


async def test_gateway_case_30_a_hung_replica_is_suspect_and_others_are_unaffected(store, store_server):
    """It accepts and never answers: who meets it gets a 504, everybody else does not notice."""

    async def hang(exchange: Exchange) -> None:
        await exchange.client_left()

    config = configuration(model__first_byte_timeout_s=0.3, model__max_replicas=2)
    async with replica_server(hang) as hung, replica_server() as well, serving(store_server, config) as served:
        fleet = Fleet(store)
        await fleet.admit(hung, slot=0, incarnation="a-hung")
        await fleet.admit(well, slot=1, incarnation="b-well")
        await eventually(lambda: len(served.gateway.registry.available("m")) == 2)
        first = await served.chat()
        assert (first.status_code, first.json()["error"]["code"]) == (504, "upstream_timeout")
        assert {(await served.chat()).status_code for _ in range(10)} == {200}
        assert (len(hung.requests), len(well.requests)) == (1, 10)
        reasons = await eventually(lambda: store.hgetall(fleet.keys.suspects))
        assert list(reasons) == ["a-hung"]


async def test_three_errors_in_a_row_eject_and_a_trial_brings_back_one_request_at_a_time(store, store_server, monkeypatch):
    monkeypatch.setattr(health, "PAUSE_S", 0.2)
    gate = Gate()
    async with replica_server(replying("500 Oops")) as sick, replica_server() as well, serving(store_server) as served:
        fleet = Fleet(store)
        await fleet.admit(sick, slot=0, incarnation="a-sick")
        await fleet.admit(well, slot=1, incarnation="b-well")
        registry = served.gateway.registry
        await eventually(lambda: len(registry.available("m")) == 2)
        statuses = [(await served.chat()).status_code for _ in range(6)]
        assert statuses == [500, 500, 500, 200, 200, 200]
        sick.default = gate
        await eventually(lambda: len(registry.available("m")) == 2)
        sick.requests.clear()
        burst = [asyncio.create_task(served.chat()) for _ in range(6)]
        await eventually(lambda: len(well.requests) >= 8)
        assert sick.most_inflight == len(sick.requests) == 1, "on trial"
        gate.open.set()
        assert {response.status_code for response in await asyncio.gather(*burst)} == {200}
        await eventually(lambda: len(registry.available("m")) == 2)


async def test_the_last_replica_is_not_taken_away_by_errors_that_requests_provoke(store, store_server):
    async with replica_server(replying("500 Oops")) as fake, serving(store_server) as served:
        fleet = Fleet(store)
        await fleet.admit(fake, incarnation="only")
        await eventually(lambda: served.gateway.registry.available("m"))
        assert {(await served.chat()).status_code for _ in range(5)} == {500}
        assert served.gateway.registry.available("m")
        assert list(await eventually(lambda: store.hgetall(fleet.keys.suspects))) == ["only"], "but somebody looks closer"


async def test_a_request_whose_replica_cannot_be_reached_keeps_its_turn(store, store_server):
    """Two wait behind it; it is served before them by the replica that comes next."""
    async with replica_server() as fake, serving(store_server, configuration(model__max_replicas=2)) as served:
        fleet = Fleet(store)
        dead = await FakeReplica().start()
        await dead.stop()
        first = asyncio.create_task(served.chat(n="first"))
        await eventually(lambda: served.held() == 1)
        await fleet.admit(dead, slot=0, concurrency=1)
        await eventually(lambda: not served.gateway.registry.available("m") and served.held() == 1)
        others = [asyncio.create_task(served.chat(n="other")) for _ in range(2)]
        await eventually(lambda: served.held() == 3)
        await fleet.admit(fake, slot=1, concurrency=1)
        assert {response.status_code for response in await asyncio.gather(first, *others)} == {200}
        assert json.loads(fake.requests[0].body)["n"] == "first"
        assert served.counts() == (0, 0, 0)


# ---------------------------------------------------------------- counts


async def test_gateway_case_25_a_restart_at_the_same_address_does_not_inherit_counts(store, store_server):
    """What ends on the old incarnation is not taken off the new one's count."""
    old, new = Gate(), Gate()
    async with replica_server(answer, old, new) as fake, serving(store_server) as served:
        fleet, ledger = Fleet(store), served.gateway.ledger
        await fleet.admit(fake, incarnation="old", concurrency=1)
        first = asyncio.create_task(served.chat())
        await eventually(lambda: ledger.inflight("old") == 1)
        await fleet.admit(fake, incarnation="new", concurrency=1)
        second = asyncio.create_task(served.chat())
        await eventually(lambda: ledger.inflight("new") == 1)
        # The old one's connections ended with it; its request is over, whatever it was.
        assert (await first).status_code in (200, 502)
        assert (ledger.inflight("old"), ledger.inflight("new")) == (0, 1)
        new.open.set()
        assert (await second).status_code == 200
        assert served.counts() == (0, 0, 0)


async def test_gateway_case_15_overflow_is_503_never_500(store, store_server):
    gate = Gate()
    config = configuration(model__hold={"max_requests": 3})
    async with replica_server(gate) as fake, serving(store_server, config) as served:
        await Fleet(store).admit(fake, concurrency=2)
        await eventually(lambda: served.gateway.registry.available("m"))
        tasks = [asyncio.create_task(served.chat()) for _ in range(30)]
        await eventually(lambda: sum(task.done() for task in tasks) == 25)
        gate.open.set()
        responses = await asyncio.gather(*tasks)
        assert Counter(response.status_code for response in responses) == {200: 5, 503: 25}
        refused = [response for response in responses if response.status_code == 503]
        assert {response.json()["error"]["code"] for response in refused} == {"queue_full"}
        assert all(1 <= int(response.headers["retry-after"]) <= 60 for response in refused)


async def test_gateway_case_48_what_is_put_to_sleep_is_not_picked_and_what_it_has_finishes(store, store_server):
    """Sleep is a drain: the record says so first, and the report says when nothing is left on it."""
    gate = Gate()
    async with replica_server(gate) as fake, serving(store_server) as served:
        fleet = Fleet(store)
        replica = await fleet.admit(fake)
        first = asyncio.create_task(served.chat())
        await eventually(lambda: len(fake.requests) == 1)
        drained = await fleet.change(replica, State.DRAINING)

        async def left() -> int | None:
            report = json.loads(await store.get(fleet.keys.gateway("gw")))
            return report["replicas"].get(replica.incarnation, 0) if report["seq"] >= drained.seq else None

        await eventually(lambda: not served.gateway.registry.available("m"))
        second = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        assert await left() in (None, 1)
        gate.open.set()
        assert (await first).status_code == 200

        async def idle() -> bool:
            return await left() == 0

        await eventually(idle)
        assert len(fake.requests) == 1
        await fleet.admit(fake, incarnation="awake")
        assert (await second).status_code == 200


# ---------------------------------------------------------------- what gateways and tenants share


async def test_gateway_case_72_three_gateways_never_exceed_a_replica_and_lose_nothing(store, store_server):
    """Cold and warm; with fewer slots than gateways; and a gateway that comes late gets its part."""

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.01)
        await answer(exchange)

    async with contextlib.AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(replica_server(slow)) for _ in range(2)]
        served = [await stack.enter_async_context(serving(store_server, id=f"g{n}")) for n in range(3)]
        fleet = Fleet(store)
        cold = [asyncio.create_task(served[n % 3].chat()) for n in range(30)]
        await fleet.admit(one, slot=0, concurrency=4)
        assert {response.status_code for response in await asyncio.gather(*cold)} == {200}
        await fleet.admit(two, slot=1, concurrency=2)
        served.append(await stack.enter_async_context(serving(store_server, id="late")))
        warm = [asyncio.create_task(served[n % 4].chat()) for n in range(80)]
        assert {response.status_code for response in await asyncio.gather(*warm)} == {200}
        assert (one.most_inflight, two.most_inflight) == (4, 2)
        assert [each.counts() for each in served] == [(0, 0, 0)] * 4


async def test_gateway_case_74_two_gateways_that_want_a_replica_share_one_operation(store, store_server):
    async with serving(store_server, id="a") as a, serving(store_server, id="b") as b:
        calls = [served.client.post("/admin/v1/scale-up", json={"model": "m"}, headers=ADMIN) for served in (a, b) * 5]
        answers = [response.json() for response in await asyncio.gather(*calls)]
        assert len({each["operation"]["id"] if "operation" in each else each["id"] for each in answers}) == 1
        assert len(await Fleet(store).jobs()) == 1


def shared(**tenants: dict[str, Any]) -> Config:
    """Tenants whose key is their name."""
    specs = {name: {"keys": [key_hash(f"key-of-{name}")], **spec} for name, spec in tenants.items()}
    model = {"engine": {"kind": "http", "command": ["/bin/true"]}}
    return parse({"models": {"m": model}, "tenants": specs})


def as_tenant(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{name}"}


async def test_gateway_case_66_a_tenants_flood_leaves_the_next_one_the_first_round(store, store_server):
    async with replica_server() as fake, serving(store_server, shared(a={}, b={})) as served:
        flood = [asyncio.create_task(served.chat(headers=as_tenant("a"), n="a")) for _ in range(200)]
        await eventually(lambda: served.held() == 200)
        single = asyncio.create_task(served.chat(headers=as_tenant("b"), n="b"))
        await eventually(lambda: served.held() == 201)
        await Fleet(store).admit(fake, concurrency=1)
        assert (await single).status_code == 200
        assert "b" in [json.loads(request.body)["n"] for request in fake.requests[:2]]
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await eventually(lambda: served.counts() == (0, 0, 0))


async def test_a_tenants_concurrency_holds_over_gateways_and_others_pass_it(store, store_server):
    gate = Gate()
    config = shared(a={"limits": {"concurrency": 2}}, b={})
    async with (
        replica_server(gate) as fake,
        serving(store_server, config, id="g1") as one,
        serving(store_server, config, id="g2") as two,
    ):
        await Fleet(store).admit(fake, concurrency=8)
        await eventually(lambda: one.gateway.registry.available("m") and two.gateway.registry.available("m"))
        tasks = [asyncio.create_task(served.chat(headers=as_tenant("a"))) for served in (one, two) * 4]
        await eventually(lambda: len(fake.requests) == 2)
        await eventually(lambda: one.held() + two.held() == 6)
        tasks += [asyncio.create_task(served.chat(headers=as_tenant("b"))) for served in (one, two)]
        await eventually(lambda: len(fake.requests) == 4, what="b is not held up by a")
        gate.open.set()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}
        assert fake.most_inflight <= 4


async def test_a_tenants_waiting_requests_are_bounded_in_its_own_name(store, store_server):
    config = shared(a={"limits": {"max_held": 2}}, b={})
    async with serving(store_server, config) as served:
        held = [asyncio.create_task(served.chat(headers=as_tenant("a"))) for _ in range(2)]
        await eventually(lambda: served.held() == 2)
        refused = await served.chat(headers=as_tenant("a"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        held.append(asyncio.create_task(served.chat(headers=as_tenant("b"))))
        await eventually(lambda: served.held() == 3)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_sessions_stay_on_their_replica(store, store_server):
    async def told(exchange: Exchange) -> None:
        await exchange.json(completion(str(exchange.writer.get_extra_info("sockname")[1])))

    config = configuration(model__balance="session", model__max_replicas=3)
    async with contextlib.AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(replica_server(told)) for _ in range(3)]
        served = await stack.enter_async_context(serving(store_server, config))
        for slot, fake in enumerate(fakes):
            await Fleet(store).admit(fake, slot=slot, incarnation=f"i{slot}")
        await eventually(lambda: len(served.gateway.registry.available("m")) == 3)
        homes: dict[str, set[str]] = {}
        for n in range(36):
            session = f"s{n % 9}"
            response = await served.client.post(CHAT, json={"model": "m"}, headers={"x-session-id": session})
            homes.setdefault(session, set()).add(response.json()["choices"][0]["message"]["content"])
        assert all(len(home) == 1 for home in homes.values())
        assert len(set.union(*homes.values())) > 1
