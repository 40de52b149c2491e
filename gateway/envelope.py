"""What the gateway reads of a request, and what it changes in heads on their way through. Bodies are never touched.

Works on bytes and pairs of strings, so that any HTTP implementation can use it. Knows nothing of models, replicas or
waiting.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from gateway.client import SPOKEN_FOR
from gateway.errors import InvalidRequest, MissingModel
from gateway.members import Buffer, Crowded, Repeated, members
from gateway.structs import Peek

Pairs = list[tuple[str, str]]
BODILESS = (204, 304)
"""Statuses whose answers end with their heads."""

_HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"),
        *("te", "trailer", "trailers", "transfer-encoding", "upgrade"),
    )
)
_NOT_FORWARDED = _HOP_BY_HOP | frozenset(
    (
        *("host", "content-length", "expect", "authorization", "api-key", "x-api-key"),
        *SPOKEN_FOR,
        *("x-request-id", "x-rewake-deadline-s", "x-rewake-model"),
        *("origin", "access-control-request-method", "access-control-request-headers"),
    )
)
_NOT_RETURNED = _HOP_BY_HOP | frozenset(
    (
        *("x-request-id", "x-rewake-start", "x-rewake-incarnation", "x-rewake-error"),
        *("access-control-allow-origin", "access-control-allow-credentials", "access-control-allow-headers"),
        *("access-control-allow-methods", "access-control-expose-headers", "access-control-max-age"),
    )
)
"""Other origins are the configuration's business (:mod:`gateway.cors`): engines are too generous by default."""
_EVENTS = "text/event-stream"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_CLIENT_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
_ANSWER_MARGIN_S = 1.0


_PEEK: Final = msgspec.json.Decoder(Peek)
_LARGE: Final = 1 << 20


def peek(body: Buffer, *, required: bool = True) -> Peek:
    """Model and stream flag of a JSON body; the model may be absent, and is empty then, if it is not ``required``.

    Raises:
        MissingModel: it is absent though required, or no string.
        InvalidRequest: not JSON, not an object, a wrong type, or a field given twice: two parsers might then disagree
            about which one counts, and the request be authorised for one model and served by another.
    """
    try:
        found = _PEEK.decode(body)
    except msgspec.ValidationError as error:
        kind = MissingModel if "$.model" in str(error) else InvalidRequest
        code = "missing_model" if kind is MissingModel else "invalid_json"
        raise kind(f"The request body does not fit: {error}.", code) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.", "invalid_json") from None
    if required and not found.model:
        raise MissingModel("The field `model` is missing or empty.", "missing_model")
    if _might_repeat(body):
        _refuse_repeats(body)
    return found


def _might_repeat(body: Buffer) -> bool:
    """False means certainly not: no second literal key, and no escaped ASCII letter that could spell one."""
    if _twice(body, b'"model"') or _twice(body, b'"stream"'):
        return True
    # Most have no escape at all, and a single byte is found many times as fast.
    return _has(body, b"\\") and (_has(body, b"\\u006") or _has(body, b"\\u007"))


def _twice(body: Buffer, part: bytes) -> bool:
    if isinstance(body, bytes):
        return body.count(part) > 1
    first = body.find(part)
    return first >= 0 and body.find(part, first + len(part)) >= 0


def _has(body: Buffer, part: bytes) -> bool:
    # A mapped file takes "in" for a question about single bytes.
    return part in body if isinstance(body, bytes) else body.find(part) >= 0


def _refuse_repeats(body: Buffer) -> None:
    """Refuse a body that gives one of the two fields twice; a large one for any field, so that none takes long to judge."""
    try:
        members(body)
        return
    except (msgspec.DecodeError, Crowded) as error:
        reason = str(error) or "too many"
        raise InvalidRequest(f"The request body's fields cannot be told apart: {reason}.", "invalid_json") from None
    except Repeated:
        if len(body) > _LARGE:
            raise InvalidRequest("The request body gives a field more than once.", "invalid_json") from None
    try:
        objects: list[list[str]] = []
        json.loads(bytes(body), object_pairs_hook=lambda pairs: objects.append([key for key, _ in pairs]))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.", "invalid_json") from None
    keys = objects[-1]  # the outermost is the last to be complete
    for key in ("model", "stream"):
        if keys.count(key) > 1:
            raise InvalidRequest(f"The request body gives `{key}` more than once.", "invalid_json")


def patience_s(headers: Mapping[str, str], longest_s: float) -> float:
    """Seconds that a request may be held: at most ``longest_s``, and less than the client itself will wait.

    An OpenAI client tells its read timeout; it is answered a little earlier, while it still listens.

    Raises:
        InvalidRequest: ``x-rewake-deadline-s`` is not a positive number.
    """
    wanted = [longest_s]
    for name in _CLIENT_TIMEOUTS:
        seconds = _seconds(headers.get(name))
        if seconds is not None:
            wanted.append(seconds - min(_ANSWER_MARGIN_S, seconds / 20))
    own = headers.get("x-rewake-deadline-s")
    if own is not None:
        seconds = _seconds(own)
        if seconds is None:
            raise InvalidRequest(f"x-rewake-deadline-s is {own!r}; it must be a positive number of seconds.", "invalid_deadline")
        wanted.append(seconds)
    return min(wanted)


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own id when it is short and plain, else a new one."""
    return given_id(headers) or new_id()


def given_id(headers: Mapping[str, str]) -> str:
    """The client's own id when it is short and plain, else nothing."""
    given = headers.get("x-request-id")
    return given if given and _REQUEST_ID.fullmatch(given) else ""


def new_id() -> str:
    """An id for a request that has none."""
    return f"req_{next(_IDS)}"


def _ids() -> Iterator[str]:
    """Random, 24 hexadecimal digits each. The system is asked for many at a time: one by one the call costs more than all else
    that an id takes."""
    while True:
        drawn = secrets.token_hex(12 * 256)
        for at in range(0, len(drawn), 24):
            yield drawn[at : at + 24]


_IDS: Final = _ids()


def forwarded(headers: Iterable[tuple[str, str]], *, id: str, origin: Pairs) -> Pairs:
    """The head for the replica: end-to-end headers as they are, hop-by-hop and the gateway's own left out.

    ``origin``: headers that say where the request comes from, in place of what the client says of that.
    """
    given = list(headers)
    dropped = _NOT_FORWARDED | _named_in_connection(given)
    kept = [(name, value) for name, value in given if name.lower() not in dropped]
    return [*kept, ("x-request-id", id), *origin]


def returned(headers: Iterable[tuple[str, str]], *, id: str, start: str, incarnation: str) -> tuple[Pairs, bool]:
    """The head for the client, and whether the body is an event stream (which nobody on the way may buffer)."""
    given, kept, stream = list(headers), Pairs(), False
    dropped = _NOT_RETURNED
    for pair in given:
        name = pair[0].lower()
        if name == "content-type":
            stream = stream or pair[1][: len(_EVENTS)].lower() == _EVENTS
        elif name == "connection":
            dropped |= _named_in_connection(given)
        if name not in dropped:
            kept.append(pair)
    if stream:
        dropped |= {"content-length", "cache-control", "x-accel-buffering"}
    if dropped is not _NOT_RETURNED:
        kept = [pair for pair in kept if pair[0].lower() not in dropped]
    kept += (("x-request-id", id), ("x-rewake-start", start), ("x-rewake-incarnation", incarnation))
    if stream:
        kept += (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
    return kept, stream


def _named_in_connection(headers: Pairs) -> frozenset[str]:
    return frozenset(
        token.strip().lower() for name, value in headers if name.lower() == "connection" for token in value.split(",")
    )
