"""What a worker inherits from whoever started it: listening sockets, and the line to its supervisor.

A supervisor keeps the listening socket open while workers come and go, so that no connection is refused in between; a worker
says when it serves, and only then does its predecessor begin to drain. Sockets of systemd are taken in the same way. Knows
nothing of what the configuration means.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Mapping
from typing import Literal

from gateway import logs
from policies.control import MAX_LINE, Ask, FromChild, Ready, Refused, Taken, Told, Verdict, line, to_child

_SD_FIRST_FD = 3
_ASK_S = 90.0
"""A supervisor that restarts workers answers when all of them are ready."""


class NoAnswer(Exception):
    """The supervisor has gone, or does not answer in time."""


def listeners(environ: Mapping[str, str], fd: int | None) -> list[socket.socket]:
    """The listening sockets that this process was started with: the supervisor's ``fd``, or systemd's; may be none.

    Raises:
        OSError: what was passed is no socket.
    """
    count = 0
    if fd is None and environ.get("LISTEN_PID") == str(os.getpid()):
        count = int(environ.get("LISTEN_FDS", "0"))
    fds = [fd] if fd is not None else range(_SD_FIRST_FD, _SD_FIRST_FD + count)
    found = []
    for each in fds:
        os.set_inheritable(each, False)
        found.append(socket.socket(fileno=each))
    return found


def notify(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tell systemd, if it has asked to be told; ``READY=1``, ``STOPPING=1``."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        out.send(state.encode())


class Line:
    """A worker's end of the line to its supervisor.

    Args:
        fd: of the inherited socket; taken over.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._rest = b""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Verdict]] = {}
        self._numbers = itertools.count(1)
        self.on_told: Callable[[Told], str] = lambda told: ""
        """Puts a configuration in force; returns why not, or nothing."""
        self.on_refused: Callable[[], None] = lambda: None
        """A reload was refused by the supervisor."""

    def first(self) -> Told:
        """The configuration to start with. Blocks; for use before there is an event loop.

        Raises:
            ValueError: something else came, or the line ended.
        """
        data = b""
        while b"\n" not in data:
            more = self._socket.recv(1 << 16)
            if not more:
                raise ValueError("the supervisor has ended")
            data += more
        head, _, self._rest = data.partition(b"\n")
        message = to_child(head)
        if not isinstance(message, Told):
            raise ValueError(f"the supervisor began with {message.kind!r}")
        return message

    async def open(self) -> None:
        """Join the event loop; comes before all that follows."""
        self._socket.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE)
        self._reader.feed_data(self._rest)

    async def run(self) -> None:
        """Hear the supervisor until cancelled. Its end is no business of ours: the kernel will tell this process to stop."""
        assert self._reader is not None, "open() comes first"
        try:
            while data := await self._reader.readline():
                self._heard(data)
        except (OSError, ValueError, NoAnswer) as error:
            logs.warning("the supervisor is not understood", reason=str(error))
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(NoAnswer("the supervisor has gone"))
        if self._writer is not None:
            self._writer.close()
        await asyncio.Event().wait()

    def ready(self, *, connected: bool) -> None:
        """This process serves; ``connected``: and has read the store."""
        with contextlib.suppress(NoAnswer):
            self._say(Ready(connected=connected))

    async def ask(self, what: Literal["reload", "restart"]) -> Verdict:
        """Have the supervisor do something to all processes.

        Raises:
            NoAnswer: it is not known what became of it.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._say(Ask(number=number, what=what))
            async with asyncio.timeout(_ASK_S):
                return await answer
        except TimeoutError:
            raise NoAnswer(f"the supervisor has not answered within {_ASK_S:g} s") from None
        finally:
            del self._asked[number]

    def _heard(self, data: bytes) -> None:
        message = to_child(data)
        if isinstance(message, Told):
            self._say(Taken(number=message.number, fault=self.on_told(message)))
        elif isinstance(message, Refused):
            self.on_refused()
        elif (asked := self._asked.get(message.number)) is not None and not asked.done():
            asked.set_result(message)

    def _say(self, message: FromChild) -> None:
        if self._writer is None or self._writer.is_closing():
            raise NoAnswer("the supervisor has gone")
        self._writer.write(line(message))
