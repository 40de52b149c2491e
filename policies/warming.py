"""Which snapshots are read into the page cache while nobody needs the memory, so that their next restore is not from the disk.

Pure: sizes in, a decision with its reasons out. Knows nothing of how anything is read, or how memory is counted.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from policies.scalars import Section

_THERE = 0.95
"""Of what a restore reads; the page cache keeps its own counsel about the rest."""


class Warming(Section):
    """Reading the newest snapshot of each model into the page cache while nothing is started and the memory is free."""

    enabled: bool = True
    """Off: a restore finds what happens to be in the page cache, which is nothing after one that read past it."""
    keep_free: Annotated[float, Field(ge=0.05, le=0.95, allow_inf_nan=False)] = 0.2
    """The share of this host's memory, or of the smallest control group around the restorer, that is left alone by it."""


@dataclass(frozen=True, slots=True)
class Warmable:
    """One model's newest usable snapshot, as far as reading it is concerned."""

    id: str
    created_ms: int
    bytes: int
    """What a restore reads."""
    cached: int
    """Of it, what is in the page cache."""
    engine_bytes: int
    """Memory that its engine takes besides; nothing if one runs already."""
    running: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a host, or of the control groups around the restorer, whichever leaves less; in bytes."""

    free: int
    """Used for nothing."""
    idle: int
    """Files that were read once and not again, and that nobody has mapped: what the kernel gives up first."""
    total: int

    def room(self, settings: Warming, ours: int) -> int:
        """What may be used, negative if too much is used already.

        Args:
            ours: bytes that were read on purpose, which count as idle and are not.
        """
        return self.free + max(0, self.idle - ours) - int(settings.keep_free * self.total)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is read, in this order; and why the others are not."""

    read: tuple[str, ...]
    left: Mapping[str, str]


def plan(found: Sequence[Warmable], settings: Warming, memory: Memory, done: Container[str] = ()) -> Plan:
    """Whole snapshots, as many as fit: first of models of which nothing runs, the newest first.

    A snapshot is read only if its engine has room beside it without anything being given up: otherwise its restore would push
    out of memory what it is about to read.

    Args:
        done: what has been read already, and is not read again if the kernel has taken the memory back.
    """
    room, read, left = memory.room(settings, sum(one.cached for one in found)), [], {}
    for one in sorted(found, key=lambda one: (one.running, -one.created_ms, one.id)):
        missing = one.bytes - one.cached
        if one.cached >= _THERE * one.bytes:
            left[one.id] = "it is there already"
        elif one.id in done:
            left[one.id] = "it was read, and the kernel has taken the memory back"
        elif missing + one.engine_bytes > room:
            wanted = f"{_size(missing)} and {_size(one.engine_bytes)} for its engine"
            left[one.id] = f"{wanted} do not fit into the {_size(max(0, room))} that may be used"
        else:
            read.append(one.id)
            room -= missing
    return Plan(tuple(read), left)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
