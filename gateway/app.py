"""The composition root: makes every part, ties them together, gives each its route and its time to live.

The only module that knows all others. What a part does is not written here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway import envelope, errors, logs
from gateway.admin import MAX_BODY_BYTES, Admin
from gateway.capacity import Slices
from gateway.current import Current
from gateway.errors import GatewayError
from gateway.eta import Eta
from gateway.exchange import Call, Reply, reply
from gateway.ledger import Ledger
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.operations import Operations
from gateway.proxy import REQUEST_ID, Proxy
from gateway.registry import Registry
from gateway.report import Reporter
from gateway.scaling import Scaler
from gateway.settings import Settings
from gateway.store import Store
from gateway.upstream import Upstreams
from gateway.waitroom import Waitroom
from policies.replica import State

INFERENCE = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_PERIOD_S = 1.0
_END_S = 5.0
_CUT_S = 0.25
"""What is left after the drain gets this long, twice, before it is cut."""
_MAX_FIELD = 32 << 10


@dataclass(slots=True)
class Gateway:
    """The parts of one process that more than one route, or a test, looks at."""

    settings: Settings
    current: Current
    store: Store
    ledger: Ledger
    registry: Registry
    link: Link
    reporter: Reporter
    operations: Operations
    scaler: Scaler
    waitroom: Waitroom
    upstreams: Upstreams
    metrics: Metrics
    proxy: Proxy
    admin: Admin
    models: Models
    crashed: asyncio.Event
    """Set when a part that must live as long as the process has died."""
    idle: asyncio.Event
    """Set while no request is being answered."""
    open: int = 0
    """Requests being answered."""

    def opened(self) -> None:
        self.open += 1
        self.idle.clear()

    def closed(self) -> None:
        self.open -= 1
        if not self.open:
            self.idle.set()

    def drain(self) -> None:
        """Not ready any more; waiters are refused; open responses go on and close their connections."""
        self.reporter.draining = True
        self.waitroom.drain()
        self.reporter.kick()

    async def quiet(self, within_s: float) -> bool:
        """Wait until no request is open; False when ``within_s`` seconds were not enough."""
        try:
            async with asyncio.timeout(within_s):
                await self.idle.wait()
        except TimeoutError:
            return False
        return True

    async def health(self, call: Call) -> Reply:
        """The process is alive, and so are all its parts."""
        if self.crashed.is_set():
            raise GatewayError("A part of the gateway has died; see its log.")
        return reply({"status": "ok"})

    async def ready(self, call: Call) -> Reply:
        """New requests may be sent here."""
        if self.reporter.draining:
            raise errors.ShuttingDown("This gateway is shutting down.", retry_after_s=1.0)
        if not self.link.connected.is_set():
            raise errors.StoreUnavailable("The store is not reached.", retry_after_s=1.0)
        return reply({"status": "ready"})

    async def scrape(self, call: Call) -> Reply:
        self._observe()
        return self.metrics.expose()

    def _observe(self) -> None:
        loads = self.ledger.loads()
        slots = {replica.id: self.ledger.inflight(replica.incarnation) for replica in self.registry.replicas()}
        self.metrics.observe(loads, {model: self.ledger.held_bytes(model) for model in loads}, slots)
        self.metrics.store_connected.set(self.link.connected.is_set())

    async def keep_gauges(self) -> None:
        """Other workers answer scrapes for this one: what they show is at most a second old."""
        arrivals: dict[str, int] = {}
        while True:
            self._observe()
            for model, load in self.ledger.loads().items():
                if load.arrivals != arrivals.get(model, 0) or load.held or load.inflight:
                    arrivals[model] = load.arrivals
                    expiry = time.time() + self.current.config.models[model].idle_park_s
                    self.metrics.session_expires.labels(model).set(expiry)
                elif not self.registry.count(model, {State.ADMITTED}):
                    self.metrics.session_expires.labels(model).set(0)
            await asyncio.sleep(_PERIOD_S)


GATEWAY = web.AppKey("gateway", Gateway)


def compose(settings: Settings, metrics: Metrics) -> Gateway:
    """Make the parts and connect them. Needs a running event loop; nothing is started."""
    loop = asyncio.get_running_loop()
    current, config = Current(settings.config), settings.config
    models = list(config.models)
    store = Store(settings.store_url, config.store.namespace)
    ledger, registry, eta, upstreams = Ledger(models, loop.time), Registry(models), Eta(), Upstreams()
    link = Link(store, registry, models)
    operations = Operations(store, link)
    reporter = Reporter(settings.id, store=store, ledger=ledger, registry=registry)
    scaler = Scaler(current, registry=registry, reporter=reporter, operations=operations)
    waitroom = Waitroom(current, fleet=registry, capacity=Slices(lambda: reporter.gateways), ledger=ledger)
    proxy = Proxy(current, ledger=ledger, registry=registry, waitroom=waitroom, upstreams=upstreams, eta=eta, metrics=metrics)
    admin = Admin(current, settings.admin_token, store=store, registry=registry, reporter=reporter, operations=operations)

    def edge(model: str) -> None:
        reporter.kick()
        scaler.poke(model)

    def fleet_changed(model: str) -> None:
        waitroom.pump(model)
        upstreams.retain(registry.incarnations())
        edge(model)

    def peers_changed() -> None:
        for model in models:
            waitroom.pump(model)

    ledger.on_edge = edge
    registry.on_change.append(fleet_changed)
    registry.on_record += [metrics.record, lambda before, after: eta.learn(after)]
    reporter.on_peers = peers_changed
    scaler.on_trigger = lambda model, outcome: metrics.scale_up_triggers.labels(
        model, "false" if outcome.created else "true"
    ).inc()
    idle = asyncio.Event()
    idle.set()
    return Gateway(
        settings,
        current,
        store,
        ledger,
        registry,
        link,
        reporter,
        operations,
        scaler,
        waitroom,
        upstreams,
        metrics,
        proxy,
        admin,
        Models(current, registry),
        asyncio.Event(),
        idle,
    )


def build(settings: Settings, metrics: Metrics) -> web.Application:
    """The application with all routes; its parts live from startup to cleanup. Needs a running event loop."""
    gateway = compose(settings, metrics)
    app = web.Application(middlewares=[_shape], client_max_size=settings.config.gateway.max_body_bytes)
    app[GATEWAY] = gateway
    app.on_response_prepare.append(_finish_head)
    app.cleanup_ctx.append(_life)
    for path in INFERENCE:
        app.router.add_post(path, gateway.proxy.handle)
    admin, models = gateway.admin, gateway.models
    for method, path, handler in (
        ("GET", "/health", gateway.health),
        ("GET", "/ready", gateway.ready),
        ("GET", "/metrics", gateway.scrape),
        ("GET", "/v1/models", models.list),
        ("GET", "/v1/models/{name:.+}", models.get),
        ("GET", "/admin/v1/models", admin.models),
        ("GET", "/admin/v1/replicas", admin.replicas),
        ("GET", "/admin/v1/snapshots", admin.snapshots),
        ("POST", "/admin/v1/snapshots", admin.create_snapshot),
        ("POST", "/admin/v1/scale-up", admin.scale_up),
        ("POST", "/admin/v1/scale-down", admin.scale_down),
        ("POST", "/admin/v1/drain", admin.drain),
        ("GET", "/admin/v1/operations/{id}", admin.operation),
    ):
        add = app.router.add_get if method == "GET" else app.router.add_post
        add(path, _plain(handler))
    return app


async def _life(app: web.Application) -> AsyncIterator[None]:
    """Start the parts that live as long as the process; at the end take the report back, then let go of the store."""
    gateway = app[GATEWAY]
    jobs = (gateway.link.run(), gateway.reporter.run(), gateway.scaler.run(), gateway.keep_gauges())
    tasks = [asyncio.create_task(job) for job in jobs]

    ending = False

    def ended(task: asyncio.Task[None]) -> None:
        if not ending:
            logs.error("a part of the gateway has died", None if task.cancelled() else task.exception())
            gateway.crashed.set()

    for task in tasks:
        task.add_done_callback(ended)
    yield
    ending = True
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=_END_S)
    await gateway.upstreams.close()
    await gateway.reporter.leave()
    gateway.registry.close()
    await gateway.store.close()


def _plain(handler: Callable[[Call], Awaitable[Reply]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A route for a handler that knows no web framework."""

    async def route(request: web.Request) -> web.Response:
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise errors.RequestTooLarge(f"The request body is larger than {MAX_BODY_BYTES} bytes.")
        body = await request.content.read(MAX_BODY_BYTES) if request.can_read_body else b""
        call = Call(request.headers.get("Authorization"), dict(request.match_info), dict(request.query), body)
        return _response(await handler(call))

    return route


def _response(answer: Reply) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers={"Content-Type": answer.content_type, **answer.headers})


@web.middleware
async def _shape(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Counts open requests and turns every exception into its one shape."""
    gateway = request.app[GATEWAY]
    request[REQUEST_ID] = envelope.request_id(request.headers)
    gateway.opened()
    try:
        return await handler(request)
    except GatewayError as error:
        return _response(errors.render(error))
    except web.HTTPException as error:
        return _response(errors.render(_translated(request, error)))
    except Exception as error:
        logs.error("bug", error, request_id=request[REQUEST_ID], path=request.path)
        if request.writer.output_size > 0:
            # A second status line in the middle of a body would be taken for content.
            raise ConnectionError("the response had begun") from error
        return _response(errors.render(GatewayError("The gateway failed; its log tells more under this request id.")))
    finally:
        gateway.closed()


def _translated(request: web.Request, error: web.HTTPException) -> GatewayError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = {"Allow": error.headers.get("Allow", "")}
        return errors.MethodNotAllowed(f"{request.method} is not possible on {request.path}.", headers=allowed)
    if isinstance(error, web.HTTPNotFound):
        return errors.NotFound(f"There is no path {request.path}.")
    return errors.InvalidRequest(f"{error.reason}.", "invalid_http")


async def _finish_head(request: web.Request, response: web.StreamResponse) -> None:
    """The last hand on every head."""
    response.headers.setdefault("x-request-id", request.get(REQUEST_ID, ""))
    if request.app[GATEWAY].reporter.draining:
        response.headers["Connection"] = "close"
        response.force_close()


class _Protocol(web.RequestHandler):
    """Answers what is not HTTP in the same shape as everything else."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response had begun")
        if status < 500:
            error: GatewayError = errors.InvalidRequest(f"This is not valid HTTP: {message or exc}.", "invalid_http")
        else:
            logs.error("bug", exc)
            error = GatewayError("The gateway failed.")
        response = _response(errors.render(error))
        response.force_close()
        return response


class _Server(web.Server):
    """Makes our protocols."""

    def __init__(self, handler: Any, request_factory: Any, **options: Any) -> None:
        super().__init__(handler, request_factory=request_factory, handler_cancellation=True)
        self._options = options

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, **self._options)


class Runner(web.AppRunner):
    """Runs the application the only way that is right for it: a client that leaves cancels its handler."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=_CUT_S)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            made.request_factory,
            access_log=None,
            auto_decompress=False,
            max_line_size=_MAX_FIELD,
            max_field_size=_MAX_FIELD,
        )
