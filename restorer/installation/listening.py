"""The addresses that an installation serves at: bound once, kept open while workers come and go.

One socket for each worker at each address: the kernel deals connections out among them. Since the installation holds
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
    gateway = config.gateway
    return _bound(gateway.host, gateway.port, gateway.workers, "gateway.host or gateway.port")


def bind_metrics(config: Config) -> list[socket.socket]:
    """The same for metrics, where they have an address of their own; else nothing.

    Raises:
        Environment: the address cannot be had.
    """
    return [] if config.metrics.at is None else _bound(*config.metrics.at, config.gateway.workers, "metrics.address")


def _bound(host: str, port: int, workers: int, setting: str) -> list[socket.socket]:
    found: list[socket.socket] = []
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # Among sockets that share a port the kernel asks nobody: another installation would get some of our clients.
        with socket.socket(family, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
        for _ in range(workers):
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
            f"cannot listen on {host}:{port}: {error.strerror or error}; change {setting}, or stop what has it"
        ) from None
    return found


def base_url(config: Config, listener: socket.socket | None = None) -> str:
    """Where the gateway is reached from this machine; ``listener``: tells the port where the configuration leaves it open."""
    port = config.gateway.port if listener is None else listener.getsockname()[1]
    return _url("http" if config.gateway.tls is None else "https", config.gateway.host, port)


def metrics_url(config: Config) -> str | None:
    """Where metrics are reached from this machine, if they have an address of their own."""
    return None if config.metrics.at is None else _url("http", *config.metrics.at)


def _url(scheme: str, host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
