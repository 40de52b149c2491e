"""What a worker inherits: sockets of a supervisor or of systemd, and the line to a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from conftest import eventually

from gateway.handover import Line, NoAnswer, listeners, notify
from policies.control import Ask, FromChild, Ready, Refused, Taken, ToChild, Told, Verdict, from_child, line

ROOT = Path(__file__).parents[1]
TOLD = Told(number=1, config={"models": {}}, certificate="c", key="k")


class Supervising:
    """The other end."""

    def __init__(self, ours: socket.socket) -> None:
        self.ours = ours
        self.heard: list[FromChild] = []

    def say(self, *messages: ToChild) -> None:
        self.ours.sendall(b"".join(map(line, messages)))

    async def hear(self) -> FromChild:
        """The next message."""
        data = await asyncio.to_thread(self.ours.recv, 1 << 16)
        first, *rest = data.splitlines()
        assert not rest
        return from_child(first)


@contextlib.asynccontextmanager
async def supervised(*first: ToChild) -> AsyncIterator[tuple[Line, Supervising]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    other = Supervising(ours)
    other.say(*first)
    inherited = Line(theirs.detach())
    assert inherited.first() == first[0]
    await inherited.open()
    hearing = asyncio.create_task(inherited.run())
    try:
        yield inherited, other
    finally:
        hearing.cancel()
        await asyncio.wait({hearing})
        assert inherited._writer is not None
        inherited._writer.close()
        ours.close()


async def test_what_follows_the_first_message_is_not_lost() -> None:
    second = TOLD.model_copy(update={"number": 2})
    async with supervised(TOLD, second) as (_, other):
        assert await other.hear() == Taken(number=2)


async def test_a_configuration_is_answered_by_its_number_with_why_not() -> None:
    async with supervised(TOLD) as (inherited, other):
        inherited.on_told = lambda told: "" if told.certificate == "c" else "unusable"
        other.say(TOLD.model_copy(update={"number": 7}))
        assert await other.hear() == Taken(number=7)
        other.say(TOLD.model_copy(update={"number": 8, "certificate": ""}))
        assert await other.hear() == Taken(number=8, fault="unusable")


async def test_ready_and_refused() -> None:
    async with supervised(TOLD) as (inherited, other):
        inherited.ready(connected=True)
        assert await other.hear() == Ready(connected=True)
        refused: list[bool] = []
        inherited.on_refused = lambda: refused.append(True)
        other.say(Refused())
        await eventually(lambda: refused)


async def test_answers_reach_who_asked_in_any_order() -> None:
    async with supervised(TOLD) as (inherited, other):
        first = asyncio.create_task(inherited.ask("reload"))
        assert await other.hear() == Ask(number=1, what="reload")
        second = asyncio.create_task(inherited.ask("restart"))
        assert await other.hear() == Ask(number=2, what="restart")
        other.say(Verdict(number=2, applied=("b",)), Verdict(number=9), Verdict(number=1, fault="a"))
        assert ((await first).fault, (await second).applied) == ("a", ("b",))


async def test_a_supervisor_that_goes_is_an_answer() -> None:
    async with supervised(TOLD) as (inherited, other):
        asked = asyncio.create_task(inherited.ask("reload"))
        await other.hear()
        other.ours.shutdown(socket.SHUT_RDWR)
        with pytest.raises(NoAnswer, match="has gone"):
            await asked
        with pytest.raises(NoAnswer, match="has gone"):
            await inherited.ask("reload")
        inherited.ready(connected=True)  # nobody hears it, and that is no error


async def test_a_supervisor_that_is_silent_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.handover._ASK_S", 0.05)
    async with supervised(TOLD) as (inherited, _):
        with pytest.raises(NoAnswer, match="not answered within"):
            await inherited.ask("reload")


@pytest.mark.parametrize("first", [b"", line(Refused()), b"rubbish\n"])
async def test_a_supervisor_of_another_kind_is_refused(first: bytes) -> None:
    ours, theirs = socket.socketpair()
    inherited = Line(theirs.detach())
    with ours:
        ours.sendall(first)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ValueError, match=r"supervisor|JSON|json"):
            inherited.first()
    inherited._socket.close()


def test_a_supervisors_socket_is_taken_over_and_not_passed_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        fd = os.dup(ours.fileno())
        os.set_inheritable(fd, True)
        (found,) = listeners({}, fd)
        with found:
            assert found.getsockname() == ours.getsockname()
            assert not found.get_inheritable()


def test_sockets_of_systemd_are_for_the_process_that_they_were_meant_for() -> None:
    code = (
        "import os, sys\n"
        "from gateway.handover import listeners\n"
        "os.dup2(int(sys.argv[2]), 3)\n"  # the number that systemd gives the first
        "os.environ['LISTEN_PID'] = str(os.getpid() + int(sys.argv[1]))\n"
        "print([s.getsockname()[1] for s in listeners(os.environ, None)])\n"
        "os._exit(0)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        for other, expected in ((0, f"[{port}]"), (1, "[]")):
            argv = [sys.executable, "-c", code, str(other), str(ours.fileno())]
            ran = subprocess.run(
                argv,
                cwd=ROOT,
                pass_fds=[ours.fileno()],
                env={**os.environ, "LISTEN_FDS": "1"},
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
            assert ran.stdout.strip() == expected


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_if_it_has_asked(tmp_path: Path, abstract: bool) -> None:
    notify("READY=1", {})
    name = f"rewake-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}" if abstract else name)
        systemd.settimeout(30)
        notify("READY=1", {"NOTIFY_SOCKET": f"@{name}" if abstract else name})
        assert systemd.recv(64) == b"READY=1"
    notify("STOPPING=1", {"NOTIFY_SOCKET": str(tmp_path / "nobody")})
