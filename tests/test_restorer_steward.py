"""Replacing children without a gap, and the configuration that all of them are offered or none."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from certificates import make
from conftest import eventually
from processes import alive

from policies.config import Config, parse
from policies.control import Told
from restorer.installation import steward as module
from restorer.installation.steward import Steward
from restorer.installation.supervisor import Child, Supervisor

_CHILD = '''
"""Speaks as a gateway worker does; how is told by the environment."""
import json, os, signal, socket, sys, time
how, journal = os.environ["HOW"], os.environ["JOURNAL"]
fd = int(sys.argv[sys.argv.index("--control-fd") + 1])
lines = open(fd, "rb", closefd=False)
def say(**message):
    os.write(fd, json.dumps(message).encode() + b"\\n")
def note(event):
    with open(journal, "a") as file:
        file.write(f"{event} {os.getpid()}\\n")
def end(*_):
    note("got-SIGTERM")
    if how == "deaf":
        return
    if how == "slow":
        time.sleep(1)
    note("ends")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
first = json.loads(lines.readline())
drain = first["config"]["gateway"]["drain_s"]
note(f"begins:{drain:g}")
marker = journal + ".next"
next_how = open(marker).read() if os.path.exists(marker) else ""
if next_how == "crash":
    sys.exit(7)
if next_how != "mute":
    say(kind="ready", connected=next_how != "unconnected")
if how == "asks":
    say(kind="ask", number=5, what="reload")
for line in lines:
    message = json.loads(line)
    note(f"{message['kind']}:{message.get('fault', '')}")
    if message["kind"] == "told":
        fault = "unusable" if message["config"]["gateway"]["drain_s"] == 13 else ""
        if message["certificate"] == "BAD":
            fault = "bad pair"
        say(kind="taken", number=message["number"], fault=fault)
while True:
    signal.pause()
'''


def config(**gateway: Any) -> Config:
    return parse({"models": {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}}}, "gateway": gateway})


class Installation:
    """Children of the above kind under a steward."""

    def __init__(self, folder: Path, first: Config | None = None) -> None:
        self.journal = folder / "journal"
        self.journal.touch()
        self.program = folder / "child.py"
        self.program.write_text(_CHILD)
        self.said: list[str] = []
        self.wished: Config | Exception = config()
        self.steward = Steward(first or config(), read=self._read, say=self.said.append)
        self.supervisor = self.steward.supervisor = Supervisor(say=lambda _, text: self.said.append(text), first_delay_s=0.02)

    def _read(self) -> Config:
        if isinstance(self.wished, Exception):
            raise self.wished
        return self.wished

    async def start(self, *names: str, how: str = "", stop_s: float = 10.0) -> None:
        self.steward.gateways += names
        environment = os.environ | {"HOW": how, "JOURNAL": str(self.journal)}
        for name in names:
            argv = (sys.executable, str(self.program))
            self.supervisor.start(Child(name, argv, stop_s, env=environment, talk=self.steward.talk))
        for name in names:
            assert await self.supervisor.ready(name, within_s=20)

    def next_is(self, how: str) -> None:
        """How children are that start from now on."""
        Path(f"{self.journal}.next").write_text(how)

    def events(self, *kinds: str) -> list[str]:
        events = [line.split()[0] for line in self.journal.read_text().splitlines()]
        return [event for event in events if not kinds or event.partition(":")[0] in kinds]


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Installation]:
    found = Installation(tmp_path)
    yield found
    found.steward.close()
    await found.supervisor.stop(*found.steward.gateways)
    assert found.supervisor.pids == {}


# ---------------------------------------------------------------- replacing


async def test_the_successor_is_ready_before_the_old_one_is_told_to_end(it: Installation) -> None:
    await it.start("a", how="slow")
    old = it.supervisor.pids["a"]
    assert await it.supervisor.replace("a", within_s=20) == ""
    pids = it.supervisor.pids
    assert pids["a"] != old
    assert pids[f"a/{old}"] == old
    await eventually(lambda: not alive(old))
    assert it.events() == ["begins:30", "begins:30", "got-SIGTERM", "ends"]
    await eventually(lambda: set(it.supervisor.pids) == {"a"})
    # And the new one is kept, as the old one was.
    os.kill(it.supervisor.pids["a"], signal.SIGKILL)
    await eventually(lambda: len(it.events("begins")) == 3)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("crash", "a ended with status 7; the old one goes on"),
        ("mute", "a was not ready within 1 s; the old one goes on"),
        ("unconnected", "a does not reach the store; the old one goes on"),
    ],
)
async def test_a_successor_that_is_none_is_given_up(it: Installation, how: str, says: str) -> None:
    await it.start("a")
    before = it.supervisor.pids
    it.next_is(how)
    assert await it.supervisor.replace("a", within_s=1 if how == "mute" else 20) == says
    assert it.supervisor.pids == before
    assert it.events("got-SIGTERM") == []
    it.next_is("")
    assert await it.supervisor.replace("a", within_s=20) == ""


async def test_an_old_one_that_does_not_end_is_killed_at_its_deadline(it: Installation) -> None:
    await it.start("a", how="deaf", stop_s=0.3)
    old = it.supervisor.pids["a"]
    assert await it.supervisor.replace("a", within_s=20) == ""
    await eventually(lambda: not alive(old), within=10)
    assert f"the old a (pid {old}) did not end in time and is killed" in it.said


async def test_stop_ends_the_old_one_and_the_coming_one_as_well(it: Installation) -> None:
    await it.start("a", how="slow")
    assert await it.supervisor.replace("a", within_s=20) == ""
    it.next_is("mute")
    replacing = asyncio.create_task(it.supervisor.replace("a", within_s=60))
    await eventually(lambda: len(it.events("begins")) == 3)
    pids = it.supervisor.pids.values()
    assert len(pids) >= 2
    await it.supervisor.stop("a")
    assert "is being stopped" in await replacing
    assert not any(map(alive, pids))
    assert it.supervisor.pids == {}


async def test_one_that_crashes_while_its_successor_comes_is_no_trouble(it: Installation) -> None:
    await it.start("a")
    replacing = asyncio.create_task(it.supervisor.replace("a", within_s=20))
    os.kill(it.supervisor.pids["a"], signal.SIGKILL)
    assert await replacing == ""
    await eventually(lambda: set(it.supervisor.pids) == {"a"})


async def test_restart_goes_one_by_one_and_stops_at_the_first_that_fails(it: Installation) -> None:
    await it.start("a", "b")
    before = it.supervisor.pids
    verdict = await it.steward.restart()
    assert (verdict.fault, verdict.applied) == ("", ("a", "b"))
    assert not set(before.values()) & {it.supervisor.pids["a"], it.supervisor.pids["b"]}
    it.next_is("crash")
    kept = it.supervisor.pids["b"]
    verdict = await it.steward.restart()
    assert verdict.applied == ()
    assert "a ended with status 7" in verdict.fault
    assert it.supervisor.pids["b"] == kept


async def test_a_restart_before_anything_runs_says_so(it: Installation) -> None:
    assert "no worker has been started yet" in (await it.steward.restart()).fault


async def test_many_restarts_leave_nothing_open(it: Installation) -> None:
    await it.start("a")
    assert await it.supervisor.replace("a", within_s=20) == ""
    await eventually(lambda: set(it.supervisor.pids) == {"a"})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        assert await it.supervisor.replace("a", within_s=20) == ""
    await eventually(lambda: set(it.supervisor.pids) == {"a"})
    await eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


async def test_the_end_of_everything_ends_a_restart_that_is_under_way(it: Installation) -> None:
    await it.start("a")
    it.next_is("mute")
    it.steward.soon(it.steward.restart())
    await eventually(lambda: len(it.events("begins")) == 2)
    pids = it.supervisor.pids.values()
    it.steward.close()
    assert await it.supervisor.stop("a") == []
    await eventually(lambda: not any(map(alive, pids)))


# ---------------------------------------------------------------- the configuration


async def test_a_reload_reaches_all_and_whoever_starts_later(it: Installation) -> None:
    await it.start("a", "b")
    it.wished = config(drain_s=7, port=1)
    verdict = await it.steward.reload()
    assert (verdict.fault, verdict.applied, verdict.restart) == ("", ("gateway.drain_s",), ("gateway.port",))
    assert it.events("told") == ["told:", "told:"]
    assert "reloaded; in force: gateway.drain_s; only after a restart of everything: gateway.port" in it.said
    # By now the file may be as broken as it likes.
    it.wished = ValueError("broken")
    os.kill(it.supervisor.pids["a"], signal.SIGKILL)
    await eventually(lambda: "begins:7" in it.events())


async def test_a_file_with_faults_reaches_nobody(it: Installation) -> None:
    await it.start("a", "b")
    it.wished = ValueError("gateway.prot: unknown setting")
    assert (await it.steward.reload()).fault == "gateway.prot: unknown setting"
    await eventually(lambda: it.events("refused") == ["refused:", "refused:"])
    assert it.events("told") == []
    assert it.steward.config == config()


async def test_what_one_worker_cannot_use_no_other_gets(it: Installation) -> None:
    await it.start("a", "b")
    it.wished = config(drain_s=13)
    assert (await it.steward.reload()).fault == "unusable"
    await eventually(lambda: len(it.events("refused")) == 2)
    assert it.events("told") == ["told:"]
    assert it.steward.config == config()
    assert it.steward.talk.first().config["gateway"]["drain_s"] == 30


async def test_who_asks_gets_the_answer(it: Installation) -> None:
    it.wished = config(drain_s=7)
    await it.start("a", how="asks")
    await eventually(lambda: it.events("verdict") == ["verdict:"], within=10)
    assert it.steward.config.gateway.drain_s == 7


async def test_a_reload_without_any_worker_is_in_force_for_the_next(it: Installation) -> None:
    it.wished = config(drain_s=7)
    assert (await it.steward.reload()).fault == ""
    await it.start("a")
    assert it.events() == ["begins:7"]


async def test_certificates_are_read_here_and_renewed_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.02)
    pair, other = make(tmp_path, "used"), make(tmp_path, "other")
    it = Installation(tmp_path, config(tls={"certificate": str(pair.certificate), "key": str(pair.key)}))
    first = it.steward.talk.first()
    assert (first.certificate, first.key) == (pair.certificate.read_text(), pair.key.read_text())
    await it.start("a")
    watching = asyncio.create_task(it.steward.watch())
    try:
        pair.certificate.write_text("BAD")
        await eventually(lambda: "refused:" in it.events())
        assert it.steward.talk.first().certificate == first.certificate
        pair.certificate.unlink()
        await asyncio.sleep(0.1)  # a look or two at nothing
        pair.certificate.write_bytes(other.certificate.read_bytes())
        pair.key.write_bytes(other.key.read_bytes())
        await eventually(lambda: it.steward.talk.first().key == other.key.read_text())
        assert "another certificate is in force" in it.said
    finally:
        watching.cancel()
        await it.supervisor.stop("a")


def test_a_key_is_never_printed() -> None:
    assert "secret" not in repr(Told(number=1, config={}, certificate="c", key="secret"))
