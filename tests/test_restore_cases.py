"""Cases of snapshot and restore from public bug reports that have no better place: small processes, the real CRIU.

Every other row is a test named ``test_restore_case_NN_...`` beside what it is about, or stands in :data:`ELSEWHERE`.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually, require_root
from dumping import dumped, restored, some_boxes, started

from restorer.boxes.box import FIRST_PID, Box, BoxFactory, Output
from restorer.checkpoint.criu import Criu
from restorer.errors import ToolHung
from restorer.procfs.processes import status

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    66: "no handles of device memory outlive a restore: weights are handed over anew each time",
    80: "no container runtime's image format is in the way: CRIU's own files are the snapshot",
}
"""Rows that are no test of this project's, and why."""
ROWS = {
    *(1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 15, 17, 18, 19, 20, 22, 23, 24, 25, 27, 28, 30, 31, 32, 33, 35, 36, 37, 39, 40, 41),
    *(43, 44, 46, 47, 48, 49, 51, 52, 53, 54, 55, 56, 57, 59, 60, 61, 62, 63, 64, 65, 66, 68, 69, 70, 71, 72, 73, 74, 77, 78),
    *(79, 80, 82, 84),
}
TICKING = """
    import asyncio
    def tick():
        os.read(timer, 8)
        ticks.write(b"."); ticks.flush()
    timer = ok(libc.timerfd_create(1, 0o4000)); ok(libc.timerfd_settime(timer, 0, struct.pack("qqqq", 0, 10**7, 0, 10**7), None))
    ticks = open(private + "/ticks", "ab", buffering=0)
    loop = asyncio.new_event_loop(); loop.add_reader(timer, tick); loop.call_later(0.05, open, private + "/ready", "w")
    loop.run_forever()
"""
"""An event loop driven by a timer of the kernel's."""


def test_every_row_is_a_test_or_has_a_reason() -> None:
    named = {int(number) for path in ROOT.glob("tests/test_*.py") for number in _numbers(path.read_text())}
    assert sorted(ROWS - named - ELSEWHERE.keys()) == []
    assert sorted(named - ROWS) == []
    assert sorted(named & ELSEWHERE.keys()) == []


def _numbers(text: str) -> Iterator[str]:
    for cases in re.findall(r"def test_restore_cases?_((?:and_|\d\d_)+)", text):
        yield from re.findall(r"\d\d", cases)


@pytest.fixture
async def boxes() -> AsyncIterator[BoxFactory]:
    async with some_boxes(52) as factory:
        yield factory


@pytest.mark.criu
async def test_restore_case_03_a_neighbour_that_forks_all_the_time_takes_no_pid_of_ours(
    boxes: BoxFactory, tmp_path: Path
) -> None:
    box = await boxes.take()
    await started(box, "for _ in range(8): threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()")
    await dumped(box, tmp_path)
    neighbour = await asyncio.create_subprocess_exec("/bin/sh", "-c", "while :; do /bin/true & wait; done")
    try:
        for _ in range(20):
            other = await boxes.take()
            pid = await restored(tmp_path, other)
            assert sorted(map(int, os.listdir(f"/proc/{pid}/task"))) != []
            assert status(pid, "NSpid").split()[-1] == str(FIRST_PID)
            await boxes.discard(other)
    finally:
        neighbour.kill()
        await neighbour.wait()


async def test_restore_case_04_tools_that_enter_a_box_take_no_pid_of_an_engine(boxes: BoxFactory) -> None:
    box = await boxes.take()
    pids = {int((await box.run(["/bin/sh", "-c", "echo $$"], timeout_s=10)).text) for _ in range(30)}
    assert len(pids) == 30
    assert max(pids) < FIRST_PID
    assert await box.spawn(["/bin/sleep", "60"], {}) == FIRST_PID


@pytest.mark.criu
async def test_restore_case_05_a_port_in_use_and_another_address_are_in_nobodys_way(boxes: BoxFactory, tmp_path: Path) -> None:
    script = """
        server = socket.create_server(("0.0.0.0", 9000))
        def serve():
            while True:
                client, _ = server.accept(); client.sendall(b"mine"); client.close()
        threading.Thread(target=serve, daemon=True).start()
        """
    donor, neighbour, clone = [await boxes.take() for _ in range(3)]
    await started(donor, script)
    await started(neighbour, 'taken = socket.create_server(("0.0.0.0", 9000))')
    await dumped(donor, tmp_path)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 9000))
        taken.listen()
        await restored(tmp_path, clone)
        reader, writer = await asyncio.open_connection(clone.address, 9000)
        assert await reader.read() == b"mine"
        writer.close()
    assert len({donor.address, neighbour.address, clone.address}) == 3


async def test_restore_case_12_no_parent_images_no_compatibility_mode_no_pre_dump(tmp_path: Path) -> None:
    asked: list[str] = []

    class Fake:
        work = tmp_path

        async def run(self, argv: list[str], *, timeout_s: float, name: str) -> Output:
            asked.extend(argv)
            return Output(0, "")

    box: Any = Fake()
    await Criu(Path("/criu"), 1).dump(box, 1000, tmp_path, ("--tcp-close",))
    await Criu(Path("/criu"), 1).restore(box, tmp_path, ("--tcp-close",))
    never = ("--parent", "--prev-images-dir", "--track-mem", "--mntns-compat-mode", "pre-dump", "--lazy-pages", "--auto-dedup")
    assert [word for word in asked if word.startswith(never)] == []
    assert {"dump", "restore"} < set(asked)


@pytest.mark.criu
async def test_restore_cases_37_41_a_loop_on_a_timer_goes_on_under_a_libc_with_restartable_sequences(
    boxes: BoxFactory, tmp_path: Path
) -> None:
    library = os.confstr("CS_GNU_LIBC_VERSION")
    assert library is not None
    assert tuple(map(int, library.split()[1].split("."))) >= (2, 35), "rseq is registered from here on"
    box, other = await boxes.take(), await boxes.take()
    await started(box, TICKING)
    await dumped(box, tmp_path)
    await restored(tmp_path, other)
    ticks = other.private / "home/ticks"
    before = ticks.stat().st_size
    await eventually(lambda: ticks.stat().st_size > before + 20, what="the timer to go on")


@pytest.mark.criu
async def test_restore_case_40_time_has_gone_on_and_what_is_over_is_seen_to_be(boxes: BoxFactory, tmp_path: Path) -> None:
    """A token's end is a time of the wall clock, which no snapshot holds back; waiting by the monotonic clock goes on."""
    script = """
        until = time.time() + 1.5
        def watch():
            while time.time() < until: time.sleep(0.02)
            open(private + "/over", "w").write(str(time.time()))
        threading.Thread(target=watch, daemon=True).start()
        """
    box, other = await boxes.take(), await boxes.take()
    await started(box, script)
    await dumped(box, tmp_path)
    assert not (box.private / "home/over").exists()
    taken = time.time()
    await eventually(lambda: time.time() > taken + 2.0, what="the token's end")
    await restored(tmp_path, other)
    over = other.private / "home/over"
    await eventually(lambda: over.exists() and over.read_text(), what="the restored process to see it")
    assert abs(float(over.read_text()) - time.time()) < 20


@pytest.mark.criu
async def test_restore_case_43_what_enters_a_box_is_where_its_engine_is_and_the_engines_children_have_its_clock(
    boxes: BoxFactory, tmp_path: Path
) -> None:
    """CRIU gives what it restores a time namespace, in which its clocks go on. Its children live there; tools need no clock."""
    script = """
        def answer():
            while not os.path.exists(private + "/ask"): time.sleep(0.02)
            said = subprocess.check_output([sys.executable, "-I", "-c", "import os; print(os.readlink('/proc/self/ns/time'))"])
            open(private + "/new", "wb").write(said); os.rename(private + "/new", private + "/said")
        threading.Thread(target=answer, daemon=True).start()
        """
    box, other = await boxes.take(), await boxes.take()
    await started(box, script)
    await dumped(box, tmp_path)
    pid = await restored(tmp_path, other)
    kinds = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"]
    entered = await other.run(["/bin/sh", "-c", f"cd /proc/self/ns && readlink {' '.join(kinds)}"], timeout_s=20)
    assert entered.text.split() == [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in kinds]
    (other.private / "home/ask").touch()
    said = other.private / "home/said"
    await eventually(said.exists, within=60, what="the restored process to start a child")
    assert said.read_text().strip() == os.readlink(f"/proc/{pid}/ns/time")


@pytest.mark.criu
async def test_restore_case_46_a_restored_process_is_in_its_boxs_control_group_not_its_donors(
    boxes: BoxFactory, tmp_path: Path
) -> None:
    box, other = await boxes.take(), await boxes.take()
    await started(box, "")
    await dumped(box, tmp_path)
    pid = await restored(tmp_path, other)
    assert _groups(pid) == _groups(other.init_pid)


def test_restore_case_47_without_its_capability_the_doctor_says_so_and_how_to_mend_it() -> None:
    require_root()
    script = (
        "from restorer.boxes import probes; found = probes.capabilities(); print(found.ok, found.found, found.remedy, sep='\\n')"
    )
    argv = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    verdict, found, remedy = done.stdout.splitlines()[:3]
    assert verdict == "fail"
    assert "CAP_SYS_ADMIN" in found
    assert remedy


async def test_restore_case_48_a_dump_that_never_returns_is_ended_and_the_engine_runs_on(
    boxes: BoxFactory, tmp_path: Path
) -> None:
    box = await boxes.take()
    pid = await started(box, "")
    hanging = tmp_path / "criu"
    hanging.write_text("#!/bin/sh\nkill -STOP 1000\nwhile :; do sleep 0.1; done\n")
    hanging.chmod(0o755)
    with pytest.raises(ToolHung):
        await Criu(hanging, 1.0).dump(box, 1000, tmp_path, ())
    assert status(pid, "State").startswith("T")
    await asyncio.to_thread(box.let_run)
    assert not status(pid, "State").startswith("T")
    assert not _inside(box, str(hanging))


def _groups(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def _inside(box: Box, word: str) -> list[str]:
    found = []
    for entry in filter(str.isdigit, os.listdir(box.root / "proc")):
        argv = (box.root / "proc" / entry / "cmdline").read_bytes().decode()
        found += [argv] if word in argv else []
    return found
