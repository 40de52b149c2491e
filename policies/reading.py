"""How a restore reads what it needs: each choice made from what was measured, with its reason in words.

Knows rates and sizes; nothing of how anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from policies.floor import Rates
from policies.manifest import Manifest, MappedFile
from policies.scalars import OnOff, Section

LEAST_BYTES = 64 << 20
"""Smaller files are read on by the kernel faster than a choice is made."""
_LEAST_TOUCHED = 0.5
_HEAD_BYTES = 64 << 10
"""Of a mapped file, for CRIU to see whether it is the same build."""
_TWICE = 1.5
"""So much faster must be what takes fresh memory twice, and the processors with it, than what takes it once."""
_CLEARLY = 1.25
"""Short measurements differ by less than this without a reason."""


class Restore(Section):
    """How snapshots of a model are read when they are restored."""

    read: Literal["auto", "direct", "cached"] = "auto"
    """Big memory that is not in the page cache: ``direct`` past it, ``cached`` through it, ``auto`` as measured."""
    prefetch: Annotated[Literal["auto", "on", "off"], OnOff] = "auto"
    """Read big files that the engine maps while it is restored. ``auto``: those of which the rehearsal's canary touched half."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice, and why."""

    on: bool
    why: str


def direct(settings: Restore, rates: Rates | None, *, alone: bool = True) -> Choice:
    """Whether big memory that is not in the page cache is read past it: fresh memory is then taken once, not twice.

    Args:
        alone: no other replica is being restored from the same snapshot, which could share what is read.
    """
    if settings.read != "auto":
        return Choice(settings.read == "direct", f"restore.read is {settings.read}")
    if not alone:
        return Choice(False, "another replica is being restored from the same snapshot, and reads the same")
    if rates is None:
        return Choice(True, "this host has not been measured yet")
    why = f"{_rate(rates.disk)} past the page cache, {_rate(rates.disk_cached)} through it"
    return Choice(rates.disk_cached < _TWICE * rates.disk, why)


def huge(rates: Rates | None) -> Choice:
    """Whether big memory is put into huge pages."""
    if rates is None:
        return Choice(True, "this host has not been measured yet")
    why = f"fresh memory takes {_rate(rates.fill_huge)} in huge pages, {_rate(rates.fill)} in small ones"
    return Choice(rates.fill_huge >= _CLEARLY * rates.fill, why)


def ahead(settings: Restore, files: Sequence[MappedFile]) -> tuple[tuple[MappedFile, ...], str]:
    """(mapped files to be read while CRIU works, why these)."""
    big = tuple(file for file in files if file.bytes >= LEAST_BYTES)
    if settings.prefetch != "auto":
        return big if settings.prefetch == "on" else (), f"restore.prefetch is {settings.prefetch}"
    if not big:
        return (), "no big file is mapped"
    measured = [file for file in big if file.touched is not None]
    if not measured:
        return (), "it was not rehearsed, so nobody knows which files the first token needs"
    chosen = tuple(file for file in measured if (file.touched or 0) >= _LEAST_TOUCHED * file.bytes)
    touched = sum(file.touched or 0 for file in measured) / sum(file.bytes for file in measured)
    return chosen, f"the rehearsal's canary touched {touched:.0%} of the big files that are mapped"


def first(settings: Restore, files: Sequence[MappedFile]) -> tuple[tuple[str, int], ...]:
    """(path, bytes from its beginning) of mapped files that are asked for before CRIU is, those that it looks at first first.

    CRIU looks at the beginning of each, one after another, and then writes into pages that the engine had changed, which the
    kernel reads from the file for it: so small files, which are mostly libraries, are asked for whole.
    """
    if settings.prefetch == "off":
        return ()
    whole, room = [], LEAST_BYTES
    for file in sorted(files, key=lambda file: file.bytes):
        if (room := room - file.bytes) < 0:
            break
        whole.append((file.path, file.bytes))
    return (*((file.path, min(file.bytes, _HEAD_BYTES)) for file in files), *whole)


def choices(settings: Restore, manifest: Manifest, rates: Rates | None, *, alone: bool = True) -> tuple[str, ...]:
    """Every choice that a restore of this snapshot makes here, in words."""
    past, (files, why) = direct(settings, rates, alone=alone), ahead(settings, manifest.files)
    return (
        f"cold memory is read {'past' if past.on else 'through'} the page cache: {past.why}",
        f"{len(files)} mapped files are read ahead: {why}",
        "no page is left for later: nobody is served before the canary, which waits for each that it touches",
    )


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.2f} GB/s"
