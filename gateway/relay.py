"""An answer's body on its way from the replica to the client: as it comes, under a watch, ended properly or not at all.

Owns what is known of a body in passing: whether it stands between two frames, what it took, and whose silence ended it.
"""

from __future__ import annotations

import asyncio
import contextlib

from gateway import errors, usage
from gateway.downstream import Downstream
from gateway.errors import GatewayError
from gateway.trail import Trail
from gateway.upstream import Answer, Truncated
from gateway.watch import Watch
from policies.config import Model

_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LAST = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
_LONGEST = max(map(len, _LAST))
_MAX_LATE, _LATE_S = 64 << 10, 5.0
"""Bytes, and seconds, of a replica's error that comes when the client has its head already."""


class LateAnswer(Exception):
    """The replica answered with an error of its own, and the client's head was sent before."""

    def __init__(self, status: int, frame: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.frame = frame


class Frames:
    """Where an event stream stands. Feed it every piece; it keeps a few bytes."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> None:
        self._tail = piece[-_LONGEST:] if len(piece) >= _LONGEST else (self._tail + piece)[-_LONGEST:]

    @property
    def between(self) -> bool:
        """Whether a frame of our own may follow: behind part of one it would be read as that one's end."""
        return not self._tail or self._tail.endswith(_BLANK_LINES)

    @property
    def done(self) -> bool:
        """Whether the last frame of OpenAI's streams has passed: a client that has it need not wait for the body's end."""
        return self._tail.endswith(_LAST)


class Relay:
    """One body. The answer's head has been sent."""

    def __init__(self, answer: Answer, down: Downstream, model: Model, trail: Trail) -> None:
        self._answer = answer
        self._down = down
        self._model = model
        self._trail = trail
        self._writing = False
        self._stopped = False
        self._watch: Watch | None = None
        self.frames = Frames()
        self.meter = usage.meter(answer.content_type, answer.encoding)

    async def run(self) -> None:
        """Pass the body on to its proper end.

        Raises:
            Truncated: it has none; :meth:`failure` tells why.
            ClientGone: nobody takes it.
        """
        answer, down, trail, frames, meter = self._answer, self._down, self._trail, self.frames, self.meter
        self._watch = watch = Watch(
            asyncio.get_running_loop(),
            idle_s=self._model.idle_body_timeout_s,
            total_s=self._model.total_timeout_s,
            on_expiry=self._expire,
        )
        try:
            while piece := await answer.read():
                watch.moved()
                frames.feed(piece)
                meter.feed(piece)
                trail.bytes_out += len(piece)
                self._writing = True
                await down.write(piece)
                self._writing = False
                watch.moved()
            self._writing = True  # a client may stall at the very end, too
            await down.finish()
        finally:
            watch.stop()

    @property
    def blames_replica(self) -> bool:
        """That the body broke off says something of its replica: not if it was merely long, or this gateway stops."""
        return not self._stopped and (self._watch is None or self._watch.expired != "total")

    def failure(self, error: Truncated) -> GatewayError:
        """What the client is told when :meth:`run` raised ``error``."""
        if self._stopped:
            return errors.unfinished()
        expired = self._watch.expired if self._watch is not None else None
        if expired == "idle":
            return errors.stood_still(self._model.idle_body_timeout_s)
        if expired == "total" and self._model.total_timeout_s is not None:
            return errors.took_too_long(self._model.total_timeout_s)
        return errors.broke_off(str(error))

    def shut_down(self) -> None:
        """The gateway ends before the body does."""
        self._stopped = True
        self._answer.abort()

    def _expire(self) -> None:
        """Time is up: end the side that stands still. Its reader, or writer, gets an error and unwinds."""
        if self._writing:
            self._trail.code = "client_stalled"
            self._down.abort()
        else:
            self._answer.abort()


async def remainder(answer: Answer) -> bytes:
    """The body of an error, if it is short; what came of it, if it is not, or breaks off, or takes too long."""
    body = b""
    with contextlib.suppress(Truncated, TimeoutError):
        async with asyncio.timeout(_LATE_S):
            while len(body) < _MAX_LATE and (piece := await answer.read()):
                body += piece
    return body[:_MAX_LATE]
