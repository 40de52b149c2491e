"""Who may ask, for what, and how much: tenants, their keys (as hashes) and their limits."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import Field

from policies.scalars import Count, Section

KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
"""An API key as it is stored: keys are long and random, so a plain SHA-256 cannot be turned back."""


def key_hash(key: str) -> str:
    """What the configuration holds in place of ``key``."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


class Limits(Section):
    """What one tenant may use, over all gateways. None: no limit."""

    requests_per_minute: Count | None = None
    """A minute's worth may be used at once; it comes back evenly."""
    tokens_per_minute: Count | None = None
    """Prompt and completion tokens as the engines' ``usage`` counts them; a tenant in debt waits until it is paid off."""
    concurrency: Count | None = None
    """Requests in flight on replicas at once. More than that wait, others pass them."""
    max_held: Count | None = None
    """Requests in waiting rooms at once."""


class Tenant(Section):
    """One party that shares the models with others."""

    keys: tuple[KeyHash, ...] = ()
    """``rewake key`` makes a key and prints the line to put here. Without any, nobody can be this tenant."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Share of the slots while others wait too."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Waiters of a higher priority go first, whatever the weights."""
    models: tuple[str, ...] | None = None
    """The models it may use; None: all."""
    limits: Limits = Limits()
