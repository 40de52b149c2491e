"""What is decided about a request, step by step: who asks, what for, may it, how it is sent, what came of it.

All synchronous, and in no HTTP library's terms, so that every way of serving decides by the same: :mod:`gateway.proxy` awaits
between these steps, :mod:`gateway.fastpath` takes them without a task. The numbers are their order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gateway import access, affinity, dialects, edits, envelope, errors, intake, logs, usage, websocket
from gateway.body import Body, Form, document
from gateway.claim import Refused, Ticket
from gateway.client import Clients
from gateway.current import Current
from gateway.dialects import Dialect
from gateway.envelope import Pairs
from gateway.epilogue import Epilogue
from gateway.errors import GatewayError
from gateway.eta import Eta
from gateway.exchange import Head
from gateway.hold import Holding
from gateway.ledger import Ledger
from gateway.limits import Limits
from gateway.metrics import Metrics
from gateway.models import named
from gateway.registry import Registry
from gateway.routes import Found
from gateway.tenants import Tenants
from gateway.tracing import Tracer
from gateway.trail import Trail
from gateway.upstream import Outgoing, Unreachable
from policies.config import Config, Model
from policies.health import Outcome, outcome_of
from policies.replica import Replica

_OK: Final = Outcome.OK
_OUTCOMES = {"restore_failed": "failed", "shutting_down": "shutdown", "queue_full": "full", "queue_bytes_full": "full"}
_MAX_ERRANDS: Final = 16
"""Models that one connection asks for in turn."""


class Errand:
    """What a head asks of a model, whatever its body says further.

    Args:
        edited: the model's settings ask for edits of the body.
    """

    patience_s: float | None = None

    def __init__(self, model: str, spec: Model, dialect: Dialect, edited: bool) -> None:
        self.model = model
        self.spec = spec
        self.dialect = dialect
        self.edited = edited
        self.keyed = spec.balance in affinity.KEYED
        self.first_byte_timeout_s = spec.first_byte_timeout_s
        self.frames: dict[str, Frame] = {}
        """By incarnation; :mod:`gateway.passing` keeps them here."""


class Frame:
    """How an errand goes to one incarnation.

    Args:
        before: the head that the replica shall get, as far as the request's id.
        after: the rest of it, without the body's length.
    """

    __slots__ = ("after", "before", "digits", "length", "replica", "start")

    def __init__(self, before: bytes, after: bytes, replica: Replica) -> None:
        self.before = before
        self.after = after
        self.start = replica.start or "cold"
        self.replica = replica.id
        self.length = 0
        """Of the last body; and as it stood on the wire, since clients repeat themselves."""
        self.digits = b"0"


class Known:
    """What follows from one head alone. Clients repeat their heads, so a connection keeps the last one's; what depends on the
    configuration holds for one."""

    __slots__ = ("client", "config", "errands", "form", "id", "repeated", "tenant", "traceparent")

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.id = envelope.given_id(headers)
        """The client's own; empty: it has none."""
        self.repeated = headers.get("x-stainless-retry-count", "0") != "0"
        """Its client says that it has sent this request before."""
        self.traceparent = headers.get("traceparent", "")
        self.config: Config | None = None
        self.tenant = ""
        self.client = ""
        self.form: Form | None = None
        self.errands: dict[str, Errand] = {}
        """By the model's name as the client writes it."""


class Order:
    """A request about which all is decided but when it goes, and where to."""

    holding: Holding | None = None

    def __init__(self, head: Head, found: Found, body: Body, ticket: Ticket, trail: Trail, errand: Errand) -> None:
        self.head = head
        self.found = found
        self.body = body
        self.model = errand.model
        self.spec = errand.spec
        """As it was when the request came: a reload does not change what it was promised."""
        self.dialect = errand.dialect
        self.ticket = ticket
        self.trail = trail
        self.errand = errand


class Decisions:
    """The steps, over the parts of one gateway process."""

    def __init__(
        self,
        current: Current,
        *,
        tenants: Tenants,
        limits: Limits,
        clients: Clients,
        log: access.Log,
        ledger: Ledger,
        registry: Registry,
        eta: Eta,
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        self._current = current
        self._tenants = tenants
        self._limits = limits
        self._clients = clients
        self._ledger = ledger
        self._registry = registry
        self._eta = eta
        self._metrics = metrics
        self._tracer = tracer
        self._sampler = None if tracer is None else tracer.sampler
        self._epilogue = Epilogue(metrics.account, log.write, self._trace)
        metrics.gather = self._epilogue.settle
        self._wall = time.time

    def begin(self, head: Head, found: Found, known: Known) -> Trail:
        """1. The facts of a request whose head has arrived."""
        trail = Trail(head.id, found.route.name, head.received, head.method, known.repeated)
        trail.client = head.peer or ""
        if self._tracer is None or self._sampler is None:
            return trail
        if known.traceparent:
            trail.trace = self._tracer.begin(known.traceparent)
        elif self._sampler.chosen():
            trail.trace = self._tracer.drawn()
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
        errand = Errand(model, spec, dialects.of(found.path), edits.wanted(body, spec))
        return self._ordered(head, found, tenant, body, trail, errand)

    def _ordered(self, head: Head, found: Found, tenant: str, body: Body, trail: Trail, errand: Errand) -> Order:
        model, spec = errand.model, errand.spec
        if errand.patience_s is None:
            errand.patience_s = envelope.patience_s(head.headers, spec.hold.max_wait_s)
        if not found.route.wakes and not self._registry.available(model):
            raise errors.NotRunning(f"Model {model!r} is not running, and {found.route.name} does not start it.")
        together = ""
        if errand.keyed:
            together = affinity.key(spec.balance, tenant=tenant, headers=head.headers, body=body.data)
        ticket = Ticket(model, body.size, head.received + errand.patience_s, tenant, together)
        return Order(head, found, body, ticket, trail, errand)

    def prepare(self, head: Head, found: Found, data: bytes, trail: Trail, known: Known) -> Order:
        """1 to 4 for a request that is there already, whole, small and JSON; in the same order, without what is known already.

        Raises:
            GatewayError: it may not go on.
        """
        config = self._current.config
        if known.config is config and known.form is not None:
            trail.client, trail.tenant = known.client, known.tenant
        else:
            known.config, known.errands = None, {}
            known.tenant = self.identify(head, trail)
            known.client, known.form = trail.client, intake.check(found, head.headers, config)
            known.config = config
        body = document(found, known.form, data)
        errand = known.errands.get(body.model)
        if errand is None:
            spec = self.permit(known.tenant, body, trail)
            if len(known.errands) >= _MAX_ERRANDS:
                known.errands.clear()
            errand = Errand(trail.model or "", spec, dialects.of(found.path), edits.wanted(body, spec))
            known.errands[body.model] = errand
        else:
            trail.bytes_in, trail.stream, trail.asked, trail.model = body.size, body.stream, body.model, errand.model
        if errand.edited:
            edits.apply_now(body, errand.spec)
        return self._ordered(head, found, known.tenant, body, trail, errand)

    def charge(self, order: Order) -> bool:
        """5. Its tenant's budget has a request left, and 6. it counts as demand. False: that is not known yet.

        Raises:
            RateLimited: there is none left.
        """
        charged = self._limits.charge_request(order.ticket.tenant)
        if charged:
            self._ledger.arrive(order.model)
        return charged

    # 7. Waitroom.claim: a slot, a place, or a refusal.

    def refusal(self, refused: Refused, order: Order) -> GatewayError:
        """What the waiting room's refusal is to the client."""
        code, model = refused.reject.code, order.model
        self._metrics.waited(order.trail, _OUTCOMES.get(code, "timeout"), order.ticket.waited_s)
        position = 1 + (self._ledger.held(model) if code in ("queue_full", "queue_bytes_full") else 0)
        promise_s = self._eta.retry_after_s(model, position)
        return errors.refusal(code, model=model, detail=refused.reject.detail, retry_after_s=promise_s)

    def held(self, order: Order) -> None:
        """7. It has to wait."""
        order.trail.phase = "held"
        if self._tracer is not None:
            self._tracer.held(order.head.headers, order.trail)

    def released(self, order: Order, replica: Replica | None) -> None:
        """7. It waits no more, for a replica has come, or for some other reason."""
        if self._tracer is not None:
            self._tracer.released(order.trail, replica)

    def dispatched(self, order: Order, replica: Replica) -> None:
        """8. It goes to this replica."""
        self.sent(order, replica, replica.incarnation, replica.id, replica.start or "cold")

    def sent(self, order: Order, replica: Replica, incarnation: str, id: str, start: str) -> None:
        """The same, for who knows already what its record says."""
        trail, ticket = order.trail, order.ticket
        trail.phase, trail.start = "dispatched", start
        trail.replica, trail.incarnation = id, incarnation
        if trail.trace is not None and self._tracer is not None:
            self._tracer.dispatched(trail, replica, order.spec)
        if ticket.waited_s and ticket.turns == 1:
            self._metrics.waited(trail, "admitted", ticket.waited_s)

    def outgoing(self, order: Order, replica: Replica) -> Outgoing:
        """8. The request as this replica shall get it."""
        self.dispatched(order, replica)
        head, trail = order.head, order.trail
        origin = self._clients.origin(head.peer, head.scheme, head.headers)
        pairs = envelope.forwarded(head.headers.items(), id=head.id, origin=origin.pairs())
        if trail.trace is not None:
            pairs = [(name, value) for name, value in pairs if name.lower() != "traceparent"]
            pairs.append(("traceparent", trail.trace.outward))
        if trail.committed:
            # The client has a head without Content-Encoding already.
            pairs = [(name, value) for name, value in pairs if name.lower() != "accept-encoding"]
        query = edits.requeried(order.found.query, order.spec)
        path = f"{order.found.path}?{query}" if query else order.found.path
        if order.found.route.serves == "socket":
            return Outgoing(path, websocket.asking(pairs), order.body, head.method, upgrade=True)
        return Outgoing(path, order.body.headers(pairs), order.body, head.method)

    def answered(
        self, order: Order, replica: Replica, status: int, headers: Iterable[tuple[str, str]], now: float
    ) -> tuple[Pairs, bool]:
        """9. The head for the client, and whether the body is an event stream."""
        self.began(order, replica, status, now)
        return self.returned(order, replica, headers)

    def began(self, order: Order, replica: Replica, status: int, now: float) -> None:
        """9. The replica has answered."""
        trail = order.trail
        trail.phase, trail.first_byte_s = "streaming", now - trail.since
        if status < 400:
            self._registry.outcome(replica, _OK)
        else:
            self._registry.outcome(replica, outcome_of(status), f"it answered {status}")
        if trail.stream:
            self._metrics.first_byte(trail, trail.first_byte_s)

    def returned(self, order: Order, replica: Replica, headers: Iterable[tuple[str, str]]) -> tuple[Pairs, bool]:
        """9. Its head, as the client shall get it, and whether the body is an event stream."""
        trail = order.trail
        pairs, events = envelope.returned(headers, id=trail.id, start=trail.start, incarnation=replica.incarnation)
        for name in order.dialect.id_headers:
            pairs = [(other, value) for other, value in pairs if other.lower() != name]
            pairs.append((name, trail.id))
        return pairs, events

    # What may go wrong between 8 and 10; each says what the client is told.

    def unreachable(self, replica: Replica, error: Unreachable) -> None:
        """Nothing was sent: the request goes back to the head of its queue."""
        self._registry.outcome(replica, Outcome.DEAD, str(error))
        self._metrics.upstream_retries.labels("unreachable").inc()
        logs.warning("replica unreachable", replica=replica.id, incarnation=replica.incarnation, reason=str(error))

    def replayed(self, order: Order) -> None:
        """A reused connection ended without a byte: the request is sent once more, on a fresh one."""
        order.trail.retries += 1
        self._metrics.upstream_retries.labels("stale_connection").inc()

    def silent(self, order: Order, replica: Replica) -> GatewayError:
        """No head came in time."""
        error = errors.UpstreamTimeout(f"The replica sent nothing within {order.spec.first_byte_timeout_s:g} s.")
        self._registry.outcome(replica, Outcome.DEAD, str(error))
        return error

    def broken(self, replica: Replica, reason: str) -> GatewayError:
        """The connection ended before a head came."""
        error = errors.UpstreamError(f"The replica's connection failed: {reason}.")
        self._registry.outcome(replica, Outcome.FAILED, str(error))
        return error

    def cut_short(self, order: Order, replica: Replica, error: GatewayError, *, blame: bool) -> None:
        """The body has no end."""
        order.trail.status, order.trail.code = error.status, error.code
        if blame:
            self._registry.outcome(replica, Outcome.FAILED, str(error))
        self._metrics.truncated_responses.labels(replica.model, error.code).inc()

    def spent(self, order: Order, used: usage.Usage | None) -> None:
        """10. What the answer took, as far as it came."""
        if used is None:
            return
        prompt, completion, said = used
        if said:
            order.trail.prompt_tokens, order.trail.completion_tokens = prompt, completion
        self._limits.charge_tokens(order.ticket.tenant, prompt + completion)

    def served(self, order: Order, seconds: float) -> None:
        """For how long it had its slot."""
        self._eta.served(order.model, seconds)

    def account(self, trail: Trail, now: float) -> None:
        """11. It has ended, somehow; ``now``: loop time."""
        trail.seconds = now - trail.since
        trail.ended = self._wall()
        self._epilogue.add(trail)

    def _trace(self, ended: Sequence[Trail]) -> None:
        """12. The few of them that are traced."""
        if self._tracer is not None:
            for trail in ended:
                if trail.trace is not None:
                    try:
                        self._tracer.ended(trail)
                    except Exception as error:  # one request's must not become another's
                        logs.error("bug", error, request_id=trail.id)
