"""The data path, whole and in order: read, choose the model, wait for a slot, send, stream back.

Bodies pass as they are, in both directions; nothing of a stream is collected. What may happen to a request is decided by
the waiting room and told by the upstream; this module turns it into bytes on the client's connection. A body that broke
off never looks complete: its connection ends without the mark of a proper end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from gateway import envelope, errors, logs
from gateway.current import Current
from gateway.downstream import REQUEST_ID
from gateway.errors import GatewayError
from gateway.eta import Eta
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.registry import Registry
from gateway.upstream import Answer, Broken, Outgoing, Pool, Silent, Truncated, Unreachable, Upstreams
from gateway.waitroom import Refused, Ticket, Waitroom
from policies.config import Model
from policies.replica import Replica

MAX_TURNS = 8
"""Slots that one request may be given before its replicas' being unreachable is its answer."""
BODY_PAUSE_S = 30.0
"""A client that pauses for longer while it sends its body has gone."""
_LINGER_S = 5.0
_OUTCOMES = {"restore_failed": "failed", "shutting_down": "shutdown", "queue_full": "full", "queue_bytes_full": "full"}


@dataclass(slots=True)
class _Trail:
    """What became of one request, for metrics and the log."""

    route: str
    id: str
    since: float
    phase: Literal["reading", "held", "dispatched", "streaming"] = "reading"
    model: str | None = None
    start: str = "none"
    status: int = 499
    code: str = "client_left"
    replayed: bool = False


class Proxy:
    """Serves the inference routes of one gateway process."""

    def __init__(
        self,
        current: Current,
        *,
        ledger: Ledger,
        registry: Registry,
        waitroom: Waitroom,
        upstreams: Upstreams,
        eta: Eta,
        metrics: Metrics,
    ) -> None:
        self._current = current
        self._ledger = ledger
        self._registry = registry
        self._waitroom = waitroom
        self._upstreams = upstreams
        self._eta = eta
        self._metrics = metrics

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request, from its head to the last byte of its answer.

        Raises:
            GatewayError: there is no answer of a replica; nothing has been sent to the client yet.
        """
        loop = asyncio.get_running_loop()
        trail = _Trail(request.path, request[REQUEST_ID], loop.time())
        try:
            body = await self._read(request)
            model = self._resolve(envelope.peek(body).model)
            trail.model = model
            patience_s = envelope.patience_s(request.headers, self._current.config.models[model].hold.max_wait_s)
            ticket = Ticket(model, len(body), trail.since + patience_s)
            self._ledger.arrive(model)
            return await self._serve(request, body, ticket, trail)
        except GatewayError as error:
            trail.status, trail.code = error.status, error.code
            raise
        finally:
            self._account(request, trail, loop.time() - trail.since)

    async def _read(self, request: web.Request) -> bytes:
        """The whole body, within bounds of size and patience."""
        limit = self._current.config.gateway.max_body_bytes
        too_large = errors.RequestTooLarge(f"The request body is larger than {limit} bytes.")
        if (request.content_length or 0) > limit:
            raise too_large
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise errors.UnsupportedEncoding("Send the request body uncompressed.")
        body = bytearray()
        try:
            while True:
                async with asyncio.timeout(BODY_PAUSE_S):
                    chunk = await request.content.readany()
                if not chunk:
                    return bytes(body)
                body += chunk
                if len(body) > limit:
                    raise too_large
        except TimeoutError:
            raise errors.SlowRequest(f"No more of the request body came for {BODY_PAUSE_S:g} s.") from None
        except web.RequestPayloadError as error:
            raise errors.InvalidRequest(f"The request body is not framed properly: {error}.", "invalid_http") from None

    def _resolve(self, name: str) -> str:
        model = self._current.config.resolve(name)
        if model is None:
            raise errors.ModelNotFound(f"The model {name!r} does not exist.")
        return model

    async def _serve(self, request: web.Request, body: bytes, ticket: Ticket, trail: _Trail) -> web.StreamResponse:
        """Slot, dispatch, relay; and again for as long as the chosen replica could not even be reached."""
        outgoing = self._outgoing(request, body)
        trail.phase = "held"
        try:
            with self._waitroom.claim(ticket) as claim:
                for _ in range(MAX_TURNS):
                    replica = claim.replica or await claim.granted()
                    assert replica is not None, "without a limit of time there is a replica or a refusal"
                    trail.phase, trail.start = "dispatched", replica.start or "cold"
                    if ticket.waited_s and ticket.turns == 1:
                        self._metrics.queue_wait.labels(ticket.model, "admitted").observe(ticket.waited_s)
                    try:
                        answer = await self._dispatch(replica, outgoing, trail)
                    except Unreachable as error:
                        self._registry.suspect(replica, str(error))
                        self._metrics.upstream_retries.labels("unreachable").inc()
                        logs.warning(
                            "replica unreachable", replica=replica.id, incarnation=replica.incarnation, reason=str(error)
                        )
                        trail.phase = "held"
                        claim.again()
                        continue
                    try:
                        return await self._relay(request, replica, answer, trail)
                    finally:
                        answer.close()
        except Refused as refused:
            raise self._refusal(refused, ticket) from None
        except asyncio.CancelledError:
            if trail.phase == "held":
                self._metrics.queue_wait.labels(ticket.model, "cancelled").observe(ticket.waited_s)
            raise
        raise errors.UpstreamError(f"No replica of model {ticket.model!r} could be reached.", retry_after_s=1.0)

    async def _dispatch(self, replica: Replica, outgoing: Outgoing, trail: _Trail) -> Answer:
        """The replica's response head. Sent again once, on a fresh connection, when a reused one stayed silent."""
        pool, limit_s = self._upstreams.pool(replica), self._model(replica).first_byte_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._send(pool, outgoing, trail)
        except TimeoutError:
            raise errors.UpstreamTimeout(f"The replica sent nothing within {limit_s:g} s.") from None
        except Broken as error:
            raise errors.UpstreamError(f"The replica's connection failed: {error}.") from None

    async def _send(self, pool: Pool, outgoing: Outgoing, trail: _Trail) -> Answer:
        try:
            return await pool.send(outgoing, fresh=trail.replayed)
        except Silent:
            trail.replayed = True
            self._metrics.upstream_retries.labels("stale_connection").inc()
        return await pool.send(outgoing, fresh=True)

    async def _relay(self, request: web.Request, replica: Replica, answer: Answer, trail: _Trail) -> web.StreamResponse:
        """Head and body to the client, chunk by chunk as they come."""
        loop = asyncio.get_running_loop()
        self._metrics.time_to_first_byte.labels(replica.model, trail.start).observe(loop.time() - trail.since)
        headers, events = envelope.returned(answer.headers, id=trail.id, start=trail.start, incarnation=replica.incarnation)
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        trail.phase = "streaming"
        idle_s, last = self._model(replica).idle_body_timeout_s, b""
        try:
            await response.prepare(request)
            async with asyncio.timeout(idle_s) as silence:
                while chunk := await answer.read():
                    silence.reschedule(loop.time() + idle_s)
                    last = chunk
                    await response.write(chunk)
                    silence.reschedule(loop.time() + idle_s)
            await response.write_eof()
        except Truncated as error:
            failure: GatewayError = errors.UpstreamError(f"The replica's answer broke off: {error}.")
        except TimeoutError:
            failure = errors.UpstreamTimeout(f"The answer did not move for {idle_s:g} s.")
        except ConnectionError:
            return response
        else:
            trail.status, trail.code = answer.status, ""
            return response
        trail.status, trail.code = failure.status, failure.code
        self._metrics.truncated_responses.labels(replica.model, failure.code).inc()
        await self._cut(request, response, failure, last if events else None)
        return response

    async def _cut(self, request: web.Request, response: web.StreamResponse, failure: GatewayError, last: bytes | None) -> None:
        """End a response that has begun and cannot be completed; ``last``: the last bytes of an event stream."""
        transport = request.transport
        if transport is None or transport.is_closing():
            return
        if last is not None:
            between = b"" if not last or last.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
            frame = between + b"data: " + json.dumps(errors.envelope(failure)).encode() + b"\n\n"
            if transport.get_write_buffer_size() == 0:
                with contextlib.suppress(ConnectionError):
                    await response.write(frame)
        if request.version < (1, 1) and response.content_length is None:
            # Such a body ends with the connection: only a reset tells the client that this is not the end.
            connection: socket.socket = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
            return
        transport.close()
        asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)

    def _outgoing(self, request: web.Request, body: bytes) -> Outgoing:
        headers = envelope.forwarded(
            request.headers.items(), id=request[REQUEST_ID], peer=request.remote, scheme=request.scheme, host=request.host
        )
        return Outgoing(request.rel_url.raw_path_qs, headers, body)

    def _model(self, replica: Replica) -> Model:
        return self._current.config.models[replica.model]

    def _refusal(self, refused: Refused, ticket: Ticket) -> GatewayError:
        code = refused.reject.code
        self._metrics.queue_wait.labels(ticket.model, _OUTCOMES.get(code, "timeout")).observe(ticket.waited_s)
        promise_s = self._eta.retry_after_s(ticket.model)
        return errors.refusal(code, model=ticket.model, detail=refused.reject.detail, retry_after_s=promise_s)

    def _account(self, request: web.Request, trail: _Trail, seconds: float) -> None:
        metrics, model = self._metrics, self._metrics.model(trail.model)
        metrics.requests.labels(model, trail.route, str(trail.status), trail.start).inc()
        if trail.code == "client_left":
            metrics.client_disconnects.labels(trail.phase).inc()
        elif trail.code:
            metrics.errors.labels(model, trail.code).inc()
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            metrics.client_retries.labels(model).inc()
        if trail.code:
            logs.info(
                "request ended early",
                request_id=trail.id,
                model=model,
                code=trail.code,
                phase=trail.phase,
                seconds=round(seconds, 3),
            )
