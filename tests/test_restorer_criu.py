"""What the real CRIU writes when a restore fails, and whose fault we say it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dumping import dumped, restored, some_boxes, started

from restorer.boxes.box import BoxFactory
from restorer.errors import ToolFailed

pytestmark = pytest.mark.criu


@pytest.fixture
async def boxes() -> AsyncIterator[BoxFactory]:
    async with some_boxes(53) as factory:
        yield factory


async def test_real_failures_are_told_apart_by_what_criu_wrote(boxes: BoxFactory, tmp_path: Path) -> None:
    library = tmp_path / "library.bin"
    library.write_bytes(bytes(8192))
    script = f"""
        with open({str(library)!r}, "rb") as file: kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        server = socket.create_server(("0.0.0.0", 9000))
        """
    donor = await boxes.take()
    await started(donor, script)
    images = tmp_path / "images"
    await dumped(donor, images)

    async def verdict() -> tuple[str, str]:
        box = await boxes.take()
        try:
            with pytest.raises(ToolFailed) as failed:
                await restored(images, box)
        finally:
            await boxes.discard(box)
        found = failed.value.verdict
        return found.cls, found.evidence

    library.write_bytes(bytes(4096))
    cls, evidence = await verdict()
    assert (cls, "bad size" in evidence) == ("host", True), evidence
    library.unlink()
    cls, evidence = await verdict()
    assert (cls, "Can't open file" in evidence) == ("host", True), evidence
    library.write_bytes(bytes(8192))

    core = images / "i/core-1000.img"
    whole = core.read_bytes()
    core.write_bytes(whole[: len(whole) // 2])
    assert (await verdict())[0] == "snapshot"
    core.unlink()
    assert (await verdict())[0] == "snapshot"
    core.write_bytes(whole)

    taken = await boxes.take()
    await taken.spawn(["/bin/sleep", "60"], {})
    (taken.private / "engine.log").unlink()
    with pytest.raises(ToolFailed) as failed:
        await restored(images, taken)
    assert failed.value.verdict.cls == "transient", failed.value.verdict
    assert "File exists" in failed.value.verdict.evidence
