"""Writes of the fast path: together where that saves wake-ups, at once where it would only take time, and always in order."""

from __future__ import annotations

import asyncio
from typing import cast

from gateway.life import Life
from gateway.outbox import Outbox


class Wire:
    """A transport that notes what it is given."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.sent.append(data)

    def is_closing(self) -> bool:
        return self.closing


def outbox(open_requests: int, wanted: int = 2) -> tuple[Outbox, list[Wire], list[asyncio.Transport]]:
    life = Life(asyncio.Event())
    for _ in range(open_requests):
        life.opened()
    wires = [Wire() for _ in range(wanted)]
    return Outbox(life), wires, [cast(asyncio.Transport, wire) for wire in wires]


async def test_with_few_requests_open_each_is_sent_at_once() -> None:
    box, wires, transports = outbox(1)
    box.put(transports[0], b"a")
    assert wires[0].sent == [b"a"]


async def test_with_many_open_they_leave_together_before_the_loop_waits() -> None:
    box, wires, transports = outbox(64)
    box.put(transports[0], b"a")
    box.put(transports[1], b"b")
    box.put(transports[0], b"c")
    assert not wires[0].sent
    await asyncio.sleep(0)
    assert (wires[0].sent, wires[1].sent) == ([b"a", b"c"], [b"b"])


async def test_they_are_bounded() -> None:
    box, wires, transports = outbox(64, wanted=150)
    for transport in transports:
        box.put(transport, b"x")
    assert sum(len(wire.sent) for wire in wires) == 128
    await asyncio.sleep(0)
    assert all(wire.sent == [b"x"] for wire in wires)


async def test_a_connection_that_ended_meanwhile_gets_nothing() -> None:
    box, wires, transports = outbox(64)
    box.put(transports[0], b"a")
    box.put(transports[1], b"b")
    wires[0].closing = True
    box.send()
    assert (wires[0].sent, wires[1].sent) == ([], [b"b"])


async def test_what_somebody_watches_for_waits_for_nobody_and_passes_nobody() -> None:
    box, wires, transports = outbox(64)
    box.put(transports[0], b"a")
    assert wires[0].sent == []
    box.put(transports[0], b"b", now=True)
    assert wires[0].sent == [b"a", b"b"]


async def test_nor_does_it_wait_until_other_connections_have_theirs() -> None:
    box, wires, transports = outbox(64)
    box.put(transports[0], b"a")
    box.put(transports[1], b"b", now=True)
    assert (wires[0].sent, wires[1].sent) == ([], [b"b"])
    await asyncio.sleep(0)
    assert (wires[0].sent, wires[1].sent) == ([b"a"], [b"b"])
