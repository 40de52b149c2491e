"""Which requests are plain: the gate of the fast path, over bytes alone.

Strict on purpose. Whatever another reader could take differently is not plain, and is judged by the other path with every byte
unread; so a rule that is missing here costs speed, never safety.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDict

from gateway import routes
from gateway.errors import GatewayError
from gateway.routes import Found

MAX_HEAD: Final = 16 << 10
MAX_BODY: Final = 256 << 10
"""A larger body would keep the loop from others while its model is looked for."""
_HEAD = re.compile(rb"POST (/[!-~]+) HTTP/1\.1((?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ \t]*[!-~\t ]*)+)")
_NOT_PLAIN = frozenset(
    (
        *("transfer-encoding", "expect", "upgrade", "content-encoding", "trailer", "te", "origin"),
        *("connection", "proxy-connection", "keep-alive"),
    )
)
_PATHS: dict[str, Found | None] = {}
_MAX_PATHS = 1024


@dataclass(frozen=True, slots=True)
class Plain:
    """A head that the fast path understands."""

    target: str
    found: Found
    headers: CIMultiDict[str]
    host: str
    length: int


def plain(head: bytes) -> Plain | None:
    """The head of a plain request, without its last empty line; None: let the other path judge it.

    Plain is a POST to a route that replicas serve, HTTP/1.1, printable ASCII, a Host, a Content-Length, no header twice and
    none of :data:`_NOT_PLAIN` (but ``Connection: keep-alive``), a JSON body or none named otherwise.
    """
    matched = _HEAD.fullmatch(head)
    if matched is None:
        return None
    found = _found(matched[1].decode("ascii"))
    if found is None:
        return None
    headers: CIMultiDict[str] = CIMultiDict()
    for line in matched[2].decode("ascii").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        value = value.strip(" \t")
        lower = name.lower()
        if lower in _NOT_PLAIN:
            if lower == "connection" and value.lower() == "keep-alive":
                continue
            return None
        if name in headers:
            return None
        headers.add(name, value)
    length, kind = headers.get("content-length", ""), headers.get("content-type", "application/json").lower()
    if "host" not in headers or not length.isdigit() or len(length) > 9 or not kind.startswith("application/json"):
        return None
    size = int(length)
    return Plain(matched[1].decode("ascii"), found, headers, headers["host"], size) if 0 < size <= MAX_BODY else None


def _found(target: str) -> Found | None:
    """What a target names, if that is simply a replica's route for JSON."""
    if target not in _PATHS:
        if len(_PATHS) >= _MAX_PATHS:
            _PATHS.clear()
        found = None
        with contextlib.suppress(GatewayError):
            found = routes.find("POST", target)
        simple = found is not None and found.route.serves == "replica" and found.route.model == "body" and not found.query
        _PATHS[target] = found if simple else None
    return _PATHS[target]
