"""What two snapshots share, and in what they differ: bytes by their chunks, settings and hosts by their fields.

Reads the lists of chunks and the manifests, never an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policies.manifest import Manifest
from restorer.storage import chunks


@dataclass(slots=True)
class Shares:
    """Bytes of content (holes are none) of an object of this name, or of all."""

    path: str
    shared: int = 0
    """Of the second snapshot's object: what is in any object of the first."""
    only_a: int = 0
    """Of the first one's: what is in no object of the second."""
    only_b: int = 0
    chunks_shared: int = 0
    chunks_a: int = 0
    chunks_b: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """Two snapshots, compared."""

    a: str
    b: str
    total: Shares
    objects: list[Shares]
    """By path; large ones first."""
    fields: Mapping[str, tuple[Any, Any]]
    """Of profile and host: those that differ, each with both values."""

    def document(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "a": self.a,
            "b": self.b,
            "total": asdict(self.total),
            "objects": [asdict(one) for one in self.objects],
            "fields": {name: {"a": a, "b": b} for name, (a, b) in self.fields.items()},
        }


def compare(one: tuple[Manifest, Path], other: tuple[Manifest, Path]) -> Difference:
    """Two snapshots, each as (manifest, folder).

    Raises:
        SnapshotError: one of them has no list of chunks, or not the one that its manifest names.
    """
    (a, folder_a), (b, folder_b) = one, other
    listed_a, listed_b = chunks.of(folder_a, a), chunks.of(folder_b, b)
    known_a, known_b = ({chunk.id for found in listed.values() for chunk in found} for listed in (listed_a, listed_b))
    rows = []
    for path in sorted(listed_a.keys() | listed_b.keys()):
        row = Shares(path)
        for chunk in listed_a.get(path, ()):
            row.chunks_a += 1
            row.only_a += 0 if chunk.id in known_b else chunk.size
        for chunk in listed_b.get(path, ()):
            row.chunks_b += 1
            if chunk.id in known_a:
                row.shared, row.chunks_shared = row.shared + chunk.size, row.chunks_shared + 1
            else:
                row.only_b += chunk.size
        rows.append(row)
    rows.sort(key=lambda row: -(row.shared + row.only_a + row.only_b))
    total = Shares("", **{name: sum(getattr(row, name) for row in rows) for name in Shares.__slots__ if name != "path"})
    return Difference(a.id, b.id, total, rows, dict(_fields(a, b)))


def _fields(a: Manifest, b: Manifest) -> list[tuple[str, tuple[Any, Any]]]:
    found: list[tuple[str, tuple[Any, Any]]] = []
    for part in ("profile", "host"):
        left, right = (getattr(one, part).model_dump(mode="json") for one in (a, b))
        for name in sorted(left.keys() | right.keys()):
            x, y = left.get(name), right.get(name)
            if x == y:
                continue
            if isinstance(x, list) and isinstance(y, list):
                x, y = [item for item in x if item not in y], [item for item in y if item not in x]
            found.append((f"{part}.{name}", (x, y)))
    return found
