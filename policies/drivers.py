"""Which NVIDIA drivers are known not to be up to it, and for what: refused before anything is frozen, with reason and remedy.

A row is here because somebody has seen it fail (or the driver's own manual says that it lacks the call). What no row speaks of is
allowed. The operator's word (``restorer.drivers``) goes before the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from policies.compat import Mismatch
from policies.manifest import GpuFacts

Word = Literal["allow", "deny"]
Version = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
"""A driver's version, or the beginning of one: ``595`` stands for all of that branch."""


class Row(NamedTuple):
    """Drivers from one version (inclusive) up to another (exclusive) that must not be used for something."""

    since: tuple[int, ...]
    before: tuple[int, ...]
    open_only: bool
    """Of the open kernel modules alone; where it is not known which they are, they count as open."""
    forbids: Literal["capture", "move"]
    """``capture``: GPU state is neither captured nor restored. ``move``: it is not restored onto another GPU than its own."""
    why: str
    remedy: str


DENIED = (
    Row(
        (),
        (570,),
        False,
        "capture",
        "it can neither checkpoint a tree of processes nor give a lock up in time",
        "install driver 570 or later (580 to restore onto another GPU)",
    ),
    Row(
        (),
        (580,),
        False,
        "move",
        "it cannot put state onto another GPU than it was taken from",
        "install driver 580 or later",
    ),
    Row(
        (595,),
        (596,),
        True,
        "capture",
        "its open kernel module can hang the whole host when a process that was restored is killed",
        "install a driver of another branch, or its proprietary kernel module",
    ),
)
"""What is known, whatever order."""


def refused(facts: GpuFacts | None, overrides: Mapping[str, Word]) -> list[Mismatch]:
    """Why no GPU state may be captured or restored with this host's driver; empty when it may."""
    return _denied(facts, overrides) or [_mismatch(facts, row) for row in _rows(facts, overrides, "capture")]


def immovable(facts: GpuFacts | None, overrides: Mapping[str, Word]) -> list[Mismatch]:
    """Why no GPU state may be put onto another GPU than it was taken from; empty when it may."""
    return [_mismatch(facts, row) for row in _rows(facts, overrides, "move")]


def _rows(facts: GpuFacts | None, overrides: Mapping[str, Word], forbids: str) -> Iterator[Row]:
    version = _parsed(facts)
    if facts is None or version is None or _word(facts, overrides) == "allow":
        return
    for row in DENIED:
        within = row.since <= version and version[: len(row.before)] < row.before
        if row.forbids == forbids and within and not (row.open_only and facts.open_module is False):
            yield row


def _denied(facts: GpuFacts | None, overrides: Mapping[str, Word]) -> list[Mismatch]:
    if facts is None or facts.driver is None or _word(facts, overrides) != "deny":
        return []
    return [
        Mismatch("host.gpu.driver", "one that restorer.drivers does not deny", facts.driver, "take it out of restorer.drivers")
    ]


def _word(facts: GpuFacts, overrides: Mapping[str, Word]) -> Word | None:
    """What the operator says of this driver; the longest version that fits decides."""
    fits = [given for given in overrides if f"{facts.driver}.".startswith(f"{given}.")]
    return overrides[max(fits, key=len)] if fits else None


def _mismatch(facts: GpuFacts | None, row: Row) -> Mismatch:
    assert facts is not None
    assert facts.driver is not None
    branch = facts.driver.partition(".")[0]
    remedy = f"{row.why}; {row.remedy}; restorer.drivers: {{'{branch}': allow}} tries all the same"
    return Mismatch("host.gpu.driver", "one that is not known to fail", facts.driver, remedy)


def _parsed(facts: GpuFacts | None) -> tuple[int, ...] | None:
    """None: unknown, which other rules refuse."""
    if facts is None or facts.driver is None:
        return None
    parts = facts.driver.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None
