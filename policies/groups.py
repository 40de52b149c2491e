"""Models that exclude each other because they share a GPU: who is on, who is next, who has to go."""

from __future__ import annotations

from policies.scalars import Count, PositiveSeconds, Section


class Group(Section):
    """Models (they name their group themselves) of which only ``members`` run at once."""

    members: Count = 1
    """Models of the group that may have replicas at the same time."""
    min_tenure_s: PositiveSeconds = 10.0
    """A member that was let in serves at least this long before another may displace it: no thrash."""
    max_wait_s: PositiveSeconds = 60.0
    """A model that has waited this long is let in next, however busy the members are: no starvation."""
