"""How finished spans stand on the wire: the messages of OpenTelemetry's protocol (OTLP 1), as protobuf writes them.

By hand, and what many spans say alike is written once: by the library's general way this is most of what tracing costs. Tests
read it with the library. Pure; knows nobody who sends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from policies.tracing import Context, Span

_KINDS: Final = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
_ERROR: Final = 2
_REMOTE_KNOWN, _REMOTE = 0x100, 0x200
_UNIQUE: Final = "rewake.request_id"
"""No two spans of different requests share it."""
_INT64: Final = (1 << 64) - 1
_SHORT: Final = tuple(bytes((number,)) for number in range(128))
_OWN_FLAGS: Final = b"\x85\x01" + struct.pack("<I", _REMOTE_KNOWN)
_REMOTE_FLAGS: Final = struct.pack("<I", _REMOTE_KNOWN | _REMOTE)
_TIMES: Final = struct.Struct("<BQBQ")
_NOTHING: Final[Mapping[str, int]] = {}
_FIXED64, _LENGTH = 1, 2
"""How a field's value is written, in the three lowest bits before it."""


def request(resource: Mapping[str, object], scope: str, version: str, spans: Iterable[bytes]) -> bytes:
    """ExportTraceServiceRequest: all of them of one resource and one scope; each as :func:`span` writes it."""
    origin = _part(1, b"".join(attribute(1, name, value) for name, value in resource.items()))
    by = _part(1, _part(1, scope.encode()) + _part(2, version.encode()))
    return _part(1, origin + _part(2, by + b"".join(spans)))


def span(one: Span) -> bytes:
    """A span, as a part of a ScopeSpans."""
    return written(
        name=one.name,
        context=one.context,
        parent=one.parent,
        kind=one.kind,
        begun_ns=one.begun_ns,
        ended_ns=one.ended_ns,
        attributes=one.attributes,
        links=one.links,
        events=one.events,
        error=one.error,
    )


def written(
    *,
    name: str,
    context: Context,
    parent: Context | None,
    begun_ns: int,
    ended_ns: int,
    attributes: Mapping[str, str | int | float | bool],
    kind: str = "internal",
    links: Iterable[Context] = (),
    events: Mapping[str, int] = _NOTHING,
    error: str = "",
) -> bytes:
    """The same, out of what a :class:`policies.tracing.Span` says: for those that are made by the hundred and stored nowhere."""
    parts = [
        b"\x0a\x10",
        bytes.fromhex(context.trace),
        b"\x12\x08",
        bytes.fromhex(context.span),
        _named(name, kind),
        _TIMES.pack(7 << 3 | _FIXED64, begun_ns, 8 << 3 | _FIXED64, ended_ns),
    ]
    for fact, value in attributes.items():
        parts.append(attribute(9, fact, value) if fact == _UNIQUE else _kept(fact, value))
    for event, at in events.items():
        parts.append(_part(11, struct.pack("<BQ", 1 << 3 | _FIXED64, at) + _part(2, event.encode())))
    parts += [_part(13, _link(link)) for link in links]
    if error:
        parts.append(_part(15, _text(2, error) + bytes((3 << 3, _ERROR))))
    if parent is None:
        parts.append(_OWN_FLAGS)
    else:
        parts += (b"\x22\x08", bytes.fromhex(parent.span), b"\x85\x01", _REMOTE_FLAGS)
    return _part(2, b"".join(parts))


def attribute(field: int, name: str, value: object) -> bytes:
    """A KeyValue, as the part of a message with this number."""
    if isinstance(value, bool):
        said = bytes((2 << 3, value))
    elif isinstance(value, int):
        said = b"\x18" + _number(value & _INT64)
    elif isinstance(value, float):
        said = struct.pack("<Bd", 4 << 3 | _FIXED64, value)
    else:
        said = _text(1, str(value))
    return _part(field, _part(1, name.encode()) + _part(2, said))


@lru_cache(maxsize=1024, typed=True)
def _kept(name: str, value: str | float | bool) -> bytes:
    """An attribute that other spans have as well."""
    return attribute(9, name, value)


@lru_cache(maxsize=256)
def _named(name: str, kind: str) -> bytes:
    return _text(5, name) + bytes((6 << 3, _KINDS[kind]))


def _link(context: Context) -> bytes:
    own = _part(1, bytes.fromhex(context.trace)) + _part(2, bytes.fromhex(context.span))
    return own + bytes((6 << 3 | 5,)) + _REMOTE_FLAGS


def _text(field: int, text: str) -> bytes:
    return _part(field, text.encode("utf-8", "replace"))


def _part(field: int, data: bytes) -> bytes:
    """A field, below 16, with its length before it."""
    return _SHORT[field << 3 | _LENGTH] + _number(len(data)) + data


def _number(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    if number < len(_SHORT):
        return _SHORT[number]
    written = bytearray()
    while number >= len(_SHORT):
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
