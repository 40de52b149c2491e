"""Snapshots on their way into the page cache: what is read of files, when it ends, and what a host reads of its snapshots."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import eventually
from test_restorer_hostfacts import written
from test_restorer_snapshots import draft

from policies.config import Config
from policies.warming import Memory
from policies.wire import SnapshotSummary
from restorer.machine.host import Host
from restorer.machine.hostfacts import memory_now
from restorer.operations import warming
from restorer.operations.warming import Warmer, read
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.stamps import Stamps
from restorer.system import pagecache

MIB = 1 << 20
GB = 10**9


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_SETTLE_S", 0.01)


def cold_file(path: Path, size: int = 4 * MIB, hole: int = 0) -> Path:
    """Data, a hole, data; not in the page cache."""
    with path.open("wb") as file:
        file.write(os.urandom(size))
        file.seek(hole, os.SEEK_CUR)
        file.write(os.urandom(4096))
    evict(path)
    return path


def evict(*paths: Path) -> None:
    pagecache.evict(paths)
    if pagecache.tier(paths) != "disk":
        pytest.skip("this file system keeps its files in memory")


def always(_: int) -> bool:
    return True


def test_what_is_missing_is_read_and_no_hole(tmp_path: Path) -> None:
    path = cold_file(tmp_path / "f", hole=32 * MIB)
    count, whole = read([path], threading.Event(), always)
    assert whole
    assert 0 < count <= 4 * MIB + 8192
    assert pagecache.tier([path]) == "page cache"
    with path.open("rb") as file:
        assert pagecache.resident(file.fileno(), 16 * MIB, 8 * MIB) == 0
    assert read([path], threading.Event(), always) == (0, True)


def test_a_file_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    path = cold_file(tmp_path / "f")
    assert read([tmp_path / "gone", path], threading.Event(), always)[1]
    assert pagecache.tier([path]) == "page cache"


def test_reading_ends_at_once_when_something_is_to_be_started(tmp_path: Path) -> None:
    path, stopped = cold_file(tmp_path / "f"), threading.Event()
    stopped.set()
    assert read([path], stopped, always) == (0, False)
    assert pagecache.tier([path]) == "disk"


def test_reading_ends_when_the_memory_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_LOOK_BYTES", MIB)
    answers = iter([True, False])
    count, whole = read([cold_file(tmp_path / "f", 8 * MIB)], threading.Event(), lambda _: next(answers))
    assert not whole
    assert 0 < count < 8 * MIB


def test_its_thread_comes_after_all_others() -> None:
    with concurrent.futures.ThreadPoolExecutor(1, initializer=warming._humble) as pool:
        mine = pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert mine == 19
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


class Scenery:
    """A store with snapshots of a megabyte each, a host that knows it, and its warmer."""

    def __init__(self, folder: Path, **warm: Any) -> None:
        self.store = SnapshotStore(folder / "snapshots", Stamps(folder / "stamps.json"))
        model = {"engine": {"kind": "http", "command": ["/bin/true"]}, "canary": {"prompts": ["a"]}}
        config = Config.model_validate({"models": {"m": model}, "restorer": {"warm": warm}})
        self.host = cast(Host, SimpleNamespace(config=config, snapshots=self.store, weights=SimpleNamespace(root=folder)))
        self.free = 100 * GB
        self.summaries: list[SnapshotSummary] = []
        self.warmer = Warmer(self.host, lambda: self.summaries, set, lambda: Memory(self.free, 0, 100 * GB))

    def made(self, created_ms: int, **more: Any) -> list[Path]:
        """The objects of a new snapshot, which are cold."""
        with self.store.stage() as staging:
            (staging.images / "pages-1.img").write_bytes(os.urandom(MIB))
            manifest = self.store.commit(staging, draft(created_ms=created_ms))
        name = manifest.profile.model
        about = {"id": manifest.id, "model": name, "created_ms": created_ms, "bytes": MIB, "fits": True, **more}
        self.summaries.append(SnapshotSummary(**about))
        paths = [self.store.folder(manifest.id) / one.path for one in manifest.objects]
        evict(*paths)
        return paths


async def running(scenery: Scenery, until: Callable[[], bool], what: str) -> None:
    task = asyncio.create_task(scenery.warmer.run())
    try:
        await eventually(until, what=what)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def there(paths: list[Path]) -> bool:
    return pagecache.tier(paths) == "page cache"


async def test_the_newest_usable_snapshot_of_a_model_is_read(tmp_path: Path) -> None:
    scenery = Scenery(tmp_path)
    old, new = scenery.made(1), scenery.made(2)
    unfit, bad = scenery.made(3, fits=False), scenery.made(4, quarantined="its bytes changed")
    await running(scenery, lambda: there(new), "the newest in the page cache")
    assert [pagecache.tier(paths) for paths in (old, unfit, bad)] == ["disk"] * 3


async def test_while_a_job_is_under_way_nothing_is_read_and_afterwards_it_is(tmp_path: Path) -> None:
    scenery = Scenery(tmp_path)
    paths = scenery.made(1)
    scenery.warmer.began()
    task = asyncio.create_task(scenery.warmer.run())
    await asyncio.sleep(0.2)
    assert not there(paths)
    scenery.warmer.ended()
    await eventually(lambda: there(paths), what="it in the page cache")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_what_the_kernel_has_taken_back_is_read_again_after_the_next_job_and_not_before(tmp_path: Path) -> None:
    scenery = Scenery(tmp_path)
    paths, warmer = scenery.made(1), scenery.warmer
    warmer._round(warmer._wanted())
    assert there(paths)
    evict(*paths)
    warmer._round(warmer._wanted())
    assert not there(paths)
    warmer.began()
    warmer.ended()
    warmer._stopped.clear()
    warmer._round(warmer._wanted())
    assert there(paths)


@pytest.mark.parametrize(("free", "warm"), [(100 * GB, {"enabled": False}), (10 * GB, {"keep_free": 0.2})])
async def test_nothing_is_read_where_it_is_off_or_memory_is_short(tmp_path: Path, free: int, warm: dict[str, Any]) -> None:
    scenery = Scenery(tmp_path, **warm)
    scenery.free = free
    paths = scenery.made(1)
    looked = threading.Event()

    def memory() -> Memory:
        looked.set()
        return Memory(free, 0, 100 * GB)

    scenery.warmer._memory = memory
    task = asyncio.create_task(scenery.warmer.run())
    await asyncio.sleep(0.2)
    if "enabled" not in warm:
        await eventually(looked.is_set, what="a look at the memory")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not there(paths)


def test_what_nobody_needs_is_what_the_host_or_a_group_leaves(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 16000 kB\nMemFree: 8000 kB\nInactive(file): 3000 kB\nMapped: 1000 kB\n",
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/memory.max": str(6000 << 10),
        "sys/fs/cgroup/a/memory.current": str(5000 << 10),
        "sys/fs/cgroup/a/memory.stat": f"anon 1\nfile_mapped {100 << 10}\nactive_file 7\ninactive_file {700 << 10}\n",
        "sys/fs/cgroup/a/b/memory.max": "max",
    }
    written(tmp_path, files)
    assert memory_now(tmp_path / "proc", tmp_path / "sys") == Memory(1000 << 10, 600 << 10, 6000 << 10)
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text("max")
    assert memory_now(tmp_path / "proc", tmp_path / "sys") == Memory(8000 << 10, 2000 << 10, 16000 << 10)


def test_a_version_1_group_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 16000 kB\nMemFree: 8000 kB\n",
        "proc/self/cgroup": "4:memory:/a\n0::/",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(6000 << 10),
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(7000 << 10),
        "sys/fs/cgroup/memory/a/memory.stat": f"total_mapped_file 0\ntotal_inactive_file {700 << 10}\n",
    }
    written(tmp_path, files)
    assert memory_now(tmp_path / "proc", tmp_path / "sys") == Memory(0, 700 << 10, 6000 << 10)
