"""What two snapshots share, said of real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import Place
from test_restorer_snapshots import HOST, PROFILE

from restorer.errors import SnapshotError
from restorer.storage.difference import compare


def test_bytes_chunks_and_fields_are_told_apart(tmp_path: Path) -> None:
    place = Place(tmp_path)
    host = HOST.model_copy(update={"cpu_flags": ("a", "b")})
    a = place.made()
    b = place.made(shift=300, created_ms=2, profile=PROFILE.model_copy(update={"port": 2}), host=host)
    found = compare(*((one, place.snapshots.folder(one.id)) for one in (a, b)))
    pages = next(one for one in found.objects if one.path == "images/pages-1.img")
    assert found.objects[0] is pages, "the largest first"
    assert pages.shared > 0.7 * (pages.shared + pages.only_b)
    assert pages.chunks_shared < pages.chunks_b
    assert found.total.only_b >= 300 * 4096
    assert found.fields == {"profile.port": (1, 2), "host.cpu_flags": ([], ["b"])}
    document = found.document()
    assert document["total"]["shared"] == sum(one["shared"] for one in document["objects"])


def test_a_snapshot_is_to_itself_all_shared(tmp_path: Path) -> None:
    place = Place(tmp_path)
    a = place.made()
    found = compare(*[(a, place.snapshots.folder(a.id))] * 2)
    assert found.total.only_a == found.total.only_b == 0
    assert found.total.shared > 12 << 20
    assert not found.fields


def test_one_without_a_list_is_said_to_have_none(tmp_path: Path) -> None:
    place = Place(tmp_path)
    a = place.made()
    older = a.model_copy(update={"format": 1, "chunks": None})
    with pytest.raises(SnapshotError, match=r"listed no chunks.*snapshot create"):
        compare((a, place.snapshots.folder(a.id)), (older, place.snapshots.folder(a.id)))
