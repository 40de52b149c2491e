"""The client's side of a request: a head, a body in pieces, and one of two ends, a proper one or a cut.

:class:`Downstream` is all that the data path asks of a client's connection; here it is made of aiohttp's request. A body
that was cut never looks complete: its connection ends without the mark of a proper end. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import web

from gateway.envelope import Pairs
from gateway.exchange import Head
from gateway.intake import Source, Unframed
from gateway.routes import Found
from gateway.websocket import Wire

REQUEST_ID = web.RequestKey("request_id", str)
UNTYPED = web.ResponseKey("untyped", bool)
"""The replica did not say what its answer is, and neither does the gateway."""
_LINGER_S = 5.0
"""How long a client may take to read what was sent before the cut."""


class ClientGone(Exception):
    """The client's connection has ended: nothing more can be sent."""


class Downstream(Protocol):
    """One client that waits for one answer. What it sends last is a :meth:`finish` or a :meth:`cut`."""

    @property
    def begun(self) -> bool:
        """A head was sent: no status can be told any more."""

    @property
    def version(self) -> tuple[int, int]:
        """HTTP's, of the request."""

    async def proceed(self) -> None:
        """Tell a client that waits for it to send its body."""

    async def head(self, status: int, reason: str | None, headers: Pairs) -> None:
        """Send the head of the answer. Raises ClientGone."""

    async def write(self, data: bytes) -> None:
        """Send a piece of the body at once; waits while the client does not take it. Raises ClientGone."""

    async def finish(self) -> None:
        """End the body properly. Raises ClientGone."""

    async def cut(self, frame: bytes = b"") -> None:
        """Send ``frame`` if that needs no waiting, and end the connection so that nobody takes the body for complete."""

    def abort(self) -> None:
        """Drop the connection, whatever was still to be sent."""

    def wire(self) -> Wire:
        """The raw connection, after a head of status 101."""


class AiohttpDownstream:
    """A request that aiohttp's server has accepted. Its handler returns :attr:`response` when all has been sent."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self.response is not None

    @property
    def version(self) -> tuple[int, int]:
        return self._request.version.major, self._request.version.minor

    async def proceed(self) -> None:
        await AiohttpSource(self._request).proceed()

    async def head(self, status: int, reason: str | None, headers: Pairs) -> None:
        self.response = web.StreamResponse(status=status, reason=reason, headers=headers)
        self.response[UNTYPED] = not any(name.lower() == "content-type" for name, _ in headers)
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        try:
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone from error

    async def finish(self) -> None:
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error

    async def cut(self, frame: bytes = b"") -> None:
        transport, response = self._request.transport, self.response
        assert response is not None
        if transport is None or transport.is_closing():
            return
        if frame and transport.get_write_buffer_size() == 0:
            with contextlib.suppress(ConnectionError):
                await response.write(frame)
        if self.version < (1, 1) and response.content_length is None:
            # Such a body ends with the connection: only a reset tells the client that this is not the end.
            connection: socket.socket = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
            return
        transport.close()
        asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)

    def abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    def wire(self) -> Wire:
        assert self.response is not None
        self.response.force_close()
        return Wire(self._request.protocol)


async def serve(
    request: web.Request, found: Found, handle: Callable[[Head, Found, Source, Downstream], Awaitable[None]]
) -> web.StreamResponse:
    """Let ``handle`` answer a request, and tell aiohttp what was sent."""
    down = AiohttpDownstream(request)
    await handle(head_of(request), found, AiohttpSource(request), down)
    # Without an answer the client has gone; whatever is returned finds a closed connection.
    return down.response if down.response is not None else web.Response(status=499)


class AiohttpSource:
    """The body of a request that aiohttp's server has accepted, for :class:`gateway.intake.Intake`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request

    async def readany(self) -> bytes:
        try:
            return await self._request.content.readany()
        except web.RequestPayloadError as error:
            raise Unframed(str(error)) from error

    async def proceed(self) -> None:
        """Tell a client that waits for it to send its body."""
        if self._request.version >= (1, 1):
            await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # It is no part of the answer: that has not begun.
            self._request.writer.output_size = 0


def head_of(request: web.Request) -> Head:
    """The head of a request that has just arrived."""
    return Head(
        method=request.method,
        target=request.rel_url.raw_path_qs,
        headers=request.headers,
        id=request[REQUEST_ID],
        received=asyncio.get_running_loop().time(),
        peer=request.remote,
        scheme=request.scheme,
        host=request.host,
        version=(request.version.major, request.version.minor),
    )
