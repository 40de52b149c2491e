"""The restorer's settings: what it works with on its host, how often it tries, how others reach what it runs.

Owns validation and the wording of its errors. Knows nothing of models.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator

from policies.drivers import Version, Word
from policies.expose import Expose
from policies.scalars import Count, PositiveSeconds, Section
from policies.warming import Warming


class Quarantine(Section):
    """When a snapshot whose restores fail is not restored any more, and how long it is left alone before that."""

    hosts: Annotated[int, Field(ge=2)] = 2
    """So many hosts on which a restore failed by the snapshot's own fault: no host restores it any more."""
    failures: Count = 3
    """So many such failures in a row on one host: that host does not restore it any more. Proof, such as a byte that is not what
    was committed, is enough at once."""
    backoff_s: PositiveSeconds = 1.0
    """The pause after a first failed restore of a snapshot, whatever its reason; it doubles with each further one in a row."""
    most_backoff_s: PositiveSeconds = 3600.0
    """The longest pause."""


class Restorer(Section):
    """The worker that starts, restores, captures and stops engines on this host."""

    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    """The name of this host in the installation; no two may have the same. None: its hostname."""
    expose: Expose | None = None
    """Where gateways of other hosts reach the replicas of this one. None: they cannot."""
    criu: str = "criu"
    """The CRIU binary (>= 4.2), a path or a name on PATH."""
    criu_timeout_s: PositiveSeconds = 120.0
    """A CRIU call that takes longer is killed together with its namespaces."""
    runc: str = "runc"
    """The runc binary (>= 1.1), a path or a name on PATH; only asked for by models whose ``engine.backend`` is ``runc``."""
    gpu_helper: tuple[str, ...] = ()
    """argv of the process that speaks to the GPU driver; empty: Rewake's own, under this Python."""
    drivers: Mapping[Version, Word] = {}
    """NVIDIA drivers, by version or branch, to ``allow`` though known to fail, or to ``deny``: GPU engines start cold there."""
    network: str = "198.18.0.0/16"
    """IPv4 network out of which each replica gets a /30 of its own; must not overlap a network this host talks to."""
    parallel_starts: Count = 3
    """Starts, restores and captures that may run at once on this host."""
    lease_s: PositiveSeconds = 10.0
    """A job whose restorer is silent for this long may be claimed by another."""
    max_attempts: Count = 3
    """Tries of one job before its failure is final."""
    quarantine: Quarantine = Quarantine()
    warm: Warming = Warming()
    lost_after_s: Annotated[float, Field(ge=6, allow_inf_nan=False)] = 10.0
    """A host that has not reported for so long, and whose replicas no gateway can connect to, is lost: others start anew what
    was there. At least 6."""
    failure_backoff_s: PositiveSeconds = 30.0
    """After a final failure the model answers 503 for this long before it is tried again."""

    @field_validator("network")
    @classmethod
    def _network(cls, network: str) -> str:
        parsed = ipaddress.IPv4Network(network)
        if parsed.prefixlen > 28:
            raise ValueError(f"{network} holds fewer than four replicas; use a /28 or larger network")
        return str(parsed)
