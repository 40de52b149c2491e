"""What every section of the configuration is made of: its base, sizes, times, counts, networks."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Section(BaseModel):
    """One mapping of the configuration file: frozen, and every unknown key a fault."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _size(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _spelt(value: object) -> object:
    return ("on" if value else "off") if isinstance(value, bool) else value


OnOff = BeforeValidator(_spelt)
"""For settings that are ``on`` or ``off`` among other words: YAML reads these bare words as true and false."""

Bytes = Annotated[int, BeforeValidator(_size), Field(ge=0)]
"""A size in bytes; in YAML an integer or a string such as ``64 MiB``."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def _network(value: str) -> str:
    return str(ipaddress.ip_network(value, strict=False))


Network = Annotated[str, AfterValidator(_network)]
"""An IPv4 or IPv6 network, such as ``10.0.0.0/8``."""
