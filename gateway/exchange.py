"""A request's head, a plain call and a plain reply, in no HTTP library's terms.

Lets the data path's decisions, the admin API, the model list and the errors be written and tested without a web framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel


@dataclass(slots=True, eq=False)
class Head:
    """The head of one request, as any HTTP implementation can give it. Not to be changed; it is not frozen since that makes
    each one three times as dear."""

    method: str
    target: str
    """Path and query as they stand on the request line."""
    headers: Mapping[str, str]
    """Case-insensitive; ``items()`` gives a repeated header as often as it came."""
    id: str
    """The request's id: the client's own, or a new one."""
    received: float
    """Loop time."""
    peer: str | None = None
    """Address at the other end of the connection."""
    scheme: str = "http"
    host: str = ""
    version: tuple[int, int] = (1, 1)


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
