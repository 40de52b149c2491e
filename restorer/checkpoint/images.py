"""CRIU's image files as records: a magic number, then protobuf messages, each with its length before it.

Reads and writes just what :mod:`restorer.checkpoint.pages` needs, field by field, so that fields it does not know stay as
they are. Knows the encoding of protobuf and nothing of what the fields mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from restorer.errors import SnapshotError

_COMMON = 0x54564319
"""First word of every image of the format that CRIU writes since version 1.6; the second says which image it is."""
_HEAD = 8
_LENGTH = struct.Struct("<I")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """One field of a message, as it is on the wire."""

    number: int
    kind: int
    value: int | bytes


class Image(NamedTuple):
    """One image file."""

    head: bytes
    messages: list[bytes]

    def write(self, path: Path) -> None:
        """Write it to a new file, for root alone."""
        with path.open("xb") as file:
            path.chmod(0o600)
            file.write(self.head)
            for message in self.messages:
                file.write(_LENGTH.pack(len(message)) + message)


def read(path: Path) -> Image:
    """An image file that holds messages and nothing else.

    Raises:
        SnapshotError: it is not one.
    """
    data = path.read_bytes()
    if len(data) < _HEAD or _LENGTH.unpack_from(data)[0] != _COMMON:
        raise SnapshotError(f"{path} is no image that is known here; use another version of CRIU")
    messages, at = [], _HEAD
    while at < len(data):
        try:
            (length,) = _LENGTH.unpack_from(data, at)
        except struct.error:
            raise _broken(path) from None
        at += _LENGTH.size
        messages.append(data[at : at + length])
        if len(messages[-1]) != length:
            raise _broken(path)
        at += length
    return Image(data[:_HEAD], messages)


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a message, in their order.

    Raises:
        SnapshotError: it is not one.
    """
    at = 0
    try:
        while at < len(message):
            key, at = _number(message, at)
            kind = key & 7
            if kind == _VARINT:
                value, at = _number(message, at)
                yield Field(key >> 3, kind, value)
                continue
            if kind == _BYTES:
                length, at = _number(message, at)
            else:
                length = {_FIXED64: 8, _FIXED32: 4}[kind]
            if at + length > len(message):
                raise IndexError
            yield Field(key >> 3, kind, message[at : at + length])
            at += length
    except (IndexError, KeyError):
        raise SnapshotError("a message in CRIU's images cannot be read; use another version of CRIU") from None


def numbers(message: bytes) -> dict[int, int]:
    """Field number -> value, of the fields that are integers; of a repeated one, the last."""
    return {field.number: field.value for field in fields(message) if isinstance(field.value, int)}


def encoded(content: Iterable[Field]) -> bytes:
    """A message with these fields."""
    found = bytearray()
    for number, kind, value in content:
        found += _varint(number << 3 | kind)
        if isinstance(value, int):
            found += _varint(value)
        else:
            found += (_varint(len(value)) if kind == _BYTES else b"") + value
    return bytes(found)


def integer(number: int, value: int) -> Field:
    """A field that is an unsigned integer."""
    return Field(number, _VARINT, value)


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _broken(path: Path) -> SnapshotError:
    return SnapshotError(f"{path} ends in the middle of a message; make a new snapshot")
