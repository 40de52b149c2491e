"""The plain case, fast: ``POST`` of a whole JSON body over HTTP/1.1, relayed by a pair of protocols without a task.

Every decision is :mod:`gateway.decisions`'; here are the client's bytes. What is not plain (:mod:`gateway.plain` says what is)
is handed to aiohttp's server on the same connection, with every byte of it unread. What is plain but cannot go at once, since
it must wait or its replica must be reached anew, goes on in :meth:`gateway.proxy.Proxy.go`, the coroutine that the other path
uses, over the same client's connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from gateway import envelope, logs
from gateway.answering import Answering
from gateway.claim import Claim, Refused
from gateway.connection import Connections
from gateway.decisions import Decisions, Known, Order
from gateway.errors import GatewayError
from gateway.exchange import Head
from gateway.life import Life
from gateway.outbox import Outbox
from gateway.passing import Passing
from gateway.plain import MAX_HEAD, Plain, plain
from gateway.proxy import Proxy
from gateway.trail import Trail
from gateway.waitroom import Waitroom
from policies.replica import Replica

_PATIENCE_S: Final = 1.0
"""A request that has not arrived whole by then is handed over, with the deadlines that the other path has."""
_AHEAD: Final = 256 << 10
"""Bytes that a client may send ahead of its turn."""
_TICK_S: Final = 1.0
_IDLE_S = 3630.0
"""A connection on which nothing was asked for so long is closed; as long as on the other path."""
_STALLED_S = 300.0
"""A client that has not taken the end of its last answer by then is cut off."""
_BUG = "The gateway failed; its log tells more under this request id."


class FastPath:
    """What all fast connections of one process share. Needs a running event loop."""

    def __init__(self, decisions: Decisions, proxy: Proxy, *, waitroom: Waitroom, life: Life) -> None:
        self.loop = asyncio.get_running_loop()
        self.decide = decisions
        self.proxy = proxy
        self.waitroom = waitroom
        self.life = life
        self.clients: set[FastProtocol] = set()
        self.outbox = Outbox(life)
        self.partial: dict[FastProtocol, float] = {}
        """Connections with a part of a request -> loop time at which it began."""
        self.passing: set[Passing] = set()
        self._pools: dict[str, Connections] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.empty = asyncio.Event()
        self.empty.set()

    def __call__(self, behind: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """A protocol for a client's connection; ``behind`` makes the one that takes it over."""
        return cast(asyncio.Protocol, FastProtocol(self, behind))

    def joined(self, client: FastProtocol) -> None:
        self.clients.add(client)
        self.empty.clear()

    def left(self, client: FastProtocol) -> None:
        """Its connection has ended, or is another protocol's."""
        self.clients.discard(client)
        self.partial.pop(client, None)
        if not self.clients:
            self.empty.set()

    def pool(self, replica: Replica, incarnation: str) -> Connections:
        """The connections to a replica; ``incarnation``: its own, which the caller has at hand."""
        pool = self._pools.get(incarnation)
        if pool is None:
            pool = self._pools[incarnation] = Connections(replica, self.outbox)
        return pool

    def retain(self, incarnations: frozenset[str]) -> None:
        """End the connections of all other incarnations: their engines are gone."""
        for incarnation in self._pools.keys() - incarnations:
            self._pools.pop(incarnation).close()

    async def run(self) -> None:
        """Look at every deadline once a second, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = self.loop.time()
            for client in [client for client, since in self.partial.items() if now - since >= _PATIENCE_S]:
                client.hand_over()
            for passing in [passing for passing in self.passing if passing.deadline <= now]:
                passing.overdue(now)
            for client in [client for client in self.clients if client.forgotten(now)]:
                client.abort()
            for pool in self._pools.values():
                pool.tidy()

    def cut(self) -> None:
        """End every answer that is under way; clients are told that it is not complete."""
        for passing in list(self.passing):
            passing.shut_down()

    def close(self) -> None:
        """Cut off whatever is left."""
        self.retain(frozenset())
        for client in list(self.clients):
            client.abort()


class FastProtocol:
    """One client's connection, for as long as all it sends is plain.

    What asyncio calls a protocol; it does not inherit from its class, since what is compiled cannot.

    Args:
        other: makes the protocol that takes the connection over.
    """

    def __init__(self, path: FastPath, other: Callable[[], asyncio.Protocol]) -> None:
        self._path = path
        self.outbox = path.outbox
        self._other = other
        self._buffer = b""
        self._busy = False
        """A request is being answered."""
        self._head = b""
        """The last head, with its empty line. Clients repeat themselves, so what it says is kept, and what followed from that."""
        self._plain: Plain | None = None
        self._known: Known | None = None
        self._passing: Passing | None = None
        self._task: asyncio.Task[None] | None = None
        self._under_way = False
        """The task has taken its first step."""
        self._peer: str | None = None
        self._scheme = "http"
        self._paused_reading = False
        self._since = path.loop.time()
        """When the last request ended."""
        self._clogged = False
        """The client does not take what was sent: nothing more is begun, and nothing handed over."""
        self.answering: Answering | None = None
        self.transport: asyncio.Transport | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not registered as such
        peer = transport.get_extra_info("peername")
        self._peer = peer[0] if isinstance(peer, tuple) else None
        self._scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._path.joined(self)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if not self._busy and not self._clogged:
            self._look()
        elif len(self._buffer) > _AHEAD and not self._paused_reading and self.transport is not None:
            self._paused_reading = True
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._path.left(self)
        self.transport = None
        if self.answering is not None:
            self.answering.lost()
        if self._passing is not None:
            self._passing.client_left()
        elif self._task is not None and self._under_way:
            # One that was cancelled before its first step would never run, and give nothing back.
            self._task.cancel()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._clogged = True
        if self.answering is not None:
            self.answering.pause()
        if self._passing is not None:
            self._passing.hold_back()

    def resume_writing(self) -> None:
        self._clogged = False
        if self.answering is not None:
            self.answering.resume()
        if self._passing is not None:
            self._passing.go_on()
        if not self._busy:
            self._go_on()

    # requests

    def _look(self) -> None:
        """Serve what has arrived, as far as it is plain and whole."""
        while self._buffer and not (self._busy or self._clogged or self.transport is None or self.transport.is_closing()):
            if not self._head or self._buffer[: len(self._head)] != self._head:
                end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD + 4)
                if end < 0 and len(self._buffer) <= MAX_HEAD and b"POST /".startswith(self._buffer[:6]):
                    break
                found = plain(self._buffer[:end]) if end >= 0 else None
                if found is None:
                    self.hand_over()
                    return
                self._head, self._plain, self._known = self._buffer[: end + 4], found, Known(found.headers)
            assert self._plain is not None
            assert self._known is not None
            at = len(self._head)
            whole = at + self._plain.length
            if len(self._buffer) < whole:
                break
            body = self._buffer[at:whole]
            self._buffer = self._buffer[whole:]
            if self._path.partial:
                self._path.partial.pop(self, None)
            self._begin(self._plain, body, self._known)
        if self._buffer and not self._busy and not self._clogged:
            self._path.partial.setdefault(self, self._path.loop.time())

    def hand_over(self) -> None:
        """From here on the connection is the other path's, as soon as its client has taken what was sent."""
        self.outbox.send()
        if self._clogged:
            return  # the other path would not hear of it
        self._path.left(self)
        transport, self.transport = self.transport, None
        if transport is None or transport.is_closing():
            return
        other = self._other()
        transport.set_protocol(other)
        other.connection_made(transport)
        if self._buffer:
            other.data_received(self._buffer)
        self._buffer = b""

    def _begin(self, request: Plain, body: bytes, known: Known) -> None:
        path, decide = self._path, self._path.decide
        id, now = known.id or envelope.new_id(), path.loop.time()
        head = Head("POST", request.target, request.headers, id, now, self._peer, self._scheme, request.host)
        self._busy = True
        path.life.opened()
        self.answering = Answering(self, head, request.found)
        trail = decide.begin(head, request.found, known)
        claim: Claim | None = None
        try:
            order = decide.prepare(head, request.found, body, trail, known)
            if not decide.charge(order):
                self.carry(order, None)
                return
            claim = path.waitroom.claim(order.ticket)
            path.waitroom.enter(claim)
            if claim.replica is None:
                self.carry(order, claim)
                return
            self._passing = Passing(path, self, order, claim, now)
        except Refused as refused:
            self._refuse(decide.refusal(refused, order), trail)
        except GatewayError as error:
            self._refuse(error, trail)
        except Exception as error:
            logs.error("bug", error, request_id=head.id, path=request.target)
            if claim is not None:
                claim.leave()
            self._refuse(GatewayError(_BUG), trail)
        else:
            self._passing.begin()

    def _refuse(self, error: GatewayError, trail: Trail) -> None:
        assert self.answering is not None
        trail.status, trail.code = error.status, error.code
        self.answering.refuse(error)
        now = self._path.loop.time()
        self._path.decide.account(trail, now)
        self.ended(now)

    def carry(self, order: Order, claim: Claim | None) -> None:
        """Go on in a task: it has to wait, or to be sent elsewhere."""
        self._passing, self._under_way = None, False
        self._task = task = self._path.loop.create_task(self._carried(order, claim))
        self._path.tasks.add(task)
        task.add_done_callback(self._path.tasks.discard)

    async def _carried(self, order: Order, claim: Claim | None) -> None:
        assert self.answering is not None
        assert self._task is not None
        answering, self._under_way = self.answering, True
        if self.transport is None:
            self._task.cancel()
        try:
            await self._path.proxy.go(order, answering, claim)
        except GatewayError as error:
            answering.refuse(error)
        except asyncio.CancelledError:
            if self.transport is not None:
                raise
        except Exception as error:
            logs.error("bug", error, request_id=order.head.id, path=order.head.target)
            if answering.begun:
                self.abort()
            else:
                answering.refuse(GatewayError(_BUG))
        finally:
            self._task = None
            self.ended(self._path.loop.time())

    def ended(self, now: float) -> None:
        """The request in hand has been answered, or cannot be; ``now``: loop time."""
        self._passing = self.answering = None
        self._busy = False
        self._since = now
        self._path.life.closed()
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._path.life.draining:
            self.outbox.send()
            transport.close()
            return
        self._go_on()

    def _go_on(self) -> None:
        """Turn to what has come in the meantime."""
        if self.transport is None or self.transport.is_closing():
            return
        if self._paused_reading:
            self._paused_reading = False
            self.transport.resume_reading()
        if self._buffer:
            # Not from within the end of the last one: a client that sends many at once must not deepen the stack.
            self._path.loop.call_soon(self._next)

    def _next(self) -> None:
        if not self._busy:
            self._look()

    def forgotten(self, now: float) -> bool:
        """Its client asks for nothing any more, or takes nothing."""
        return not self._busy and now >= self._since + (_STALLED_S if self._clogged else _IDLE_S)

    @property
    def draining(self) -> bool:
        return self._path.life.draining

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
