"""Equal memory of two snapshots shares its blocks on a real XFS and a real Btrfs, and nothing else about them changes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import require_root
from places import Place

from restorer.storage import sharing

SCRIPT = """
import json, os, subprocess, sys
sys.path[:0] = {path!r}
from pathlib import Path
image, mounted = Path(sys.argv[1]), Path(sys.argv[2])
done = subprocess.run(["mount", "-o", "loop", image, mounted], capture_output=True, text=True)
if done.returncode:
    print(json.dumps({{"lacking": done.stderr}}))
    sys.exit()
from places import Place
from restorer.storage import sharing
def taken():
    os.sync()
    facts = os.statvfs(mounted)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize
place = Place(mounted)
first = place.made(pages=24)
sharer = sharing.Sharer(place.snapshots)
second = place.made(pages=24, shift=300, created_ms=2)
before = taken()
times = [path.stat().st_ctime_ns for path in sorted((mounted / "snapshots").rglob("*"))]
shared = sharer.round()
found = {{"shared": shared, "first": first.id, "second": second.id, "freed": before - taken(), "again": sharer.round()}}
found["times"] = times == [path.stat().st_ctime_ns for path in sorted((mounted / "snapshots").rglob("*"))]
place.snapshots.remove(first.id)
found["faults"] = [str(fault) for fault in place.snapshots.verify(second.id, full=True)]
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
async def test_equal_memory_shares_its_blocks_where_the_file_system_can(tmp_path: Path, kind: str) -> None:
    require_root()
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"needs mkfs.{kind}")
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(1 << 30)
    await asyncio.to_thread(subprocess.run, [f"mkfs.{kind}", "-q", image], check=True, capture_output=True)
    script = SCRIPT.format(path=[str(Path.cwd()), str(Path(__file__).parent)])
    argv = ["unshare", "--mount", sys.executable, "-c", script, image, mounted]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "lacking" in found:
        pytest.skip(f"cannot mount it here: {found['lacking']}")
    assert found["shared"].keys() == {found["second"]}
    size = found["shared"][found["second"]]
    assert size > 16 << 20
    if kind == "xfs":  # Btrfs frees an extent only when nothing of it is used any more
        assert found["freed"] > 0.9 * size
    assert found["times"], "what is known to be unchanged still is"
    assert found["again"] == {}
    assert found["faults"] == [], "it stays whole when the other is removed"


async def test_elsewhere_nothing_happens(tmp_path: Path) -> None:
    place = Place(tmp_path)
    first, second = place.made(pages=2), place.made(pages=2, created_ms=2)
    if sharing.share(place.snapshots, second, [first]):
        pytest.skip("the file system of the tests can")
    for manifest in (first, second):
        assert list(place.snapshots.verify(manifest.id, full=True)) == []
