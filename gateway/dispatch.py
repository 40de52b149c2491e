"""From a request that the server has accepted to whoever answers it: a replica, or one of the gateway's own handlers.

What comes before every answer stands here in its order: the route, a preflight, the key. One of the few modules that know
aiohttp's server; decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl

from aiohttp import web

from gateway import cors, routes, server
from gateway.admin import MAX_BODY_BYTES
from gateway.current import Current
from gateway.downstream import AiohttpSource
from gateway.exchange import Call
from gateway.intake import Intake
from gateway.life import Handler
from gateway.routes import Found
from gateway.tenants import Tenants

Passer = Callable[[web.Request, Found], Awaitable[web.StreamResponse]]
"""Passes a request on to a replica; raises GatewayError while nothing has been sent."""


class Dispatch:
    """The one handler of the server's one route.

    Args:
        own: for each :attr:`gateway.routes.Route.serves` that is the gateway's own, who answers it.
    """

    def __init__(self, current: Current, *, tenants: Tenants, intake: Intake, own: Mapping[str, Handler], passer: Passer) -> None:
        self._current = current
        self._tenants = tenants
        self._intake = intake
        self._own = own
        self._passer = passer

    def attach(self, app: web.Application) -> None:
        """Take all of the application's requests."""
        app.router.add_route("*", "/{tail:.*}", self.handle, expect_handler=_later)
        app.on_response_prepare.append(self._grant)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises:
        GatewayError: there is no such route, no permission, or no answer.
        """
        found = routes.find(request.method, request.raw_path)
        if found.preflight:
            return server.response(cors.options(self._current.config.gateway.cors, found, request.headers))
        if found.route.serves in ("replica", "socket"):
            return await self._passer(request, found)
        tenant = self._tenants.authenticate(request.headers) if found.route.auth == "tenant" else ""
        return server.response(await self._own[found.route.serves](await self._call(request, found, tenant)))

    async def _call(self, request: web.Request, found: Found, tenant: str) -> Call:
        """A plain request, its small body read."""
        source = AiohttpSource(request)
        body = await self._intake.read_small(found, request.headers, source, source.proceed, MAX_BODY_BYTES)
        query = dict(parse_qsl(found.query, keep_blank_values=True))
        return Call(request.headers.get("Authorization"), found.params, query, body, tenant)

    async def _grant(self, request: web.Request, response: web.StreamResponse) -> None:
        for name, value in cors.granted(self._current.config.gateway.cors, request.headers.get("Origin")):
            if name == "Vary":
                response.headers.add(name, value)
            else:
                response.headers[name] = value


async def _later(request: web.Request) -> None:
    """What a client expects is looked at when its body is wanted, or refused with it unsent."""
