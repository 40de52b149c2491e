"""From a request that the server has accepted to whoever answers it: a replica, or one of the gateway's own handlers.

What comes before every answer stands here in its order: the route, a preflight, the key. One of the few modules that know
aiohttp's server; decides nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl

from aiohttp import web

from gateway import access, cors, routes, server
from gateway.admin import MAX_BODY_BYTES
from gateway.client import Clients
from gateway.current import Current
from gateway.downstream import REQUEST_ID, AiohttpSource
from gateway.errors import GatewayError
from gateway.exchange import Call, Reply
from gateway.intake import Intake
from gateway.life import Handler
from gateway.metrics import OTHER
from gateway.routes import Found
from gateway.tenants import Tenants
from gateway.trail import Trail

Passer = Callable[[web.Request, Found], Awaitable[web.StreamResponse]]
"""Passes a request on to a replica; raises GatewayError while nothing has been sent."""

_PROBES = ("/health", "/ready", "/metrics", "/admin/v1/overview")
"""Asked every few seconds for as long as the process lives, or somebody looks: not worth a line each."""
_LONGEST_METHOD = 16


class Dispatch:
    """The one handler of the server's one route.

    Args:
        own: for each :attr:`gateway.routes.Route.serves` that is the gateway's own, who answers it.
    """

    def __init__(
        self,
        current: Current,
        *,
        tenants: Tenants,
        clients: Clients,
        log: access.Log,
        intake: Intake,
        own: Mapping[str, Handler],
        passer: Passer,
    ) -> None:
        self._current = current
        self._tenants = tenants
        self._clients = clients
        self._log = log
        self._intake = intake
        self._own = own
        self._passer = passer

    def attach(self, app: web.Application) -> None:
        """Take all of the application's requests, those included whose target is no path."""
        app.router.add_route("*", "/{tail:.*}", self.handle, expect_handler=_later)
        app.middlewares.append(self._instead)
        app.on_response_prepare.append(self._grant)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises:
        GatewayError: there is no such route, no permission, or no answer.
        """
        trail = Trail(request[REQUEST_ID], OTHER, asyncio.get_running_loop().time(), method=request.method[:_LONGEST_METHOD])
        passed = False
        try:
            found = routes.find(request.method, request.raw_path)
            trail.route, passed = found.route.name, found.route.serves in ("replica", "socket") and not found.preflight
            if passed:
                return await self._passer(request, found)
            answer = await self._answer(request, found, trail)
            trail.status, trail.code = answer.status, ""
            return server.response(answer)
        except GatewayError as error:
            trail.status, trail.code = error.status, error.code
            raise
        except Exception:
            trail.status, trail.code = GatewayError.status, GatewayError.code
            raise
        finally:
            if not passed and trail.route not in _PROBES:
                self._note(request, trail)

    async def _answer(self, request: web.Request, found: Found, trail: Trail) -> Reply:
        if found.preflight:
            return cors.options(self._current.config.gateway.cors, found, request.headers)
        if found.route.auth == "tenant":
            trail.tenant = self._tenants.authenticate(request.headers)
        return await self._own[found.route.serves](await self._call(request, found, trail.tenant))

    def _note(self, request: web.Request, trail: Trail) -> None:
        """The line of the access log; what is passed on has one by the proxy."""
        trail.client = self._clients.origin(request.remote, request.scheme, request.headers).address
        trail.seconds = asyncio.get_running_loop().time() - trail.since
        self._log.write((trail,))

    async def _call(self, request: web.Request, found: Found, tenant: str) -> Call:
        """A plain request, its small body read."""
        source = AiohttpSource(request)
        body = await self._intake.read_small(found, request.headers, source, source.proceed, MAX_BODY_BYTES)
        query = dict(parse_qsl(found.query, keep_blank_values=True))
        head = request.headers
        more = {"accept": head.get("Accept", ""), "if_none_match": head.get("If-None-Match", "")}
        return Call(head.get("Authorization"), found.params, query, body, tenant, **more)

    @web.middleware
    async def _instead(self, request: web.Request, handler: object) -> web.StreamResponse:
        return await self.handle(request)

    async def _grant(self, request: web.Request, response: web.StreamResponse) -> None:
        for name, value in cors.granted(self._current.config.gateway.cors, request.headers.get("Origin")):
            if name == "Vary":
                response.headers.add(name, value)
            else:
                response.headers[name] = value


async def _later(request: web.Request) -> None:
    """What a client expects is looked at when its body is wanted, or refused with it unsent."""
