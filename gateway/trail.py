"""What became of one request: plain facts, filled in on its way, for metrics, the access log and tenants' accounts.

Never holds a prompt, an answer or a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policies.tracing import Context

Phase = Literal["reading", "held", "dispatched", "streaming"]


@dataclass(slots=True)
class Trace:
    """A request's place in the trace that it is part of: its own span, and those that follow from it."""

    own: Context
    parent: Context | None
    """The client's."""
    hold: str
    """Id of the span of its being held, if it is."""
    asking: str
    """Id of the span of its being answered by a replica."""
    held_at: float | None = None
    """Loop time at which it began to wait."""
    sent_at: float | None = None
    """Loop time at which it went to a replica, the last time."""
    peer: tuple[str, int, str] = ("", 0, "")
    """Address and port of that replica, and the kind of its engine."""
    cause: Context | None = None
    """The operation that brought the replica that it waited for."""

    @property
    def id(self) -> str:
        return self.own.trace

    @property
    def outward(self) -> str:
        """The ``traceparent`` that the replica gets."""
        return Context(self.own.trace, self.asking).header


class Trail:
    """One request. Times are seconds; counts of tokens are the engine's own.

    No dataclass: one is made for each request, and only what is no default should cost anything.

    Args:
        route: bounded: the name of a route, never a path that a client made up.
        since: loop time at which its head had arrived.
        client_retry: it says that it is a client's repetition.
    """

    client: str = ""
    """Its address, as far as it is known."""
    tenant: str = ""
    model: str | None = None
    """A configured model; None until one was found."""
    asked: str = ""
    """The name that the client gave."""
    stream: bool = False
    phase: Phase = "reading"
    status: int = 499
    """What the client got; 499: it left before."""
    code: str = "client_left"
    """Why it ended early, as in the error that says so; empty for an answer of a replica that came whole."""
    start: str = "none"
    """How the replica was started: ``restored`` or ``cold``."""
    replica: str = ""
    incarnation: str = ""
    committed: bool = False
    """The head was sent while it was still held."""
    retries: int = 0
    """Times it was sent again."""
    waited_s: float = 0.0
    first_byte_s: float | None = None
    """From its head to the first byte of the answer's head."""
    seconds: float = 0.0
    ended: float = 0.0
    """Seconds since the epoch; 0: now."""
    bytes_in: int = 0
    bytes_out: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    trace: Trace | None = None
    """None: nobody traces it."""

    def __init__(self, id: str, route: str, since: float, method: str = "POST", client_retry: bool = False) -> None:
        self.id = id
        self.route = route
        self.since = since
        self.method = method
        self.client_retry = client_retry
