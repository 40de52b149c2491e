"""Where the members of a JSON object stand in its text, so that some can be changed and every other byte stays.

Exact or refused: a span is believed only if the parser that validated the whole found the same bytes there. Knows nothing
of what members mean.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice
from mmap import mmap

import msgspec

Buffer = bytes | mmap
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_COLON = re.compile(rb'"[ \t\n\r]*+:')
_SPACE = re.compile(rb"[ \t\n\r]*")
_KEY = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


MAX_KEYS = 200_000
"""Keys of a large text, nested ones included, that are worth the memory of telling them apart."""
_SMALL = 1 << 20


class Crowded(Exception):
    """There are so many keys that looking at them would cost more memory than any honest text is worth."""


class Repeated(Exception):
    """Some member is there more than once: which one counts, two parsers may see differently."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member; offsets in bytes, ends exclusive."""

    key: str
    start: int
    """Of the key."""
    value: int
    end: int


def members(text: Buffer) -> list[Member]:
    """The members of the object that ``text`` is, in order.

    Raises:
        msgspec.DecodeError: not valid JSON, or not an object.
        Repeated: a key is there twice, however it is spelt.
        Crowded: it is large, and has more than MAX_KEYS keys.
    """
    if len(text) > _SMALL and next(islice(_COLON.finditer(text), MAX_KEYS, None), None) is not None:
        raise Crowded
    values, found = _OBJECT.decode(text), list[Member]()
    at = _after(text, _space(text, 0), b"{")
    for key, raw in values.items():
        if found:
            at = _after(text, at, b",")
        token = _KEY.match(text, at)
        if token is None or json.loads(token[0], strict=False) != key:
            raise Repeated
        value = _after(text, _space(text, token.end()), b":")
        end = value + len(memoryview(raw))
        # A repeated key keeps its first place and its last value: then these bytes are not that value.
        if text[value:end] != bytes(raw):
            raise Repeated
        found.append(Member(key, at, value, end))
        at = _space(text, end)
    if text[at : at + 1] != b"}":
        raise Repeated
    return found


def _space(text: Buffer, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None, "an empty match is always possible"
    return match.end()


def _after(text: Buffer, at: int, mark: bytes) -> int:
    """Where the next token begins after the one byte that must stand here."""
    if text[at : at + 1] != mark:
        raise Repeated
    return _space(text, at + 1)
