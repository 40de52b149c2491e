"""One answer on a client's connection, as bytes: head, framing, an end or a cut. The fast path's :class:`Downstream`.

Its synchronous half serves answers that pass without a task; the awaiting half is what :meth:`gateway.proxy.Proxy.go` asks
of any client's side.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from gateway import dialects
from gateway.downstream import ClientGone
from gateway.envelope import BODILESS, Pairs
from gateway.errors import GatewayError
from gateway.exchange import Head
from gateway.routes import Found
from gateway.websocket import Wire

if TYPE_CHECKING:
    from gateway.fastpath import FastProtocol


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def written(status: int, reason: str | None, headers: Pairs, *, closing: bool) -> tuple[str, bool]:
    """A head as it stands on the wire, and whether its body comes in chunks."""
    head, sized = f"HTTP/1.1 {status} {reason or ''}\r\n", False
    for name, value in headers:
        head += f"{name}: {value}\r\n"
        sized = sized or name.lower() == "content-length"
    chunked = not sized and status not in BODILESS
    if chunked:
        head += "Transfer-Encoding: chunked\r\n"
    if closing:
        head += "Connection: close\r\n"
    return f"{head}\r\n", chunked


_LINGER_S = 5.0
"""How long a client may take to read what was sent before the cut."""


class Answering:
    """Made when a request begins, dropped when it has ended."""

    __slots__ = (
        "_chunked",
        "_client",
        "_found",
        "_head",
        "_pending",
        "_resumed",
        "begun",
        "status",
        "version",
        "watched",
    )

    def __init__(self, client: FastProtocol, head: Head, found: Found) -> None:
        self._client = client
        self._head = head
        self._found = found
        self._chunked = False
        self._pending: list[bytes] = []
        self._resumed: asyncio.Future[None] | None = None
        self.begun = False
        self.status = 0
        self.version = (1, 1)
        self.watched = False
        """Somebody waits for its first words, which must not wait for other connections'."""

    # without a task

    def begin(self, status: int, reason: str | None, headers: Pairs) -> None:
        """The head; it leaves with the next :meth:`flush`."""
        head, chunked = written(status, reason, headers, closing=self._client.draining)
        self.begin_with(status, head, chunked=chunked)

    def begin_with(self, status: int, head: str, *, chunked: bool) -> None:
        """The head, as :func:`written` writes it."""
        self.begun, self.status, self._chunked = True, status, chunked
        self._pending.append(head.encode("latin-1"))

    def piece(self, data: bytes) -> None:
        """A piece of the body; it leaves with the next :meth:`flush`."""
        if not data:
            return  # as a chunk it would be the end
        if self._chunked:
            self._pending += (b"%x\r\n" % len(data), data, b"\r\n")
        else:
            self._pending.append(data)

    def whole(self, status: int, head: bytes, body: bytes) -> None:
        """Head and body at once, the body as long as the head says."""
        self.begun, self.status = True, status
        if self._client.transport is not None:
            self._client.outbox.put(self._client.transport, head + body)

    def flush(self) -> None:
        """Send what there is, in one write, with those of others."""
        pending = self._pending
        if pending and self._client.transport is not None:
            data = pending[0] if len(pending) == 1 else b"".join(pending)
            self._client.outbox.put(self._client.transport, data, self.watched)
            self.watched = False
        self._pending = []

    def end(self) -> None:
        """The body is complete."""
        if self._chunked:
            self._pending.append(b"0\r\n\r\n")
        self.flush()

    def refuse(self, error: GatewayError) -> None:
        """Answer with an error; nothing was sent before."""
        reply = dialects.of(self._found.path).render(error, self._head.id)
        headers = [("Content-Type", reply.content_type), *reply.headers.items(), ("Content-Length", str(len(reply.body)))]
        if not any(name.lower() == "x-request-id" for name, _ in headers):
            headers.append(("x-request-id", self._head.id))
        self.begin(reply.status, _reason(reply.status), headers)
        self._pending.append(reply.body)
        self.flush()

    def cut_off(self, frame: bytes = b"") -> None:
        """End the connection so that nobody takes the body for complete."""
        transport = self._client.transport
        if transport is None or transport.is_closing():
            return
        self.flush()
        self._client.outbox.send()
        if frame and transport.get_write_buffer_size() == 0:
            self.piece(frame)
            self.flush()
            self._client.outbox.send()
        transport.close()
        asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)

    # for whoever awaits

    async def proceed(self) -> None:
        """A plain request's client waits for nothing."""

    async def head(self, status: int, reason: str | None, headers: Pairs) -> None:
        self.begin(status, reason, headers)
        await self._sent()

    async def write(self, data: bytes) -> None:
        self.piece(data)
        await self._sent()

    async def finish(self) -> None:
        self.end()

    async def cut(self, frame: bytes = b"") -> None:
        self.cut_off(frame)

    def abort(self) -> None:
        self._client.abort()

    def wire(self) -> Wire:
        raise NotImplementedError("a plain request asks for no other protocol")

    async def _sent(self) -> None:
        if self._client.transport is None:
            raise ClientGone
        self.flush()
        self._client.outbox.send()  # so that it is known whether the client keeps up
        if self._resumed is not None:
            await self._resumed

    # the connection's news

    def pause(self) -> None:
        """The client does not take what was sent."""
        if self._resumed is None:
            self._resumed = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None and not resumed.done():
            resumed.set_result(None)

    def lost(self) -> None:
        """The connection has ended."""
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_exception(ClientGone())
            self._resumed.exception()  # perhaps nobody waits, which is no error
