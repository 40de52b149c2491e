"""The access log: one JSON line for each request, on standard output. Never a prompt, an answer, a key or a query string.

Requests that ended together hand in their facts and go on; a thread writes the lines, many at a time. The text is made by who
hands in, for it takes half a microsecond a line, and two threads that compute by turns cost more: the thread finds whole pieces.
A reader that is too slow loses lines, which are counted and said: it never slows a request. Knows nothing of why a request ended
as it did.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Final

import msgspec

from gateway import logs
from gateway.current import Current
from gateway.trail import Trail
from policies.config import Config

BOUND = 10_000
"""Lines that may wait to be written."""
_GATHER_S = 0.05
"""Lines that come within this time are written together."""
_ENCODER: Final = msgspec.json.Encoder()
_MAX_COMMON: Final = 1024
"""Texts of what lines have in common that are kept; a client's address is part of it."""
_TWO_DIGITS: Final = tuple(f"{number:02d}" for number in range(100))
_NUMBERS: Final = tuple(str(number) for number in range(1000))
"""Most are small, and to look one up takes a tenth of making it."""
_UNTRACED: Final = ',"trace_id":""}\n'
_WHOLE = select.PIPE_BUF
"""Bytes that one write puts into a pipe in one piece, whoever else writes there."""
_WHOLE_FILE = 1 << 20
"""A file takes each write in one piece, and what a write costs it is less for each line of many; this bounds what is joined."""


def standard_output() -> int:
    """The descriptor of standard output; of nothing at all when the process was started without one: its number may be a
    connection's by now."""
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC) if sys.__stdout__ is None else 1


class Log:
    """The log of one process; its thread lives from :meth:`start` to :meth:`close`.

    Args:
        out: file descriptor where the lines go; written by the thread alone, and unbuffered: a process cannot end properly
            while a thread hangs in a buffered file.
        wall: seconds since the epoch.
        on_dropped: called in the thread with the number of lines that were lost.
    """

    def __init__(
        self,
        current: Current,
        out: int,
        *,
        wall: Callable[[], float] = time.time,
        on_dropped: Callable[[int], None] = lambda lines: None,
    ) -> None:
        self._out = out
        self._wall = wall
        self._on_dropped = on_dropped
        self._whole = _WHOLE_FILE if stat.S_ISREG(os.fstat(out).st_mode) else _WHOLE
        self._on = current.config.gateway.access_log
        self._common: dict[_Common, str] = {}
        self._last: Trail | None = None
        self._last_common = ""
        self._second = self._millisecond = -1
        """Since the epoch, of the last line; requests that end together share their texts."""
        self._to_the_second = self._begun = ""
        self._waiting: deque[tuple[bytes, int]] = deque()
        """Pieces of so many whole lines."""
        self._taken = self._written = 0
        """Lines. Each is one thread's to count: the difference is what waits."""
        self._dropped = 0
        self._said = 0
        self._some = threading.Event()
        self._told = False
        """The thread will look for lines again, without being woken."""
        self._ending = False
        self._gone = False
        # A daemon: a reader that has stopped reading must not keep the process from ending.
        self._writer = threading.Thread(target=self._run, name="access-log", daemon=True)
        current.on_change.append(self._reloaded)

    def start(self) -> None:
        self._writer.start()

    def write(self, trails: Sequence[Trail]) -> None:
        """Take in requests that have ended."""
        if not self._on:
            return
        if self._gone or self._taken - self._written >= BOUND:
            self._dropped += len(trails)
            return
        lines = []
        for trail in trails:
            try:
                lines.append(self._line(trail))
            except Exception as error:  # one request's must not become another's
                logs.error("bug", error, request_id=trail.id)
        self._taken += len(lines)
        self._waiting.append(("".join(lines).encode(), len(lines)))
        if not self._told:
            self._told = True
            self._some.set()

    def close(self, within_s: float = 1.0) -> None:
        """Write what waits, and end; what could not be written by then is lost. Blocks for so long at most."""
        self._ending = True
        self._some.set()
        if self._writer.is_alive():
            self._writer.join(within_s)

    def _run(self) -> None:
        try:
            while not self._ending:
                self._some.wait()
                if not self._ending:
                    time.sleep(_GATHER_S)
                self._some.clear()
                self._told = False  # before it looks: a line that comes from now on wakes it once more
                self._drain()
            self._drain()
        except OSError as error:
            self._gone = True
            logs.error("access log ended: its output is gone", reason=str(error))

    def _reloaded(self, before: Config, after: Config) -> None:
        self._on = after.gateway.access_log

    def _drain(self) -> None:
        while self._waiting:
            lines, number = self._next()
            self._put(lines)
            self._written += number
        lost = self._dropped - self._said
        if lost:
            self._said += lost
            self._on_dropped(lost)
            second, rest = divmod(int(self._wall() * 1000), 1000)
            said = {"time": f"{_to_the_second(second)}.{rest:03d}Z", "event": "access log lines lost", "lines": lost}
            self._put(_ENCODER.encode(said) + b"\n")

    def _next(self) -> tuple[bytes, int]:
        """Some of what waits, as much as makes a write that is worth it; and how many lines it is."""
        piece, number = self._waiting.popleft()
        pieces, size = [piece], len(piece)
        while self._waiting and size + len(self._waiting[0][0]) <= self._whole:
            piece, more = self._waiting.popleft()
            pieces.append(piece)
            size, number = size + len(piece), number + more
        return b"".join(pieces), number

    def _put(self, lines: bytes) -> None:
        """Write whole lines, as many at once as go in in one piece."""
        while lines:
            end = len(lines)
            if end > self._whole:
                end = 1 + lines.rfind(b"\n", 0, self._whole)
                if end == 0:  # one alone is longer
                    end = 1 + lines.find(b"\n")
            lines = lines[os.write(self._out, lines[:end]) :]

    def _line(self, trail: Trail) -> str:
        """Put together out of texts; to encode all fields anew takes four times as long."""
        millisecond = int((trail.ended or self._wall()) * 1000)
        if millisecond != self._millisecond:
            self._now_is(millisecond)
        id = encode_basestring_ascii(trail.id)  # the client may have chosen it
        waited = _short(trail.waited_s) if trail.waited_s else "0.0"
        duration = _short(trail.seconds)
        if trail.first_byte_s is None:
            first = "null"
        else:  # an answer that came whole began when it ended
            first = duration if trail.first_byte_s == trail.seconds else _short(trail.first_byte_s)
        prompt = "null" if trail.prompt_tokens is None else _number(trail.prompt_tokens)
        completion = "null" if trail.completion_tokens is None else _number(trail.completion_tokens)
        end = _UNTRACED if trail.trace is None else f',"trace_id":"{trail.trace.id}"}}\n'
        return (
            f'{self._begun}{id}{self._shared(trail)}{waited},"ttft_s":{first},"duration_s":{duration},'
            f'"bytes_in":{_number(trail.bytes_in)},"bytes_out":{_number(trail.bytes_out)},'
            f'"prompt_tokens":{prompt},"completion_tokens":{completion}{end}'
        )

    def _now_is(self, millisecond: int) -> None:
        second = millisecond // 1000
        if second != self._second:
            self._second, self._to_the_second = second, _to_the_second(second)
        rest = millisecond % 1000
        self._millisecond = millisecond
        stamp = f"{self._to_the_second}.{_NUMBERS[rest // 100]}{_TWO_DIGITS[rest % 100]}Z"
        self._begun = f'{{"time":"{stamp}","request_id":'

    def _shared(self, trail: Trail) -> str:
        """The fields that it has in common with many others, as text; most with the one before."""
        if self._last is not None and _alike(self._last, trail):
            return self._last_common
        self._last, self._last_common = trail, self._looked_up(trail)
        return self._last_common

    def _looked_up(self, trail: Trail) -> str:
        common = (
            trail.client,
            trail.tenant,
            trail.method,
            trail.route,
            trail.model,
            trail.stream,
            trail.status,
            trail.code,
            trail.phase,
            trail.start,
            trail.replica,
            trail.incarnation,
            trail.retries,
        )
        text = self._common.get(common)
        if text is None:
            if len(self._common) >= _MAX_COMMON:
                self._common.clear()
            fields = dict(zip(_COMMON, common, strict=True))
            text = self._common[common] = f',{_ENCODER.encode(fields)[1:-1].decode()},"waited_s":'
        return text


_COMMON = (
    *("client", "tenant", "method", "route", "model", "stream", "status", "code", "phase"),
    *("start", "replica", "incarnation", "retries"),
)
_Common = tuple[str, str, str, str, str | None, bool, int, str, str, str, str, str, int]


def _alike(one: Trail, other: Trail) -> bool:
    """They have the same in common with others."""
    return (
        one.status == other.status
        and one.stream == other.stream
        and one.retries == other.retries
        and one.client == other.client
        and one.tenant == other.tenant
        and one.method == other.method
        and one.route == other.route
        and one.model == other.model
        and one.code == other.code
        and one.phase == other.phase
        and one.start == other.start
        and one.replica == other.replica
        and one.incarnation == other.incarnation
    )


def _short(seconds: float) -> str:
    """To a tenth of a millisecond."""
    tenths = int(seconds * 10_000 + 0.5)
    if tenths <= 0:
        return str(tenths / 10_000)
    rest = tenths % 10_000
    return f"{_number(tenths // 10_000)}.{_TWO_DIGITS[rest // 100]}{_TWO_DIGITS[rest % 100]}"


def _number(number: int) -> str:
    return _NUMBERS[number] if 0 <= number < len(_NUMBERS) else str(number)


def _to_the_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
