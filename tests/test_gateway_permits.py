"""Permits against a real store: never more than the total, fair shares, no round trips for a lone gateway, faults."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conftest import eventually, running_store
from fake_replica import configuration
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from redis import asyncio as redis_asyncio

from gateway import permits as permits_module
from gateway.current import Current
from gateway.errors import StoreUnavailable
from gateway.ledger import Ledger
from gateway.permits import TTL_S, Grant, Permits, Wish
from gateway.store import Store
from policies.config import Config, parse
from policies.replica import Replica, State
from policies.wire import Keys

pytestmark = pytest.mark.contract


def replica(concurrency: int, incarnation: str = "i", state: State = State.ADMITTED) -> Replica:
    return Replica(id="m#0", model="m", state=state, fence=1, incarnation=incarnation, concurrency=concurrency)


class Lender:
    """The store, counted, and cut off when a test says so."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: list[list[Wish]] = []
        self.lost = False

    async def lend(self, gateway: str, number: int, wishes: Any, *, spare: bool, leave: bool, dead: str) -> list[Grant | None]:
        if self.lost:
            raise StoreUnavailable("cut off", retry_after_s=1.0)
        self.calls.append(list(wishes))
        return list(await self.store.lend(gateway, number, wishes, spare=spare, leave=leave, dead=dead))


class Gateway:
    """As much of a gateway as permits need: counts, and requests that wait for a slot."""

    def __init__(self, name: str, store: Store, config: Config, *replicas: Replica) -> None:
        self.fleet = list(replicas)
        self.ledger = Ledger(config.models, asyncio.get_running_loop().time)
        self.lender = Lender(store)
        self.current = Current(config)
        self.permits = Permits(name, self.current, lender=self.lender, fleet=self, ledger=self.ledger)
        self.permits.on_more = self.pump

    def replicas(self) -> list[Replica]:
        return self.fleet

    @property
    def limit(self) -> int:
        return self.permits.limit(self.fleet[0])

    @property
    def used(self) -> int:
        return self.ledger.inflight("i")

    def pump(self) -> None:
        while self.ledger.held("m") and self.used < self.limit:
            self.ledger.grant("m", 1, "i", "")

    def ask(self, count: int = 1) -> None:
        for _ in range(count):
            self.ledger.hold("m", 1, "")
        self.pump()
        self.permits.wanted()

    def end(self, count: int = 1) -> None:
        for _ in range(count):
            self.ledger.end("m", "i", "")
            self.permits.released("i", "")
            self.pump()


@contextlib.asynccontextmanager
async def gateways(url: str, count: int, total: int, config: Config | None = None) -> AsyncIterator[list[Gateway]]:
    """Gateways that share one replica; hints reach all, as over the link."""
    store = Store(url, "rewake")
    made = [Gateway(f"g{n}", store, config or configuration(), replica(total)) for n in range(count)]

    async def listen() -> None:
        async with store.hints() as hints:
            listening.set()
            async for hint in hints:
                for gateway in made:
                    if hint.permits is not None:
                        gateway.permits.hint(hint.permits)

    listening = asyncio.Event()
    tasks = [asyncio.create_task(listen())]
    await listening.wait()
    tasks += [asyncio.create_task(gateway.permits.run()) for gateway in made]
    try:
        yield made
        assert not [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()


async def noted(store: redis_asyncio.Redis, pool: str = "replica:i") -> dict[str, int]:
    """What the store says that each gateway holds."""
    entries = await store.hgetall(Keys("rewake").permits(pool))
    return {id: int(entry.split()[0]) for id, entry in entries.items() if id[0] != "~"}


async def test_a_lone_gateway_has_all_at_once_and_asks_nobody_for_a_request(store, store_server):
    async with gateways(store_server, 1, 8) as [alone]:
        await eventually(lambda: alone.limit == 8)
        before = len(alone.lender.calls)
        for _ in range(500):
            alone.ask(8)
            assert alone.used == 8, "granted in the same breath"
            alone.end(8)
        await asyncio.sleep(0.05)
        assert len(alone.lender.calls) - before <= 2


async def test_what_nobody_wants_is_split_so_that_nobody_has_to_ask_first(store, store_server):
    async with gateways(store_server, 2, 8) as [a, b]:
        await eventually(lambda: (a.limit, b.limit) == (4, 4))
        a.ask(3)
        b.ask(2)
        assert (a.used, b.used) == (3, 2)


async def test_shares_are_max_min_fair_by_what_each_wants(store, store_server):
    async with gateways(store_server, 3, 12) as [a, b, c]:
        a.ask(100)
        b.ask(100)
        c.ask(2)
        await eventually(lambda: (a.used, b.used, c.used) == (12, 0, 0) or a.used + b.used + c.used == 12)

        def turn_over() -> bool:
            for gateway in (a, b, c):
                if gateway is not c and gateway.used:
                    gateway.end()
            return (a.used, b.used, c.used) == (5, 5, 2)

        await eventually(turn_over, what="5, 5 and 2")


async def test_a_waiting_gateway_gets_its_share_as_soon_as_something_ends(store, store_server):
    async with gateways(store_server, 2, 4) as [a, b]:
        await eventually(lambda: a.limit)
        a.ask(20)
        await eventually(lambda: a.used == 4)
        b.ask(3)
        await eventually(lambda: a.limit == 2, what="a knows that b waits")
        for expected in (1, 2):
            a.end()
            await eventually(lambda expected=expected: b.used == expected)
        assert (a.used, b.used) == (2, 2)
        a.end()
        assert a.used == 2, "its share is its own again"


async def test_idle_permits_move_within_milliseconds(store, store_server):
    async with gateways(store_server, 2, 8) as [a, b]:
        await eventually(lambda: a.limit + b.limit == 8)
        loop = asyncio.get_running_loop()
        since = loop.time()
        b.ask(8)
        await eventually(lambda: b.used == 8)
        assert loop.time() - since < 0.5
        assert a.limit == 0


async def test_with_fewer_permits_than_gateways_everybody_has_a_turn(store, store_server):
    async with gateways(store_server, 3, 1) as made:
        served = dict.fromkeys(range(3), 0)
        for gateway in made:
            gateway.ask(1000)

        def turn_over() -> bool:
            assert sum(gateway.used for gateway in made) <= 1
            for n, gateway in enumerate(made):
                if gateway.used:
                    served[n] += 1
                    gateway.end()
            return min(served.values()) > 3

        await eventually(turn_over, what=f"turns for all: {served}")


async def test_without_the_store_what_is_held_is_used(store, store_server):
    async with gateways(store_server, 2, 8) as [a, b]:
        await eventually(lambda: (a.limit, b.limit) == (4, 4))
        a.lender.lost = b.lender.lost = True
        for _ in range(3):
            a.ask(10)
            assert a.used == 4
            await asyncio.sleep(0.02)
            a.end(4)
            assert a.used == 4
        a.lender.lost = b.lender.lost = False
        await eventually(lambda: a.used == 8)


async def test_a_gateway_that_leaves_gives_all_back_at_once(store, store_server):
    async with gateways(store_server, 2, 4) as [a, b]:
        await eventually(lambda: a.limit)
        a.ask(4)
        await eventually(lambda: a.used == 4)
        b.ask(4)
        await eventually(lambda: b.permits._pools and b.used == 0)
        a.ledger = Ledger(["m"], asyncio.get_running_loop().time)
        a.fleet.clear()
        a.permits._ledger = a.ledger
        await a.permits.leave()
        await eventually(lambda: b.used == 4)
        assert set(await noted(store)) == {"g1"}


async def test_a_gateway_that_died_is_forgotten_after_a_while(store, store_server, monkeypatch):
    for name, seconds in (("PERIOD_S", 0.1), ("TTL_S", 0.5)):
        monkeypatch.setattr(permits_module, name, seconds)
    monkeypatch.setattr("gateway.store.TTL_S", 0.5)
    async with gateways(store_server, 2, 4) as [a, b]:
        await eventually(lambda: a.limit)
        a.ask(4)
        await eventually(lambda: a.used == 4)
        a.lender.lost = True
        b.ask(4)
        await eventually(lambda: b.used == 4)


async def test_a_successor_takes_over_at_once_from_a_gateway_that_was_killed(store, store_server):
    """It is certain that the predecessor is dead: nobody waits for its lease to expire."""
    async with gateways(store_server, 2, 4) as [killed, successor]:
        await eventually(lambda: killed.limit)
        killed.ask(4)
        await eventually(lambda: killed.used == 4)
        killed.lender.lost = True
        successor.permits.dead = "g0"
        successor.ask(4)
        await eventually(lambda: successor.used == 4)
        assert await noted(store) == {"g1": 4}


async def test_a_store_that_forgot_gives_no_more_until_all_have_spoken(tmp_path):
    with running_store(tmp_path) as url:
        async with gateways(url, 2, 8) as [a, b]:
            await eventually(lambda: a.limit + b.limit == 8)
            a.ask(3)
            b.ask(3)
            await eventually(lambda: (a.used, b.used) == (3, 3))
            client = redis_asyncio.from_url(url, decode_responses=True)
            b.lender.lost = True
            await client.flushall()
            a.ask(20)
            for _ in range(20):
                await asyncio.sleep(0.02)
                assert a.used + b.used <= 8
            b.lender.lost = False
            await eventually(lambda: a.used == 5)
            assert b.used == 3
            await client.aclose()


async def test_a_call_that_was_overtaken_changes_nothing(store, store_server):
    mine = Store(store_server, "rewake")
    wish = Wish("replica:i", 8, 0, 8, 0)
    assert await mine.lend("g", 2, [wish], spare=True, leave=False) == [Grant(8, 8, False)]
    late = Wish("replica:i", 8, 0, 0, 0)
    assert await mine.lend("g", 1, [late], spare=True, leave=False) == [None]
    assert await noted(store) == {"g": 8}
    await mine.close()


async def test_a_draining_gateway_takes_no_part_of_what_nobody_wants(store, store_server):
    mine = Store(store_server, "rewake")
    for number in (1, 2):
        for id, spare in (("new", True), ("old", False)):
            await mine.lend(id, number, [Wish("replica:i", 8, 0, 1, 0)], spare=spare, leave=False)
    assert await noted(store) == {"new": 7, "old": 1}
    await mine.close()


async def test_pools_of_tenants_are_shared_like_replicas(store, store_server):
    limits = {"concurrency": 6, "max_held": 10}
    model = {"engine": {"kind": "http", "command": ["/bin/true"]}}
    config = parse({"models": {"m": model}, "tenants": {"t": {"limits": limits}, "free": {}}})
    async with gateways(store_server, 2, 8, config) as [a, b]:
        assert (a.permits.tenant_limit("t"), a.permits.places("t")) == (0, 10)
        assert (a.permits.tenant_limit("free"), a.permits.places("free")) == (None, None)
        sums = lambda: (  # noqa: E731
            sum(g.permits.tenant_limit("t") or 0 for g in (a, b)),
            sum(g.permits.places("t") or 0 for g in (a, b)),
        )
        await eventually(lambda: sums() == (6, 10))
        a.ledger.hold("m", 1, "t")
        a.ledger.grant("m", 1, "i", "t")
        for _ in range(9):
            a.ledger.hold("m", 1, "t")
        a.permits.wanted()
        await eventually(lambda: a.permits.tenant_limit("t") == 6)
        await eventually(lambda: a.permits.places("t") == 10)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(total=st.integers(1, 20), wants=st.lists(st.integers(0, 12), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_shares_are_max_min_fair_whatever_is_wanted(store_server, total, wants, seed):
    """Nobody is short while somebody else has more than one above it, and nothing that is wanted is left lying about."""
    begun = time.monotonic()
    parts = asyncio.run(_settled(store_server, total, wants, random.Random(seed)))
    assume(time.monotonic() - begun < TTL_S / 2)  # else parts have expired meanwhile
    assert sum(parts) >= min(total, sum(wants)), parts
    assert sum(parts) > total - len(parts), parts
    for want, part in zip(wants, parts, strict=True):
        if part < want:
            assert max(parts) <= part + 1, parts


async def _settled(url: str, total: int, wants: list[int], chance: random.Random) -> list[int]:
    client, store = redis_asyncio.from_url(url, decode_responses=True), Store(url, "rewake")
    try:
        await client.flushall()
        number, order, held, before = 0, list(range(len(wants))), {}, None
        while held != before:  # a fixed point: everybody was asked, and nothing moved
            assert number < 20 * len(wants), (before, held)
            before = held
            chance.shuffle(order)
            for n in order:
                number += 1
                wish = Wish("replica:i", total, 0, wants[n], 0)
                await store.lend(f"g{n}", number, [wish], spare=True, leave=False)
            held = await noted(client)
    finally:
        await store.close()
        await client.aclose()
    return [held[f"g{n}"] for n in range(len(wants))]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), total=st.integers(1, 6))
def test_gateway_case_72_whatever_happens_the_total_is_never_exceeded(store_server, seed, total):
    """Random demand, ends, lost calls and hints; the sum over all gateways is checked after every step."""
    asyncio.run(_storm(store_server, random.Random(seed), total))


async def _storm(url: str, chance: random.Random, total: int) -> None:
    client = redis_asyncio.from_url(url, decode_responses=True)
    await client.flushall()
    async with gateways(url, 3, total) as made:
        for _ in range(60):
            gateway = chance.choice(made)
            action = chance.choice(["ask", "ask", "end", "end", "lose", "hint", "wait"])
            if action == "ask":
                gateway.ask(chance.randint(1, 4))
            elif action == "end" and gateway.used:
                gateway.end(chance.randint(1, gateway.used))
            elif action == "lose":
                gateway.lender.lost = not gateway.lender.lost
            elif action == "hint":
                gateway.permits.hint("replica:i")
            elif action == "wait":
                await asyncio.sleep(chance.choice([0, 0.001, 0.01]))
            used = [each.used for each in made]
            assert sum(used) <= total, (action, used)
        used_before = {each.permits.id: each.used for each in made}
        held = await noted(client)
        assert sum(held.values()) <= total, held
        assert all(used <= held.get(id, 0) for id, used in used_before.items()), (used_before, held)
    await client.aclose()
