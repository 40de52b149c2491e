"""What CRIU knows of the kernel, where a host's /run does not lie in memory: in a real box, with the real CRIU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dumping import some_boxes, started
from e2e_installation import needed

from restorer.boxes.box import BoxFactory
from restorer.checkpoint import kerndat
from restorer.checkpoint.criu import GHOST_LIMIT
from restorer.procfs.inventory import examine

pytestmark = pytest.mark.criu
LOADED = "Loaded kdat cache"


@pytest.fixture
async def boxes() -> AsyncIterator[BoxFactory]:
    async with some_boxes(57) as factory:
        yield factory


@pytest.fixture
def criu() -> Path:
    return Path(needed("REWAKE_CRIU"))


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """/run as in a container."""
    monkeypatch.setattr(kerndat, "file_system", lambda place: "overlay")


async def checked(boxes: BoxFactory, criu: Path, kept: Path | None) -> str:
    """CRIU's own log of a check that went well."""
    box = await boxes.take()
    log = box.work / "check.log"
    output = await box.run(kerndat.shown(kept, [str(criu), "check", "-v4", "-o", str(log)]), timeout_s=30)
    assert output.rc == 0, output.text
    return log.read_text(errors="replace")


@pytest.mark.usefixtures("on_disk")
async def test_criu_is_asked_once_and_finds_the_answer_in_each_box(boxes: BoxFactory, criu: Path, tmp_path: Path) -> None:
    kept = kerndat.kept(criu, tmp_path)
    assert kept == tmp_path / "criu.kdat"
    assert kept.stat().st_mode & 0o777 == 0o600
    before = kept.read_bytes()
    for _ in range(2):
        assert LOADED in await checked(boxes, criu, kept)
    assert kept.read_bytes() == before
    # What is shown in a box is shown nowhere else.
    assert not kerndat.PLACE.exists() or not kerndat.PLACE.samefile(kept)


@pytest.mark.usefixtures("on_disk")
async def test_a_tree_that_was_restored_so_can_be_captured_again_without_a_word(
    boxes: BoxFactory, criu: Path, tmp_path: Path
) -> None:
    kept = kerndat.kept(criu, tmp_path)
    box = await boxes.take()
    pid = await started(box, "")
    shown = await box.run(kerndat.shown(kept, ["cat", "/proc/self/mountinfo"]), timeout_s=30)
    assert str(kerndat.PLACE) in shown.text
    assert examine(pid, private=("/dev/shm", str(box.mountpoint)), ghost_limit=GHOST_LIMIT) == []


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("content", [None, b"", b"of another CRIU" * 100], ids=["gone", "empty", "another"])
async def test_criu_looks_for_itself_where_what_was_kept_is_of_no_use(
    boxes: BoxFactory, criu: Path, tmp_path: Path, content: bytes | None
) -> None:
    kept = tmp_path / "criu.kdat"
    if content is not None:
        kept.write_bytes(content)
    assert LOADED not in await checked(boxes, criu, kept) or content is None


def test_where_run_lies_in_memory_criu_is_left_alone(criu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kerndat, "file_system", lambda place: "tmpfs")
    assert kerndat.kept(criu, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert kerndat.shown(None, ["criu", "restore"]) == ["criu", "restore"]


@pytest.mark.usefixtures("on_disk")
def test_a_criu_that_says_nothing_costs_time_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = tmp_path / "criu"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert kerndat.kept(broken, tmp_path) is None
    assert "40 ms longer" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["criu"]
