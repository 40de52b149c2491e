"""The address that an installation serves at: bound once, kept open while workers come and go.

One socket for each worker, all at the same address: the kernel deals connections out among them. Since the installation holds
them, a connection that arrives while a worker is replaced waits for its successor instead of being refused.
"""

from __future__ import annotations

import socket

from policies.config import Config
from restorer.errors import Environment


def bind(config: Config) -> list[socket.socket]:
    """A bound socket for each worker; they begin to listen in the workers.

    Raises:
        Environment: the address cannot be had.
    """
    host, port, found = config.gateway.host, config.gateway.port, []
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # Among sockets that share a port the kernel asks nobody: another installation would get some of our clients.
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
        for _ in range(config.gateway.workers):
            listener = socket.socket(family, socket.SOCK_STREAM)
            found.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            address = listener.getsockname()
    except OSError as error:
        for listener in found:
            listener.close()
        raise Environment(
            f"cannot listen on {host}:{port}: {error.strerror or error}; change gateway.host or gateway.port, or stop what has it"
        ) from None
    return found


def base_url(config: Config, listener: socket.socket | None = None) -> str:
    """Where the gateway is reached from this machine; ``listener``: tells the port where the configuration leaves it open."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(config.gateway.host, config.gateway.host)
    port = config.gateway.port if listener is None else listener.getsockname()[1]
    scheme = "http" if config.gateway.tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
