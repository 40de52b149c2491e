"""Everything that can go wrong in the restorer, as one tree. Knows no sibling: every module raises from here.

The ``kind`` of an error, and what a tool has written, decide what becomes of a start: see :mod:`policies.failures`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import ClassVar

from policies.compat import Mismatch
from policies.failures import KILLED, Class, Verdict, classify


class RestorerError(Exception):
    """Base of all. Never raised itself."""

    kind: ClassVar[Class]
    certain: ClassVar[bool] = False
    """Of a snapshot's fault: once is proof."""
    remedy: ClassVar[str] = ""
    """Where it is another than that of its kind, and no line that was written knows a better one."""
    log: str = ""
    """What the tool or the engine behind it has written."""

    @property
    def verdict(self) -> Verdict:
        """Whose fault it is, after a look at what was written."""
        return classify(self.kind, str(self), self.log, certain=self.certain, remedy=self.remedy)

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


class NotNamed(RestorerError):
    """The model's settings do not let it run on this host."""

    kind = "host"
    remedy = "name a host in models.MODEL.engine.hosts that has a restorer, or start one on a host that is named there"


class SnapshotError(RestorerError):
    """The snapshot, or the donor that was to become one, is not usable. Says which object or file, expected and found."""

    kind = "snapshot"
    certain = True


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
        self.tool, self.rc, self.log = tool, rc, tail
        super().__init__(f"{self.brief}: {tail.strip() or 'it said nothing'}")

    @property
    def brief(self) -> str:
        if self.rc < 0:
            return f"{self.tool} was ended by signal {-self.rc} ({signal.strsignal(-self.rc)})"
        return f"{self.tool} failed with status {self.rc}"

    @property
    def verdict(self) -> Verdict:
        # Whatever it has written before, that is not why.
        return Verdict(cls=self.kind, evidence=self.brief, remedy=KILLED) if self.rc == -signal.SIGKILL else super().verdict


class ToolHung(RestorerError):
    """An external program did not end in time and was killed."""

    kind = "tool"


class Environment(RestorerError):
    """This host cannot do it just now: the disk is full, a program or a file is missing, no address is free."""

    kind = "environment"


class RemoteFailed(RestorerError):
    """A store outside this host does not do what it is asked: unreachable, no such bucket, no right, no room."""

    kind = "environment"


class ArrivalFailed(RemoteFailed):
    """What was still on its way of a snapshot did not come: no fault of the snapshot, which is pulled on by the next try."""


class InUse(RestorerError):
    """What was to be removed is used by somebody, or what was to be used is being removed. Says by whom."""

    kind = "environment"


class EngineDied(RestorerError):
    """The engine's process ended by itself."""

    kind = "transient"
    remedy = "mend what the engine says at the end of its log: in models.MODEL.engine, in its files, or on this host"


class EngineNotReady(RestorerError):
    """The engine runs, but did not answer, or not in time."""

    kind = "transient"


class HeldBack(RestorerError):
    """The snapshot that would do failed a moment ago; it is tried again after a pause."""

    kind = "transient"


class Cancelled(RestorerError):
    """Nobody wants the result any more, or the right to make it was lost."""

    kind = "cancelled"


class StoreUnavailable(RestorerError):
    """The shared store did not answer, or not as expected."""

    kind = "environment"


class WrongSchema(RestorerError):
    """Another version of the software wrote this store; waiting does not mend it."""

    kind = "environment"


class LeaseLost(RestorerError):
    """Another claim of this job, or a later write of this record, exists; whatever was being done must be undone."""

    kind = "cancelled"
