"""The tokens that an answer took, read from its bytes as they pass.

A stream's events are not parsed: its end is kept, a few kilobytes, and looked through once when it has ended. Of a document
only what stands after the word ``usage`` is kept. Knows nothing of who pays.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgspec

from gateway.structs import Counted

_HEAD: Final = 2 << 10
_TAIL: Final = 4 << 10
"""Bytes kept of a stream's beginning and end: Anthropic's API counts the prompt in its first event, all count in the last."""
_FULL: Final = 2 * _TAIL
_LAST: Final = 64
"""Bytes in which the event that only says the end is looked for."""
_OBJECT: Final = 2 << 10
"""A longer object is none that counts tokens."""
_USAGE: Final = b'"usage"'
_TIMINGS: Final = b'"timings"'
"""llama.cpp says the latter even to those who did not ask for the former. Within a JSON string neither can appear: its quotes
would be escaped."""
_NEAR: Final = 32
"""The colon stands within so many bytes of the key's beginning."""
_EDGE: Final = max(len(_USAGE), len(_TIMINGS)) - 1
_CANDIDATES: Final = 8
_INFLATED: Final = 64 << 20
_PIECE: Final = 64 << 10
_MOST: Final = 1_000_000_000
_DECODER: Final = json.JSONDecoder()
_FLAT: Final = msgspec.json.Decoder(Counted)


Usage = tuple[int, int, bool]
"""Tokens of the prompt and of the completion of one answer, and whether the engine said so. If not, since nobody asked it or the
stream was cut, each event of the stream counts as one token, and the prompt as far as it is known."""


class Meter:
    """Sees an answer's body pass. This one reads nothing of it."""

    def feed(self, chunk: bytes) -> None:
        """The next bytes, as the replica sent them."""

    def usage(self) -> Usage | None:
        """What they say, once there are no more; None: nothing."""
        return None


def meter(content_type: str, encoding: str = "") -> Meter:
    """The meter for an answer with these headers."""
    return maker(content_type, encoding)()


@lru_cache(maxsize=64)
def maker(content_type: str, encoding: str = "") -> Callable[[], Meter]:
    """Of meters for answers with these headers: there are few kinds of answers, and many of each."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "text/event-stream":
        inner: Callable[[], Meter] = _Events
    elif kind.endswith("json"):
        inner = _Document
    else:
        return Meter
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return inner
    return (lambda: _Inflating(inner())) if coding in ("gzip", "x-gzip", "deflate") else Meter


class _Events(Meter):
    """An event stream."""

    __slots__ = ("_events", "_head", "_parts", "_size")

    def __init__(self) -> None:
        self._head: bytes | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._events = 0

    def feed(self, chunk: bytes) -> None:
        self._parts.append(chunk)
        self._size += len(chunk)
        if self._size > _FULL:
            self._fold()

    def _fold(self) -> None:
        """Count the events of all but the end, and forget them."""
        kept = b"".join(self._parts)
        if self._head is None:
            self._head = kept[:_HEAD]
            self._events = int(kept.startswith(b"data:"))
        cut = kept.rfind(b"\n", len(kept) - _FULL, len(kept) - _TAIL)
        cut = cut if cut >= 0 else len(kept) - _TAIL
        self._events += kept.count(b"\ndata:", 0, cut)
        self._parts = [kept[cut:]]
        self._size = len(kept) - cut

    def usage(self) -> Usage | None:
        tail = b"".join(self._parts)
        whole = self._head is None
        first = tail[:_HEAD] if self._head is None else self._head
        first = first[: _end_of_event(first)]
        begun = _latest(first) or (None, None)
        ended = _latest(tail[len(first) :] if whole else tail)
        if ended is not None:
            return ended[0] or begun[0] or 0, ended[1] or 0, True
        events = self._events + tail.count(b"\ndata:") + (whole and tail.startswith(b"data:"))
        events -= b"data: [DONE]" in tail[-_LAST:]
        if events <= 0:
            return None
        return begun[0] or 0, max(begun[1] or 0, events), False


class _Document(Meter):
    """One JSON document, of any length."""

    __slots__ = ("_edge", "_found", "_open", "_whole")

    def __init__(self) -> None:
        self._whole: bytes | None = b""
        """All of it, for as long as it came in one piece: most do, and are searched once, from their end."""
        self._edge = b""
        self._open: list[bytearray] = []
        self._found: deque[bytearray] | None = None

    def feed(self, chunk: bytes) -> None:
        if self._whole is not None:
            if not self._whole:
                self._whole = chunk
                return
            first, self._whole = self._whole, None
            self._search(first)
        self._search(chunk)

    def _search(self, chunk: bytes) -> None:
        for growing in self._open:
            growing.extend(chunk[: _OBJECT - len(growing)])
        window = self._edge + chunk
        found = self._found
        if found is None:
            found = self._found = deque(maxlen=_CANDIDATES)
        for at in _positions(window):
            candidate = bytearray(window[at : at + _OBJECT])
            self._open.append(candidate)
            found.append(candidate)
        self._open = [candidate for candidate in self._open[-_CANDIDATES:] if len(candidate) < _OBJECT]
        self._edge = window[-_EDGE:]

    def usage(self) -> Usage | None:
        if self._whole is not None:
            found = _latest(self._whole)
        else:
            candidates = reversed(self._found or ())
            found = next((counts for one in candidates if (counts := _latest(bytes(one))) is not None), None)
        return None if found is None else (found[0] or 0, found[1] or 0, True)


class _Inflating(Meter):
    """A compressed body; what it holds is measured by another meter, as far as it is sane."""

    __slots__ = ("_inflater", "_inner", "_left")

    def __init__(self, inner: Meter) -> None:
        self._inner = inner
        self._inflater = zlib.decompressobj(32 + zlib.MAX_WBITS)
        self._left = _INFLATED

    def feed(self, chunk: bytes) -> None:
        while chunk and self._left > 0:
            try:
                piece = self._inflater.decompress(chunk, _PIECE)
            except zlib.error:
                self._left = 0
                return
            self._left -= len(piece)
            self._inner.feed(piece)
            chunk = self._inflater.unconsumed_tail

    def usage(self) -> Usage | None:
        return self._inner.usage() if self._left > 0 else None


Counts = tuple[int | None, int | None]
"""Prompt and completion, as far as they are said."""


def _positions(data: bytes) -> list[int]:
    found = []
    for key in (_USAGE, _TIMINGS):
        at = data.find(key)
        while at >= 0:
            found.append(at)
            at = data.find(key, at + 1)
    return sorted(found)


def _latest(data: bytes) -> Counts | None:
    """The counts in the last whole object that one of the keys names and that has any."""
    # As nearly all engines say it: once, flat, and near the end.
    _, key, after = data.rpartition(_USAGE)
    text, brace, _ = after.partition(b"}")
    before, mark, flat = text.partition(b":")
    if key and brace and mark and len(before) < _NEAR - len(_USAGE) and len(text) < _OBJECT and _TIMINGS not in after:
        try:
            said = _FLAT.decode(flat + b"}")
        except (msgspec.MsgspecError, ValueError):
            pass
        else:
            if 0 <= said.prompt_tokens <= _MOST and 0 <= said.completion_tokens <= _MOST:
                return said.prompt_tokens, said.completion_tokens
    for at in reversed(_positions(data)):
        colon = data.find(b":", at, at + _NEAR)
        document = _object(data, colon + 1) if colon >= 0 else None
        if document is not None and (counts := _counts(document)) != (None, None):
            return counts
    return None


def _object(data: bytes, start: int) -> dict[str, Any] | None:
    """The JSON object that begins there, if one does, and ends soon."""
    # Most hold nothing but numbers, and end with the first brace.
    end = data.find(b"}", start, start + _OBJECT)
    flat = data[start : end + 1] if end >= 0 else b""
    try:
        document = msgspec.json.decode(flat)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        text = data[start : start + _OBJECT].decode("utf-8", "replace").lstrip()
        try:
            document, _ = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return None
    return document if isinstance(document, dict) else None


def _counts(document: dict[str, Any]) -> Counts:
    def number(*names: str) -> int | None:
        """The sum of those that are there, None when the first is not."""
        values = [document.get(name) for name in names]
        if type(values[0]) is not int:
            return None
        return sum(min(value, _MOST) for value in values if type(value) is int and value > 0)

    prompt = number("prompt_tokens")
    if prompt is None:
        prompt = number("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    if prompt is None:
        prompt = number("prompt_n", "cache_n")
    completion = next(
        (n for name in ("completion_tokens", "output_tokens", "predicted_n") if (n := number(name)) is not None), None
    )
    total = number("total_tokens")
    if prompt is None and completion is None:
        return total, None
    if completion is None and prompt is not None and total is not None:
        completion = max(0, total - prompt)
    return prompt, completion


def _end_of_event(data: bytes) -> int:
    ends = [at for blank in (b"\n\n", b"\r\n\r\n") if (at := data.find(blank)) >= 0]
    return min(ends, default=0)
