"""The access log: whole lines, no secrets, no waiting, and an honest count of what was lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from conftest import running_store
from hypothesis import given
from hypothesis import strategies as st

from gateway import access
from gateway.current import Current
from gateway.trail import Trail
from policies.config import parse

MODELS = {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}}}


def current(access_log: bool = True) -> Current:
    return Current(parse({"models": MODELS, "gateway": {"access_log": access_log}}))


def trail(**facts: Any) -> Trail:
    made = Trail("req_1", "/v1/chat/completions", 5.0)
    for name, value in facts.items():
        setattr(made, name, value)
    return made


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)


def read_lines(end: int) -> list[dict[str, Any]]:
    """Everything up to the end of the pipe."""
    with open(end, "rb", closefd=False) as file:
        return [json.loads(line) for line in file.read().splitlines()]


def logged(*trails: Trail, config: Current | None = None) -> list[dict[str, Any]]:
    """The lines that these make; as many as a pipe holds."""
    with pipe() as (out, into):
        log = access.Log(config or current(), into, wall=lambda: 1_700_000_000.125)
        log.start()
        for each in trails:
            log.write((each,))
        log.close()
        os.close(into)
        return read_lines(out)


def test_a_line_tells_all_facts_and_no_others() -> None:
    told = trail(
        client="192.0.2.7",
        tenant="alice",
        model="m",
        asked="a-name-that-the-client-made-up",
        stream=True,
        status=200,
        code="",
        phase="streaming",
        start="restored",
        replica="m#0",
        incarnation="inc-1",
        waited_s=1.23456,
        first_byte_s=1.5,
        seconds=2.5,
        bytes_in=10,
        bytes_out=2000,
        prompt_tokens=7,
        completion_tokens=40,
    )
    assert logged(told) == [
        {
            "time": "2023-11-14T22:13:20.125Z",
            "request_id": "req_1",
            "client": "192.0.2.7",
            "tenant": "alice",
            "method": "POST",
            "route": "/v1/chat/completions",
            "model": "m",
            "stream": True,
            "status": 200,
            "code": "",
            "phase": "streaming",
            "start": "restored",
            "replica": "m#0",
            "incarnation": "inc-1",
            "retries": 0,
            "waited_s": 1.2346,
            "ttft_s": 1.5,
            "duration_s": 2.5,
            "bytes_in": 10,
            "bytes_out": 2000,
            "prompt_tokens": 7,
            "completion_tokens": 40,
            "trace_id": "",
        }
    ]


def test_a_client_that_left_is_told_as_499() -> None:
    (line,) = logged(trail())
    assert (line["status"], line["code"], line["phase"], line["ttft_s"]) == (499, "client_left", "reading", None)


def test_odd_names_make_no_second_line() -> None:
    (line,) = logged(trail(id='a"b\n{"forged": 1}\u2028', tenant="t\r\n"))
    assert line["request_id"] == 'a"b\n{"forged": 1}\u2028'


@given(
    seconds=st.floats(-1, 1e7),
    wall=st.floats(1, 4e9),
    numbers=st.tuples(
        st.integers(0, 10**12), st.integers(0, 10**12), st.none() | st.integers(0, 2000), st.none() | st.integers(0, 2000)
    ),
    id=st.text(max_size=20),
    code=st.text(max_size=20),
)
def test_every_value_is_told_as_json_says_it(
    seconds: float, wall: float, numbers: tuple[int, int, int | None, int | None], id: str, code: str
) -> None:
    """A line is put together out of texts; whoever reads it gets what an encoder would have written."""
    names = ("bytes_in", "bytes_out", "prompt_tokens", "completion_tokens")
    facts: dict[str, Any] = {"id": id, "code": code, "seconds": seconds, "ended": wall, **dict(zip(names, numbers, strict=True))}
    with open(os.devnull, "wb") as nowhere:
        log = access.Log(current(), nowhere.fileno())
        log.write((trail(**facts),))
        line = json.loads(log._waiting.pop()[0])
    assert (line["request_id"], line["code"]) == (id, code)
    assert tuple(line[name] for name in names) == numbers
    assert line["duration_s"] == int(seconds * 10_000 + 0.5) / 10_000
    told = datetime.strptime(line["time"], "%Y-%m-%dT%H:%M:%S.%f%z").timestamp()
    assert abs(told - int(wall * 1000) / 1000) < 0.0005


def test_a_line_is_not_taken_for_the_one_before_it() -> None:
    """Each fact by itself makes it another."""
    others: dict[str, Any] = {name: "x" for name in ("client", "tenant", "method", "route", "model", "code", "phase", "start")}
    others |= {"replica": "x", "incarnation": "x", "stream": True, "status": 200, "retries": 1}
    with open(os.devnull, "wb") as nowhere:
        log = access.Log(current(), nowhere.fileno())
        log.write([each for name, value in others.items() for each in (trail(), trail(**{name: value}))])
        lines = [json.loads(line) for line in log._waiting.pop()[0].splitlines()]
    plain = lines[0]
    for (name, value), same, other in zip(others.items(), lines[::2], lines[1::2], strict=True):
        assert same == plain | {"time": same["time"]}
        assert other == plain | {"time": other["time"], name: value}
    assert set(others) == set(access._COMMON)


def test_what_lines_have_in_common_is_kept_for_a_bounded_number_of_clients() -> None:
    with open(os.devnull, "wb") as nowhere:
        log = access.Log(current(), nowhere.fileno())
        for number in range(3000):
            log.write((trail(client=f"client-{number}"),))
        lines = [json.loads(line) for line in b"".join(piece for piece, _ in log._waiting).splitlines()]
        assert [line["client"] for line in lines] == [f"client-{number}" for number in range(3000)]
        assert len(log._common) <= 1024


def test_switched_off_it_writes_nothing_and_a_reload_switches_it_on() -> None:
    config = current(access_log=False)
    with pipe() as (out, into):
        log = access.Log(config, into)
        log.start()
        log.write((trail(id="unseen"),))
        config.replace(current().config)
        log.write((trail(id="seen"),))
        log.close()
        os.close(into)
        assert [line["request_id"] for line in read_lines(out)] == ["seen"]


def test_lines_keep_their_order_and_come_whole_beside_those_of_others() -> None:
    """Two workers share one pipe: each write is small enough to go in in one piece."""
    with pipe() as (out, into):
        found: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: found.extend(read_lines(out)))
        reader.start()
        logs = [access.Log(current(), into) for _ in range(2)]
        for number, log in enumerate(logs):
            log.start()
            for n in range(1000):
                log.write((trail(id=f"{number}-{n}"),))
        for log in logs:
            log.close(10)
        os.close(into)
        reader.join(30)
    for number in range(2):
        mine = [line["request_id"] for line in found if line["request_id"].startswith(f"{number}-")]
        assert mine == [f"{number}-{n}" for n in range(1000)]


def test_what_ended_together_is_written_as_if_one_by_one() -> None:
    """Into a pipe in whole lines of at most what it takes in one piece, be one alone longer."""
    trails = [trail(id=f"r{n}", tenant="x" * (5000 if n == 20 else 10)) for n in range(64)]
    with pipe() as (out, into):
        pieces: list[bytes] = []
        reader = threading.Thread(target=lambda: pieces.extend(iter(lambda: os.read(out, 1 << 20), b"")))
        log = access.Log(current(), into)
        log.write(trails)
        write, written = os.write, list[bytes]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(access.os, "write", lambda to, data: (written.append(data), write(to, data))[1])
            reader.start()
            log.start()
            log.close(30)
        os.close(into)
        reader.join(30)
    assert [json.loads(line)["request_id"] for line in b"".join(pieces).splitlines()] == [f"r{n}" for n in range(64)]
    assert all(data.endswith(b"\n") for data in written)
    assert all(len(data) <= 4096 or data.count(b"\n") == 1 for data in written)
    assert len(written) < 16


def test_one_that_cannot_be_told_costs_no_other_its_line(caplog: pytest.LogCaptureFixture) -> None:
    with open(os.devnull, "wb") as nowhere:
        log = access.Log(current(), nowhere.fileno())
        log.write((trail(id="r1"), trail(id="r2", seconds=float("nan")), trail(id="r3")))
        assert [json.loads(line)["request_id"] for line in log._waiting.pop()[0].splitlines()] == ["r1", "r3"]
    assert "r2" in str([record.__dict__ for record in caplog.records])


def test_a_reader_that_stalls_costs_lines_but_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BOUND", 500)
    lost: list[int] = []
    with pipe() as (out, into):
        log = access.Log(current(), into, on_dropped=lost.append)
        log.start()
        began = time.monotonic()
        for n in range(20_000):
            log.write((trail(id=f"r{n}"),))
        assert time.monotonic() - began < 20
        found: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: found.extend(read_lines(out)))
        reader.start()
        log.close(10)
        os.close(into)
        reader.join(30)
    told = [line["lines"] for line in found if line.get("event") == "access log lines lost"]
    written = sum("request_id" in line for line in found)
    assert told == lost
    assert sum(told) > 0
    assert written + sum(told) == 20_000


def test_a_reader_that_never_reads_does_not_keep_the_process() -> None:
    with pipe() as (_, into):
        log = access.Log(current(), into)
        log.start()
        for n in range(2000):
            log.write((trail(id=f"r{n}", tenant="x" * 200),))
        began = time.monotonic()
        log.close(0.2)
        assert time.monotonic() - began < 10


def test_a_reader_that_is_gone_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with pipe() as (out, into):
        os.close(out)
        log = access.Log(current(), into)
        log.start()
        log.write((trail(),))
        log.close(5)
        log.write((trail(),))
    assert "access log ended" in caplog.text


def test_every_fact_of_a_trail_is_either_logged_or_left_out_on_purpose() -> None:
    facts = {name for name in dir(trail()) if not name.startswith("_")}
    renamed = {"id": "request_id", "first_byte_s": "ttft_s", "seconds": "duration_s", "trace": "trace_id"}
    left_out = {"since", "ended", "asked", "committed", "client_retry"}
    (line,) = logged(trail())
    assert {renamed.get(fact, fact) for fact in facts - left_out} == line.keys() - {"time"}


# ---------------------------------------------------------------- as a process


async def serve_models(folder: Path, url: str, redirection: str, requests: int) -> None:
    """``python -m gateway`` in a shell that redirects its output; asked a few times, then ended by SIGTERM."""
    config = {"models": MODELS, "gateway": {"port": 0, "user": "daemon"}, "run_dir": str(folder / "run")}
    (folder / "rewake.yaml").write_text(yaml.safe_dump(config))
    (folder / "token").write_text("token")
    argv = [sys.executable, "-m", "gateway", "--config", str(folder / "rewake.yaml"), "--store", url]
    command = f"exec {shlex.join([*argv, '--admin-token-file', str(folder / 'token')])} {redirection}"
    worker = await asyncio.create_subprocess_exec(
        "sh", "-c", command, cwd=Path(__file__).parents[1], stderr=asyncio.subprocess.PIPE
    )
    assert worker.stderr is not None
    try:
        async with asyncio.timeout(20):
            said = b""
            while b" listening on " not in (line := await worker.stderr.readline()):
                said += line
                assert line, said.decode()
            async with httpx.AsyncClient(base_url=line.decode().rpartition(" ")[2].strip()) as client:
                for n in range(requests):
                    answer = await client.get("/v1/models", headers={"x-request-id": f"r{n}"})
                    assert answer.status_code == 200
            worker.send_signal(signal.SIGTERM)
            assert b"access log ended" not in await worker.stderr.read()
            assert await worker.wait() == 0
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user may pass through."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def open_store(open_folder: Path) -> Iterator[str]:
    with running_store(open_folder) as url:
        (open_folder / "store.sock").chmod(0o666)
        yield url


async def test_a_process_writes_every_line_before_it_ends(open_store: str, open_folder: Path) -> None:
    await serve_models(open_folder, open_store, f"> {open_folder}/out", requests=20)
    lines = [json.loads(line) for line in (open_folder / "out").read_text().splitlines()]
    assert [line["request_id"] for line in lines] == [f"r{n}" for n in range(20)]


async def test_without_standard_output_no_line_goes_into_a_connection(open_store: str, open_folder: Path) -> None:
    await serve_models(open_folder, open_store, ">&-", requests=20)
