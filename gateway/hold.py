"""What a held request's client sees: nothing at first, so that a failure is still a status; then signs of life.

The first phase is *silent*. After it, a client that asked for an event stream is *committed*: its answer begins, and frames
tell its place and when it may expect to be served; what fails from then on is a last frame and a cut. Knows neither who is
served next nor what is sent to the replica.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.dialects import Dialect
from gateway.downstream import Downstream
from gateway.envelope import Pairs
from gateway.eta import Eta
from policies.holding import Hold, KeepAlive
from policies.replica import Replica

_EVENTS: Pairs = [
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
]


class Claim(Protocol):
    """A place in a queue, as the waiting room gives it."""

    @property
    def position(self) -> int:
        """1 is next."""

    async def granted(self, within_s: float | None) -> Replica | None:
        """The replica, or None when there was none within that time."""


@dataclass(slots=True)
class Holding:
    """How one request is held; made when it first has to wait, and kept if it has to wait again."""

    model: str
    hold: Hold
    dialect: Dialect
    mode: KeepAlive
    id: str
    silent_until: float
    """Loop time."""
    committed: bool = False


def mode_for(hold: Hold, *, user_agent: str, events: bool, version: tuple[int, int], dialect: Dialect, model: str) -> KeepAlive:
    """What this client is shown while it waits. ``off`` unless it asked for an event stream that can be broken off visibly."""
    if not events or version < (1, 1):
        return "off"
    mode = hold.keepalive_for(user_agent)
    return mode if dialect.sign(mode, position=1, eta_s=None, model=model) else "off"


async def until_granted(
    holding: Holding, claim: Claim, down: Downstream, eta: Eta, draw: Callable[[], float] = random.random
) -> Replica:
    """Wait for a replica, showing the client that it is not forgotten.

    Raises:
        Refused: as the claim does; ``down.begun`` says whether a status can still be told.
        ClientGone: while it was being shown.
    """
    if holding.mode == "off":
        replica = None
        while replica is None:
            replica = await claim.granted(None)
        return replica
    if not holding.committed:
        replica = await claim.granted(max(0.0, holding.silent_until - asyncio.get_running_loop().time()))
        if replica is not None:
            return replica
        holding.committed = True
        ids = ("x-request-id", *holding.dialect.id_headers)
        await down.head(200, "OK", [*_EVENTS, *((name, holding.id) for name in ids)])
    while True:
        await down.write(_sign(holding, claim, eta))
        replica = await claim.granted(holding.hold.pause_s(draw()))
        if replica is not None:
            return replica


def _sign(holding: Holding, claim: Claim, eta: Eta) -> bytes:
    position = claim.position
    return holding.dialect.sign(holding.mode, position=position, eta_s=eta.wait_s(holding.model, position), model=holding.model)
