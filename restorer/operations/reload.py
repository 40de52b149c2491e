"""Takes up a new configuration while replicas run: from the supervisor, which has read it, or from the file at SIGHUP.

A running replica keeps what it was started with. What becomes of replicas whose model is gone is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import yaml

from policies.config import Config, ConfigError, parse
from policies.control import MAX_LINE, FromChild, Ready, Taken, Told, line, to_child
from policies.reload import merge
from restorer.errors import Environment
from restorer.machine.host import Host

log = logging.getLogger("rewake.restorer")


def read(file: Path) -> Config:
    """The configuration file.

    Raises:
        Environment: it cannot be used; says every fault.
    """
    try:
        return parse(yaml.safe_load(file.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise Environment(f"{file} cannot be read: {error}") from None
    except (yaml.YAMLError, ConfigError) as error:
        raise Environment(f"{file} is not usable:\n{error}") from None


class Line:
    """This process's end of the line to its supervisor.

    Args:
        fd: of the inherited socket; taken over.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._rest = b""

    def first(self) -> Config:
        """The configuration to start with. Blocks; for use before there is an event loop.

        Raises:
            Environment: the supervisor has gone, or says something else.
        """
        data = b""
        while b"\n" not in data:
            more = self._socket.recv(1 << 16)
            if not more:
                raise Environment("the supervisor has ended")
            data += more
        head, _, self._rest = data.partition(b"\n")
        try:
            message = to_child(head)
            if not isinstance(message, Told):
                raise ValueError(f"it began with {message.kind!r}")
            return parse(message.config)
        except ValueError as error:
            raise Environment(f"the supervisor is of another version; start it anew: {error}") from None

    async def run(self, host: Host) -> None:
        """Put in force what the supervisor says, until it ends; then this process is told to end, too."""
        self._socket.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE)
        reader.feed_data(self._rest)

        def say(message: FromChild) -> None:
            writer.write(line(message))

        try:
            say(Ready(connected=True))
            while data := await reader.readline():
                message = to_child(data)
                if isinstance(message, Told):
                    say(Taken(number=message.number, fault=_taken(host, message)))
        except (OSError, ValueError) as error:
            log.warning("the supervisor is not understood: %s", error)
        finally:
            writer.close()


def reload(host: Host, file: Path) -> None:
    """Read the file again; a fault is logged, and the old configuration stays in force."""
    try:
        _put(host, read(file))
    except Environment as error:
        log.error("reload rejected, the old configuration stays in force: %s", error)


def _taken(host: Host, told: Told) -> str:
    try:
        _put(host, parse(told.config))
    except ConfigError as error:
        return str(error)
    return ""


def _put(host: Host, config: Config) -> None:
    merged, changes = merge(host.config, config)
    host.adopt(merged)
    if changes.restart:
        log.warning("reloaded; only a restart takes up %s", ", ".join(changes.restart))
    else:
        log.info("reloaded")
