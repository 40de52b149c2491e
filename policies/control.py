"""What a supervisor and the processes under it say to each other: one JSON object a line, over a socket pair.

The supervisor owns the configuration: it alone reads the file, and the private key, as whoever started it. A process under it
gets the last good one, at its start as later. Names and shapes only: no socket lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

MAX_LINE = 16 << 20
"""Bytes of the longest message: a configuration and a certificate chain."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class Told(_Message):
    """Supervisor: put this in force. The first message of each life, then at each reload; answered by :class:`Taken`."""

    kind: Literal["told"] = "told"
    number: int
    """Counts up, and comes back in the answer."""
    config: Mapping[str, Any]
    """A document for :func:`policies.config.parse`."""
    certificate: str = ""
    """PEM: the chain, the server's own certificate first; empty without TLS."""
    key: str = Field(default="", repr=False)
    """PEM."""


class Refused(_Message):
    """Supervisor: a reload was refused, and what was in force stays."""

    kind: Literal["refused"] = "refused"


class Verdict(_Message):
    """Supervisor: the answer to :class:`Ask`."""

    kind: Literal["verdict"] = "verdict"
    number: int
    fault: str = ""
    """Why nothing was done, every fault on a line of its own; empty: it was done."""
    applied: tuple[str, ...] = ()
    next_start: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()


class Ready(_Message):
    """Child: it serves. ``connected``: it knows what its predecessor knew, for it has read the store."""

    kind: Literal["ready"] = "ready"
    connected: bool


class Taken(_Message):
    """Child: what was told is in force, or why it is not."""

    kind: Literal["taken"] = "taken"
    number: int
    fault: str = ""


class Ask(_Message):
    """Child: somebody who may has asked for this."""

    kind: Literal["ask"] = "ask"
    number: int
    what: Literal["reload", "restart"]


ToChild = Told | Refused | Verdict
FromChild = Ready | Taken | Ask
_TO_CHILD: TypeAdapter[ToChild] = TypeAdapter(Annotated[ToChild, Field(discriminator="kind")])
_FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="kind")])


def line(message: _Message) -> bytes:
    """A message as it travels."""
    return message.model_dump_json().encode() + b"\n"


def to_child(data: bytes) -> ToChild:
    """What a supervisor said; raises ValueError if it said nothing of this kind."""
    return _TO_CHILD.validate_json(data)


def from_child(data: bytes) -> FromChild:
    """What a child said; raises ValueError if it said nothing of this kind."""
    return _FROM_CHILD.validate_json(data)
