"""Connections to replicas: one pool per incarnation, and exact knowledge of what a failed attempt may have caused.

The one module that knows the HTTP client. A pool ends with its incarnation, and its connections with it, so no byte
meant for one incarnation can reach the next one at the same address. Decides nothing: it says what happened.
"""

from __future__ import annotations

import asyncio
import functools
import io
from collections.abc import AsyncIterator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp
from yarl import URL

from gateway import whereabouts
from gateway.envelope import Pairs
from gateway.websocket import Wire
from policies.replica import Replica

CONNECT_S = 2.0
"""A replica is one hop away: one that takes longer to accept is unreachable."""
KEEP_IDLE_S: Final = 3.5
"""Connections idle for longer are not used again; uvicorn, the commonest server of engines, closes them after 5 s."""
_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_MAX_LINE = 64 << 10
_LARGE_BODY = 1 << 20


class Unreachable(Exception):
    """No connection: not a byte of the request was sent."""


class Silent(Exception):
    """A connection that had served before ended without one byte of answer: it was most likely closed for being idle."""


class Broken(Exception):
    """The connection failed after the request may have reached the replica."""


class Truncated(Exception):
    """The answer's body ended before it was complete."""


class Payload(Protocol):
    """A request's body, in memory or not; it can be read again."""

    @property
    def size(self) -> int: ...

    @property
    def data(self) -> bytes | None:
        """None: it lies elsewhere, and comes in pieces."""

    def pieces(self) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request as the replica shall get it."""

    path: str
    """Path and query, as they shall stand on the request line."""
    headers: Pairs
    body: Payload
    method: str = "POST"
    upgrade: bool = False
    """It asks for another protocol, so it goes out on a connection of its own."""


class _Protocol(aiohttp.client_proto.ResponseHandler):
    """Counts what it receives, and can be cut off from outside."""

    def __init__(self, loop: asyncio.AbstractEventLoop, alive: set[_Protocol]) -> None:
        super().__init__(loop)
        self._alive = alive
        self.received = 0
        self.requests = 0
        self.cut = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._alive.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._alive.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        super().data_received(data)

    def cut_off(self) -> None:
        """Close at once. The transport is aborted, not the protocol: so whoever reads gets an error, not silence."""
        self.cut = True
        if self.transport is not None:
            self.transport.abort()


@dataclass(slots=True)
class _Attempt:
    """Which connection a request went out on."""

    protocol: _Protocol | None = None
    received_before: int = 0

    @property
    def silent_reuse(self) -> bool:
        protocol = self.protocol
        return protocol is not None and protocol.requests > 1 and protocol.received == self.received_before


_ATTEMPT: ContextVar[_Attempt] = ContextVar("attempt")


class _Connector(aiohttp.TCPConnector):
    """Tells the attempt in whose context it connects which connection that became."""

    def __init__(self, alive: set[_Protocol], **options: Any) -> None:
        super().__init__(limit=0, **options)
        self._factory = functools.partial(_Protocol, self._loop, alive)  # type: ignore[assignment]

    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        connection = await super().connect(*args, **kwargs)
        attempt, protocol = _ATTEMPT.get(), connection.protocol
        assert isinstance(protocol, _Protocol)
        protocol.requests += 1
        attempt.protocol, attempt.received_before = protocol, protocol.received
        return connection


class Answer:
    """A response whose head has arrived. The owner reads it to the end or closes it."""

    def __init__(self, response: aiohttp.ClientResponse, protocol: _Protocol | None) -> None:
        self._response = response
        self._protocol = protocol
        self.status = response.status
        self.reason = response.reason
        self.content_type = response.headers.get("Content-Type", "")
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        self.encoding = "" if encoding == "identity" else encoding
        """How the body is compressed; empty: not at all."""

    @property
    def headers(self) -> Iterable[tuple[str, str]]:
        return self._response.headers.items()

    async def read(self) -> bytes:
        """The next bytes as they come; empty at the end.

        Raises:
            Truncated: the replica, or its pool, went away before the end.
        """
        try:
            chunk = await self._response.content.readany()
        except (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, OSError) as error:
            raise Truncated(_reason(error)) from error
        if not chunk and self._protocol is not None and self._protocol.cut:
            raise Truncated("its connection was cut off")
        return chunk

    def wire(self) -> Wire:
        """The raw connection, after a status of 101."""
        return Wire(self._protocol, None)

    def abort(self) -> None:
        """End the connection at once; whoever reads gets Truncated."""
        if self._protocol is not None:
            self._protocol.cut_off()

    def close(self) -> None:
        """Close the connection, unless the body has been read to its end."""
        self._response.close()


class Pool:
    """Connections to one incarnation. Needs a running event loop.

    Raises:
        Unreachable: nothing leads there from here.
    """

    def __init__(self, replica: Replica) -> None:
        way = whereabouts.way(replica)
        if way is None:
            raise Unreachable(whereabouts.barred(replica))
        self._base = f"http://{whereabouts.netloc(way)}"
        self._way = way
        self._alive: set[_Protocol] = set()
        self._kept = self._session(keepalive_timeout=KEEP_IDLE_S)
        self._single = self._session(force_close=True)

    async def send(self, outgoing: Outgoing, *, fresh: bool = False) -> Answer:
        """Send a request and wait for the answer's head; ``fresh``: on a new connection, whatever the pool holds.

        Raises:
            Unreachable: nothing was sent.
            Silent: sent on a connection that had served before and ended without a byte. Never with ``fresh``.
            Broken: anything else; the replica may have worked on it.
        """
        attempt = _Attempt()
        token = _ATTEMPT.set(attempt)
        data, headers = _sendable(outgoing)
        try:
            response = await (self._single if fresh or outgoing.upgrade else self._kept).request(
                outgoing.method,
                URL(self._base + outgoing.path, encoded=True),
                data=data,
                headers=headers,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(_reason(error)) from error
        except (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, OSError) as error:
            if attempt.protocol is None:
                raise Unreachable(_reason(error)) from error
            if attempt.silent_reuse and not attempt.protocol.cut:
                raise Silent(_reason(error)) from error
            raise Broken(_reason(error)) from error
        finally:
            _ATTEMPT.reset(token)
        return Answer(response, attempt.protocol)

    async def close(self) -> None:
        """Cut everything off, answers that are still being read included."""
        lost = [closed for protocol in self._alive if (closed := protocol.closed) is not None]
        for protocol in list(self._alive):
            protocol.cut_off()
        # The connector forgets who reads from a connection: whoever does must have heard of its end before.
        await asyncio.gather(*lost, return_exceptions=True)
        await self._kept.close()
        await self._single.close()

    def _session(self, **options: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=_Connector(self._alive, socket_factory=lambda _: whereabouts.socket_for(self._way), **options),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=_AUTO_HEADERS,
            max_line_size=_MAX_LINE,
            max_field_size=_MAX_LINE,
        )


class Upstreams:
    """The pools of this process, by incarnation."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._live: frozenset[str] | None = None
        """Incarnations that have not ended, as far as it was said."""
        self._closing: set[asyncio.Task[None]] = set()

    def pool(self, replica: Replica) -> Pool:
        """Raises Unreachable: the incarnation has ended, at its address there may be another by now; or nothing leads there."""
        if self._live is not None and replica.incarnation not in self._live:
            raise Unreachable("the replica was stopped")
        if replica.incarnation not in self._pools:
            self._pools[replica.incarnation] = Pool(replica)
        return self._pools[replica.incarnation]

    def retain(self, incarnations: frozenset[str]) -> None:
        """Close the pools of all others: their engines are gone."""
        self._live = incarnations
        for incarnation in self._pools.keys() - incarnations:
            task = asyncio.ensure_future(self._pools.pop(incarnation).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self.retain(frozenset())
        await asyncio.gather(*self._closing)


def _sendable(outgoing: Outgoing) -> tuple[Any, Pairs]:
    """The body as the HTTP client takes it, always with its length: engines' servers need not know chunked requests."""
    body, headers = outgoing.body, outgoing.headers
    if body.data is None:
        return body.pieces(), [*headers, ("Content-Length", str(body.size))]
    if not body.data and outgoing.method in ("GET", "HEAD", "DELETE"):
        return None, headers
    return (io.BytesIO(body.data) if body.size > _LARGE_BODY else body.data), headers


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
