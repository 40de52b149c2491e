"""Where the parts of a ``multipart/form-data`` body stand. Reads heads and positions; a file's bytes are never looked at.

Strict where two parsers could differ about which field is which: such a body is refused. Every span is a pair of offsets,
so that a part can be changed and all other bytes stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.errors import InvalidRequest
from gateway.members import Buffer

_BOUNDARY = re.compile(
    r"""multipart/form-data\s*(?:;\s*[\w!#$%&'*+.^`|~-]+\s*=\s*(?:"[^"\\]*"|[^;\s"]+)\s*)*""", re.IGNORECASE | re.ASCII
)
_PARAMETER = re.compile(r"""\s*;\s*([\w!#$%&'*+.^`|~-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;\s"]*)""", re.ASCII)
_ALPHABET = re.compile(r"[A-Za-z0-9'()+_,./:=? -]{0,69}[A-Za-z0-9'()+_,./:=?-]")
_MAX_PARTS = 1000
_MAX_HEAD = 16 << 10
_WINDOW = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """One part; offsets in bytes, ends exclusive."""

    name: str
    start: int
    """Of the boundary line in front of it."""
    value: int
    end: int
    """Of the value; the line break behind it belongs to the next boundary."""
    file: bool
    """It has a file name: it is not a plain field."""


def boundary(content_type: str) -> bytes:
    """The boundary that a Content-Type names.

    Raises:
        InvalidRequest: none, more than one, or one that RFC 2046 does not allow.
    """
    parameters = _PARAMETER.findall(content_type) if _BOUNDARY.fullmatch(content_type.strip()) else []
    named: list[str] = [value.strip('"') for name, value in parameters if name.lower() == "boundary"]
    if len(named) != 1 or not _ALPHABET.fullmatch(named[0]):
        raise _invalid("its Content-Type names no usable boundary")
    return named[0].encode()


def parts(body: Buffer, boundary: bytes) -> tuple[list[Part], int]:
    """All parts in order, and the offset of the boundary line that ends the last one.

    Raises:
        InvalidRequest: not framed as RFC 7578 says.
    """
    line, found = b"--" + boundary, list[Part]()
    if body[: len(line)] != line:
        raise _invalid("it does not begin with its boundary")
    start = 0
    while body[start + len(line) : start + len(line) + 2] == b"\r\n":
        if len(found) == _MAX_PARTS:
            raise _invalid(f"it has more than {_MAX_PARTS} parts")
        head = start + len(line) + 2
        blank = body.find(b"\r\n\r\n", head - 2, head + _MAX_HEAD)
        if blank < 0:
            raise _invalid("a part's head does not end")
        name, file = _named(bytes(body[head:blank]))
        end = _find(body, b"\r\n" + line, blank + 2)
        if end < blank + 4:
            raise _invalid("a boundary stands where a part's value should begin")
        found.append(Part(name, start, blank + 4, end, file))
        start = end + 2
    tail = body[start + len(line) : start + len(line) + 5]
    if tail not in (b"--", b"--\r\n"):
        raise _invalid("after its last part stands something else than the closing boundary")
    return found, start


def field(body: Buffer, found: list[Part], name: str) -> str | None:
    """The value of a plain field; None without one.

    Raises:
        InvalidRequest: there twice, sent as a file, or not short text.
    """
    named = [part for part in found if part.name == name]
    if not named:
        return None
    if len(named) > 1:
        raise _invalid(f"it gives `{name}` more than once")
    part = named[0]
    if part.file or part.end - part.value > _MAX_HEAD:
        raise _invalid(f"`{name}` must be a plain field")
    try:
        return bytes(body[part.value : part.end]).decode()
    except UnicodeDecodeError:
        raise _invalid(f"`{name}` is not UTF-8") from None


def written(name: str, value: str, boundary: bytes) -> bytes:
    """A plain field as a part, ready to stand before any boundary line."""
    head = f'\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
    return b"--" + boundary + head.encode() + value.encode() + b"\r\n"


def _named(head: bytes) -> tuple[str, bool]:
    """Name of a part, and whether it is a file."""
    disposition, encoding = [], "binary"
    for line in head.split(b"\r\n") if head else ():
        key, colon, value = line.partition(b":")
        if not colon or b"\n" in line or b"\r" in line or not key or key != key.strip():
            raise _invalid("a part's head is not made of `Name: value` lines")
        if key.lower() == b"content-disposition":
            disposition.append(value.decode("utf-8", "replace").strip())
        elif key.lower() == b"content-transfer-encoding":
            encoding = value.decode("latin-1").strip().lower()
    kind, semicolon, rest = disposition[0].partition(";") if len(disposition) == 1 else ("", "", "")
    parameters, at = list[tuple[str, str]](), 0
    rest = semicolon + rest
    while match := _PARAMETER.match(rest, at):
        parameters.append((match[1].lower(), match[2]))
        at = match.end()
    keys = [key for key, _ in parameters]
    if kind.strip().lower() != "form-data" or rest[at:].strip() or keys.count("name") != 1 or "name*" in keys:
        raise _invalid('a part does not say its name as `Content-Disposition: form-data; name="…"`')
    name = dict(parameters)["name"].removeprefix('"').removesuffix('"')
    if "\\" in name or encoding not in ("binary", "8bit", "7bit"):
        raise _invalid("a part is named or encoded in a way that not everybody reads alike")
    return name, "filename" in keys or "filename*" in keys


def _find(body: Buffer, mark: bytes, start: int) -> int:
    """Offset of ``mark``; looks window by window, so that no other thread waits for long."""
    while start < len(body):
        at = body.find(mark, start, start + _WINDOW + len(mark))
        if at >= 0:
            return at
        start += _WINDOW
    raise _invalid("its closing boundary is missing")


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"The request body is not proper multipart/form-data: {why}.", "invalid_multipart")
