"""The access log: one JSON line for each request, on standard output. Never a prompt, an answer, a key or a query string.

Requests hand in their facts and go on; a thread writes the lines, many at a time. A line is made where its request ends, for it
takes half a microsecond, and two threads that compute by turns cost more. A reader that is too slow loses lines, which are
counted and said: it never slows a request. Knows nothing of why a request ended as it did.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
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
_WHOLE = select.PIPE_BUF
"""Bytes that one write puts into a pipe in one piece, whoever else writes there."""
_WHOLE_FILE = 64 << 10
"""A file takes each write in one piece; this bounds what is joined."""


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
        self._second = self._millisecond = -1
        """Since the epoch, of the last line; requests that end together share their texts."""
        self._to_the_second = self._stamp = ""
        self._waiting: deque[bytes] = deque()
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

    def write(self, trail: Trail) -> None:
        """Take in a request that has ended."""
        if not self._on:
            return
        if self._gone or len(self._waiting) >= BOUND:
            self._dropped += 1
            return
        self._waiting.append(self._line(trail))
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
        lines, size = list[bytes](), 0
        while self._waiting:
            line = self._waiting.popleft()
            if lines and size + len(line) > self._whole:
                self._put(b"".join(lines))
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        self._put(b"".join(lines))
        lost = self._dropped - self._said
        if lost:
            self._said += lost
            self._on_dropped(lost)
            second, rest = divmod(int(self._wall() * 1000), 1000)
            said = {"time": f"{_to_the_second(second)}.{rest:03d}Z", "event": "access log lines lost", "lines": lost}
            self._put(_ENCODER.encode(said) + b"\n")

    def _put(self, piece: bytes) -> None:
        while piece:
            piece = piece[os.write(self._out, piece) :]

    def _line(self, trail: Trail) -> bytes:
        """Put together out of texts; to encode all fields anew takes four times as long."""
        millisecond = int((trail.ended or self._wall()) * 1000)
        if millisecond != self._millisecond:
            self._now_is(millisecond)
        id = _ENCODER.encode(trail.id).decode()  # the client may have chosen it
        first = "null" if trail.first_byte_s is None else _short(trail.first_byte_s)
        prompt = "null" if trail.prompt_tokens is None else _number(trail.prompt_tokens)
        completion = "null" if trail.completion_tokens is None else _number(trail.completion_tokens)
        trace = "" if trail.trace is None else trail.trace.id
        line = (
            f'{{"time":"{self._stamp}","request_id":{id},{self._shared(trail)}'
            f'"waited_s":{_short(trail.waited_s)},"ttft_s":{first},"duration_s":{_short(trail.seconds)},'
            f'"bytes_in":{_number(trail.bytes_in)},"bytes_out":{_number(trail.bytes_out)},'
            f'"prompt_tokens":{prompt},"completion_tokens":{completion},"trace_id":"{trace}"}}\n'
        )
        return line.encode()

    def _now_is(self, millisecond: int) -> None:
        second = millisecond // 1000
        if second != self._second:
            self._second, self._to_the_second = second, _to_the_second(second)
        rest = millisecond % 1000
        self._millisecond = millisecond
        self._stamp = f"{self._to_the_second}.{_NUMBERS[rest // 100]}{_TWO_DIGITS[rest % 100]}Z"

    def _shared(self, trail: Trail) -> str:
        """The fields that it has in common with many others, as text."""
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
            text = self._common[common] = _ENCODER.encode(fields)[1:-1].decode() + ","
        return text


_COMMON = (
    *("client", "tenant", "method", "route", "model", "stream", "status", "code", "phase"),
    *("start", "replica", "incarnation", "retries"),
)
_Common = tuple[str, str, str, str, str | None, bool, int, str, str, str, str, str, int]


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
