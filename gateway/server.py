"""The HTTP server as this gateway wants it: protocol, server, runner, and the one shape of everything that is answered.

The one module that knows how aiohttp serves. Knows no part of the gateway but its life: what is open, and whether it drains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

from aiohttp import http_exceptions, web
from aiohttp.http import SERVER_SOFTWARE

from gateway import dialects, envelope, errors, logs, routes
from gateway.downstream import REQUEST_ID, UNTYPED
from gateway.errors import GatewayError
from gateway.exchange import Reply
from gateway.life import Life

LIFE = web.AppKey("life", Life)
_CUT_S = 0.25
"""What is left after the drain gets this long, twice, before it is cut."""
_MAX_FIELD = 32 << 10
_SWITCHING = 101
HEAD_S = 30.0
"""From the first byte of a request's head to its last."""
_LINGER_S = 2.0
"""A client that still sends a body that was refused gets this long to read why."""


def response(answer: Reply) -> web.Response:
    """An answer in aiohttp's terms."""
    return web.Response(status=answer.status, body=answer.body, headers={"Content-Type": answer.content_type, **answer.headers})


@web.middleware
async def shape(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Counts open requests and turns every exception into its one shape."""
    life = request.app[LIFE]
    request[REQUEST_ID] = envelope.request_id(request.headers)
    life.opened()
    try:
        return await handler(request)
    except GatewayError as error:
        return _refused(request, error)
    except web.HTTPException as error:
        return _refused(request, _translated(request, error))
    except Exception as error:
        logs.error("bug", error, request_id=request[REQUEST_ID], path=request.path)
        if request.writer.output_size > 0:
            # A second status line in the middle of a body would be taken for content.
            raise ConnectionError("the response had begun") from error
        return _refused(request, GatewayError("The gateway failed; its log tells more under this request id."))
    finally:
        life.closed()


def _refused(request: web.Request, error: GatewayError) -> web.Response:
    """An error as its path's clients want it. What is still to come of the body is not read: the connection ends."""
    answer = response(dialects.of(request.path).render(error, request[REQUEST_ID]))
    if not request.content.at_eof():
        answer.force_close()
    return answer


def _translated(request: web.Request, error: web.HTTPException) -> GatewayError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = {"Allow": error.headers.get("Allow", "")}
        return errors.MethodNotAllowed(f"{request.method} is not possible on {request.path}.", headers=allowed)
    if isinstance(error, web.HTTPNotFound):
        return errors.NotFound(f"There is no path {request.path}.")
    return errors.InvalidRequest(f"{error.reason}.", "invalid_http")


def _broken(exc: BaseException | None, message: str) -> GatewayError:
    """What a client is told whose bytes are no HTTP; little of them is repeated."""
    if isinstance(exc, http_exceptions.LineTooLong) or "Too many headers" in message:
        return errors.HeadersTooLarge("The target, a header, or the number of headers is larger than is allowed.")
    said = " ".join(message.partition("\n\n")[0].split())
    return errors.InvalidRequest(f"This is not valid HTTP: {routes.shown(said).rstrip('.:')}.", "invalid_http")


async def finish_head(request: web.Request, answer: web.StreamResponse) -> None:
    """The last hand on every head."""
    answer.headers.setdefault("x-request-id", request.get(REQUEST_ID, ""))
    if answer.get(UNTYPED, False):
        answer.headers.popall("Content-Type", None)
    if answer.headers.get("Server") == SERVER_SOFTWARE:
        # A replica's own passes; ours is nobody's business.
        del answer.headers["Server"]
    if request.app[LIFE].draining and answer.status != _SWITCHING:
        answer.headers["Connection"] = "close"
        answer.force_close()


class Front(Protocol):
    """What sees a connection's bytes first."""

    @property
    def empty(self) -> asyncio.Event:
        """Set while it has no connection."""

    def __call__(self, behind: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """A protocol for a connection; it hands over what is not for it to one that ``behind`` makes."""


class _Protocol(web.RequestHandler):
    """Answers what is not HTTP in the same shape as everything else, and ends who sends a head too slowly."""

    __slots__ = ("_slow",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._slow: asyncio.TimerHandle | None = None
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        seen = self._request_count
        super().data_received(data)
        if self._request_count != seen:
            self._in_time()
        elif self._slow is None and self._between_requests():
            self._slow = asyncio.get_running_loop().call_later(HEAD_S, self._too_slow)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self._current_request is None and not self._messages

    def _in_time(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _too_slow(self) -> None:
        if self._between_requests() and self.transport is not None:
            answer = errors.render(errors.SlowRequest(f"The head of the request was not complete within {HEAD_S:g} s."))
            head = {**answer.headers, "Content-Type": answer.content_type, "Content-Length": str(len(answer.body))}
            lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
            self.transport.write(f"HTTP/1.1 408 Request Timeout\r\n{lines}Connection: close\r\n\r\n".encode() + answer.body)
            self.close()
            self.transport.close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response had begun")
        if status < 500:
            error = _broken(exc, message or str(exc))
        else:
            logs.error("bug", exc)
            error = GatewayError("The gateway failed.")
        answer = response(errors.render(error))
        answer.headers["x-request-id"] = envelope.request_id({})
        answer.force_close()
        return answer


class _Server(web.Server):
    """Makes our protocols."""

    def __init__(self, handler: Any, request_factory: Any, **options: Any) -> None:
        super().__init__(handler, request_factory=request_factory, handler_cancellation=True)
        self._options = options
        self.front: Front | None = None
        self.empty = asyncio.Event()
        self.empty.set()

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.empty.clear()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        if not self.connections:
            self.empty.set()

    def __call__(self) -> web.RequestHandler:
        """A protocol for a connection; typed as aiohttp's, although the fast path's comes first where there is one."""
        if self.front is not None:
            return cast(web.RequestHandler, self.front(self.behind))
        return self.behind()

    def behind(self) -> web.RequestHandler:
        """A protocol of aiohttp's, for what is not plain."""
        return _Protocol(self, loop=self._loop, **self._options)


class Runner(web.AppRunner):
    """Runs the application the only way that is right for it: a client that leaves cancels its handler."""

    def __init__(self, app: web.Application, front: Front | None = None) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=_CUT_S)
        self._front = front

    async def emptied(self, within_s: float) -> None:
        """Wait until no connection is left, or ``within_s`` seconds."""
        assert isinstance(self.server, _Server)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                if self._front is not None:
                    await self._front.empty.wait()
                await self.server.empty.wait()

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(
            made.request_handler,
            made.request_factory,
            access_log=None,
            auto_decompress=False,
            max_line_size=_MAX_FIELD,
            max_field_size=_MAX_FIELD,
            lingering_time=_LINGER_S,
        )
        server.front = self._front
        return server
