"""A request that found a free slot, on its way: the replica's bytes become the client's, without a task.

The sink of one :class:`gateway.connection.Connection`. What is decided is :mod:`gateway.decisions`'; what must wait after all
goes back to whoever gave it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gateway import errors
from gateway.answering import written
from gateway.claim import Claim, Refused
from gateway.connection import Connection, Connections, Whole
from gateway.decisions import Decisions, Frame, Order
from gateway.dialects import Dialect
from gateway.envelope import Pairs
from gateway.errors import GatewayError
from gateway.relay import Frames
from gateway.upstream import Broken, Outgoing, Silent, Truncated, Unreachable
from gateway.usage import Meter, maker
from policies.replica import Replica

if TYPE_CHECKING:
    from gateway.fastpath import FastPath, FastProtocol


_ID: Final = "x-request-id"
_TRACE: Final = "traceparent"
_MARK: Final = "\0"
_LENGTH: Final = "\1"
"""Marks stand where a head differs from the next one. No header of a plain request has them in it, nor has a replica's."""
_MAX_FRAMES: Final = 64
"""Replicas come and go while a connection stays."""


class Passing:
    """One request that found a free slot: its answer, on its way from a replica's connection to the client's.

    The sink of a :class:`gateway.connection.Connection`.
    """

    __slots__ = (
        "_answering",
        "_begun",
        "_claim",
        "_client",
        "_connection",
        "_frames",
        "_held_back",
        "_meter",
        "_moved",
        "_order",
        "_path",
        "_pool",
        "_replica",
        "_request",
        "_since",
        "_task",
        "deadline",
    )

    def __init__(self, path: FastPath, client: FastProtocol, order: Order, claim: Claim, now: float) -> None:
        assert claim.replica is not None
        assert client.answering is not None
        self._path = path
        self._client = client
        self._order = order
        self._claim = claim
        self._replica: Replica = claim.replica
        self._answering = client.answering
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._frames: Frames | None = None
        self._meter: Meter | None = None
        self._held_back = False
        self._begun = self._since = self._moved = now
        self.deadline = now + order.errand.first_byte_timeout_s
        self._pool = path.pool(self._replica, claim.incarnation)
        self._request = _request(path.decide, order, self._replica, self._pool)

    def begin(self) -> None:
        self._path.passing.add(self)
        connection = self._pool.idle()
        if connection is None:
            self._connect()
        else:
            self._connection = connection
            connection.send(self._request, self, self._order.trail.stream)

    # the client's side

    def client_left(self) -> None:
        """Free the replica at once."""
        if self._frames is not None and self._frames.done:
            self._order.trail.status, self._order.trail.code = self._answering.status, ""
        self._end(keep=False)

    def hold_back(self) -> None:
        self._held_back = True
        if self._connection is not None:
            self._connection.hold_back()

    def go_on(self) -> None:
        self._held_back = False
        self._moved = self._path.loop.time()
        if self._connection is not None:
            self._connection.go_on()

    # the replica's side

    def head(self, status: int, reason: str, headers: Pairs) -> None:
        now = self._path.loop.time()
        self._path.decide.began(self._order, self._replica, status, now)
        length, shape = self._shape(status, reason, headers)
        self._frames = Frames() if shape.events else None
        self._meter = shape.meter()
        self._since = self._moved = now
        self.deadline = self._due()
        self._answering.watched = shape.events
        self._answering.begin_with(status, shape.head(self._order.trail.id, length), chunked=shape.chunked)

    def whole(self, head: Whole, body: bytes) -> None:
        order, trail, shape, now = self._order, self._order.trail, head.shape, self._path.loop.time()
        self._connection = None  # the pool's, as in complete()
        self._path.decide.began(order, self._replica, head.status, now)
        if shape is None or shape.dialect is not order.dialect or shape.closing is not self._client.draining:
            shape = head.shape = self._shape(head.status, head.reason, head.headers)[1]
            head.pieces = shape.pieces(str(head.length))
        self._meter = shape.meter()
        self._meter.feed(body)
        trail.bytes_out += head.length
        trail.status, trail.code = head.status, ""
        self._answering.whole(head.status, trail.id.encode("latin-1").join(head.pieces), body)
        self._ended(now, keep=True)

    def _shape(self, status: int, reason: str, headers: Pairs) -> tuple[str, Shape]:
        """The value of Content-Length, if it has one, and how a head that differs in nothing but that is passed on."""
        order, length, marked = self._order, "", headers
        for at, (name, value) in enumerate(headers):
            if name.lower() == "content-length":
                length, marked = value, [*headers[:at], (name, _LENGTH), *headers[at + 1 :]]
        key = (status, reason, self._client.draining, order.dialect, marked)
        shape = self._pool.shape
        if shape is None or shape.key != key:
            pairs, events = self._path.decide.returned(order, self._replica, marked)
            shape = self._pool.shape = Shape(key, pairs, events)
        return length, shape

    def body(self, piece: bytes) -> None:
        assert self._meter is not None
        if self._frames is not None:
            self._frames.feed(piece)
        self._meter.feed(piece)
        self._order.trail.bytes_out += len(piece)
        self._answering.piece(piece)

    def flush(self) -> None:
        self._moved = self._path.loop.time()
        self._answering.flush()

    def complete(self) -> None:
        trail = self._order.trail
        if self._answering.status:
            trail.status, trail.code = self._answering.status, ""
        self._connection = None  # the pool's: a client that is slow with the end of this must not hold back the next answer
        self._answering.end()
        self._end(keep=True)

    def failed(self, error: Silent | Broken | Truncated) -> None:
        self._connection = None
        trail = self._order.trail
        if isinstance(error, Silent) and trail.retries == 0:
            self._path.decide.replayed(self._order)
            self._connect()
        elif isinstance(error, Truncated):
            self._cut(errors.broke_off(str(error)), blame=True)
        else:
            self._give_up(self._path.decide.broken(self._replica, str(error)))

    def overdue(self, now: float) -> None:
        """A deadline may have passed."""
        spec = self._order.spec
        if not self._answering.begun:
            self._give_up(self._path.decide.silent(self._order, self._replica))
            return
        total = spec.total_timeout_s
        if total is not None and now >= self._since + total:
            self._cut(errors.took_too_long(total), blame=False)
        elif now >= self._moved + spec.idle_body_timeout_s:
            if self._held_back:
                self._order.trail.code = "client_stalled"
                self._client.abort()
            else:
                self._cut(errors.stood_still(spec.idle_body_timeout_s), blame=True)
        else:
            self.deadline = self._due()

    def _due(self) -> float:
        """When a body that does not move again, or never ends, is overdue."""
        spec = self._order.spec
        due = self._moved + spec.idle_body_timeout_s
        return due if spec.total_timeout_s is None else min(due, self._since + spec.total_timeout_s)

    def shut_down(self) -> None:
        """The gateway ends before the answer does."""
        if self._answering.begun:
            self._cut(errors.unfinished(), blame=False)
        else:
            self._give_up(errors.unfinished())

    # ends

    def _connect(self) -> None:
        self._task = task = self._path.loop.create_task(self._connected())
        self._path.tasks.add(task)
        task.add_done_callback(self._path.tasks.discard)

    async def _connected(self) -> None:
        try:
            connection = await self._pool.connect()
        except Unreachable as error:
            self._task = None
            self._elsewhere(error)
            return
        self._task = None
        self._connection = connection
        if self._held_back:
            connection.hold_back()
        connection.send(self._request, self, self._order.trail.stream)

    def _elsewhere(self, error: Unreachable) -> None:
        """Not a byte was sent: back to the head of the queue, or to another replica."""
        self._path.passing.discard(self)
        self._path.decide.unreachable(self._replica, error)
        try:
            self._claim.again()
        except Refused as refused:
            self._path.passing.add(self)
            self._give_up(self._path.decide.refusal(refused, self._order))
        else:
            self._client.carry(self._order, self._claim)

    def _give_up(self, error: GatewayError) -> None:
        """No head has come, and none will."""
        trail = self._order.trail
        trail.status, trail.code = error.status, error.code
        self._answering.refuse(error)
        self._end(keep=False)

    def _cut(self, error: GatewayError, *, blame: bool) -> None:
        """The answer has begun and cannot be completed."""
        self._path.decide.cut_short(self._order, self._replica, error, blame=blame)
        events = self._frames is not None and self._frames.between
        self._answering.cut_off(self._order.dialect.late(error, self._order.head.id) if events else b"")
        self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        if self in self._path.passing:
            self._ended(self._path.loop.time(), keep=keep)

    def _ended(self, now: float, *, keep: bool) -> None:
        path, order = self._path, self._order
        path.passing.discard(self)
        if not keep:
            if self._task is not None:
                self._task.cancel()
            if self._connection is not None:
                self._connection.abandon()
        try:
            self._claim.leave()
            if self._meter is not None:
                path.decide.spent(order, self._meter.usage())
            path.decide.served(order, now - self._begun)
            path.decide.account(order.trail, now)
        finally:
            self._client.ended(now)


class Shape:
    """How a replica's head is passed on. Its heads differ in little but their length, and the client's in the request's id: what
    was written for one serves for all that are the same otherwise, and judging each anew is a tenth of a request's whole cost.

    Args:
        key: all that the rest follows from, within one incarnation.
    """

    __slots__ = ("_template", "chunked", "closing", "dialect", "events", "key", "meter")

    def __init__(self, key: tuple[int, str, bool, Dialect, Pairs], pairs: Pairs, events: bool) -> None:
        status, reason, self.closing, self.dialect, headers = self.key = key
        self.events = events
        kind = encoding = ""
        for name, value in headers:
            lower = name.lower()
            if lower == "content-type":
                kind = value
            elif lower == "content-encoding":
                encoding = value
        self.meter = maker(kind, encoding)
        ids = (_ID, *self.dialect.id_headers)
        marked = [(name, _MARK if name in ids else value) for name, value in pairs]
        plain = reason.replace(_MARK, "").replace(_LENGTH, "")
        self._template, self.chunked = written(status, plain, marked, closing=self.closing)

    def head(self, id: str, length: str) -> str:
        return self._template.replace(_LENGTH, length).replace(_MARK, id)

    def pieces(self, length: str) -> list[bytes]:
        """The head of this length as bytes, without the id between its pieces."""
        return self._template.replace(_LENGTH, length).encode("latin-1").split(_MARK.encode())


def _request(decide: Decisions, order: Order, replica: Replica, pool: Connections) -> bytes:
    """The request as bytes, body included. Heads that differ in nothing but id and length are written once."""
    frames, data = order.errand.frames, order.body.data
    assert data is not None
    frame = frames.get(pool.incarnation)
    if frame is not None:
        decide.sent(order, replica, pool.incarnation, frame.replica, frame.start)
    else:
        if len(frames) >= _MAX_FRAMES:
            frames.clear()
        outgoing = decide.outgoing(order, replica)
        before, after = _head(outgoing, pool.host, order.head.id, traced=order.trail.trace is not None)
        frame = frames[pool.incarnation] = Frame(before, after, replica)
    id, trace = order.head.id, order.trail.trace
    if trace is not None:
        id = f"{id}\r\n{_TRACE}: {trace.outward}"
    return b"%b%b%b%b\r\n\r\n%b" % (frame.before, id.encode(), frame.after, str(len(data)).encode(), data)


def _head(outgoing: Outgoing, host: str, id: str, *, traced: bool) -> tuple[bytes, bytes]:
    """The request's head before its id, and between that and the body's length. A trace of ours goes with the id."""
    lines = [f"POST {outgoing.path} HTTP/1.1\r\nHost: {host}"]
    headers = [pair for pair in outgoing.headers if not (traced and pair[0] == _TRACE)]
    lines += [f"{name}: {_MARK if name == _ID and value == id else value}" for name, value in headers]
    lines.append("Content-Length: ")
    before, after = "\r\n".join(lines).encode("latin-1").split(_MARK.encode())
    return before, after
