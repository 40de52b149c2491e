"""Gauges tell the truth: whatever happens to requests, replicas and the configuration, in the end nothing is left over."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
from conftest import eventually
from fake_replica import CHAT, Exchange, FakeReplica, Fleet, Served, answer, delta, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import asyncio as redis_asyncio

from gateway.fastpath import FastProtocol
from policies.config import Config, parse
from policies.replica import Replica, State
from policies.tenancy import key_hash

ACTIONS = ["ask", "ask", "ask", "ask", "cancel", "admit", "fail", "drain", "restart", "reload", "pause"]
GAUGES = ("rewake_queue_depth", "rewake_queue_bytes", "rewake_inflight_requests", "rewake_model_demand")


async def stream(exchange: Exchange) -> None:
    await exchange.begin_events()
    await exchange.event(delta("a"))
    await exchange.event(delta("b"))
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end()


async def oops(exchange: Exchange) -> None:
    await exchange.json({"error": {"message": "oops"}}, "500 Oops")


async def busy(exchange: Exchange) -> None:
    await exchange.json({"error": {"message": "busy"}}, "503 Service Unavailable", "Retry-After: 3\r\n")


async def reset(exchange: Exchange) -> None:
    exchange.reset()


async def break_off(exchange: Exchange) -> None:
    await exchange.begin_events()
    await exchange.event(delta("a"))
    exchange.reset()


async def hang(exchange: Exchange) -> None:
    await exchange.client_left()


SCRIPTS = [answer, answer, answer, stream, oops, busy, reset, break_off, hang]


class Storm:
    """One gateway under random events."""

    def __init__(self, url: str, chance: random.Random) -> None:
        self.url = url
        self.chance = chance
        self.tasks: list[asyncio.Task[Any]] = []
        self.fakes: list[FakeReplica] = []
        self.records: dict[int, Replica] = {}

    async def run(self, actions: list[str]) -> None:
        client = redis_asyncio.from_url(self.url, decode_responses=True)
        await client.flushall()
        self.fleet = Fleet(client)
        self.fakes = [await FakeReplica(self.script).start() for _ in range(2)]
        try:
            async with serving(self.url, self.config()) as self.served:
                for action in actions:
                    await getattr(self, action)()
                    assert min(self.values()) >= 0
                await self.end()
        finally:
            for fake in self.fakes:
                await fake.stop()
            await client.aclose()

    async def end(self) -> None:
        """All clients leave or are answered; nothing may be left of any of them."""
        for task in self.tasks:
            if self.chance.random() < 0.5:
                task.cancel()
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 30)
        outcomes = [task for task in self.tasks if not task.cancelled()]
        assert all(isinstance(task.exception(), httpx.TransportError | None) for task in outcomes)
        served = self.served
        await eventually(lambda: served.counts() == (0, 0, 0), what=f"no counts left: {served.counts()}")
        ledger = served.gateway.ledger
        assert {(load.held, load.inflight) for load in ledger.loads().values()} == {(0, 0)}
        assert (ledger.tenant_held("t"), ledger.tenant_inflight("t")) == (0, 0)
        assert all(value == 0 for value in self.values() if value < 1e6) or self.turned_away()
        await eventually(lambda: not any(fake.inflight for fake in self.fakes), what="no replica works for nobody")

    def turned_away(self) -> bool:
        """Demand outlives a request that was promised a replica; nothing else may."""
        page = self.page()
        return all(value == 0 for name, value in page if not name.startswith("rewake_model_demand"))

    def values(self) -> list[float]:
        return [value for _, value in self.page()]

    def page(self) -> list[tuple[str, float]]:
        self.served.gateway.gauges.observe()
        lines = self.served.gateway.metrics.expose().body.decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith(GAUGES))
        return [(name, float(value)) for name, _, value in samples]

    def config(self) -> Config:
        engine = {"kind": "http", "command": ["/bin/true"]}
        hold = {"max_requests": self.chance.choice([2, 50]), "max_wait_s": self.chance.choice([0.2, 0.6]), "silent_s": 0.05}
        model = {"engine": engine, "hold": hold, "first_byte_timeout_s": 0.3, "concurrency": 2}
        limits = {"concurrency": self.chance.choice([None, 1, 3]), "max_held": self.chance.choice([None, 2])}
        models = {"m": model, "n": model} if self.chance.random() < 0.7 else {"m": model}
        return parse(
            {"gateway": {"access_log": False}, "models": models, "tenants": {"t": {"keys": [key_hash("k")], "limits": limits}}}
        )

    async def script(self, exchange: Exchange) -> None:
        await self.chance.choice(SCRIPTS)(exchange)

    async def ask(self) -> None:
        body = {"model": self.chance.choice(["m", "m", "n"]), "messages": [], "stream": self.chance.random() < 0.5}
        call = self.served.client.post(CHAT, json=body, headers={"Authorization": "Bearer k"})
        self.tasks.append(asyncio.create_task(call))
        await self.pause()

    async def cancel(self) -> None:
        if self.tasks:
            self.chance.choice(self.tasks).cancel()

    async def admit(self) -> None:
        slot = self.chance.randrange(2)
        self.records[slot] = await self.fleet.admit(self.fakes[slot], slot=slot, concurrency=self.chance.choice([1, 2, 4]))

    async def fail(self) -> None:
        await self.turn(State.FAILED)

    async def drain(self) -> None:
        await self.turn(State.DRAINING)

    async def turn(self, state: State) -> None:
        if self.records:
            slot = self.chance.choice(sorted(self.records))
            await self.fleet.change(self.records.pop(slot), state)

    async def restart(self) -> None:
        """The same address refuses for a moment."""
        fake = self.chance.choice(self.fakes)
        await fake.stop()
        await self.pause()
        await fake.start()

    async def reload(self) -> None:
        self.served.gateway.current.replace(self.config())

    async def pause(self) -> None:
        await asyncio.sleep(self.chance.choice([0, 0, 0.002, 0.02]))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=5, max_size=50), seed=st.integers(0, 2**32))
def test_gateway_case_25_whatever_happens_the_gauges_end_at_zero(store_server: str, actions: list[str], seed: int) -> None:
    """Success, errors, resets, hangs, clients that leave, replicas that come, fail, drain and restart, reloads."""
    asyncio.run(Storm(store_server, random.Random(seed)).run(actions))


async def test_what_the_gauges_show_is_what_is_held(store: redis_asyncio.Redis, store_server: str) -> None:
    async with serving(store_server) as served:
        tasks = [asyncio.create_task(served.chat()) for _ in range(3)]
        await eventually(lambda: served.held() == 3)
        assert samples(served, "rewake_queue_depth") == {'{model="m"}': 3.0}
        assert samples(served, "rewake_model_demand") == {'{model="m"}': 3.0}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: samples(served, "rewake_queue_depth") == {'{model="m"}': 0.0})


async def test_a_client_that_leaves_before_its_task_has_begun_leaves_nothing(
    store: redis_asyncio.Redis, store_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is cancelled before its first step never enters its coroutine, so nothing in it could give anything back."""
    carry = FastProtocol.carry

    def carried_and_lost(self: FastProtocol, *args: Any) -> None:
        transport = self.transport
        carry(self, *args)
        self.connection_lost(ConnectionResetError())
        assert isinstance(transport, asyncio.Transport)
        transport.abort()

    monkeypatch.setattr(FastProtocol, "carry", carried_and_lost)
    async with serving(store_server) as served:
        for _ in range(3):
            with pytest.raises(httpx.TransportError):
                await served.chat()
        await eventually(lambda: served.counts() == (0, 0, 0))
        await eventually(lambda: served.gateway.life.open == 0)


def samples(served: Served, name: str) -> dict[str, float]:
    served.gateway.gauges.observe()
    lines = served.gateway.metrics.expose().body.decode().splitlines()
    found = (line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(f"{name}{{"))
    return {labels: float(value) for labels, _, value in found}
