"""The data path of everything that may have to wait, whole and in order: read, wait for a slot, send, stream back.

What is decided between the awaits is :mod:`gateway.decisions`'. Bodies pass as they are but for a model's edits; nothing of a
stream is collected. Once an answer has begun, a failure is a last frame and a cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from gateway import dialects, edits, errors, hold, websocket
from gateway.claim import Claim, Refused
from gateway.decisions import Decisions, Order, repeated
from gateway.downstream import ClientGone, Downstream
from gateway.envelope import Pairs
from gateway.errors import GatewayError
from gateway.eta import Eta
from gateway.exchange import Head
from gateway.hold import Holding
from gateway.intake import Intake, Source
from gateway.ledger import Ledger
from gateway.limits import Limits
from gateway.metrics import Metrics
from gateway.registry import Registry
from gateway.relay import LateAnswer, Relay, remainder
from gateway.routes import Found
from gateway.trail import Trail
from gateway.upstream import Answer, Broken, Outgoing, Pool, Silent, Truncated, Unreachable, Upstreams
from gateway.waitroom import Waitroom
from policies.replica import Replica

MAX_TURNS = 8
"""Slots that one request may be given before its replicas' being unreachable is its answer."""


class Proxy:
    """Serves the inference routes of one gateway process."""

    def __init__(
        self,
        decisions: Decisions,
        *,
        intake: Intake,
        limits: Limits,
        ledger: Ledger,
        registry: Registry,
        waitroom: Waitroom,
        upstreams: Upstreams,
        eta: Eta,
        metrics: Metrics,
    ) -> None:
        self._decide = decisions
        self._intake = intake
        self._limits = limits
        self._ledger = ledger
        self._registry = registry
        self._waitroom = waitroom
        self._upstreams = upstreams
        self._eta = eta
        self._metrics = metrics
        self._relays: set[Relay] = set()
        self._ending = False

    def cut(self) -> None:
        """End every answer that is under way; clients are told that it is not complete."""
        self._ending = True
        for relay in list(self._relays):
            relay.shut_down()

    async def handle(self, head: Head, found: Found, source: Source, down: Downstream) -> None:
        """One request, from its head to the last byte of its answer.

        Raises:
            GatewayError: there is no answer of a replica, and nothing has been sent to the client.
        """
        trail = self._decide.begin(head, found, repeated(head.headers))
        await self._to_its_end(self._served(head, found, source, down, trail), trail, head, found, down)

    async def go(self, order: Order, down: Downstream, claim: Claim | None) -> None:
        """The rest of a request that was prepared without a task.

        Args:
            claim: its place or slot, which is given back; None: its tenant's budget has to be asked for first.

        Raises:
            GatewayError: as :meth:`handle` does.
        """
        work = self._gone(order, down, claim)
        await self._to_its_end(work, order.trail, order.head, order.found, down)

    async def _to_its_end(self, work: Awaitable[None], trail: Trail, head: Head, found: Found, down: Downstream) -> None:
        """Whatever happens, the client is told as much as it still can be, and the request is accounted for."""
        try:
            await work
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
        except asyncio.CancelledError:
            if self._ending and trail.status == 499:
                trail.status, trail.code = errors.ShuttingDown.status, errors.ShuttingDown.code
            raise
        except Exception:
            trail.status, trail.code = GatewayError.status, GatewayError.code
            raise
        finally:
            self._decide.account(trail, asyncio.get_running_loop().time())

    async def _receive(self, head: Head, found: Found, source: Source, down: Downstream, trail: Trail) -> Order:
        """Everything before the waiting room. Nothing that is refused here counts as demand."""
        tenant = self._decide.identify(head, trail)
        if found.route.serves == "socket":
            websocket.check(head)
        body = await self._intake.read(found, head.headers, source, down.proceed)
        try:
            spec = self._decide.permit(tenant, body, trail)
            await edits.apply(body, spec)
            order = self._decide.order(head, found, tenant, body, trail)
            await self._charge(order)
        except BaseException:
            body.close()
            raise
        return order

    async def _charge(self, order: Order) -> None:
        if not self._decide.charge(order):
            await self._limits.obtain(order.ticket.tenant)
            self._ledger.arrive(order.model)

    async def _served(self, head: Head, found: Found, source: Source, down: Downstream, trail: Trail) -> None:
        order = await self._receive(head, found, source, down, trail)
        await self._claimed(order, down)

    async def _gone(self, order: Order, down: Downstream, claim: Claim | None) -> None:
        if claim is not None:
            try:
                with order.body:
                    await self._serve(order, down, claim)
            finally:
                claim.leave()
            return
        try:
            await self._charge(order)
        except BaseException:
            order.body.close()
            raise
        await self._claimed(order, down)

    async def _claimed(self, order: Order, down: Downstream) -> None:
        with order.body:
            try:
                with self._waitroom.claim(order.ticket) as claim:
                    await self._serve(order, down, claim)
            except Refused as refused:
                raise self._decide.refusal(refused, order) from None

    async def _serve(self, order: Order, down: Downstream, claim: Claim) -> None:
        """A slot, dispatch, relay; and again for as long as the chosen replica could not even be reached."""
        loop = asyncio.get_running_loop()
        try:
            for _ in range(MAX_TURNS):
                replica = claim.replica or await self._wait(order, claim, down)
                since = loop.time()
                try:
                    answer = await self._dispatch(order, replica)
                except Unreachable as error:
                    self._decide.unreachable(replica, error)
                    claim.again()
                    continue
                try:
                    return await self._relay(order, replica, answer, down)
                finally:
                    answer.close()
                    self._decide.served(order, loop.time() - since)
        except Refused as refused:
            raise self._decide.refusal(refused, order) from None
        raise errors.UpstreamError(f"No replica of model {order.model!r} could be reached.", retry_after_s=1.0)

    async def _wait(self, order: Order, claim: Claim, down: Downstream) -> Replica:
        trail, ticket = order.trail, order.ticket
        self._decide.held(order)
        holding = order.holding = order.holding or self._holding(order, down)
        promised_s, before_s = self._eta.wait_s(order.model, claim.position), ticket.waited_s
        replica = None
        try:
            replica = await hold.until_granted(holding, claim, down, self._eta)
            self._metrics.promised(order.model, promised_s, ticket.waited_s - before_s)
            return replica
        except (asyncio.CancelledError, ClientGone):
            self._metrics.waited(trail, "cancelled", ticket.waited_s)
            raise
        finally:
            self._decide.released(order, replica)
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
        outgoing, limit_s = self._decide.outgoing(order, replica), order.spec.first_byte_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._send(self._upstreams.pool(replica), outgoing, order)
        except TimeoutError:
            raise self._decide.silent(order, replica) from None
        except Broken as broken:
            raise self._decide.broken(replica, str(broken)) from None

    async def _send(self, pool: Pool, outgoing: Outgoing, order: Order) -> Answer:
        """Sent again once, on a fresh connection, when a reused one stayed silent."""
        try:
            return await pool.send(outgoing, fresh=order.trail.retries > 0)
        except Silent:
            self._decide.replayed(order)
        return await pool.send(outgoing, fresh=True)

    async def _relay(self, order: Order, replica: Replica, answer: Answer, down: Downstream) -> None:
        """Head and body to the client, piece by piece as they come."""
        trail = order.trail
        now = asyncio.get_running_loop().time()
        headers, events = self._decide.answered(order, replica, answer.status, answer.headers, now)
        if answer.status == websocket.SWITCHING:
            return await self._tunnel(order, answer, headers, down)
        if down.begun:
            await self._join(order, answer, events, down)
        else:
            await down.head(answer.status, answer.reason, headers)
        relay = Relay(answer, down, order.spec, trail)
        self._relays.add(relay)
        try:
            await relay.run()
        except Truncated as broken:
            error = relay.failure(broken)
            self._decide.cut_short(order, replica, error, blame=relay.blames_replica)
            await down.cut(order.dialect.late(error, order.head.id) if events and relay.frames.between else b"")
        except (ClientGone, asyncio.CancelledError):
            if events and relay.frames.done:
                trail.status, trail.code = answer.status, ""
            raise
        else:
            trail.status, trail.code = answer.status, ""
        finally:
            self._relays.discard(relay)
            self._decide.spent(order, relay.meter.usage())

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
