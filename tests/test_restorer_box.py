"""Boxes on the real kernel: reachable, separate, gone when killed, found again when their maker died."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from conftest import eventually, require_root

from restorer.boxes.box import FIRST_PID, Box, BoxFactory
from restorer.errors import Environment, ToolHung
from restorer.procfs.processes import watch

NETWORK = "198.18.210.0/26"
SERVER = (sys.executable, "-m", "http.server", "8000", "--bind", "0.0.0.0")
ENV = {"PATH": os.environ["PATH"]}


@pytest.fixture
def folder() -> Iterator[Path]:
    require_root()
    made = Path(tempfile.mkdtemp(prefix="rewake-box-", dir="/var/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def made(folder: Path, network: str = NETWORK, spare: int = 0) -> BoxFactory:
    return BoxFactory(run_dir=folder / "run", state_dir=folder / "state", network=network, spare=spare)


@pytest.fixture
async def factory(folder: Path) -> AsyncIterator[BoxFactory]:
    factory = made(folder)
    yield factory
    for box in await made(folder).survivors():
        await factory.discard(box)
    await factory.close()


async def serving(box: Box) -> int:
    pid = await box.spawn(SERVER, ENV)
    async with httpx.AsyncClient(trust_env=False) as client:

        async def answers() -> bool:
            try:
                return (await client.get(f"http://{box.address}:8000/", timeout=2)).status_code == 200
            except httpx.HTTPError:
                return False

        await eventually(answers, what="the server in the box")
    return pid


async def serving_still(box: Box) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://{box.address}:8000/", timeout=5)).status_code == 200


async def test_three_at_once_have_the_same_pids_and_ports_and_do_not_meet(factory: BoxFactory) -> None:
    boxes = [await factory.take() for _ in range(3)]
    pids = [await serving(box) for box in boxes]
    assert pids == [FIRST_PID] * 3
    assert len({box.host_pid(FIRST_PID) for box in boxes}) == 3
    (boxes[0].root / "dev/shm/mine").write_text("1")
    assert not (boxes[1].root / "dev/shm/mine").exists()


async def test_killing_one_removes_processes_folder_link_and_state(factory: BoxFactory) -> None:
    box = await factory.take()
    engine = box.host_pid(await serving(box))
    assert engine is not None
    async with watch(engine) as ended:
        await factory.discard(box)
        await asyncio.wait_for(ended, 30)
    assert not box.alive
    assert not box.folder.exists()
    assert not box.state_file.exists()
    addresses = (await asyncio.to_thread(subprocess.run, ["ip", "-o", "addr"], capture_output=True, text=True, check=True)).stdout
    assert f"{box.host_address}/" not in addresses
    await factory.discard(box)


async def test_what_a_dead_maker_left_is_found_with_its_facts(folder: Path, factory: BoxFactory) -> None:
    box = await factory.take()
    box.remember(note="kept")
    # The maker's death in the middle of a write leaves a box without facts.
    torn = await factory.take()
    torn.state_file.write_text("{")
    later = made(folder)
    found = {one.id: one for one in await later.survivors()}
    assert found.keys() == {box.id, torn.id}
    assert found[box.id].facts["note"] == "kept"
    assert found[box.id].address == box.address
    assert "note" not in found[torn.id].facts
    for one in found.values():
        await later.discard(one)
    assert await made(folder).survivors() == []


async def test_removing_a_box_without_facts_does_not_cut_off_the_one_with_the_first_address(
    folder: Path, factory: BoxFactory
) -> None:
    kept, torn = await factory.take(), await factory.take()
    await serving(kept)
    torn.state_file.unlink()
    later = made(folder)
    found = {one.id: one for one in await later.survivors()}
    await later.discard(found[torn.id])
    await serving_still(found[kept.id])
    # Its address is still taken, too.
    assert (await later.take()).address != kept.address


async def test_a_box_that_cannot_be_made_says_why_and_leaves_nothing(folder: Path, factory: BoxFactory) -> None:
    factory.mountpoint.rmdir()
    with pytest.raises(Environment, match=r"this host cannot make a box: .*No such file"):
        await factory.take()
    factory.mountpoint.mkdir()
    assert await made(folder).survivors() == []
    assert list((folder / "state/boxes").iterdir()) == []


async def test_an_address_that_another_installation_has_is_passed_over(folder: Path, factory: BoxFactory) -> None:
    first = await factory.take()
    pid = await serving(first)
    rival = made(folder / "rival")
    second = await rival.take()
    assert second.address != first.address
    await serving(second)
    await rival.discard(second)
    # The one that was there first is untouched by all this.
    await serving_still(first)
    assert first.host_pid(pid) is not None
    await factory.discard(first)


async def test_a_network_that_others_have_taken_whole_is_an_error_that_says_so(folder: Path, factory: BoxFactory) -> None:
    small = "198.18.210.0/30"
    first = await factory.take()
    rival = made(folder / "rival", network=small)
    with pytest.raises(Environment, match=r"all 1 addresses of 198\.18\.210\.0/30 are in use"):
        await rival.take()
    assert await rival.survivors() == []
    await factory.discard(first)


async def test_a_tool_that_hangs_is_killed_at_its_deadline(factory: BoxFactory) -> None:
    box = await factory.take()
    with pytest.raises(ToolHung, match="did not end within"):
        await box.run(["/bin/sleep", "1000"], timeout_s=0.2)

    async def gone() -> bool:
        listed = await box.run(["/bin/sh", "-c", "cat /proc/[0-9]*/comm"], timeout_s=5)
        return "sleep" not in listed.text.split()

    await eventually(gone, what="the tool to be gone from the box")


async def test_spares_are_used_and_closed(folder: Path, factory: BoxFactory) -> None:
    spared = made(folder, spare=2)
    await spared.fill()
    box = await spared.take()
    assert box.alive
    await spared.close()
    assert [one.id for one in await made(folder).survivors()] == [box.id]
    await spared.discard(box)


async def test_restore_case_14_a_pid_that_belongs_to_another_process_by_now_is_left_alone(folder: Path) -> None:
    """The pid of a dead box was given to somebody else: its start time tells them apart."""
    factory = made(folder)
    bystander = await asyncio.create_subprocess_exec("/bin/sleep", "1000")
    try:
        box = factory._handle("0123456789ab", bystander.pid, 0)
        box.facts["init_start_time"] = 1
        assert not box.alive
        await box.kill()
        assert bystander.returncode is None
        os.kill(bystander.pid, 0)
    finally:
        bystander.kill()
        await bystander.wait()
