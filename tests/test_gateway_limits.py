"""Budgets of requests and tokens: exact over several gateways, synchronous in the common case, alive without a store."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import redis.asyncio
from conftest import eventually

from gateway import limits as module
from gateway.current import Current
from gateway.errors import RateLimited, StoreUnavailable
from gateway.limits import Limits
from gateway.store import Store
from policies.config import Config, parse
from policies.limits import Claim, Settled

MODELS = {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}}}


def config(tenants: dict[str, dict[str, int]]) -> Config:
    return parse({"models": MODELS, "tenants": {name: {"limits": limits} for name, limits in tenants.items()}})


class Counted:
    """The real store; counts calls, and can be out of reach."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls = 0
        self.down = False

    async def settle(self, claims: Sequence[Claim]) -> Sequence[Settled]:
        self.calls += 1
        if self.down:
            raise StoreUnavailable("out of reach")
        return await self.store.settle(claims)


@contextlib.asynccontextmanager
async def gateway(url: str, current: Current, gateways: int = 1) -> AsyncIterator[tuple[Limits, Counted]]:
    store = Store(url, "rewake")
    counted = Counted(store)
    loop = asyncio.get_running_loop()
    limits = Limits(current, store=counted, gateways=lambda: gateways, clock=loop.time)
    task = asyncio.create_task(limits.run())
    try:
        yield limits, counted
    finally:
        task.cancel()
        await asyncio.wait([task])
        await limits.leave()
        await store.close()


async def pay(limits: Limits, tenant: str = "t") -> RateLimited | None:
    """One request, as the data path pays for it."""
    try:
        if not limits.charge_request(tenant):
            await limits.obtain(tenant)
    except RateLimited as refused:
        return refused
    return None


async def passed(limits: Limits, requests: int, tenant: str = "t") -> int:
    """How many of so many simultaneous requests go."""
    return (await asyncio.gather(*(pay(limits, tenant) for _ in range(requests)))).count(None)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count exactly: on a busy machine the store may take longer than a gateway waits for it, which then goes on
    alone, owns up twice or, at its end, not at all. What that costs is bounded by other tests."""
    monkeypatch.setattr(module, "_ANSWER_S", 60.0)


# ---------------------------------------------------------------- requests


async def test_who_has_no_limits_never_asks_the_store(store: redis.asyncio.Redis, store_server: str) -> None:
    async with gateway(store_server, Current(config({"free": {}}))) as (limits, counted):
        assert all(limits.charge_request(tenant) for tenant in ("free", "", "unheard of") for _ in range(1000))
        limits.charge_tokens("free", 10**9)
        assert counted.calls == 0


@pytest.mark.contract
async def test_a_burst_goes_up_to_the_limit_exactly(store: redis.asyncio.Redis, store_server: str) -> None:
    async with gateway(store_server, Current(config({"t": {"requests_per_minute": 20}}))) as (limits, counted):
        assert await passed(limits, 50) == 20
        assert counted.calls <= 3
        refused = await pay(limits)
    assert refused is not None
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert 2 < (refused.retry_after_s or 0) <= 3
    assert refused.headers["x-ratelimit-limit-requests"] == "20"


async def test_case_72_two_gateways_share_one_limit(store: redis.asyncio.Redis, store_server: str) -> None:
    current = Current(config({"t": {"requests_per_minute": 30}}))
    async with gateway(store_server, current, 2) as (one, _), gateway(store_server, current, 2) as (two, _):
        assert sum(await asyncio.gather(passed(one, 40), passed(two, 40))) == 30


async def test_one_at_a_time_between_two_gateways_goes_up_to_the_limit(store: redis.asyncio.Redis, store_server: str) -> None:
    current = Current(config({"t": {"requests_per_minute": 10}}))
    async with gateway(store_server, current, 2) as (one, _), gateway(store_server, current, 2) as (two, _):
        went = [await pay(limits) for _ in range(10) for limits in (one, two)]
    assert went.count(None) == 10


async def test_a_steady_stream_is_paid_without_asking(store: redis.asyncio.Redis, store_server: str) -> None:
    """The lease grows with the pace: after the first few, requests find something leased, and are paid synchronously."""
    async with gateway(store_server, Current(config({"t": {"requests_per_minute": 100_000}}))) as (limits, counted):
        asked = 0
        for _ in range(500):
            if not limits.charge_request("t"):
                asked += 1
                await limits.obtain("t")
            await asyncio.sleep(0.001)
        assert asked < 150
        calls, began = counted.calls, asyncio.get_running_loop().time()
        settled = await eventually(lambda: counted.calls > calls)
        assert settled
        assert asyncio.get_running_loop().time() - began < 1


async def test_at_twenty_thousand_a_second_nobody_waits_for_the_store(store: redis.asyncio.Redis, store_server: str) -> None:
    """In the steady state no request awaits a round trip, and there are few of them."""
    rich = {"requests_per_minute": 10**8, "tokens_per_minute": 10**9}
    loop = asyncio.get_running_loop()
    async with gateway(store_server, Current(config({"t": rich}))) as (limits, counted):
        began, went, asked, calls = loop.time(), 0, 0, 0
        while (now := loop.time()) < began + 2:
            while went < (now - began) * 20_000:
                if not limits.charge_request("t"):
                    asked += now > began + 1
                    await limits.obtain("t")
                limits.charge_tokens("t", 50)
                went += 1
            calls = counted.calls if now <= began + 1 else calls
            await asyncio.sleep(0.001)
        assert asked == 0
        assert counted.calls - calls < 15
        await limits.leave()
        left = float(await store.hget("rewake:budget:t", "requests") or 10**8)
    assert 10**8 - went <= left


@pytest.mark.usefixtures("patient")
async def test_what_is_not_used_goes_back(store: redis.asyncio.Redis, store_server: str) -> None:
    current, began = Current(config({"t": {"requests_per_minute": 800}})), time.monotonic()
    async with gateway(store_server, current, 2) as (one, _), gateway(store_server, current, 2) as (two, _):
        assert await passed(one, 100) == 100
        await one.leave()
        assert 700 <= await passed(two, 1000) <= 701 + (time.monotonic() - began) * 800 / 60


@pytest.mark.usefixtures("patient")
async def test_time_gives_new_budget(store: redis.asyncio.Redis, store_server: str) -> None:
    began = time.monotonic()
    async with gateway(store_server, Current(config({"t": {"requests_per_minute": 600}}))) as (limits, _):
        assert 600 <= await passed(limits, 700) <= 601 + (time.monotonic() - began) * 600 / 60
        await eventually(lambda: _went(limits))


async def _went(limits: Limits) -> bool:
    return await pay(limits) is None


async def test_tenants_do_not_share_a_budget(store: redis.asyncio.Redis, store_server: str) -> None:
    limited = {"requests_per_minute": 5}
    async with gateway(store_server, Current(config({"a": limited, "b": limited}))) as (limits, _):
        assert await asyncio.gather(passed(limits, 9, "a"), passed(limits, 9, "b")) == [5, 5]


async def test_who_leaves_while_asking_takes_nothing_along(store: redis.asyncio.Redis, store_server: str) -> None:
    async with gateway(store_server, Current(config({"t": {"requests_per_minute": 3}}))) as (limits, _):
        assert not limits.charge_request("t")
        leaving = asyncio.create_task(limits.obtain("t"))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await passed(limits, 9) == 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("patient")
async def test_nothing_is_lost_or_made_whatever_happens(store: redis.asyncio.Redis, store_server: str, seed: int) -> None:
    """Bursts, single requests and clients that leave, at three gateways: at the end the budget is short by what went, no more."""
    dice = random.Random(seed)
    limit, loop = 600, asyncio.get_running_loop()
    current = Current(config({"t": {"requests_per_minute": limit}}))
    async with contextlib.AsyncExitStack() as stack:
        gateways = [(await stack.enter_async_context(gateway(store_server, current, 3)))[0] for _ in range(3)]
        began, went = loop.time(), 0
        for _ in range(60):
            limits = dice.choice(gateways)
            tasks = [asyncio.create_task(pay(limits)) for _ in range(dice.choice((1, 1, 2, 15)))]
            await asyncio.sleep(dice.choice((0, 0, 0.001, 0.01)))
            for task in dice.sample(tasks, len(tasks) // 3):
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            went += ended.count(None)
        for limits in gateways:
            await limits.leave()
        seconds = loop.time() - began
        left = float(await store.hget("rewake:budget:t", "requests"))
    assert went > 100
    assert limit - went <= left + 0.01
    assert left <= limit - went + seconds * limit / 60 + 3


async def test_a_reload_changes_the_limit_or_takes_it_away(store: redis.asyncio.Redis, store_server: str) -> None:
    current = Current(config({"t": {"requests_per_minute": 3}}))
    async with gateway(store_server, current) as (limits, _):
        assert await passed(limits, 9) == 3
        current.replace(config({"t": {}}))
        assert await passed(limits, 9) == 9
        current.replace(config({"t": {"requests_per_minute": 4}}))
        assert await passed(limits, 9) <= 4


# ---------------------------------------------------------------- tokens


async def test_a_tenant_in_debt_waits_until_it_is_paid_off(store: redis.asyncio.Redis, store_server: str) -> None:
    async with gateway(store_server, Current(config({"t": {"tokens_per_minute": 60}}))) as (limits, _):
        assert await pay(limits) is None
        limits.charge_tokens("t", 59)
        assert await pay(limits) is None
        limits.charge_tokens("t", 31)
        refused = await pay(limits)
    assert refused is not None
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert 29 < (refused.retry_after_s or 0) <= 31
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_a_debt_is_announced_once(store: redis.asyncio.Redis, store_server: str) -> None:
    pubsub = store.pubsub(ignore_subscribe_messages=True)
    await pubsub.subscribe("rewake:events")
    for owed in (50, 20, 30):
        await settle(store_server, requests=None, tokens=60, owed=owed)
    await store.publish("rewake:events", "end")
    heard: list[str] = []
    async with asyncio.timeout(30):
        while "end" not in heard:
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=1)
            heard += [] if message is None else [message["data"]]
    await pubsub.aclose()
    assert heard == ['{"debtor":"t"}', "end"]


async def test_who_hears_of_a_debt_asks_before_it_goes_on(store: redis.asyncio.Redis, store_server: str) -> None:
    current = Current(config({"t": {"tokens_per_minute": 60}}))
    async with gateway(store_server, current, 2) as (one, _), gateway(store_server, current, 2) as (two, _):
        assert await pay(one) is None
        assert await pay(two) is None
        one.charge_tokens("t", 1000)
        await one.leave()
        two.indebted("t")
        assert not two.charge_request("t")
        assert await pay(two) is not None


async def test_a_debt_is_known_to_other_gateways(store: redis.asyncio.Redis, store_server: str) -> None:
    current = Current(config({"t": {"tokens_per_minute": 60, "requests_per_minute": 1000}}))
    async with gateway(store_server, current, 2) as (one, _), gateway(store_server, current, 2) as (two, _):
        assert await pay(one) is None
        assert await pay(two) is None
        one.charge_tokens("t", 1000)
        await eventually(lambda: _refused(two))


async def _refused(limits: Limits) -> bool:
    return await pay(limits) is not None


async def test_a_debt_outlives_the_gateway_that_made_it(store: redis.asyncio.Redis, store_server: str) -> None:
    current = Current(config({"t": {"tokens_per_minute": 60}}))
    async with gateway(store_server, current) as (limits, _):
        assert await pay(limits) is None
        limits.charge_tokens("t", 1000)
    async with gateway(store_server, current) as (limits, _):
        assert await pay(limits) is not None


async def test_who_is_turned_away_is_counted_by_what_was_used_up(store: redis.asyncio.Redis, store_server: str) -> None:
    current = Current(config({"r": {"requests_per_minute": 1}, "k": {"tokens_per_minute": 10}}))
    async with gateway(store_server, current) as (limits, _):
        told: list[tuple[str, str]] = []
        limits.on_limited = lambda tenant, limit: told.append((tenant, limit))
        for tenant in ("r", "k"):
            assert await pay(limits, tenant) is None
        limits.charge_tokens("k", 100)
        assert await pay(limits, "r") is not None
        assert await pay(limits, "k") is not None
    assert told == [("r", "requests"), ("k", "tokens")]


# ---------------------------------------------------------------- without the store


async def test_without_the_store_each_gateway_keeps_to_its_share(store: redis.asyncio.Redis, store_server: str) -> None:
    current = Current(config({"t": {"requests_per_minute": 40}}))
    async with gateway(store_server, current, 2) as (one, a), gateway(store_server, current, 2) as (two, b):
        a.down = b.down = True
        went = await asyncio.gather(passed(one, 50), passed(two, 50))
    assert went == [20, 20]


async def test_what_was_spent_alone_is_owned_up_to(store: redis.asyncio.Redis, store_server: str) -> None:
    current = Current(config({"t": {"requests_per_minute": 40, "tokens_per_minute": 1000}}))
    async with gateway(store_server, current) as (limits, counted):
        counted.down = True
        assert await passed(limits, 30) == 30
        limits.charge_tokens("t", 2000)
        refused = await pay(limits)
        assert refused is not None
        counted.down = False
        await eventually(lambda: _field(store, "tokens", below=-900))
        assert await _field(store, "requests", below=12)


async def _field(store: redis.asyncio.Redis, field: str, *, below: float) -> bool:
    value = await store.hget("rewake:budget:t", field)
    return value is not None and float(value) < below


@pytest.mark.parametrize("seed", range(3))
async def test_a_store_that_comes_and_goes_strands_nobody(store: redis.asyncio.Redis, store_server: str, seed: int) -> None:
    dice = random.Random(seed)
    limit, loop = 300, asyncio.get_running_loop()
    current = Current(config({"t": {"requests_per_minute": limit, "tokens_per_minute": 10**6}}))
    async with contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(gateway(store_server, current, 2)) for _ in range(2)]
        began, went, losses = loop.time(), 0, 0
        async with asyncio.timeout(20):
            for _ in range(50):
                limits, counted = dice.choice(gateways)
                before, counted.down = counted.down, dice.random() < 0.3
                losses += counted.down and not before
                ended = await asyncio.gather(*(pay(limits) for _ in range(dice.choice((1, 2, 10)))))
                went += ended.count(None)
                limits.charge_tokens("t", dice.randrange(50))
                await asyncio.sleep(dice.choice((0, 0.001, 0.02)))
        for _, counted in gateways:
            counted.down = False
        seconds = loop.time() - began
    assert losses > 2
    # Alone a gateway has half of what it knew to be left, each time that it is left alone.
    assert 0 < went <= limit * 2 + seconds * limit / 60


async def test_a_store_that_pauses_holds_up_nobody_for_long(store: redis.asyncio.Redis, store_server: str) -> None:
    """A real one: it takes commands and answers them late."""
    async with gateway(store_server, Current(config({"t": {"requests_per_minute": 100}}))) as (limits, _):
        assert await pay(limits) is None
        await store.execute_command("CLIENT", "PAUSE", "2000", "ALL")
        began = asyncio.get_running_loop().time()
        assert await passed(limits, 50) == 50
        assert asyncio.get_running_loop().time() - began < 1.8
        assert limits.charge_request("t")
        await eventually(lambda: _field(store, "requests", below=60))
        assert await passed(limits, 100) < 60


class Hanging:
    """A store that takes calls and never answers."""

    async def settle(self, claims: Sequence[Claim]) -> Sequence[Settled]:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.looptime
async def test_a_store_that_hangs_costs_the_first_request_half_a_second_and_the_others_nothing() -> None:
    loop = asyncio.get_running_loop()
    current = Current(config({"t": {"requests_per_minute": 40}}))
    limits = Limits(current, store=Hanging(), gateways=lambda: 1, clock=loop.time)
    task = asyncio.create_task(limits.run())
    began = loop.time()
    assert await pay(limits) is None
    assert loop.time() - began <= 0.6
    assert all(limits.charge_request("t") for _ in range(39))
    with pytest.raises(RateLimited):
        limits.charge_request("t")
    await asyncio.sleep(31)
    assert sum(_goes(limits) for _ in range(40)) in (20, 21)
    task.cancel()
    await asyncio.wait([task])


def _goes(limits: Limits) -> bool:
    with contextlib.suppress(RateLimited):
        return limits.charge_request("t")
    return False


# ---------------------------------------------------------------- the script


async def settle(url: str, **claim: Any) -> Settled:
    store = Store(url, "rewake")
    try:
        (answer,) = await store.settle([Claim("t", **claim)])
        return answer
    finally:
        await store.close()


@pytest.mark.contract
async def test_surplus_is_a_small_part_of_what_is_left(store: redis.asyncio.Redis, store_server: str) -> None:
    assert (await settle(store_server, requests=100, tokens=None, need=20, more=1000)).granted == 20 + 10
    assert (await settle(store_server, requests=100, tokens=None, more=1000)).granted == 8
    assert (await settle(store_server, requests=100, tokens=None, need=1000)).granted == 62


async def test_a_budget_never_holds_more_than_a_minutes_worth(store: redis.asyncio.Redis, store_server: str) -> None:
    answer = await settle(store_server, requests=10, tokens=None, back=500.0)
    assert answer.requests == 10
    assert await store.pttl("rewake:budget:t") <= 60_000


async def test_a_debt_grants_nothing(store: redis.asyncio.Redis, store_server: str) -> None:
    answer = await settle(store_server, requests=10, tokens=60, need=5, more=5, owed=90)
    assert answer == Settled(0, 10, -30)
    assert 120_000 < await store.pttl("rewake:budget:t") <= 150_000
