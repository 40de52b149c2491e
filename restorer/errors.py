"""Everything that can go wrong in the restorer, as one tree. Knows no sibling: every module raises from here.

The ``kind`` of an error decides what becomes of a start: the host is wrong (another host may do), the snapshot is wrong
(quarantine it), the moment is wrong (try again), a tool or the environment is (say so), or nobody wants it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from policies.compat import Mismatch

Kind = Literal["host", "snapshot", "transient", "tool", "environment", "cancelled"]


class RestorerError(Exception):
    """Base of all. Never raised itself."""

    kind: ClassVar[Kind]

    @property
    def brief(self) -> str:
        """What clients may be told: without what engines and tools have written, which is for the operator alone."""
        return str(self).partition("; its log ends: ")[0]


class HostIncompatible(RestorerError):
    """The snapshot does not fit this host or the model's present settings; nothing was touched."""

    kind = "host"

    def __init__(self, mismatches: Sequence[Mismatch]) -> None:
        self.mismatches = list(mismatches)
        super().__init__("the snapshot does not fit here: " + " | ".join(map(str, mismatches)))


class SnapshotError(RestorerError):
    """The snapshot, or the donor that was to become one, is not usable. Says which object or file, expected and found."""

    kind = "snapshot"


class CanaryDiffers(SnapshotError):
    """A restored engine does not repeat its donor's answers; it must never see traffic."""


class ToolFailed(RestorerError):
    """An external program ended with an error.

    Args:
        tool: its name.
        rc: its exit status; negative: the signal that ended it.
        tail: the end of its log.
    """

    kind = "tool"

    def __init__(self, tool: str, rc: int, tail: str) -> None:
        self.tool, self.rc, self.tail = tool, rc, tail
        super().__init__(f"{tool} failed with status {rc}: {tail.strip() or 'it said nothing'}")

    @property
    def brief(self) -> str:
        return f"{self.tool} failed with status {self.rc}"


class ToolHung(RestorerError):
    """An external program did not end in time and was killed."""

    kind = "tool"


class Environment(RestorerError):
    """This host cannot do it just now: the disk is full, a program or a file is missing, no address is free."""

    kind = "environment"


class RemoteFailed(RestorerError):
    """A store outside this host does not do what it is asked: unreachable, no such bucket, no right, no room."""

    kind = "environment"


class InUse(RestorerError):
    """What was to be removed is used by somebody, or what was to be used is being removed. Says by whom."""

    kind = "environment"


class EngineDied(RestorerError):
    """The engine's process ended by itself."""

    kind = "transient"


class EngineNotReady(RestorerError):
    """The engine runs, but did not answer, or not in time."""

    kind = "transient"


class Cancelled(RestorerError):
    """Nobody wants the result any more, or the right to make it was lost."""

    kind = "cancelled"
