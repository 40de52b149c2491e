"""Many held streams at once, and everything that can happen to them: nothing is left, and nothing broken looks whole."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest
from conftest import eventually
from fake_replica import CHAT, Exchange, FakeReplica, Fleet, answer, completion, configuration, delta, replica_server, serving

from policies.replica import State

STREAMS = 80
HOLD = {"silent_s": 0.1, "keepalive_s": 0.05, "max_wait_s": 3}
END = b"0\r\n\r\n"


def upstream(rng: random.Random):
    """A replica that does, request by request, what replicas do."""

    async def whole(exchange: Exchange) -> None:
        await exchange.begin_events()
        for text in "abc":
            await exchange.event(delta(text))
            await asyncio.sleep(rng.random() * 0.02)
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    async def broken(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event(delta("a"))
        await exchange.chunk(b'data: {"half' if rng.random() < 0.5 else b": ping\n\n")
        await asyncio.sleep(rng.random() * 0.02)
        exchange.reset() if rng.random() < 0.5 else exchange.writer.close()

    async def refusing(exchange: Exchange) -> None:
        await exchange.json({"error": {"message": "too long"}}, rng.choice(("400 Bad Request", "429 Too Many", "500 Oh")))

    async def misfit(exchange: Exchange) -> None:
        await exchange.json(completion())

    async def deaf(exchange: Exchange) -> None:
        exchange.writer.close()

    async def any_of_them(exchange: Exchange) -> None:
        await rng.choice((whole, whole, whole, broken, refusing, misfit, deaf))(exchange)

    return any_of_them


async def client(port: int, rng: random.Random) -> str:
    """One request; what became of it, in a word."""
    await asyncio.sleep(rng.random() * 0.5)
    agent = rng.choice(("plain", "strict", "quiet"))
    body = json.dumps({"model": "m", "messages": [], "stream": rng.random() < 0.9}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nUser-Agent: {agent}\r\nContent-Length: {len(body)}\r\n\r\n"
    patience = rng.choice((60.0, 60.0, rng.random() * 0.6))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    seen = b""
    try:
        async with asyncio.timeout(patience):
            while not seen.endswith(END) and not _sized(seen) and (piece := await reader.read(65536)):
                seen += piece
    except TimeoutError:
        return "left"
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return _outcome(seen)


def _sized(seen: bytes) -> bool:
    head, found, rest = seen.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(found and length) and len(rest) >= int(length)


def _outcome(seen: bytes) -> str:
    status, _, rest = seen.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 "), seen
    assert rest.count(b"HTTP/1.1") == 0, "no second head within a body"
    if _sized(seen):
        return status.split(b" ")[1].decode()
    if seen.endswith(END):
        assert b"data: [DONE]\n\n" in rest, "whole only if its replica ended it"
        assert b'"error"' not in rest
        return "whole"
    # A replica that ended between its last event and its body's end has said all: its client may, or may not, care.
    return "told" if b'data: {"error"' in rest else "broken"


async def fate(fleet: Fleet, fakes: list[FakeReplica], rng: random.Random, over: asyncio.Event) -> None:
    """What happens to the fleet until it is over: replicas come, drain, fail, vanish; the model fails, and recovers.

    Ended by an event: the store's client can swallow a cancellation.
    """
    records = {}
    while not over.is_set():
        await asyncio.sleep(rng.random() * 0.15)
        slot = rng.randrange(2)
        happens = rng.choice(("come", "come", "come", "drain", "fail", "vanish", "doom"))
        if happens == "come":
            records[slot] = await fleet.admit(fakes[slot], slot=slot, concurrency=3)
        elif happens == "vanish":
            records[slot] = await fleet.admit(FakeReplica(port=1), slot=slot, concurrency=3)
        elif happens == "doom":
            await fleet.fail("m", "no memory", ttl_ms=50)
        elif slot in records:
            records[slot] = await fleet.change(records[slot], State.DRAINING if happens == "drain" else State.FAILED)


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_over_held_streams_leaves_nothing_and_nothing_broken_looks_whole(store, store_server, seed):
    rng = random.Random(seed)
    agents = [{"pattern": "strict", "keepalive": "chunk"}, {"pattern": "quiet", "keepalive": "off"}]
    config = configuration(model__hold={**HOLD, "user_agents": agents}, model__max_replicas=2, model__concurrency=3)
    async with (
        replica_server(upstream(rng)) as one,
        replica_server(upstream(rng)) as two,
        serving(store_server, config) as served,
    ):
        over = asyncio.Event()
        storm = asyncio.create_task(fate(Fleet(store), [one, two], rng, over))
        try:
            outcomes = Counter(await asyncio.gather(*(client(served.port, rng) for _ in range(STREAMS))))
        finally:
            over.set()
            await storm
        # How many of each is up to the storm: a model that fails early leaves no answer whole.
        assert outcomes.total() == STREAMS
        await eventually(lambda: served.counts() == (0, 0, 0))
        await eventually(lambda: served.gateway.life.open == 0)
        ledger = served.gateway.ledger
        assert (ledger.held("m"), ledger.held_bytes("m"), ledger.load("m").inflight) == (0, 0, 0)
        # And it still serves.
        one.default = answer
        replica = await Fleet(store).admit(one, slot=0, incarnation="after", concurrency=3)
        await Fleet(store).change(await Fleet(store).admit(two, slot=1), State.STOPPED)
        await eventually(lambda: served.gateway.registry.available("m") == (replica,))
        assert (await served.chat()).json() == completion()
