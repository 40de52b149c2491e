"""A request's whole body, as it came: in memory or on disk, with the edits that are still to be made to it.

What is done with most bodies, a small JSON document that has been read already, is here too; reading them is
:mod:`gateway.intake`'s. Knows nothing of models, tenants or replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from gateway import envelope, spool
from gateway.envelope import Pairs
from gateway.members import Buffer
from gateway.routes import Found
from gateway.spool import Spool

LARGE = 1 << 20
"""Bodies beyond this are looked at in a thread."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a head says of its body."""

    boundary: bytes | None
    """Of a multipart form; None: JSON."""
    gzip: bool
    expects: bool
    """The client sends nothing before it is told to."""


class Splice(NamedTuple):
    """Replace the bytes from ``start`` to ``end`` by ``text``."""

    start: int
    end: int
    text: bytes = b""


class Body:
    """A whole body. Its owner closes it, once nobody sends it any more."""

    __slots__ = ("_gave_back", "_spool", "data", "form", "found", "model", "named", "size", "splices", "stream")

    def __init__(self, found: Found, form: Form, data: bytes | None, kept: Spool | None, gave_back: Callable[[], None]) -> None:
        self.found = found
        self.form = form
        self.data = data
        """All of it, unless it is on disk."""
        self.size = len(data) if data is not None else kept.size if kept is not None else 0
        self.splices: tuple[Splice, ...] = ()
        """Edits of a body on disk, in order; :meth:`pieces` makes them."""
        self.model = ""
        """As the client wrote it."""
        self.named = False
        """The model's name is in the body, not only beside it."""
        self.stream = False
        self._spool = kept
        self._gave_back = gave_back

    async def look(self, call: Callable[[Buffer], object]) -> None:
        """Let ``call`` see all bytes: at once if they are few, else in a thread."""
        if self._spool is not None and self._spool.size:
            await self._spool.look(call)
        elif self.data is not None and len(self.data) > LARGE:
            await asyncio.to_thread(call, self.data)
        else:
            call(self.data or b"")

    def pieces(self) -> AsyncIterator[bytes]:
        """The bytes for the replica, in pieces; any number of times."""
        return spool.once(self.data or b"") if self._spool is None else self._spool.edited(self.splices)

    def headers(self, pairs: Pairs) -> Pairs:
        """A head for this body: without the Content-Encoding that an edit took off."""
        return pairs if self.form.gzip else [(name, value) for name, value in pairs if name.lower() != "content-encoding"]

    def change(self, splices: tuple[Splice, ...]) -> None:
        """Make edits; their offsets are in the bytes as they came."""
        if self._spool is not None:
            self.splices = splices
            self.size = self._spool.size + sum(len(splice.text) - (splice.end - splice.start) for splice in splices)
            return
        assert self.data is not None
        self.data = spliced(self.data, splices)
        self.size = len(self.data)

    def replace(self, data: bytes) -> None:
        """Keep these bytes, unpacked, in place of the compressed ones."""
        self.close()
        self.form = Form(self.form.boundary, False, False)
        self.data, self.size, self._spool = data, len(data), None

    def close(self) -> None:
        """Give memory and disk back. Idempotent."""
        if self._spool is not None:
            self._spool.close()
        gave_back, self._gave_back = self._gave_back, nothing
        gave_back()

    def __enter__(self) -> Body:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def document(found: Found, form: Form, data: bytes) -> Body:
    """A JSON body that has been read already, is small and names its model; ``form``: what its head says of it.

    Raises:
        GatewayError: it cannot be read, or names no model.
    """
    body, peek = Body(found, form, data, None, nothing), envelope.peek(data)
    body.model, body.stream, body.named = peek.model, bool(peek.stream), True
    return body


def spliced(data: Buffer, splices: tuple[Splice, ...]) -> bytes:
    """``data`` with edits made."""
    pieces, at = list[bytes](), 0
    for splice in splices:
        pieces += (data[at : splice.start], splice.text)
        at = splice.end
    return b"".join((*pieces, data[at:]))


def nothing() -> None:
    """What a body gives back that took nothing."""
