"""Traces as both processes speak of them: contexts as W3C ``traceparent`` writes them, and finished spans.

The restorer sends nothing anywhere: the spans of a job that somebody traces go through the store, and a gateway exports them.
Knows no tracing library, and draws no random numbers: ids are the callers'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

SPANS_KEPT = 10_000
"""Spans that wait in the store for a gateway; the oldest are dropped."""
_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Context(NamedTuple):
    """A span as others refer to it: hexadecimal ids, and whether it is recorded."""

    trace: str
    span: str
    sampled: bool = True

    @property
    def header(self) -> str:
        """As ``traceparent`` carries it."""
        return f"00-{self.trace}-{self.span}-{'01' if self.sampled else '00'}"

    @classmethod
    def of(cls, header: str | None) -> Context | None:
        """What a ``traceparent`` says; None when there is none, or it is not valid and has to be ignored."""
        found = _HEADER.fullmatch(header.strip()) if header else None
        if found is None or ((header or "").startswith("00-") and found[4]):
            return None
        return cls(found[1], found[2], bool(int(found[3], 16) & 1))


class Span(BaseModel):
    """One finished span, its times in nanoseconds since the epoch."""

    model_config = ConfigDict(frozen=True)
    name: str
    context: Context
    parent: Context | None = None
    kind: Literal["internal", "server", "client", "producer", "consumer"] = "internal"
    begun_ns: int
    ended_ns: int
    attributes: Mapping[str, str | int | float | bool] = {}
    links: tuple[Context, ...] = ()
    events: Mapping[str, int] = {}
    """Name -> when, in nanoseconds since the epoch."""
    error: str = ""
    """What went wrong; empty: nothing."""
