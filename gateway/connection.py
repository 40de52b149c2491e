"""One HTTP/1.1 connection to a replica, and the pool of them that one incarnation has: bytes and callbacks, no tasks.

The fast path's way to a replica. It tells exactly what a failed attempt may have caused, as :mod:`gateway.upstream` does for
all that awaits, and in the same words. Decides nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

import httptools

from gateway import whereabouts
from gateway.envelope import BODILESS, Pairs
from gateway.outbox import Outbox
from gateway.upstream import CONNECT_S, KEEP_IDLE_S, Broken, Silent, Truncated, Unreachable
from policies.replica import Replica

if TYPE_CHECKING:
    from gateway.passing import Passing, Shape

_MAX_HEAD: Final = 64 << 10
_MAX_KNOWN: Final = 256
"""Heads that an incarnation's answers are known by: they differ in their length, and with some engines in the time."""


class Whole:
    """The head of an answer of so many bytes, as it was parsed once. A replica repeats itself; an answer that comes whole, behind
    the very same head, needs no parser.

    Args:
        shape: how it is passed on, as far as that is known.
        pieces: the head as it is passed on, with the request's id between them; as far as the shape is known.
    """

    __slots__ = ("headers", "length", "pieces", "reason", "shape", "status")

    def __init__(self, status: int, reason: str, headers: Pairs, length: int) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.length = length
        self.shape: Shape | None = None
        self.pieces: list[bytes] = []


class Connection:
    """Serves one request at a time. Made by :class:`Connections`.

    What asyncio calls a protocol; it does not inherit from its class, since what is compiled cannot.
    """

    __slots__ = (
        "_cut",
        "_done",
        "_extra",
        "_head_size",
        "_headers",
        "_informed",
        "_keep",
        "_parser",
        "_pool",
        "_reason",
        "_received",
        "_sink",
        "_status",
        "idle_since",
        "reused",
        "transport",
    )

    def __init__(self, pool: Connections) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Passing | None = None
        self._headers: Pairs = []
        self._reason = b""
        self._status = 0
        self._head_size = 0
        self._received = self._informed = self._done = self._extra = False
        self._keep = self._cut = False
        self.transport: asyncio.Transport | None = None
        self.reused = False
        """It has served before."""
        self.idle_since = 0.0

    def send(self, request: bytes, sink: Passing, now: bool = False) -> None:
        """Send a whole request; ``sink`` gets the answer. ``now``: :meth:`gateway.outbox.Outbox.put`."""
        assert self.transport is not None
        self._sink = sink
        self._received = False
        self._pool.outbox.put(self.transport, request, now)

    def abandon(self) -> None:
        """The answer is not wanted any more: close at once and tell nobody."""
        self._sink = None
        self.close()

    def close(self) -> None:
        self._cut = True
        if self.transport is not None:
            self.transport.abort()

    def hold_back(self) -> None:
        """Read no more for now."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def go_on(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not registered as such
        self._pool.alive.add(self)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            # Nobody asked: whatever this is, it must not become the next answer's beginning.
            self.close()
            return
        head, blank, body = b"", b"", b""
        if not self._received:
            self._received = True
            head, blank, body = data.partition(b"\r\n\r\n")
            known = self._pool.known.get(head) if blank else None
            if known is not None and len(body) == known.length:
                self._sink = None
                self.reused = True
                self._pool.give_back(self)
                sink.whole(known, body)
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it switched to another protocol, unasked")
        except httptools.HttpParserError as error:
            if self._done:
                self._extra = True
                self._complete()
            else:
                self._fail(f"it is not valid HTTP: {error}")
        else:
            if self._done:
                if head and blank and self._keep and not self._extra:
                    self._learn(head, len(body))
                # Only now: whoever hears of it may send the next request, whose answer this read must not begin.
                self._complete()
            elif not self._informed:
                self._head_size += len(data)
                if self._head_size > _MAX_HEAD:
                    self._fail(f"its head is longer than {_MAX_HEAD} bytes")
            if self._sink is sink:
                sink.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        self.transport = None
        if self._sink is None:
            return
        if self._informed and exc is None and not self._cut and self._ends_with_connection():
            self._complete()
        else:
            self._fail(str(exc or "it closed the connection"))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """A request is small, and waits for nobody."""

    def resume_writing(self) -> None:
        """As above."""

    # the parser's side

    def on_message_begin(self) -> None:
        # A second answer was asked for by nobody: not a byte of it goes on, and the connection ends with the first.
        self._extra = self._done

    def on_status(self, reason: bytes) -> None:
        self._reason += reason  # it may come in pieces

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._informed:
            return  # a trailer, or of a second answer
        self._headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self._extra:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._headers, self._reason = [], b""
            return
        self._status = status
        self._informed = True
        if self._sink is not None:
            self._sink.head(status, self._reason.decode("latin-1"), self._headers)

    def on_body(self, piece: bytes) -> None:
        if self._sink is not None and not self._extra:
            self._sink.body(piece)

    def on_message_complete(self) -> None:
        if self._status == 0 or self._extra:
            return  # 100 Continue and its kind
        # Only here does the parser know.
        self._keep = self._parser.should_keep_alive()
        self._done = True

    def _learn(self, head: bytes, length: int) -> None:
        """This answer came in one piece: the next one with this head can be told by it."""
        known = self._pool.known
        sizes = [value for name, value in self._headers if name.lower() == "content-length"]
        if sizes != [str(length)] or self._status in BODILESS:
            return
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[head] = Whole(self._status, self._reason.decode("latin-1"), self._headers, length)

    def _complete(self) -> None:
        sink, self._sink = self._sink, None
        self._status = self._head_size = 0
        self._informed = self._done = False
        self._headers, self._reason = [], b""
        self.reused = True
        if self._extra or not self._keep:
            self.close()
        else:
            self._pool.give_back(self)
        self._keep = False
        if sink is not None:
            sink.complete()

    def _ends_with_connection(self) -> bool:
        names = {name.lower() for name, _ in self._headers}
        return not names & {"content-length", "transfer-encoding"}

    def _fail(self, reason: str) -> None:
        sink, self._sink = self._sink, None
        self.close()
        if sink is None:
            return
        if self._informed:
            sink.failed(Truncated(reason))
        elif self.reused and not self._received and not self._pool.ended:
            sink.failed(Silent(reason))
        else:
            sink.failed(Broken(reason))


class Connections:
    """The connections to one incarnation."""

    def __init__(self, replica: Replica, outbox: Outbox) -> None:
        self.outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._replica = replica
        self.incarnation = replica.incarnation
        self._idle: list[Connection] = []
        self.alive: set[Connection] = set()
        self.ended = False
        self.shape: Shape | None = None
        """How the last answer's head was passed on."""
        self.known: dict[bytes, Whole] = {}
        """Heads as they stand on the wire, without their last empty line."""
        self._way = whereabouts.way(replica)
        self.host = "" if self._way is None else whereabouts.netloc(self._way)

    def idle(self) -> Connection | None:
        """A connection that has served before and may be used again, or None."""
        oldest = self._loop.time() - KEEP_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        """A fresh connection.

        Raises:
            Unreachable: there is none to be had.
        """
        if self._way is None:
            raise Unreachable(whereabouts.barred(self._replica))
        sock = whereabouts.socket_for(self._way)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.sock_connect(sock, (self._way.address, self._way.port))
                made: tuple[object, object] = await self._loop.create_connection(
                    lambda: cast(asyncio.Protocol, Connection(self)), sock=sock
                )
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            raise Unreachable(str(error) or type(error).__name__) from error
        connection = cast(Connection, made[1])
        if self.ended:
            connection.close()
            raise Unreachable("the replica was stopped")
        if not connection.usable:
            raise Unreachable("it closed the connection at once")
        return connection

    def give_back(self, connection: Connection) -> None:
        """It has served; keep it for the next request."""
        if self.ended:
            connection.close()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        self.alive.discard(connection)

    def tidy(self) -> None:
        """Close what has been idle for too long."""
        oldest = self._loop.time() - KEEP_IDLE_S
        kept = [connection for connection in self._idle if connection.idle_since >= oldest and connection.usable]
        for connection in self._idle:
            if connection not in kept:
                connection.close()
        self._idle = kept

    def close(self) -> None:
        """Cut everything off: the incarnation has ended."""
        self.ended = True
        for connection in list(self.alive):
            connection.close()
