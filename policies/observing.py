"""Who may look at the metrics, and which requests are traced, where to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from policies.scalars import Count, Section
from policies.tenancy import KeyHash

Address = Annotated[str, Field(pattern=r"^([^\s:/]+|\[[0-9a-fA-F:.]+\]):\d{1,5}$")]
"""``HOST:PORT``, ``[::1]:PORT``."""
Endpoint = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$")]


class Metrics(Section):
    """The page that Prometheus scrapes."""

    address: Address | None = None
    """Where ``/metrics`` is served, such as ``10.0.0.5:9464``: by plain HTTP, nothing else beside it, and not at the gateway's
    own address. None: there."""
    keys: tuple[KeyHash, ...] = ()
    """Hashes of the keys that ``GET /metrics`` needs (``rewake key`` makes one), if not the admin token. None: everybody may
    read it."""

    @property
    def at(self) -> tuple[str, int] | None:
        """Host and port of the address, if there is one."""
        host, _, port = (self.address or "").rpartition(":")
        return (host.strip("[]"), int(port)) if port else None


class Tracing(Section):
    """OpenTelemetry. Needs the ``tracing`` extra; without an endpoint nothing of it is even loaded."""

    endpoint: Endpoint | None = None
    """Where spans are sent by OTLP over HTTP, such as ``http://127.0.0.1:4318/v1/traces``. None: no request is traced."""
    headers: Mapping[str, str] = {}
    """Sent along with them, for a collector that wants a key."""
    sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Part of the requests that are traced. One whose client says (``traceparent``) that it is, or is not, is as it says; one
    that has to be held is traced unless its client says no."""
    queue: Count = 2048
    """Requests whose spans may wait to be sent; more are dropped and counted."""
