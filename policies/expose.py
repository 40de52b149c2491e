"""How the replicas of a host are reached from others: settings of their doors.

A door is a process of its own beside each box; see :mod:`restorer.boxes.door`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import Field, field_validator

from policies.scalars import Count, Network, Section

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class Expose(Section):
    """Where gateways of other hosts reach the replicas of this one."""

    address: str
    """IP address of this host at which gateways of others reach it; it should be of a private network."""
    ports: str = "20000-20999"
    """The ports there, one for each replica and each box kept ready; a number or ``LOW-HIGH``."""
    allow: Annotated[tuple[Network, ...], Field(min_length=1)]
    """Networks that gateways come from; whoever comes from elsewhere is shut out at once."""
    connections: Count = 1024
    """Connections through one door at once; one more is closed at once."""

    @field_validator("address")
    @classmethod
    def _address(cls, value: str) -> str:
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f"{value!r} is no IP address; gateways of other hosts are told it, so a name will not do") from None
        if address.is_unspecified or address.is_multicast:
            raise ValueError(f"{value} leads to no host; name the address at which gateways of other hosts reach this one")
        return str(address)

    @field_validator("ports")
    @classmethod
    def _ports(cls, value: str) -> str:
        match = _PORTS.fullmatch(value.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= 65535:
            raise ValueError(f"{value!r} is no range of ports; write for example 20000-20999")
        return value.strip()

    @field_validator("ports", mode="before")
    @classmethod
    def _one(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @property
    def range(self) -> range:
        """The ports as numbers."""
        low, _, high = self.ports.partition("-")
        return range(int(low), int(high or low) + 1)
