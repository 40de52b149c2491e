"""Who is at the other end of a connection, and what replicas are told of it.

A proxy may say whom it speaks for, and is believed only if its address is in ``gateway.trusted_proxies``; what anybody else says
is dropped. Knows nothing of keys and tenants.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gateway.current import Current

SPOKEN_FOR = frozenset(("forwarded", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-forwarded-port", "x-real-ip"))
"""Headers that say who a request comes from: never passed on as they came."""
_HOST = re.compile(r"[A-Za-z0-9._~-]{1,253}(?::\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](?::\d{1,5})?")
_MAX_HOPS = 32
_MAX_HOST = 260
"""Longer than any host, so that none is cut into one."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Origin:
    """Where a request comes from."""

    address: str
    """The client's IP address; empty when it is not known, as on a unix socket."""
    scheme: str
    """``http`` or ``https``, as the client spoke it."""
    host: str
    """As the client addressed it."""
    chain: tuple[str, ...]
    """The client and the trusted proxies after it, the peer of this connection last."""

    def pairs(self) -> list[tuple[str, str]]:
        """The headers that tell a replica. Not to be changed: made once for many requests."""
        return self._pairs

    @cached_property
    def _pairs(self) -> list[tuple[str, str]]:
        pairs = [("X-Forwarded-For", ", ".join(self.chain))] if self.chain else []
        pairs.append(("X-Forwarded-Proto", self.scheme))
        said = f"proto={self.scheme}"
        if self.host:
            pairs.append(("X-Forwarded-Host", self.host))
            said = f'host="{self.host}";{said}'
        hops = [f"for={_node(address)}" for address in self.chain] or ["for=unknown"]
        hops[0] = f"{hops[0]};{said}"
        return [*pairs, ("Forwarded", ", ".join(hops))]


class Clients:
    """Finds out where requests come from."""

    def __init__(self, current: Current) -> None:
        self._current = current

    def origin(self, peer: str | None, scheme: str, headers: Mapping[str, str]) -> Origin:
        """Where a request comes from. For a peer that is no trusted proxy it depends on ``peer``, ``scheme`` and Host alone.

        Args:
            peer: IP address at the other end of the connection; None if it has none.
            scheme: of the connection.
            headers: looked up by lower-case names; ``items()`` gives a repeated header as often as it came.
        """
        direct = _direct(peer or "", scheme, headers.get("host", "")[:_MAX_HOST])
        trusted = self._current.config.gateway.trusted_proxies
        if not trusted or not direct.address or not _is_in(address := ipaddress.ip_address(direct.address), trusted):
            return direct
        chain = _chain(address, _joined(headers, "x-forwarded-for"), trusted)
        said = _last(_joined(headers, "x-forwarded-proto")).lower()
        return Origin(
            address=str(chain[0]),
            scheme=said if said in ("http", "https") else scheme,
            host=_host(_last(_joined(headers, "x-forwarded-host"))) or direct.host,
            chain=tuple(map(str, chain)),
        )


@lru_cache(maxsize=1024)
def _direct(peer: str, scheme: str, host: str) -> Origin:
    """The same for all requests of a connection, so that most cost a look-up."""
    address = _address(peer)
    if address is None:
        return Origin("", scheme, _host(host), ())
    return Origin(str(address), scheme, _host(host), (str(address),))


def _chain(peer: Address, said: str, trusted: tuple[str, ...]) -> list[Address]:
    """Back from the peer for as long as each hop is trusted: the first that is not is the client."""
    chain = [peer]
    for hop in reversed(said.split(",")[-_MAX_HOPS:]):
        address = _address(hop)
        if address is None:
            break
        chain.insert(0, address)
        if not _is_in(address, trusted):
            break
    return chain


@lru_cache(maxsize=4096)
def _address(text: str) -> Address | None:
    """An IP address as proxies write it: with or without a port, brackets or quotes."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@lru_cache(maxsize=4096)
def _is_in(address: Address, networks: tuple[str, ...]) -> bool:
    return any(address in ipaddress.ip_network(network) for network in networks)


def _host(text: str) -> str:
    text = text.strip()
    return text if _HOST.fullmatch(text) else ""


def _joined(headers: Mapping[str, str], wanted: str) -> str:
    """A proxy may add a line of its own after one that the client made up: all of them, in their order."""
    return ",".join(value for name, value in headers.items() if name.lower() == wanted)


def _last(values: str) -> str:
    """The value that the nearest proxy set, or added."""
    return values.rpartition(",")[2].strip()


def _node(address: str) -> str:
    return f'"[{address}]"' if ":" in address else address
