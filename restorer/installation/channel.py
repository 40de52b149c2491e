"""The supervisor's end of the line to one process under it; :mod:`policies.control` is what is said there.

Knows neither how the process is run nor what its configuration means. A process that falls silent, or ends, is an answer too:
nobody waits for it without a deadline.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from policies.control import MAX_LINE, Ask, Ready, Refused, Taken, Told, Verdict, from_child, line

GONE = "it has ended"


class Channel:
    """One life of one process.

    Args:
        ours: our end of the pair; taken over.
        on_ask: called when the process asks for something.
        complain: called with what the process said that is not understood.
    """

    def __init__(self, ours: socket.socket, *, on_ask: Callable[[Channel, Ask], None], complain: Callable[[str], None]) -> None:
        self._socket = ours
        self._on_ask = on_ask
        self._complain = complain
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[str]] = {}
        self.ready = asyncio.Event()
        """The process serves."""
        self.connected = False
        """And it has read the store."""

    async def run(self, first: Told) -> None:
        """Say what to begin with, then hear the process until its end."""
        self._socket.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE)
        try:
            self._writer.write(line(first))
            while data := await reader.readline():
                self._heard(data)
        except OSError:
            pass  # it ended, with something unread
        except ValueError as error:
            self._complain(f"is not understood: {error}")
        finally:
            self._writer.close()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_result(GONE)

    async def tell(self, told: Told, *, within_s: float) -> str:
        """Put a configuration in force there; why it is not, or nothing. :data:`GONE`: there is nobody any more."""
        if self._writer is None or self._writer.is_closing():
            return GONE
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[told.number] = answer
        self._writer.write(line(told))
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            return f"it has not answered within {within_s:g} s"
        finally:
            del self._answers[told.number]

    def say(self, message: Refused | Verdict) -> None:
        """Nothing comes back; nothing happens if there is nobody any more."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line(message))

    def _heard(self, data: bytes) -> None:
        message = from_child(data)
        if isinstance(message, Ready):
            self.connected = message.connected
            self.ready.set()
        elif isinstance(message, Taken):
            answer = self._answers.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.fault)
        else:
            self._on_ask(self, message)
