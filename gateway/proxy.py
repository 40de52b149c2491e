"""The data path, whole and in order: who asks, what for, may it, when can it go, send, stream back, account.

Bodies pass as they are but for a model's edits; nothing of a stream is collected. The decisions are synchronous and know no
HTTP library, so that every way of serving shares them; what awaits is I/O. A request that finds a free slot makes no task.
Once an answer has begun, a failure is a last frame and a cut.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway import access, affinity, dialects, edits, envelope, errors, hold, logs, usage, websocket
from gateway.claim import Claim, Refused, Ticket
from gateway.client import Clients
from gateway.current import Current
from gateway.dialects import Dialect
from gateway.downstream import ClientGone, Downstream
from gateway.envelope import Pairs
from gateway.errors import GatewayError
from gateway.eta import Eta
from gateway.exchange import Head
from gateway.hold import Holding
from gateway.intake import Body, Intake, Source
from gateway.ledger import Ledger
from gateway.limits import Limits
from gateway.metrics import Metrics
from gateway.models import named
from gateway.registry import Registry
from gateway.relay import LateAnswer, Relay, remainder
from gateway.routes import Found
from gateway.tenants import Tenants
from gateway.trail import Trail
from gateway.upstream import Answer, Broken, Outgoing, Pool, Silent, Truncated, Unreachable, Upstreams
from gateway.waitroom import Waitroom
from policies.config import Model
from policies.health import Outcome, outcome_of
from policies.replica import Replica

MAX_TURNS = 8
"""Slots that one request may be given before its replicas' being unreachable is its answer."""
_OUTCOMES = {"restore_failed": "failed", "shutting_down": "shutdown", "queue_full": "full", "queue_bytes_full": "full"}


@dataclass(slots=True, eq=False)
class Order:
    """A request about which all is decided but when it goes, and where to."""

    head: Head
    found: Found
    body: Body
    model: str
    spec: Model
    """As it was when the request came: a reload does not change what it was promised."""
    dialect: Dialect
    ticket: Ticket
    trail: Trail
    holding: Holding | None = None


class Proxy:
    """Serves the inference routes of one gateway process."""

    def __init__(
        self,
        current: Current,
        *,
        tenants: Tenants,
        limits: Limits,
        clients: Clients,
        log: access.Log,
        intake: Intake,
        ledger: Ledger,
        registry: Registry,
        waitroom: Waitroom,
        upstreams: Upstreams,
        eta: Eta,
        metrics: Metrics,
    ) -> None:
        self._current = current
        self._tenants = tenants
        self._limits = limits
        self._clients = clients
        self._log = log
        self._intake = intake
        self._ledger = ledger
        self._registry = registry
        self._waitroom = waitroom
        self._upstreams = upstreams
        self._eta = eta
        self._metrics = metrics

    async def handle(self, head: Head, found: Found, source: Source, down: Downstream) -> None:
        """One request, from its head to the last byte of its answer.

        Raises:
            GatewayError: there is no answer of a replica, and nothing has been sent to the client.
        """
        trail = self.begin(head, found)
        try:
            order = await self._receive(head, found, source, down, trail)
            try:
                await self._serve(order, down)
            finally:
                order.body.close()
        except GatewayError as error:
            trail.status, trail.code = error.status, error.code
            if not down.begun:
                raise
            await down.cut(dialects.of(found.path).late(error, head.id))
        except LateAnswer as late:
            trail.status, trail.code = late.status, ""
            await down.cut(late.frame)
        except ClientGone:
            pass
        except Exception:
            trail.status, trail.code = GatewayError.status, GatewayError.code
            raise
        finally:
            self.account(trail)

    # The decisions, in their order. All synchronous.

    def begin(self, head: Head, found: Found) -> Trail:
        """1. The facts of a request whose head has arrived."""
        repeated = head.headers.get("x-stainless-retry-count", "0") != "0"
        trail = Trail(head.id, found.route.name, head.received, method=head.method, client_retry=repeated)
        trail.client = head.peer or ""
        return trail

    def identify(self, head: Head, trail: Trail) -> str:
        """2. Whose request it is, before a byte of its body is read. Raises Unauthorized."""
        trail.client = self._clients.origin(head.peer, head.scheme, head.headers).address
        trail.tenant = tenant = self._tenants.authenticate(head.headers)
        return tenant

    def permit(self, tenant: str, body: Body, trail: Trail) -> Model:
        """3. Which model it asks for, and whether it may. Raises ModelNotFound, PermissionDenied."""
        config = self._current.config
        trail.bytes_in, trail.stream, trail.asked = body.size, body.stream, body.model
        trail.model = model = named(config, body.model)
        self._tenants.may_use(tenant, model)
        return config.models[model]

    def order(self, head: Head, found: Found, tenant: str, body: Body, trail: Trail) -> Order:
        """4. For how long it may wait, and for what. The body has been edited.

        Raises:
            GatewayError: it may not go on.
        """
        config = self._current.config
        model = named(config, body.model)
        spec = config.models[model]
        patience_s = envelope.patience_s(head.headers, spec.hold.max_wait_s)
        if not found.route.wakes and not self._registry.available(model):
            raise errors.NotRunning(f"Model {model!r} is not running, and {found.route.name} does not start it.")
        together = affinity.key(spec.balance, tenant=tenant, headers=head.headers, body=body.data)
        ticket = Ticket(model, body.size, head.received + patience_s, tenant, together)
        return Order(head, found, body, model, spec, dialects.of(found.path), ticket, trail)

    # 5. Limits.charge_request. 6. Ledger.arrive: it counts as demand. 7. Waitroom.claim: a slot, a place, or a refusal.

    def refusal(self, refused: Refused, order: Order) -> GatewayError:
        """What the waiting room's refusal is to the client."""
        code, model = refused.reject.code, order.model
        self._metrics.queue_wait.labels(model, _OUTCOMES.get(code, "timeout")).observe(order.ticket.waited_s)
        position = 1 + (self._ledger.held(model) if code in ("queue_full", "queue_bytes_full") else 0)
        promise_s = self._eta.retry_after_s(model, position)
        return errors.refusal(code, model=model, detail=refused.reject.detail, retry_after_s=promise_s)

    def outgoing(self, order: Order, replica: Replica) -> Outgoing:
        """8. The request as this replica shall get it."""
        head, trail, ticket = order.head, order.trail, order.ticket
        trail.phase, trail.start = "dispatched", replica.start or "cold"
        trail.replica, trail.incarnation = replica.id, replica.incarnation
        if ticket.waited_s and ticket.turns == 1:
            self._metrics.queue_wait.labels(order.model, "admitted").observe(ticket.waited_s)
        origin = self._clients.origin(head.peer, head.scheme, head.headers)
        pairs = envelope.forwarded(head.headers.items(), id=head.id, origin=origin.pairs())
        if trail.committed:
            # The client has a head without Content-Encoding already.
            pairs = [(name, value) for name, value in pairs if name.lower() != "accept-encoding"]
        query = edits.requeried(order.found.query, order.spec)
        path = f"{order.found.path}?{query}" if query else order.found.path
        if order.found.route.serves == "socket":
            return Outgoing(path, websocket.asking(pairs), order.body, head.method, upgrade=True)
        return Outgoing(path, order.body.headers(pairs), order.body, head.method)

    def answered(self, order: Order, replica: Replica, answer: Answer, now: float) -> tuple[Pairs, bool]:
        """9. The head for the client, and whether the body is an event stream."""
        trail = order.trail
        trail.phase, trail.first_byte_s = "streaming", now - trail.since
        self._registry.outcome(replica, outcome_of(answer.status), f"it answered {answer.status}")
        self._metrics.time_to_first_byte.labels(replica.model, trail.start).observe(trail.first_byte_s)
        return envelope.returned(answer.headers, id=trail.id, start=trail.start, incarnation=replica.incarnation)

    def spent(self, order: Order, used: usage.Usage | None) -> None:
        """10. What the answer took, as far as it came."""
        if used is None:
            return
        if used.counted == "engine":
            order.trail.prompt_tokens, order.trail.completion_tokens = used.prompt, used.completion
        self._limits.charge_tokens(order.ticket.tenant, used.total)

    def account(self, trail: Trail) -> None:
        """11. It has ended, somehow."""
        metrics, model = self._metrics, self._metrics.model(trail.model)
        trail.seconds = asyncio.get_running_loop().time() - trail.since
        metrics.requests.labels(model, trail.route, str(trail.status), trail.start).inc()
        metrics.account(trail)
        if trail.status == 499:
            metrics.client_disconnects.labels(trail.phase).inc()
        elif trail.code:
            metrics.errors.labels(model, trail.code).inc()
        if trail.client_retry:
            metrics.client_retries.labels(model).inc()
        self._log.write(trail)

    # What awaits.

    async def _receive(self, head: Head, found: Found, source: Source, down: Downstream, trail: Trail) -> Order:
        """Everything before the waiting room. Nothing that is refused here counts as demand."""
        tenant = self.identify(head, trail)
        if found.route.serves == "socket":
            websocket.check(head)
        body = await self._intake.read(found, head.headers, source, down.proceed)
        try:
            spec = self.permit(tenant, body, trail)
            await edits.apply(body, spec)
            order = self.order(head, found, tenant, body, trail)
            if not self._limits.charge_request(tenant):
                await self._limits.obtain(tenant)
            self._ledger.arrive(order.model)
        except BaseException:
            body.close()
            raise
        return order

    async def _serve(self, order: Order, down: Downstream) -> None:
        """A slot, dispatch, relay; and again for as long as the chosen replica could not even be reached."""
        loop = asyncio.get_running_loop()
        try:
            with self._waitroom.claim(order.ticket) as claim:
                for _ in range(MAX_TURNS):
                    replica = claim.replica or await self._wait(order, claim, down)
                    since = loop.time()
                    try:
                        answer = await self._dispatch(order, replica)
                    except Unreachable as error:
                        self._unreachable(replica, error)
                        claim.again()
                        continue
                    try:
                        return await self._relay(order, replica, answer, down)
                    finally:
                        answer.close()
                        self._eta.served(order.model, loop.time() - since)
        except Refused as refused:
            raise self.refusal(refused, order) from None
        raise errors.UpstreamError(f"No replica of model {order.model!r} could be reached.", retry_after_s=1.0)

    async def _wait(self, order: Order, claim: Claim, down: Downstream) -> Replica:
        trail, ticket = order.trail, order.ticket
        trail.phase = "held"
        holding = order.holding = order.holding or self._holding(order, down)
        try:
            return await hold.until_granted(holding, claim, down, self._eta)
        except (asyncio.CancelledError, ClientGone):
            self._metrics.queue_wait.labels(ticket.model, "cancelled").observe(ticket.waited_s)
            raise
        finally:
            trail.waited_s, trail.committed = ticket.waited_s, holding.committed

    def _holding(self, order: Order, down: Downstream) -> Holding:
        head, settings = order.head, order.spec.hold
        mode = hold.mode_for(
            settings,
            user_agent=head.headers.get("user-agent", ""),
            events=order.found.route.events and order.body.stream,
            version=down.version,
            dialect=order.dialect,
            model=order.model,
        )
        silent_until = asyncio.get_running_loop().time() + settings.silent_s
        return Holding(order.model, settings, order.dialect, mode, head.id, silent_until)

    async def _dispatch(self, order: Order, replica: Replica) -> Answer:
        """The replica's response head. The time that the request was held does not count."""
        outgoing, limit_s = self.outgoing(order, replica), order.spec.first_byte_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._send(self._upstreams.pool(replica), outgoing, order.trail)
        except TimeoutError:
            error: GatewayError = errors.UpstreamTimeout(f"The replica sent nothing within {limit_s:g} s.")
            self._registry.outcome(replica, Outcome.DEAD, str(error))
        except Broken as broken:
            error = errors.UpstreamError(f"The replica's connection failed: {broken}.")
            self._registry.outcome(replica, Outcome.FAILED, str(error))
        raise error

    async def _send(self, pool: Pool, outgoing: Outgoing, trail: Trail) -> Answer:
        """Sent again once, on a fresh connection, when a reused one stayed silent."""
        try:
            return await pool.send(outgoing, fresh=trail.retries > 0)
        except Silent:
            trail.retries += 1
            self._metrics.upstream_retries.labels("stale_connection").inc()
        return await pool.send(outgoing, fresh=True)

    def _unreachable(self, replica: Replica, error: Unreachable) -> None:
        self._registry.outcome(replica, Outcome.DEAD, str(error))
        self._metrics.upstream_retries.labels("unreachable").inc()
        logs.warning("replica unreachable", replica=replica.id, incarnation=replica.incarnation, reason=str(error))

    async def _relay(self, order: Order, replica: Replica, answer: Answer, down: Downstream) -> None:
        """Head and body to the client, piece by piece as they come."""
        trail = order.trail
        headers, events = self.answered(order, replica, answer, asyncio.get_running_loop().time())
        if answer.status == websocket.SWITCHING:
            return await self._tunnel(order, answer, headers, down)
        if down.begun:
            await self._join(order, answer, events, down)
        else:
            await down.head(answer.status, answer.reason, headers)
        relay = Relay(answer, down, order.spec, trail)
        try:
            await relay.run()
        except Truncated as broken:
            error = relay.failure(broken)
            trail.status, trail.code = error.status, error.code
            if relay.blames_replica:
                self._registry.outcome(replica, Outcome.FAILED, str(error))
            self._metrics.truncated_responses.labels(replica.model, error.code).inc()
            await down.cut(order.dialect.late(error, order.head.id) if events and relay.frames.between else b"")
        else:
            trail.status, trail.code = answer.status, ""
        finally:
            self.spent(order, relay.meter.usage())

    async def _tunnel(self, order: Order, answer: Answer, headers: Pairs, down: Downstream) -> None:
        """Bytes both ways for as long as the WebSocket lasts; it holds its slot until then."""
        trail = order.trail
        if order.found.route.serves != "socket" or down.begun:
            raise errors.UpstreamError("The replica switched to another protocol, unasked.")
        trail.status, trail.code = answer.status, ""
        await down.head(answer.status, answer.reason, headers + websocket.UPGRADE)
        moved = await websocket.join(down.wire(), answer.wire(), order.spec.idle_body_timeout_s)
        trail.bytes_in, trail.bytes_out = moved

    async def _join(self, order: Order, answer: Answer, events: bool, down: Downstream) -> None:
        """The client has its head already; what the replica answers must fit behind it.

        Raises:
            LateAnswer: it does not, and the last frame repeats the replica's error.
            UpstreamError: it does not, and is no error.
        """
        trail, holding = order.trail, order.holding
        assert holding is not None
        if answer.status != 200:
            body = await remainder(answer)
            raise LateAnswer(answer.status, order.dialect.relayed(answer.status, body, order.head.id))
        if not events or answer.encoding:
            raise errors.UpstreamError("The replica did not answer with a plain event stream.")
        await down.write(order.dialect.dispatched(holding.mode, start=trail.start, incarnation=trail.incarnation))
