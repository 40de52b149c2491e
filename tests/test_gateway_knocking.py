"""Replicas whose hosts do not report: knocked at, told of, given no requests while nobody answers there."""

from __future__ import annotations

import socket
from typing import Any

from conftest import eventually
from fake_replica import Fleet, replica_server, serving

from policies.replica import State
from policies.wire import GatewayReport, HostReport

REPORT = HostReport(host="h1", capable=True, capability="", snapshots=(), running=1, parallel_starts=1)


def unused() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def told(store: Any) -> dict[str, bool]:
    """What the one gateway says that it found."""
    (id,) = await store.smembers("rewake:gateways")
    return dict(GatewayReport.model_validate_json(await store.get(f"rewake:gateway:{id}")).knocked)


async def test_a_replica_is_knocked_at_when_its_host_falls_silent(store: Any, store_server: str) -> None:
    async with replica_server() as fake, serving(store_server) as served:
        there = await Fleet(store).admit(fake)
        gone = await Fleet(store).admit(fake, slot=1, incarnation="gone", port=unused())
        registry = served.gateway.registry
        await eventually(lambda: len(registry.available("m")) == 2)
        await store.set("rewake:host:h1", REPORT.model_dump_json())
        await store.sadd("rewake:hosts", "h1")
        await served.gateway.knocker.look()
        assert served.gateway.knocker.found == {}, "its host speaks for it"
        await store.delete("rewake:host:h1")

        async def both() -> bool:
            return await told(store) == {there.incarnation: True, "gone": False}

        await eventually(both, within=30.0, what="the report to say who answers")
        assert [one.id for one in registry.available("m")] == [there.id], "nobody is sent where nobody answers"
        assert "gone" in await store.hgetall("rewake:suspects")
        await Fleet(store).change(gone, State.FAILED)
        await Fleet(store).change(there, State.DRAINING)

        async def one() -> bool:
            return await told(store) == {there.incarnation: True}

        await eventually(one, within=30.0, what="what is over to be let alone, and what drains to be knocked at")


async def test_a_replica_out_of_reach_is_said_to_be(store: Any, store_server: str) -> None:
    async with replica_server() as fake, serving(store_server) as served:
        far = await Fleet(store).admit(fake, place="another/1")
        await store.sadd("rewake:hosts", "h1")
        await eventually(lambda: served.gateway.registry.count("m", {State.ADMITTED}) == 1)
        await served.gateway.knocker.look()
        assert served.gateway.knocker.found == {far.incarnation: False}


async def test_nobody_is_doubted_because_the_store_has_forgotten_who_reports(store: Any, store_server: str) -> None:
    async with replica_server() as fake, serving(store_server) as served:
        await Fleet(store).admit(fake, port=unused())
        await eventually(lambda: served.gateway.registry.count("m", {State.ADMITTED}) == 1)
        await served.gateway.knocker.look()
        assert served.gateway.knocker.found == {}
