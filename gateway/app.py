"""The composition root: makes every part, ties them together, gives each its route and its time to live.

The only module that knows all others. What a part does is not written here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from gateway import access, downstream, logs, openapi, server, tracing, whereabouts
from gateway.admin import Admin
from gateway.client import Clients
from gateway.console import Console
from gateway.current import Current
from gateway.decisions import Decisions
from gateway.dispatch import Dispatch
from gateway.eta import Eta
from gateway.fastpath import FastPath
from gateway.gauges import Gauges
from gateway.handover import Line
from gateway.hosts import Hosts
from gateway.intake import Intake
from gateway.knocking import Knocker
from gateway.ledger import Ledger
from gateway.life import Handler, Life
from gateway.limits import Limits
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.operations import Operations, Outcome, Sharing
from gateway.overview import Overview
from gateway.permits import Permits
from gateway.proxy import Proxy
from gateway.registry import Registry
from gateway.reload import Reloader
from gateway.report import Reporter
from gateway.scaling import Scaler
from gateway.settings import Settings
from gateway.store import Store
from gateway.tenants import Tenants
from gateway.tls import Certificates
from gateway.upstream import Upstreams
from gateway.waitroom import Waitroom
from policies.config import Config
from policies.replica import Replica


@dataclass(frozen=True, slots=True)
class Callers:
    """What is known of those who ask: who they are, what they may, what is noted of them."""

    tenants: Tenants
    limits: Limits
    clients: Clients
    log: access.Log


@dataclass(frozen=True, slots=True)
class Serving:
    """How requests are served: what is decided, and the two paths that act on it."""

    decisions: Decisions
    intake: Intake
    proxy: Proxy
    fast: FastPath


@dataclass(slots=True)
class Gateway:
    """The parts of one process that more than one route, or a test, looks at."""

    settings: Settings
    current: Current
    life: Life
    store: Store
    ledger: Ledger
    registry: Registry
    link: Link
    reporter: Reporter
    knocker: Knocker
    operations: Operations
    scaler: Scaler
    permits: Permits
    waitroom: Waitroom
    upstreams: Upstreams
    metrics: Metrics
    gauges: Gauges
    serving: Serving
    admin: Admin
    overview: Overview
    console: Console
    models: Models
    callers: Callers
    tracer: tracing.Tracer | None
    certificates: Certificates | None
    reloader: Reloader


GATEWAY = web.AppKey("gateway", Gateway)


def compose(settings: Settings, metrics: Metrics, line: Line | None = None) -> Gateway:
    """Make the parts and connect them. Needs a running event loop; nothing is started.

    Raises:
        CertificateError: certificate and key cannot be used.
    """
    loop = asyncio.get_running_loop()
    current, config = Current(settings.config), settings.config
    models = list(config.models)
    store = Store(settings.store_url, config.store.namespace)
    ledger, registry, upstreams = Ledger(models, loop.time), Registry(models), Upstreams()
    link = Link(store, registry, models)
    operations = Operations(store, link, lambda model: Sharing.of(current.config, model))
    reporter, knocker = Reporter(settings.id, store=store, ledger=ledger, registry=registry), Knocker(store, registry)
    eta = Eta(registry, slots=lambda model: _slots(current, registry, reporter, model), clock=loop.time, random=random.uniform)
    scaler = Scaler(current, registry=registry, reporter=reporter, operations=operations, cost_s=eta.start_s)
    dead = metrics.succeed(settings.id)
    permits = Permits(settings.id, current, lender=store, fleet=registry, ledger=ledger, dead=dead)
    waitroom = Waitroom(current, fleet=registry, capacity=permits, ledger=ledger, expected=eta.wait_s)
    callers = _callers(current, store, reporter, metrics)
    overview = Overview(current, registry=registry, reporter=reporter, store=store, eta=eta)
    admin = _admin(settings, current, store, registry, reporter, operations, link, overview)
    tracer = tracing.tracer(config, settings.id, lambda result, spans: metrics.spans.labels(result).inc(spans))
    certificates = None if settings.pem is None else Certificates(settings.pem)
    life = Life(link.connected)
    gateway = Gateway(
        settings=settings,
        current=current,
        life=life,
        store=store,
        ledger=ledger,
        registry=registry,
        link=link,
        reporter=reporter,
        knocker=knocker,
        operations=operations,
        scaler=scaler,
        permits=permits,
        waitroom=waitroom,
        upstreams=upstreams,
        metrics=metrics,
        gauges=Gauges(current, ledger, registry, link, reporter, Hosts(store), metrics, admin.authorize, certificates),
        serving=_serving(current, metrics, callers, ledger, registry, waitroom, upstreams, eta, life, tracer),
        admin=admin,
        overview=overview,
        console=Console(current),
        models=Models(current, registry, eta_s=eta.seconds, allows=callers.tenants.allows),
        callers=callers,
        tracer=tracer,
        certificates=certificates,
        reloader=_reloader(settings, current, admin, certificates, line, metrics),
    )
    _connect(gateway, eta)
    return gateway


def _admin(
    settings: Settings,
    current: Current,
    store: Store,
    registry: Registry,
    reporter: Reporter,
    operations: Operations,
    link: Link,
    overview: Overview,
) -> Admin:
    return Admin(
        current,
        settings.admin_token,
        store=store,
        registry=registry,
        reporter=reporter,
        operations=operations,
        events=link,
        overview=overview,
    )


def _serving(
    current: Current,
    metrics: Metrics,
    callers: Callers,
    ledger: Ledger,
    registry: Registry,
    waitroom: Waitroom,
    upstreams: Upstreams,
    eta: Eta,
    life: Life,
    tracer: tracing.Tracer | None,
) -> Serving:
    decisions = Decisions(
        current,
        tenants=callers.tenants,
        limits=callers.limits,
        clients=callers.clients,
        log=callers.log,
        ledger=ledger,
        registry=registry,
        eta=eta,
        metrics=metrics,
        tracer=tracer,
    )
    intake = Intake(current)
    proxy = Proxy(
        decisions,
        intake=intake,
        limits=callers.limits,
        ledger=ledger,
        registry=registry,
        waitroom=waitroom,
        upstreams=upstreams,
        eta=eta,
        metrics=metrics,
    )
    return Serving(decisions, intake, proxy, FastPath(decisions, proxy, waitroom=waitroom, life=life))


def _reloader(
    settings: Settings, current: Current, admin: Admin, certificates: Certificates | None, line: Line | None, metrics: Metrics
) -> Reloader:
    return Reloader(
        current,
        certificates=certificates,
        file=settings.file,
        line=line,
        authorize=admin.authorize,
        report=metrics.reloaded,
    )


def _callers(current: Current, store: Store, reporter: Reporter, metrics: Metrics) -> Callers:
    loop = asyncio.get_running_loop()
    limits = Limits(current, store=store, gateways=lambda: reporter.gateways, clock=loop.time)
    limits.on_limited = lambda tenant, limit: metrics.rate_limited.labels(metrics.tenant(tenant), limit).inc()
    metrics.know_tenants(current.config.tenants)
    log = access.Log(current, access.standard_output(), on_dropped=metrics.access_log_lost_lines.inc)
    return Callers(Tenants(current), limits, Clients(current), log)


async def _remember(gateway: Gateway, eta: Eta) -> None:
    """What starts took before this process began."""
    for model in gateway.current.config.models:
        eta.load(model, await gateway.store.stages(model))


async def _bury(dead: str, store: Store) -> None:
    """Nobody waits for the requests that a worker took with it when it was killed."""
    if dead:
        await store.withdraw(dead)


def _slots(current: Current, registry: Registry, reporter: Reporter, model: str) -> int:
    """Requests that this gateway may expect to have on a model's replicas at once."""
    spec, replicas = current.config.models.get(model), max(1, len(registry.available(model)))
    return 1 if spec is None else max(1, replicas * spec.concurrency // reporter.gateways)


def _connect(gateway: Gateway, eta: Eta) -> None:
    """Who hears of what."""
    registry, reporter, scaler, waitroom = gateway.registry, gateway.reporter, gateway.scaler, gateway.waitroom
    permits, triggers, tracer = gateway.permits, gateway.metrics.scale_up_triggers, gateway.tracer

    def edge(model: str) -> None:
        reporter.kick()
        scaler.poke(model)

    def fleet_changed(model: str) -> None:
        permits.look()
        waitroom.pump(model)
        gateway.upstreams.retain(registry.incarnations())
        gateway.serving.fast.retain(registry.incarnations())
        edge(model)
        scaler.poke_mates(model)

    def drain() -> None:
        reporter.draining = permits.draining = True
        reporter.kick()

    def ejected(replica: Replica, pause_s: float, reason: str) -> None:
        gateway.metrics.ejections.labels(replica.model).inc()
        logs.warning("replica ejected", replica=replica.id, incarnation=replica.incarnation, pause_s=pause_s, reason=reason)

    def triggered(model: str, outcome: Outcome) -> None:
        triggers.labels(model, "false" if outcome.created else "true").inc()
        if tracer is not None:
            tracer.asked(outcome.operation, outcome.created)

    gateway.ledger.on_edge = edge
    registry.on_eject = ejected
    registry.on_change.append(fleet_changed)
    registry.on_record += [gateway.metrics.record, whereabouts.note, lambda before, after: eta.learn(after)]
    eta.place_s = scaler.place_s
    gateway.link.on_connect += [lambda: _remember(gateway, eta), lambda: _bury(gateway.permits.dead, gateway.store)]
    gateway.link.on_permits = permits.hint
    gateway.link.on_debtor = gateway.callers.limits.indebted
    gateway.link.on_hint = gateway.overview.hinted
    reporter.waiting = waitroom.waiting
    reporter.knocked = lambda: gateway.knocker.found
    permits.on_more = waitroom.pump_all
    scaler.on_trigger = triggered
    if tracer is not None:
        scaler.trace = tracer.asking
    gateway.life.on_drain += [drain, gateway.overview.touch]
    gateway.life.on_refuse.append(waitroom.drain)
    gateway.life.on_cut += [gateway.serving.proxy.cut, gateway.serving.fast.cut]
    gateway.current.on_change.append(lambda before, after: _reloaded(gateway, before, after))


def _reloaded(gateway: Gateway, before: Config, after: Config) -> None:
    """Models may have come, gone or changed; the new configuration is in force already."""
    models = list(after.models)
    gateway.ledger.know(models)
    gateway.registry.know(models)
    gateway.metrics.know(models)
    gateway.metrics.know_tenants(after.tenants)
    gateway.link.know(models)
    for model in {**before.models, **after.models}:
        gateway.waitroom.pump(model)
    for model in models:
        gateway.scaler.poke(model)
    gateway.permits.look()


def build(settings: Settings, metrics: Metrics, line: Line | None = None) -> web.Application:
    """The application with all routes; its parts live from startup to cleanup. Needs a running event loop."""
    gateway = compose(settings, metrics, line)
    app = web.Application(middlewares=[server.shape], client_max_size=settings.config.gateway.max_body_bytes)
    app[GATEWAY], app[server.LIFE] = gateway, gateway.life
    app.on_response_prepare.append(server.finish_head)
    app.cleanup_ctx.append(_life)
    Dispatch(
        gateway.current,
        tenants=gateway.callers.tenants,
        clients=gateway.callers.clients,
        log=gateway.callers.log,
        intake=gateway.serving.intake,
        own=_own(gateway),
        passer=lambda request, found: downstream.serve(request, found, gateway.serving.proxy.handle),
    ).attach(app)
    return app


def _own(gateway: Gateway) -> dict[str, Handler]:
    """Everything that is not passed on to a replica, by its name in the table of routes."""
    life, admin, models, console = gateway.life, gateway.admin, gateway.models, gateway.console
    return {
        "health": life.health,
        "ready": life.ready,
        "metrics": gateway.gauges.scrape,
        "openapi": openapi.answer,
        "models.list": models.list,
        "models.get": models.get,
        "console.page": console.page,
        "console.asset": console.asset,
        **admin.handlers(),
        "admin.reload": gateway.reloader.handle_reload,
        "admin.restart": gateway.reloader.handle_restart,
    }


async def _life(app: web.Application) -> AsyncIterator[None]:
    """Start the parts that live as long as the process; at the end take the report back, then let go of the store."""
    gateway = app[GATEWAY]
    jobs = (gateway.link.run(), gateway.reporter.run(), gateway.scaler.run(), gateway.gauges.run(), gateway.reloader.watch())
    traces = () if gateway.tracer is None else (gateway.tracer.run(gateway.store),)
    gateway.life.start(
        (*jobs, gateway.knocker.run(), gateway.permits.run(), gateway.callers.limits.run(), gateway.serving.fast.run(), *traces)
    )
    gateway.callers.log.start()
    yield
    await gateway.life.stop()
    gateway.serving.fast.close()
    await gateway.upstreams.close()
    await gateway.permits.leave()
    await gateway.callers.limits.leave()
    gateway.metrics.flush()  # and the last lines of the log
    await asyncio.to_thread(gateway.callers.log.close)
    if gateway.tracer is not None:
        await asyncio.to_thread(gateway.tracer.close)
    await gateway.reporter.leave()
    gateway.registry.close()
    await gateway.store.close()
