"""The supervisor with children that crash, do not listen, or are orphaned."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import eventually, require_root
from processes import alive, opened_up, spawn

from restorer.installation.rundir import Account
from restorer.installation.supervisor import Child, Supervisor, end

FAKE = str(Path(__file__).with_name("fake_child.py"))
ROOT = Path(__file__).parents[1]


class Watched:
    """A supervisor, what it said, and what its children wrote down."""

    def __init__(self, folder: Path, **delays: float) -> None:
        self.journal = folder / "journal"
        self.said: list[tuple[str, str]] = []
        self.pids: list[Mapping[str, int]] = []
        self.supervisor = Supervisor(
            say=lambda name, text: self.said.append((name, text)), changed=self.pids.append, first_delay_s=0.01, **delays
        )

    def child(self, name: str, *how: str, stop_s: float = 5.0, **more: object) -> Child:
        return Child(name, (sys.executable, FAKE, str(self.journal), name, *how), stop_s, **more)  # type: ignore[arg-type]

    def events(self, name: str = "") -> list[str]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [" ".join(line.split()[:2]) for line in lines if line.startswith(name)]

    async def running(self, name: str) -> int:
        return await eventually(lambda: f"{name} begins" in self.events() and self.supervisor.pids.get(name))


async def test_lines_are_passed_on_with_the_name() -> None:
    said: list[tuple[str, str]] = []
    supervisor = Supervisor(say=lambda name, text: said.append((name, text)))
    script = "printf 'one\\ntw'; sleep 0.05; printf 'o\\nunended'; exec sleep 30"
    supervisor.start(Child("a", ("sh", "-c", script), 5.0))
    await eventually(lambda: len(said) == 2)
    await supervisor.stop("a")
    assert said == [("a", "one"), ("a", "two"), ("a", "unended")]


async def test_muted_lines_are_not_passed_on_and_endless_ones_come_in_pieces() -> None:
    said: list[str] = []
    supervisor = Supervisor(say=lambda _, text: said.append(text))
    script = "echo this is noise; head -c 50000 /dev/zero | tr '\\0' x; echo; echo end; exec sleep 30"
    supervisor.start(Child("a", ("sh", "-c", script), 5.0, muted="noise"))
    await eventually(lambda: said[-1:] == ["end"])
    await supervisor.stop("a")
    assert sum(map(len, said[:-1])) == 50000
    assert max(map(len, said)) < 40000


async def test_a_crashed_child_is_started_again_with_growing_pauses(tmp_path: Path) -> None:
    watched = Watched(tmp_path, longest_delay_s=0.04)
    watched.supervisor.start(watched.child("a", "crash"))
    await eventually(lambda: watched.events().count("a begins") >= 5)
    await watched.supervisor.stop("a")
    told = [text for name, text in watched.said if not name]
    assert "a ended with status 7" in told[0]
    assert [text.rpartition(" in ")[2] for text in told[:4]] == ["0.0 s", "0.0 s", "0.0 s", "0.0 s"]
    assert watched.supervisor.pids == {}


async def test_the_pause_is_short_again_after_a_healthy_time() -> None:
    said: list[str] = []
    supervisor = Supervisor(say=lambda _, text: said.append(text), first_delay_s=0.1, longest_delay_s=0.4, healthy_s=0.5)
    supervisor.start(Child("a", ("sh", "-c", "sleep 0.01; exit 1"), 5.0))
    await eventually(lambda: len(said) == 3)
    supervisor.start(Child("b", ("sh", "-c", "sleep 0.6; exit 1"), 5.0))
    await eventually(lambda: len([line for line in said if line.startswith("b")]) == 2)
    await supervisor.stop("a", "b")
    pauses = {name: [line.rpartition(" in ")[2] for line in said if line.startswith(name)] for name in "ab"}
    assert pauses["a"][:3] == ["0.1 s", "0.2 s", "0.4 s"]
    assert pauses["b"][:2] == ["0.1 s", "0.1 s"]


async def test_a_killed_child_is_started_again_as_another_process(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.supervisor.start(watched.child("a"))
    first = await watched.running("a")
    os.kill(first, signal.SIGKILL)
    second = await eventually(lambda: watched.events().count("a begins") == 2 and watched.supervisor.pids.get("a"))
    await watched.supervisor.stop("a")
    assert second != first
    assert any("was killed by SIGKILL" in text for _, text in watched.said)
    assert [dict(pids) for pids in watched.pids] == [{"a": first}, {}, {"a": second}, {}]


async def test_a_program_that_is_not_there_is_said_and_tried_again() -> None:
    said: list[str] = []
    supervisor = Supervisor(say=lambda _, text: said.append(text), first_delay_s=0.01)
    supervisor.start(Child("a", ("/no/such/program",), 5.0))
    await eventually(lambda: len(said) >= 2)
    await supervisor.stop("a")
    assert "could not be started: No such file or directory (/no/such/program)" in said[0]


async def test_stop_terminates_and_does_not_start_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.supervisor.start(watched.child("a"))
    pid = await watched.running("a")
    assert await watched.supervisor.stop("a") == []
    assert watched.events() == ["a begins", "a got-SIGTERM", "a ends"]
    assert not alive(pid)


async def test_stop_ends_a_child_that_waits_to_be_started_again() -> None:
    said: list[str] = []
    supervisor = Supervisor(say=lambda _, text: said.append(text), first_delay_s=60.0)
    supervisor.start(Child("a", ("false",), 60.0))
    await eventually(lambda: said)
    began = time.monotonic()
    assert await supervisor.stop("a") == []
    assert time.monotonic() - began < 30


async def test_a_deaf_child_is_killed_at_its_deadline(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.supervisor.start(watched.child("a", "deaf", stop_s=0.2))
    pid = await watched.running("a")
    assert await watched.supervisor.stop("a") == ["a"]
    assert not alive(pid)


async def test_hurry_cuts_the_wait_short(tmp_path: Path) -> None:
    watched, hurry = Watched(tmp_path), asyncio.Event()
    watched.supervisor.start(watched.child("a", "slow", "60", stop_s=60.0))
    pid = await watched.running("a")
    stopping = asyncio.create_task(watched.supervisor.stop("a", hurry=hurry))
    await eventually(lambda: "a got-SIGTERM" in watched.events())
    assert not stopping.done()
    hurry.set()
    assert await stopping == ["a"]
    assert not alive(pid)


async def test_stop_does_not_wait_for_grandchildren_that_hold_the_pipe(tmp_path: Path) -> None:
    supervisor = Supervisor(say=lambda *_: None)
    pidfile = tmp_path / "pid"
    supervisor.start(Child("a", ("sh", "-c", f"sleep 60 & echo $! > {pidfile}; wait"), 5.0))
    grandchild = int(await eventually(lambda: pidfile.exists() and pidfile.read_text().strip()))
    try:
        began = time.monotonic()
        await supervisor.stop("a")
        assert time.monotonic() - began < 30
    finally:
        os.kill(grandchild, signal.SIGKILL)


async def test_a_child_runs_in_a_session_of_its_own(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.supervisor.start(watched.child("a"))
    pid = await watched.running("a")
    assert os.getsid(pid) == pid
    await watched.supervisor.stop("a")


async def test_a_child_becomes_its_account_before_it_runs() -> None:
    require_root()
    said: list[str] = []
    supervisor = Supervisor(say=lambda _, text: said.append(text))
    script = "grep -E '^(Uid|Gid|Groups|CapEff|NoNewPrivs)' /proc/self/status; exec sleep 30"
    supervisor.start(Child("a", ("sh", "-c", script), 5.0, account=Account("nobody", 65534, 65534)))
    await eventually(lambda: len(said) == 5)
    await supervisor.stop("a")
    status = {key: value.strip() for key, _, value in (line.partition(":") for line in said)}
    assert status["Uid"] == status["Gid"] == "65534\t65534\t65534\t65534"
    assert status["Groups"] == ""
    assert int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"


_ORPHAN = """
import asyncio, signal, sys
from pathlib import Path
from restorer.installation.supervisor import Child, Supervisor
async def main():
    supervisor = Supervisor(say=lambda name, text: print(name, text, flush=True))
    for name, number in (("gentle", "SIGTERM"), ("unprivileged", "SIGTERM"), ("hard", "SIGKILL")):
        argv = (sys.executable, FAKE, JOURNAL, name, name)
        supervisor.start(Child(name, argv, 5.0, orphan_signal=signal.Signals[number]))
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_no_child_outlives_its_supervisor_however_that_dies(tmp_path: Path, number: signal.Signals) -> None:
    require_root()
    journal = tmp_path / "journal"
    journal.touch()
    journal.chmod(0o666)
    opened_up(tmp_path)
    code = _ORPHAN.replace("FAKE", repr(FAKE)).replace("JOURNAL", repr(str(journal)))
    process = spawn(sys.executable, "-c", code, cwd=ROOT)

    def begun() -> list[str]:
        return [line for line in journal.read_text().splitlines() if " begins " in line]

    try:
        await eventually(lambda: len(begun()) == 3)
    finally:
        process.send_signal(number)
        process.wait(30)
    pids = [int(line.split()[2]) for line in begun()]
    await eventually(lambda: not any(map(alive, pids)))
    events = [" ".join(line.split()[:2]) for line in journal.read_text().splitlines()]
    assert "gentle got-SIGTERM" in events
    assert "unprivileged got-SIGTERM" in events
    assert "hard got-SIGTERM" not in events


async def test_end_terminates_a_stranger_and_kills_it_at_the_deadline(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    for how, late in (("", False), ("deaf", True)):
        process = spawn(sys.executable, FAKE, str(journal), f"x{how}", how)
        await eventually(lambda how=how: journal.exists() and f"x{how} begins" in journal.read_text())
        waiting = asyncio.create_task(end(process.pid, within=0.5))
        assert await waiting is late
        process.wait(30)
    assert await end(process.pid, within=0.1) is False
