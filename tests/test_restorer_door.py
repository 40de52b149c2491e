"""Doors: what they pass on and what not, who is let in, how they end and come back; real processes, a target without a box."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually, require_root
from processes import alive, spawn

from policies.expose import Expose
from restorer.boxes.doors import Doors
from restorer.errors import Environment

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LOCAL = "127.0.0.0/8"


@dataclass
class Housed:
    """Stands in for a box: a process that lives, and a target on this host's loopback."""

    folder: Path
    process: subprocess.Popen[bytes]
    id: str = "b0b0"
    address: str = "127.0.0.1"
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def init_pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def remember(self, **facts: Any) -> None:
        self.facts |= facts

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.asynccontextmanager
async def housed(folder: Path, doors: Doors) -> AsyncIterator[Housed]:
    box = Housed(folder, spawn("sleep", "1000"))
    try:
        yield box
    finally:
        box.end()
        await doors.shut(box)


def doors_at(allow: str = LOCAL, **settings: Any) -> Doors:
    return Doors(Expose(address="127.0.0.1", ports="21000-21999", allow=[allow], **settings), lambda text: None)


@contextlib.asynccontextmanager
async def opened(folder: Path, serve: Serve, doors: Doors | None = None) -> AsyncIterator[tuple[Doors, Housed, int]]:
    """An open door to a server that serves so; yields its port."""
    require_root()
    doors = doors_at() if doors is None else doors

    async def ending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(ending, "127.0.0.1", 0)
    async with server, housed(folder, doors) as box:
        await doors.make(box)
        doors.open(box, server.sockets[0].getsockname()[1])
        yield doors, box, int(box.facts["door"]["port"])


def resident(pid: int) -> int:
    """Bytes of memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def status_of(pid: int) -> dict[str, str]:
    return dict(line.partition(":\t")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def files_of(pid: int) -> list[str]:
    return [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says at the end of what it is told all of it."""
    writer.write(await reader.read())


async def asked(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


async def shut_out(port: int) -> bool:
    """Whether a connection is reset, without a byte."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionResetError:
        return True
    try:
        assert await reader.read() == b""
    except ConnectionResetError:
        return True
    finally:
        writer.close()
    return False


async def test_bytes_and_the_end_of_each_direction_are_passed_on(tmp_path):
    async with opened(tmp_path, echo) as (doors, _, port):
        said = os.urandom(3 << 20)
        assert await asked(port, said) == said
        counts = [await asked(port, b"x") for _ in range(3)]
        assert counts == [b"x"] * 3
        # The number of those that are open is told when the door has heard of the end.
        found, now = doors.counts()
        assert found == {"passed": 4, "barred": 0, "full": 0, "refused": 0}
        await eventually(lambda: doors.counts() == (dict.fromkeys(found, 0), 0))
        assert now >= 0


async def test_who_reads_slowly_slows_who_writes_and_the_door_stays_small(tmp_path):
    size, taken = 96 << 20, asyncio.Event()
    block = os.urandom(1 << 20)

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(size // len(block)):
            writer.write(block)
            await writer.drain()
        taken.set()

    async with opened(tmp_path, pour) as (_, box, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readexactly(1000)
        assert not taken.is_set()
        got, seen = hashlib.sha256(block[:1000]), 1000
        while data := await reader.read(1 << 18):
            got.update(data)
            seen += len(data)
        assert seen == size
        assert got.hexdigest() == hashlib.sha256(block * (size // len(block))).hexdigest()
        assert resident(box.facts["door"]["pid"]) < 32 << 20
        writer.close()


async def test_a_client_that_takes_nothing_holds_up_nobody_else(tmp_path):
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1) == b"m":
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()
        writer.write(b"well")

    async with opened(tmp_path, pour) as (_, _, port):
        _, stuck = await asyncio.open_connection("127.0.0.1", port)
        stuck.write(b"m")
        for _ in range(5):
            assert await asked(port, b"?") == b"well"
        stuck.transport.abort()


async def test_an_engine_that_breaks_off_is_a_reset_and_no_end(tmp_path):
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"half")
        await reader.read(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    async with opened(tmp_path, break_off) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.readexactly(4) == b"half"
        writer.write(b"!")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_a_client_that_leaves_is_gone_for_the_engine_too(tmp_path):
    left = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        try:
            await reader.read()
        finally:
            left.set()

    async with opened(tmp_path, listen) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readexactly(5)
        writer.transport.abort()
        await asyncio.wait_for(left.wait(), 60)


async def test_whoever_is_not_allowed_is_shut_out_and_counted(tmp_path):
    async with opened(tmp_path, echo, doors_at("192.0.2.0/24")) as (doors, _, port):
        assert await shut_out(port)
        assert doors.counts()[0] == {"passed": 0, "barred": 1, "full": 0, "refused": 0}


async def test_connections_are_bounded(tmp_path):
    async with opened(tmp_path, echo, doors_at(connections=2)) as (doors, _, port):
        first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await eventually(lambda: doors.counts()[1] == 2)
        assert await shut_out(port)
        assert doors.counts()[0]["full"] == 1
        first[0][1].close()
        await eventually(lambda: doors.counts()[1] == 1)
        assert await asked(port, b"again") == b"again"
        first[1][1].close()


async def test_an_engine_that_refuses_is_counted_and_the_client_is_reset(tmp_path):
    require_root()
    doors = doors_at()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with housed(tmp_path, doors) as box:
            await doors.make(box)
            doors.open(box, nobody.getsockname()[1])
            assert await shut_out(box.facts["door"]["port"])
            await eventually(lambda: doors.counts()[1] == 0)


async def test_a_door_has_no_rights(tmp_path):
    async with opened(tmp_path, echo) as (_, box, port):
        assert await asked(port, b"x") == b"x"
        facts = status_of(box.facts["door"]["pid"])
        assert facts["Uid"].split() == ["65534"] * 4
        assert facts["Groups"].strip() == ""
        assert facts["NoNewPrivs"] == "1"
        assert {facts[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        assert {one for one in files_of(box.facts["door"]["pid"]) if one.startswith("/")} <= {
            "/dev/null",
            *(str(tmp_path / name) for name in ("door.counts", "box.log")),
        }


async def test_nobody_comes_in_before_it_is_opened(tmp_path):
    require_root()
    doors, met = doors_at(), asyncio.Event()

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.set()
        writer.write(await reader.read())
        writer.close()

    async with await asyncio.start_server(note, "127.0.0.1", 0) as server, housed(tmp_path, doors) as box:
        await doors.make(box)
        early = asyncio.create_task(asked(box.facts["door"]["port"], b"early"))
        # A second connection that is accepted by the kernel shows that the first has been, too.
        (await asyncio.open_connection("127.0.0.1", box.facts["door"]["port"]))[1].close()
        assert not met.is_set()
        assert not early.done()
        doors.open(box, server.sockets[0].getsockname()[1])
        assert await asyncio.wait_for(early, 60) == b"early"


async def test_it_ends_with_the_box_and_its_port_is_free(tmp_path):
    require_root()
    doors = doors_at()
    async with housed(tmp_path, doors) as box:
        await doors.make(box)
        door = dict(box.facts["door"])
        doors.open(box, 1)
        box.end()
        await doors.shut(box)
        assert not alive(door["pid"])
        with socket.create_server(("127.0.0.1", door["port"])):
            pass
        await doors.shut(box)


async def test_it_ends_with_a_restorer_that_dies_before_it_is_opened(tmp_path):
    require_root()
    doors = doors_at()
    async with housed(tmp_path, doors) as box:
        await doors.make(box)
        known = doors._doors[box.id]
        assert known.process is not None
        assert known.process.stdin is not None
        known.process.stdin.close()
        await eventually(lambda: not alive(known.pid))


async def test_killed_it_comes_back_at_its_port(tmp_path):
    async with opened(tmp_path, echo) as (_, box, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asked(port, b"x") == b"x"
        pid = box.facts["door"]["pid"]
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        await eventually(lambda: box.facts["door"]["pid"] != pid)
        assert box.facts["door"]["port"] == port
        assert await asked(port, b"again") == b"again"


async def test_a_successor_goes_on_with_it_and_brings_it_back(tmp_path):
    async with opened(tmp_path, echo) as (doors, box, port):
        assert await asked(port, b"x") == b"x"
        # Its restorer has died: what it knew is in the box's facts alone.
        before = doors._doors.pop(box.id)
        assert before.watching is not None
        assert before.process is not None
        before.watching.cancel()
        target = box.facts["door"]
        later = doors_at()
        with socket.create_server(("127.0.0.1", 0)) as other:
            assert await later.adopt(box, other.getsockname()[1]) == f"127.0.0.1:{port}"
            assert later.counts()[0]["passed"] == 0
            assert await asked(port, b"still") == b"still"
            assert later.counts()[0]["passed"] == 1
            os.kill(target["pid"], signal.SIGKILL)
            await eventually(lambda: box.facts["door"]["pid"] != target["pid"])
            await later.shut(box)
        assert before.process.wait() == -signal.SIGKILL


async def test_one_that_cannot_come_back_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("restorer.boxes.doors._TRIES", 2)
    monkeypatch.setattr("restorer.boxes.doors._PAUSE_S", 0.01)
    async with opened(tmp_path, echo) as (doors, box, port):
        lost: list[tuple[str, str]] = []
        doors.on_lost = lambda id, reason: lost.append((id, reason))
        pid = box.facts["door"]["pid"]
        monkeypatch.setattr("restorer.boxes.doors.bound", taken_by_others)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: lost)
        assert lost[0][0] == box.id
        assert f"127.0.0.1:{port}" in lost[0][1]


def taken_by_others(address: str, port: int, *, reuse: bool) -> socket.socket:
    raise Environment("it is somebody else's now")


async def test_ports_are_fresh_and_a_full_range_says_so(tmp_path):
    require_root()
    doors = Doors(Expose(address="127.0.0.1", ports="22000-22002", allow=[LOCAL]), lambda text: None)
    async with housed(tmp_path, doors) as box:
        seen = []
        for _ in range(3):
            await doors.make(box)
            seen.append(box.facts["door"]["port"])
            await doors.shut(box)
        assert sorted(seen) == [22000, 22001, 22002]
        with contextlib.ExitStack() as held:
            for port in seen:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            with pytest.raises(Environment, match=r"widen restorer\.expose\.ports"):
                await doors.make(box)


async def test_an_address_that_is_not_this_hosts_says_so(tmp_path):
    require_root()
    doors = Doors(Expose(address="192.0.2.1", allow=[LOCAL]), lambda text: None)
    async with housed(tmp_path, doors) as box:
        with pytest.raises(Environment, match=r"cannot listen on 192\.0\.2\.1:\d+: Cannot assign requested address"):
            await doors.make(box)


async def test_one_that_is_renewed_cuts_everybody_off_and_is_shut_at_another_port(tmp_path):
    """For an engine that rests: it comes back as another incarnation."""
    async with opened(tmp_path, echo) as (doors, box, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asked(port, b"x") == b"x"
        before = box.facts["door"]["pid"]
        await doors.renew(box)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert not alive(before)
        assert box.facts["door"]["port"] != port
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_without_expose_there_is_none(tmp_path):
    doors = Doors(None, lambda text: None)
    async with housed(tmp_path, doors) as box:
        await doors.make(box)
        doors.open(box, 1)
        assert (doors.text(box), box.facts) == ("", {})
        assert await doors.adopt(box, 1) == ""
