"""A request's head, a plain call and a plain reply, in no HTTP library's terms.

Lets the data path's decisions, the admin API, the model list and the errors be written and tested without a web framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel


class Head:
    """The head of one request, as any HTTP implementation can give it. Not to be changed.

    Args:
        target: path and query as they stand on the request line.
        headers: case-insensitive; ``items()`` gives a repeated header as often as it came.
        id: the request's id: the client's own, or a new one.
        received: loop time.
        peer: address at the other end of the connection.
    """

    def __init__(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        id: str,
        received: float,
        peer: str | None = None,
        scheme: str = "http",
        host: str = "",
        version: tuple[int, int] = (1, 1),
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.id = id
        self.received = received
        self.peer = peer
        self.scheme = scheme
        self.host = host
        self.version = version


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler may look at."""

    authorization: str | None = None
    """The ``Authorization`` header."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Named parts of the path, percent-decoded."""
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    tenant: str = ""
    """Whose key came with it; empty where nobody asked, or there are no tenants."""
    accept: str = ""
    """The ``Accept`` header."""
    if_none_match: str = ""
    """The ``If-None-Match`` header."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


def reply(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """A JSON reply; pydantic models may appear anywhere in ``document``."""
    return Reply(status, json.dumps(document, default=_plain, ensure_ascii=False).encode(), headers or {})


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")
