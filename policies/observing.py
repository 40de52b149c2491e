"""Who may look at the metrics."""

from __future__ import annotations

from policies.scalars import Section
from policies.tenancy import KeyHash


class Metrics(Section):
    """The page that Prometheus scrapes."""

    keys: tuple[KeyHash, ...] = ()
    """Hashes of the keys that ``GET /metrics`` needs (``rewake key`` makes one); none: everybody may read it."""
