"""May a snapshot be restored here and now: what its earlier restores, on this host and on others, say of it.

Only what is the snapshot's own fault counts towards quarantine. Proof, such as a byte that is not what was committed, counts at
once on the host that has it: another host has another copy. What could still be a host's doing has to happen several times
here, or on several hosts, and hosts are told apart by name. A restore that fails for any other reason is tried again after a
pause that doubles, so that nothing is tried for ever at full speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from policies.failures import Class, Verdict
from policies.restoring import Quarantine

COUNTED: tuple[Class, ...] = ("snapshot", "tool", "transient")
"""Failures after which a pause makes sense. A host that does not fit, or lacks something, is refused before anything is tried."""


class Note(BaseModel):
    """One line of a snapshot's verdicts: what became of one restore, or what an operator said."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)
    what: Literal["failed", "restored", "released", "quarantined"] = Field(alias="verdict")
    """``restored`` is noted only after failures. ``quarantined``: an earlier version's word for proof."""
    host: str = ""
    at_ms: int = 0
    facts: str = ""
    """Hash of the host's facts, to see whether hosts that fail are of one kind."""
    cls: Class = Field(default="snapshot", alias="class")
    certain: bool = False
    reason: str = ""
    """The error's own words."""
    evidence: str = ""
    remedy: str = ""

    @property
    def blames(self) -> bool:
        """It is the snapshot's fault."""
        return self.what == "quarantined" or (self.what == "failed" and self.cls == "snapshot")


class Standing(NamedTuple):
    """What follows from the notes."""

    quarantined: str | None = None
    """Why it must not be restored here any more; None: it may."""
    held_ms: int = 0
    """How long it is held back still."""
    failures: int = 0
    """Restores on this host that failed in a row."""
    last: str = ""
    """Why the last of them failed."""

    @property
    def held(self) -> str | None:
        """Why it is not to be restored just now; None: it may."""
        if self.held_ms <= 0:
            return None
        return f"held back for {self.held_ms / 1000:.0f} s after {self.failures} failed restores in a row, the last: {self.last}"


def failed(verdict: Verdict, *, host: str, facts: str, at_ms: int, reason: str) -> Note:
    """The note of a failed restore."""
    return Note(
        what="failed",
        host=host,
        facts=facts,
        at_ms=at_ms,
        cls=verdict.cls,
        certain=verdict.certain,
        reason=reason,
        evidence=verdict.evidence,
        remedy=verdict.remedy,
    )


def standing(notes: Iterable[Note], host: str, policy: Quarantine, now_ms: int) -> Standing:
    """Judge a snapshot by its notes.

    Args:
        notes: of every host, in any order.
        host: the one that asks.
    """
    ordered = sorted(notes, key=lambda note: note.at_ms)
    released = max((note.at_ms for note in ordered if note.what == "released"), default=-1)
    since = [note for note in ordered if note.at_ms > released]
    row = _row([note for note in since if note.host == host])
    reason = _reason(since, row, host, policy)
    counted = [note for note in row if note.cls in COUNTED]
    if reason is not None or not counted:
        return Standing(reason, 0, len(row), row[-1].reason if row else "")
    pause_s = min(policy.backoff_s * 2 ** min(len(counted) - 1, 30), policy.most_backoff_s)
    held_ms = counted[-1].at_ms + int(pause_s * 1000) - now_ms
    return Standing(None, max(0, min(held_ms, int(pause_s * 1000))), len(row), row[-1].reason)


def _reason(since: Sequence[Note], row: Sequence[Note], host: str, policy: Quarantine) -> str | None:
    proof = next((note for note in reversed(since) if note.host == host and note.blames and _certain(note)), None)
    if proof is not None:
        return proof.reason
    here = [note for note in row if note.blames]
    if len(here) >= policy.failures:
        return f"{len(here)} restores in a row failed by its fault, the last: {here[-1].reason}"
    hosts = {note.host: note for note in since if note.blames}
    if len(hosts) >= policy.hosts:
        return f"it failed by its own fault on {', '.join(sorted(hosts))}, the last: {list(hosts.values())[-1].reason}"
    return None


def _certain(note: Note) -> bool:
    return note.certain or note.what == "quarantined"


def _row(mine: Sequence[Note]) -> list[Note]:
    """The failures since the last restore that went well."""
    row: list[Note] = []
    for note in mine:
        row = [] if note.what == "restored" else [*row, note]
    return row
