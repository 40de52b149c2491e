"""A request's body, from the first byte to what routing must know of it; bounded in size, memory and time.

Bodies are kept as they came: small ones in memory, large ones on disk. Compressed ones are unpacked only to be looked at,
and only so far. Knows nothing of models, tenants or replicas; what is refused here has reached nobody.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol
from urllib.parse import parse_qs

from gateway import envelope, errors, multipart
from gateway.body import Body, Form, nothing
from gateway.current import Current
from gateway.errors import InvalidRequest
from gateway.members import Buffer
from gateway.routes import Found
from gateway.spool import Spool
from policies.config import Config

PAUSE_S = 30.0
"""A client that pauses for longer while it sends its body has gone."""
GRACE_S, SLOWEST_BYTES_PER_S = 60.0, 16 << 10
"""After the grace a body must have come at least this fast; or drops of it would keep a place for ever."""
MAX_RATIO, ALWAYS_UNPACKED = 100, 1 << 20
"""A compressed body may grow this much when it is unpacked; up to so many bytes it may do what it likes."""
_WRITE_BYTES = 1 << 20
_TRUE = frozenset(("true", "1", "on", "yes", "t", "y"))
_GZIP = 16 + zlib.MAX_WBITS


class Unframed(Exception):
    """The body is not framed as HTTP wants it. Sources raise it."""


class Source(Protocol):
    """Where a body comes from."""

    async def readany(self) -> bytes:
        """The next bytes as they come; empty at the end."""


class Intake:
    """Reads the bodies of one gateway process, and knows how much memory they take together."""

    def __init__(self, current: Current) -> None:
        self._current = current
        self.buffered = 0
        """Bytes of bodies in memory now, being read or kept."""

    async def read(
        self, found: Found, headers: Mapping[str, str], source: Source, before: Callable[[], Awaitable[None]] | None = None
    ) -> Body:
        """The whole body of a request; ``before`` is awaited before the first read if the client waits for a sign.

        Raises:
            GatewayError: 4xx for what is wrong with it, SpoolFailed if the disk is.
        """
        config = self._current.config
        form, hint = check(found, headers, config), hinted(found, headers)
        if form.expects and before is not None:
            await before()
        body = await self._collect(found, form, source, config.gateway.max_body_bytes, config.gateway.spool_bytes)
        try:
            await body.look(lambda data: understand(body, data, hint, config))
        except BaseException:
            body.close()
            raise
        return body

    async def read_small(
        self, found: Found, headers: Mapping[str, str], source: Source, before: Callable[[], Awaitable[None]], limit: int
    ) -> bytes:
        """The body of a call that the gateway answers itself, at most ``limit`` bytes.

        Raises:
            GatewayError: 4xx for what is wrong with it.
        """
        form = _form(found, headers, limit)
        if form.gzip:
            raise errors.UnsupportedEncoding("Send the request body uncompressed.")
        if form.expects:
            await before()
        with await self._collect(found, form, source, limit, limit) as body:
            return body.data or b""

    async def _collect(self, found: Found, form: Form, source: Source, limit: int, spool_bytes: int) -> Body:
        """All bytes; those in memory are counted, and the rest goes to disk."""
        loop, most = asyncio.get_running_loop(), self._current.config.gateway.hold.max_bytes
        data, size, spool, begun = bytearray(), 0, None, loop.time()
        try:
            async with asyncio.timeout(PAUSE_S) as pause:
                while chunk := await source.readany():
                    size += len(chunk)
                    if size > limit:
                        raise too_large(limit)
                    data += chunk
                    self.buffered += len(chunk)
                    if spool is None and (len(data) > spool_bytes or self.buffered > most):
                        spool = Spool()
                    if spool is not None and len(data) >= _WRITE_BYTES:
                        await self._move(data, spool)
                    pause.reschedule(_patience(loop.time(), begun, size))
            if spool is None:
                kept = len(data)
                return Body(found, form, bytes(data), None, lambda: self._release(kept))
            await self._move(data, spool)
            return Body(found, form, None, spool, nothing)
        except BaseException as error:
            self.buffered -= len(data)
            if spool is not None:
                spool.close()
            raise _translated(error) from None

    async def _move(self, data: bytearray, spool: Spool) -> None:
        await spool.append(bytes(data))
        self.buffered -= len(data)
        data.clear()

    def _release(self, count: int) -> None:
        self.buffered -= count


def check(found: Found, headers: Mapping[str, str], config: Config) -> Form:
    """What the head says of the body; refuses what need not be read to be refused.

    Raises:
        GatewayError: 400, 413, 415 or 417.
    """
    return _form(found, headers, config.gateway.max_body_bytes)


def _form(found: Found, headers: Mapping[str, str], limit: int) -> Form:
    said: dict[str, str] = {}
    for name, value in headers.items():
        lower = name.lower()
        if lower in ("content-type", "content-encoding", "content-length", "expect"):
            if lower in said:
                raise InvalidRequest(f"There is more than one {lower} header.", "invalid_http")
            said[lower] = value.strip()
    expect, encoding = said.get("expect", ""), said.get("content-encoding", "").lower()
    if expect and expect.lower() != "100-continue":
        raise errors.ExpectationFailed("The only expectation that can be met is 100-continue.")
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise errors.UnsupportedEncoding("Send the request body uncompressed, or compressed with gzip.")
    length = said.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large(limit)
    kind, boundary = said.get("content-type", ""), None
    if kind.lower().startswith("multipart/"):
        if not found.route.multipart:
            raise errors.UnsupportedMediaType(f"{found.route.name} takes application/json, not {kind.partition(';')[0]}.")
        boundary = multipart.boundary(kind)
    return Form(boundary, encoding.endswith("gzip"), bool(expect))


def whole(found: Found, headers: Mapping[str, str], data: bytes, config: Config) -> Body:
    """A body that has been read already and is small.

    Raises:
        GatewayError: as :meth:`Intake.read` does.
    """
    body = Body(found, check(found, headers, config), data, None, nothing)
    understand(body, data, hinted(found, headers), config)
    return body


def hinted(found: Found, headers: Mapping[str, str]) -> str:
    """The model that is named beside the body, where the route allows it; else empty.

    Raises:
        InvalidRequest: named twice, and differently.
    """
    if found.route.model == "body":
        return ""
    named = {headers["x-rewake-model"]} if "x-rewake-model" in headers else set()
    if "model=" in found.query:
        named |= set(parse_qs(found.query, max_num_fields=None).get("model", ()))
    if len(named) > 1:
        raise InvalidRequest("The header x-rewake-model and the parameter model name different models.", "invalid_request")
    return next(iter(named), "")


def understand(body: Body, data: Buffer, hint: str, config: Config) -> None:
    """Find ``model`` and ``stream``.

    Raises:
        GatewayError: it cannot be read, or names no model.
    """
    source, required = body.found.route.model, body.found.route.model == "body"
    if source != "hint":
        if body.form.gzip:
            data = unpacked(data, config.gateway.max_body_bytes)
        if body.form.boundary is not None:
            fields, _ = multipart.parts(data, body.form.boundary)
            body.model = multipart.field(data, fields, "model") or ""
            body.stream = (multipart.field(data, fields, "stream") or "").lower() in _TRUE
        else:
            peek = envelope.peek(data, required=required)
            body.model, body.stream = peek.model, bool(peek.stream)
        body.named = bool(body.model)
    if hint and body.model not in ("", hint):
        raise InvalidRequest("The body names another model than stands beside it.", "invalid_request")
    body.model = body.model or hint
    if not body.model:
        where = "the field `model`" if required else "the header x-rewake-model or the parameter `model`"
        raise errors.MissingModel(f"No model is named: {where} is missing or empty.", "missing_model")


def unpacked(data: Buffer, limit: int) -> bytes:
    """The content of a gzip body.

    Raises:
        InvalidRequest: not one whole gzip member.
        RequestTooLarge: it grows beyond ``limit`` bytes, or as only bombs do.
    """
    limit = min(limit, max(ALWAYS_UNPACKED, MAX_RATIO * len(data)))
    unzip = zlib.decompressobj(_GZIP)
    try:
        content = unzip.decompress(data, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"The request body is not valid gzip: {error}.", "invalid_encoding") from None
    if len(content) > limit:
        raise errors.RequestTooLarge(f"The request body unpacks to more than {limit} bytes.")
    if not unzip.eof or unzip.unused_data:
        raise InvalidRequest("The request body is not one whole gzip member.", "invalid_encoding")
    return content


def too_large(limit: int) -> errors.RequestTooLarge:
    return errors.RequestTooLarge(f"The request body is larger than {limit} bytes.")


def _patience(now: float, begun: float, size: int) -> float:
    """Loop time until which the next bytes must come."""
    return min(now + PAUSE_S, begun + GRACE_S + size / SLOWEST_BYTES_PER_S)


def _translated(error: BaseException) -> BaseException:
    if isinstance(error, TimeoutError):
        return errors.SlowRequest("The request body came too slowly, or stopped coming.")
    if isinstance(error, Unframed):
        return InvalidRequest(f"The request body is not framed properly: {error}.", "invalid_http")
    return error
