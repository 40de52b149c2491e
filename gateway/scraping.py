"""The address of its own that metrics may have: one path by plain HTTP, for whoever scrapes, away from clients.

Knows how to serve it, not what it shows.
"""

from __future__ import annotations

import socket

from aiohttp import web

from gateway import errors, server
from gateway.errors import GatewayError
from gateway.exchange import Call
from gateway.life import Handler

_CUT_S = 0.25
_BACKLOG = 16


class Scraping:
    """Serves ``/metrics`` on one socket from :meth:`start` to :meth:`stop`.

    Args:
        show: answers a scrape.
    """

    def __init__(self, show: Handler) -> None:
        self._show = show
        app = web.Application()
        app.router.add_get("/metrics", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CUT_S)

    async def start(self, listener: socket.socket) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=_BACKLOG).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            head = request.headers
            answer = await self._show(Call(head.get("Authorization"), {}, {}, b"", "", accept=head.get("Accept", "")))
        except GatewayError as error:
            answer = errors.render(error)
        return server.response(answer)
