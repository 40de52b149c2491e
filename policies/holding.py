"""How a request is held: the bounds of a waiting room, and what a client is told while it waits.

Two phases. *Silent*: nothing is sent, so that any failure is a real status that SDKs retry. *Committed* (streams only):
the response has begun, and comments keep it alive; a failure is an error frame and an aborted connection.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from policies.scalars import Bytes, Count, OnOff, PositiveSeconds, Section

KeepAlive = Annotated[Literal["comment", "chunk", "off"], OnOff]
"""What is sent to a held stream: SSE comments, empty chunks of the API's own kind (for clients that choke on comments), or
nothing at all: such a request stays silent until it is served."""


SPREAD = 0.15
"""The part of a pause by which it may be shorter."""


class UserAgent(Section):
    """An exception for some clients."""

    pattern: str
    """Regular expression, searched for in the ``User-Agent``."""
    keepalive: KeepAlive
    """What such a client is sent while it waits."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return pattern


class Bounds(Section):
    """Bounds of a waiting room."""

    max_requests: Count = 1000
    """Requests that wait at once."""
    max_bytes: Bytes = 256 << 20
    """Bytes of their bodies."""


class Hold(Bounds):
    """How one model's requests are held; the bounds are those of each worker."""

    max_wait_s: PositiveSeconds = 600.0
    """The longest a request is held; a client's own deadline may be shorter, never longer."""
    silent_s: PositiveSeconds = 20.0
    """How long nothing is sent. Below the 30 to 60 s after which load balancers cut silent connections."""
    keepalive: KeepAlive = "comment"
    """Then, if it asked for a stream: SSE comments with its position and expected wait; empty chunks of the API's own kind, for
    clients that choke on comments; or nothing at all, until it is served or refused."""
    keepalive_s: PositiveSeconds = 12.0
    """The longest pause between two signs of life in the committed phase."""
    user_agents: tuple[UserAgent, ...] = Field(default=())
    """Exceptions by client: the first whose pattern is found decides; none: :attr:`keepalive`."""

    def pause_s(self, draw: float) -> float:
        """Until the next sign of life; ``draw`` from 0 to 1 spreads the signs of those who came together."""
        return self.keepalive_s * (1 - SPREAD * draw)

    def keepalive_for(self, user_agent: str) -> KeepAlive:
        """What this client is sent while it waits."""
        return next(
            (exception.keepalive for exception in self.user_agents if re.search(exception.pattern, user_agent)), self.keepalive
        )
