"""How a restorer takes up a configuration: from its supervisor, and from its file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from policies.config import Config, parse
from policies.control import FromChild, Ready, Refused, Taken, ToChild, Told, from_child, line
from restorer.errors import Environment
from restorer.machine.host import Host
from restorer.operations.reload import Line, read, reload

ENGINE = {"kind": "http", "command": ["/bin/true"]}


def document(*models: str, **more: Any) -> dict[str, Any]:
    return {"models": {name: {"engine": ENGINE} for name in models}, **more}


def a_host(config: Config) -> Host:
    """A host of which only the configuration matters."""
    nothing = cast(Any, None)
    host = Host(config, "h", "here", *[nothing] * 9, None, "", nothing, nothing, nothing)
    host.snapshots = cast(Any, SimpleNamespace(sign=None, verdicts=SimpleNamespace(policy=None)))
    return host


def told(number: int, *models: str, **more: Any) -> Told:
    return Told(number=number, config=document(*models, **more))


class Other:
    """The supervisor's end."""

    def __init__(self, ours: socket.socket) -> None:
        ours.settimeout(30)
        self._ours = ours
        self._file = ours.makefile("rb")

    def say(self, *messages: ToChild) -> None:
        self._ours.sendall(b"".join(map(line, messages)))

    async def hear(self) -> FromChild:
        return from_child(await asyncio.to_thread(self._file.readline))

    def close(self) -> None:
        self._file.close()
        self._ours.close()


@contextlib.asynccontextmanager
async def hearing(*first: ToChild) -> AsyncIterator[tuple[Host, Other, asyncio.Task[None]]]:
    ours, theirs = socket.socketpair()
    other = Other(ours)
    other.say(*first)
    inherited = Line(theirs.detach())
    host = a_host(inherited.first())
    task = asyncio.create_task(inherited.run(host))
    try:
        assert await other.hear() == Ready(connected=True)
        yield host, other, task
    finally:
        task.cancel()
        await asyncio.wait({task})
        other.close()


async def test_what_the_supervisor_says_is_in_force_and_a_removed_models_settings_stay_known() -> None:
    # The second comes in the same breath as the first, which is not lost.
    async with hearing(told(1, "a", "b"), told(2, "b", "c")) as (host, other, _):
        assert await other.hear() == Taken(number=2)
        assert list(host.config.models) == ["b", "c"]
        assert host.model("a").engine.kind == "http"
        with pytest.raises(KeyError):
            host.model("never")
        other.say(Refused(), told(3, "b"))
        assert await other.hear() == Taken(number=3)
        assert host.model("c") == host.model("b")


async def test_what_needs_a_restart_keeps_its_value_and_what_does_not_fit_changes_nothing() -> None:
    async with hearing(told(1, "a")) as (host, other, _):
        other.say(told(2, "a", restorer={"network": "10.0.0.0/16", "lease_s": 7}))
        assert await other.hear() == Taken(number=2)
        assert (host.config.restorer.network, host.config.restorer.lease_s) == ("198.18.0.0/16", 7)
        other.say(Told(number=3, config={"models": {}}))
        answer = await other.hear()
        assert isinstance(answer, Taken)
        assert "models" in answer.fault
        assert host.config.restorer.lease_s == 7


async def test_the_supervisors_end_is_no_crash() -> None:
    async with hearing(told(1, "a")) as (_, other, task):
        other._ours.shutdown(socket.SHUT_RDWR)
        await asyncio.wait_for(task, 30)


@pytest.mark.parametrize("first", [b"", line(Refused()), b"rubbish\n", line(Told(number=1, config={}))])
def test_a_supervisor_of_another_version_is_refused(first: bytes) -> None:
    ours, theirs = socket.socketpair()
    fd = theirs.detach()
    inherited = Line(fd)
    assert not os.get_inheritable(fd)
    with ours, inherited._socket:
        ours.sendall(first)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(Environment, match="supervisor"):
            inherited.first()


def test_a_file_is_taken_up_or_says_why_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file, host = tmp_path / "rewake.yaml", a_host(parse(document("a")))
    file.write_text(yaml.safe_dump(document("b", state_dir="/elsewhere")))
    reload(host, file)
    assert (list(host.config.models), host.config.state_dir) == (["b"], "/var/lib/rewake")
    assert "only a restart takes up state_dir" in caplog.text
    for bad, says in (("models: [", "not usable"), ("models: {}", "models"), (None, "cannot be read")):
        caplog.clear()
        file.unlink() if bad is None else file.write_text(bad)
        reload(host, file)
        assert "reload rejected, the old configuration stays in force" in caplog.text
        assert says in caplog.text
        assert list(host.config.models) == ["b"]


def test_reading_says_every_fault(tmp_path: Path) -> None:
    file = tmp_path / "rewake.yaml"
    file.write_text(yaml.safe_dump(document("a", gateway={"prot": 1, "workers": 0})))
    with pytest.raises(Environment) as refused:
        read(file)
    assert all(part in str(refused.value) for part in (str(file), "gateway.prot", "gateway.workers"))
