"""A plain request and a plain reply, for everything that is not streamed.

Lets the admin API, the model list and the errors be written and tested without a web framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler may look at."""

    authorization: str | None = None
    """The ``Authorization`` header."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Named parts of the path, percent-decoded."""
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


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
