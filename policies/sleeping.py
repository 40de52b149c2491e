"""Settings of engines that are kept asleep, by their own API, while nobody asks for them."""

from __future__ import annotations

from typing import Literal

from policies.scalars import PositiveSeconds, Section


class Sleep(Section):
    """``engine.backend: sleep`` alone: how deep a stopped engine sleeps, and for how long."""

    level: Literal[1, 2] = 1
    """``1``: its weights are kept in the host's memory. ``2``: they are thrown away, and read from their files again when it
    wakes: slower, and it takes no memory."""
    keep_s: PositiveSeconds = 3600.0
    """How long an engine is kept asleep; then it is ended, and the next start is a cold one."""
