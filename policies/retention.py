"""Which snapshots go: how many of a kind are kept, for how long, and in how many bytes.

Nothing that is used goes, nor what came a moment ago, nor the newest usable snapshot of a model unless the operator says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.scalars import Bytes, Count, PositiveSeconds, Seconds, Section


class Retention(Section):
    """How long snapshots are kept on a host. The restorer looks every minute, `rewake snapshot gc` at once."""

    keep_last: Count | None = 3
    """Snapshots of the same model and settings that are kept, the newest; none: all."""
    max_age_s: PositiveSeconds | None = None
    """A snapshot older than this goes."""
    max_bytes: Bytes | None = None
    """What snapshots and their weights may take on the disk: beyond it quarantined ones go first, then those that do not fit
    here, then the oldest."""
    grace_s: Seconds = 3600.0
    """Nothing goes that came to this host less than so long ago."""
    spare_newest: bool = True
    """The newest usable snapshot of each model stays, whatever its age and the budget."""


class RemoteRetention(Retention):
    """Which copies a remote keeps. `rewake snapshot gc --remote NAME` goes by it when it is run; nothing goes by itself."""

    keep_last: Count | None = None
    """Copies of the same model and settings that are kept, the newest; none: all."""
    max_age_s: PositiveSeconds | None = None
    """A copy of a snapshot older than this goes."""
    max_bytes: Bytes | None = None
    """What copies may come to: beyond it the oldest go. Counted as the snapshots are on a host's disk, so less is stored."""
    grace_s: Seconds = 86400.0
    """Nothing goes that was pushed less than so long ago; and what a removed copy is made of, or one that was half pushed, stays
    so long for whoever is pulling it or goes on pushing."""
    spare_newest: bool = True
    """The newest copy of each model stays, whatever its age and the budget."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot as far as its keeping is concerned."""

    id: str
    model: str
    profile: str
    """Digest of the settings it was made with."""
    created_ms: int
    since_ms: int
    """When it came to where it is kept."""
    bytes: int
    usable: bool
    """It could be restored here and now; of a copy elsewhere nobody can say that it could not."""
    quarantined: bool = False
    in_use: bool = False
    weights: Mapping[str, int] = field(default_factory=dict)
    """Digest -> bytes of the weights sets that it names; others may name them too."""


class Removal(NamedTuple):
    """One snapshot that goes."""

    id: str
    reason: str
    bytes: int
    """What that frees: its own, and the weights that no other snapshot names then."""


def plan(snapshots: Sequence[Kept], rules: Retention, now_ms: int) -> list[Removal]:
    """What is to be removed, in order. What it leaves out is as the rules want it, or protected."""
    spared = _protected(snapshots, rules, now_ms)
    here = {one.id: one for one in snapshots}
    removals = []

    def remove(one: Kept, reason: str) -> None:
        before = _size(here.values())
        del here[one.id]
        removals.append(Removal(one.id, reason, before - _size(here.values())))

    for one, reason in _outlived(snapshots, rules, now_ms):
        if one.id not in spared:
            remove(one, reason)
    if rules.max_bytes is not None:
        for one in sorted(here.values(), key=_worth):
            if _size(here.values()) <= rules.max_bytes:
                break
            if one.id not in spared:
                remove(one, f"retention.max_bytes: {_size(here.values())} of {rules.max_bytes} bytes are taken")
    return removals


def _protected(snapshots: Sequence[Kept], rules: Retention, now_ms: int) -> set[str]:
    found = {one.id for one in snapshots if one.in_use or now_ms - one.since_ms < rules.grace_s * 1000}
    if rules.spare_newest:
        newest: dict[str, Kept] = {}
        for one in snapshots:
            if one.usable and not one.quarantined and (one.model not in newest or _age(one) > _age(newest[one.model])):
                newest[one.model] = one
        found |= {one.id for one in newest.values()}
    return found


def _outlived(snapshots: Sequence[Kept], rules: Retention, now_ms: int) -> Iterator[tuple[Kept, str]]:
    kinds: dict[tuple[str, str], list[Kept]] = {}
    for one in snapshots:
        kinds.setdefault((one.model, one.profile), []).append(one)
    surplus: set[str] = set()
    if rules.keep_last is not None:
        for kind in kinds.values():
            surplus |= {one.id for one in sorted(kind, key=_worth, reverse=True)[rules.keep_last :]}
    for one in sorted(snapshots, key=_worth):
        if one.id in surplus:
            yield one, f"retention.keep_last: there are {rules.keep_last} better ones of its model and settings"
        elif rules.max_age_s is not None and now_ms - one.created_ms > rules.max_age_s * 1000:
            yield one, f"retention.max_age_s: it was made {(now_ms - one.created_ms) // 1000} s ago"


def _worth(one: Kept) -> tuple[bool, bool, int, str]:
    """Smaller goes first: quarantined, then unusable, then old."""
    return not one.quarantined, one.usable, *_age(one)


def _age(one: Kept) -> tuple[int, str]:
    return one.created_ms, one.id


def _size(snapshots: Iterable[Kept]) -> int:
    weights: dict[str, int] = {}
    total = 0
    for one in snapshots:
        total += one.bytes
        weights.update(one.weights)
    return total + sum(weights.values())
