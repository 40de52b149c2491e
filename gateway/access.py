"""The access log: one JSON line for each request, on standard output. Never a prompt, an answer, a key or a query string.

Requests hand in their facts and go on; a thread writes the lines, many at a time. A line is made where its request ends, for it
takes two microseconds, and two threads that compute by turns cost more. A reader that is too slow loses lines, which are counted
and said: it never slows a request. Knows nothing of why a request ended as it did.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec

from gateway import logs
from gateway.current import Current
from gateway.structs import Line
from gateway.trail import Trail

BOUND = 10_000
"""Lines that may wait to be written."""
_GATHER_S = 0.05
"""Lines that come within this time are written together."""
_ENCODER = msgspec.json.Encoder()
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
        self._current = current
        self._out = out
        self._wall = wall
        self._on_dropped = on_dropped
        self._whole = _WHOLE_FILE if stat.S_ISREG(os.fstat(out).st_mode) else _WHOLE
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._said = 0
        self._some = threading.Event()
        self._ending = False
        self._gone = False
        # A daemon: a reader that has stopped reading must not keep the process from ending.
        self._writer = threading.Thread(target=self._run, name="access-log", daemon=True)

    def start(self) -> None:
        self._writer.start()

    def write(self, trail: Trail) -> None:
        """Take in a request that has ended."""
        if not self._current.config.gateway.access_log:
            return
        if self._gone or len(self._waiting) >= BOUND:
            self._dropped += 1
            return
        self._waiting.append(_line(trail.ended or self._wall(), trail))
        if not self._some.is_set():
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
                self._drain()
            self._drain()
        except OSError as error:
            self._gone = True
            logs.error("access log ended: its output is gone", reason=str(error))

    def _drain(self) -> None:
        lines, size = list[bytes](), 0
        for line in self._lines():
            if lines and size + len(line) > self._whole:
                self._put(b"".join(lines))
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        self._put(b"".join(lines))

    def _lines(self) -> Iterator[bytes]:
        while self._waiting:
            yield self._waiting.popleft()
        lost = self._dropped - self._said
        if lost:
            self._said += lost
            self._on_dropped(lost)
            yield _ENCODER.encode({"time": _stamp(self._wall()), "event": "access log lines lost", "lines": lost}) + b"\n"

    def _put(self, piece: bytes) -> None:
        while piece:
            piece = piece[os.write(self._out, piece) :]


def _line(ended: float, trail: Trail) -> bytes:
    # By position: by keyword it takes three times as long.
    line = Line(
        _stamp(ended),
        trail.id,
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
        _short(trail.waited_s),
        None if trail.first_byte_s is None else _short(trail.first_byte_s),
        _short(trail.seconds),
        trail.bytes_in,
        trail.bytes_out,
        trail.prompt_tokens,
        trail.completion_tokens,
        "" if trail.trace is None else trail.trace.id,
    )
    return _ENCODER.encode(line) + b"\n"


def _short(seconds: float) -> float:
    """To a tenth of a millisecond."""
    return int(seconds * 10_000 + 0.5) / 10_000


def _stamp(seconds: float) -> str:
    return _millisecond(int(seconds * 1000))


@lru_cache(maxsize=4)
def _millisecond(milliseconds: int) -> str:
    """Requests that end together share one."""
    seconds, rest = divmod(milliseconds, 1000)
    return f"{_second(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
