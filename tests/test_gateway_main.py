"""``python -m gateway`` as a process: its start, its user, several workers on one port, its end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import redis.asyncio
import yaml
from certificates import make
from conftest import eventually, require_root, running_store
from fake_replica import ADMIN, CHAT, TOKEN, Exchange, Fleet, answer, delta, replica_server
from otlp_receiver import collector

ROOT = Path(__file__).parents[1]
NOBODY = pwd.getpwnam("nobody")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that another user may pass through."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def store_url(folder: Path) -> Iterator[str]:
    with running_store(folder) as url:
        if os.geteuid() == 0:
            os.chown(folder / "store.sock", NOBODY.pw_uid, NOBODY.pw_gid)
        yield url


def status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def written(folder: Path, port: int, *, top: dict[str, object] | None = None, **gateway: object) -> list[str]:
    """Configuration and token as files; the arguments that name them. ``top``: more sections."""
    config = {
        **(top or {}),
        "models": {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}}},
        "gateway": {"port": port, "drain_s": 5, **gateway},
        "run_dir": str(folder / "run"),
    }
    (folder / "rewake.yaml").write_text(yaml.safe_dump(config))
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "token").chmod(0o600)
    return ["--config", str(folder / "rewake.yaml"), "--admin-token-file", str(folder / "token")]


@contextlib.asynccontextmanager
async def worker(
    arguments: list[str], url: str, number: int = 0, root: Path = ROOT
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """One gateway process that listens; yields it and its address."""
    argv = [sys.executable, "-W", "error", "-m", "gateway", *arguments, "--store", url, "--worker", str(number)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, cwd=root, stdout=pipe, stderr=pipe)
    try:
        lines = []
        async with asyncio.timeout(60):
            while True:
                line = (await process.stderr.readline()).decode()
                assert line, "".join(lines)
                lines.append(line)
                if " listening on " in line:
                    break
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        rest = (await process.stderr.read()).decode()
        await process.wait()
        assert "Traceback" not in rest, rest


async def test_two_workers_one_port_own_user_common_metrics(folder, store_url):
    arguments = written(folder, free_port())
    client = redis.asyncio.from_url(store_url, decode_responses=True)
    fleet = Fleet(client)
    async with (
        replica_server() as fake,
        worker(arguments, store_url, 0) as (first, url),
        worker(arguments, store_url, 1) as (second, same),
        httpx.AsyncClient(base_url=url) as http,
    ):
        assert url == same
        await fleet.admit(fake)
        for process in (first, second):
            status = status_of(process.pid)
            if os.geteuid() == 0:
                assert re.search(rf"^Uid:(\s{NOBODY.pw_uid}){{4}}$", status, re.M)
                assert re.search(r"^CapEff:\s0+$", status, re.M)
                assert re.search(r"^Groups:\s*$", status, re.M)
        await eventually(lambda: _both(client))
        for _ in range(20):
            # A connection of its own each time, so that both workers get some.
            async with httpx.AsyncClient(base_url=url) as once:
                assert (await once.post(CHAT, json={"model": "m"})).status_code == 200

        async def served() -> bool:
            text = (await http.get("/metrics")).text
            found = re.search(
                r'rewake_requests_total\{code="200",model="m",route="/v1/chat/completions",start="restored"\} (\S+)', text
            )
            return found is not None and float(found[1]) == 20

        # What a worker says of others is at most about a second old.
        await eventually(served)
        second.send_signal(signal.SIGTERM)
        assert await second.wait() == 0
        # What the one that ended has counted stays; a new worker takes its place and goes on counting.
        assert await served()
        places = len(list((folder / "run/metrics").glob("counter_*.db")))
        async with worker(arguments, store_url, 1) as (third, _):
            assert len(list((folder / "run/metrics").glob("counter_*.db"))) == places
            assert await served()
            third.send_signal(signal.SIGTERM)
            assert await third.wait() == 0
    await client.aclose()


async def _both(client) -> bool:
    return await client.scard("rewake:gateways") == 2


async def waits(http: httpx.AsyncClient) -> bool:
    return 'rewake_queue_depth{model="m"} 1.0' in (await http.get("/metrics")).text


async def test_sigterm_finishes_what_is_open_or_held_and_exits_0(folder, store_url):
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event(delta("first"))
        await gate.wait()
        await exchange.event(delta("last"))
        await exchange.end()

    client = redis.asyncio.from_url(store_url, decode_responses=True)
    async with (
        replica_server(slow) as fake,
        worker(written(folder, free_port(), drain_s=20), store_url) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await Fleet(client).admit(fake, concurrency=1)
        async with http.stream("POST", CHAT, json={"model": "m"}) as stream:
            pieces = stream.aiter_bytes()
            assert b"first" in await anext(pieces)
            held = asyncio.create_task(http.post(CHAT, json={"model": "m"}))
            await eventually(lambda: waits(http))
            process.send_signal(signal.SIGTERM)
            await eventually(lambda: draining(client))
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient(base_url=url) as late:
                    await late.get("/health")
            assert not held.done()
            gate.set()
            assert b"last" in b"".join([piece async for piece in pieces])
            answered = await asyncio.wait_for(held, 30)
            assert (answered.status_code, answered.headers["connection"]) == (200, "close")
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert await client.smembers("rewake:gateways") == set()
    await client.aclose()


async def test_who_stands_in_the_kernels_queue_when_the_end_comes_is_served(folder, store_url):
    client = redis.asyncio.from_url(store_url, decode_responses=True)
    async with (
        replica_server() as fake,
        worker(written(folder, free_port(), drain_s=20), store_url) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as http,
    ):
        await Fleet(client).admit(fake, concurrency=50)
        assert (await http.post(CHAT, json={"model": "m"})).status_code == 200
        process.send_signal(signal.SIGSTOP)
        queued = [asyncio.create_task(http.post(CHAT, json={"model": "m"})) for _ in range(50)]
        port = int(url.rpartition(":")[2])
        await eventually(lambda: established(port) >= 50)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert {response.status_code for response in await asyncio.gather(*queued)} == {200}
        assert await asyncio.wait_for(process.wait(), 30) == 0
    await client.aclose()


def established(port: int) -> int:
    """Connections to a local port, as the server's side has them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


async def test_a_connection_that_is_kept_may_bring_one_more_request_while_draining(folder, store_url):
    client = redis.asyncio.from_url(store_url, decode_responses=True)
    async with (
        replica_server() as fake,
        worker(written(folder, free_port(), drain_s=20), store_url) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await Fleet(client).admit(fake)
        assert (await http.post(CHAT, json={"model": "m"})).status_code == 200
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: draining(client))
        answered = await http.post(CHAT, json={"model": "m"})
        assert (answered.status_code, answered.headers["connection"]) == (200, "close")
        assert await asyncio.wait_for(process.wait(), 30) == 0
    await client.aclose()


@pytest.mark.parametrize("path", ["fast", "ordinary"])
async def test_a_stream_that_outlasts_the_drain_is_told_why_and_cut_not_ended(folder, store_url, path):
    async def endless(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event(delta("first"))
        await exchange.client_left()

    client = redis.asyncio.from_url(store_url, decode_responses=True)
    async with (
        replica_server(endless) as fake,
        worker(written(folder, free_port(), drain_s=0.3), store_url) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await Fleet(client).admit(fake)
        # A body in chunks is not plain.
        body = b'{"model":"m","stream":true}' if path == "fast" else chunked(b'{"model":"m","stream":true}')
        async with http.stream("POST", CHAT, content=body, headers={"content-type": "application/json"}) as stream:
            pieces = stream.aiter_bytes()
            await anext(pieces)
            process.send_signal(signal.SIGTERM)
            last = json.loads((await anext(pieces)).removeprefix(b"data: "))
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)
        assert last["error"]["code"] == "shutting_down"
        assert await asyncio.wait_for(process.wait(), 30) == 0
        line = json.loads((await asyncio.wait_for(process.stdout.read(), 30)).splitlines()[-1])
        assert (line["route"], line["status"], line["code"]) == (CHAT, 503, "shutting_down")
    await client.aclose()


async def chunked(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def draining(client: redis.asyncio.Redis) -> bool:
    reports = [await client.get(f"rewake:gateway:{id}") for id in await client.smembers("rewake:gateways")]
    return any('"draining":true' in (report or "") for report in reports)


async def test_case_32_restart_of_one_worker_of_two_fails_nothing(folder, store_url):
    """In small, without a supervisor: what is open or held at the one finishes there, new ones reach the other."""
    arguments = written(folder, free_port(), drain_s=20)
    client = redis.asyncio.from_url(store_url, decode_responses=True)
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await gate.wait()
        await answer(exchange)

    async with (
        replica_server(slow) as fake,
        worker(arguments, store_url, 0) as (_, url),
        worker(arguments, store_url, 1) as (ending, _),
    ):
        await Fleet(client).admit(fake, concurrency=20)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
            open_ones = [asyncio.create_task(http.post(CHAT, json={"model": "m"})) for _ in range(60)]
            await eventually(lambda: len(fake.requests) >= 20)
            ending.send_signal(signal.SIGTERM)
            await eventually(lambda: draining(client))
            new = [asyncio.create_task(http.post(CHAT, json={"model": "m"})) for _ in range(10)]
            assert not any(task.done() for task in open_ones)
            gate.set()
            assert {response.status_code for response in await asyncio.gather(*open_ones, *new)} == {200}
            assert fake.most_inflight == 20
        assert await asyncio.wait_for(ending.wait(), 30) == 0
    await client.aclose()


async def test_sighup_reads_the_file_again_and_a_bad_one_changes_nothing(folder, store_url):
    arguments, file = written(folder, free_port()), folder / "rewake.yaml"

    async def models() -> set[str]:
        return {model["id"] for model in (await http.get("/v1/models")).json()["data"]}

    async def succeeded(value: str) -> bool:
        return f"rewake_config_last_reload_successful {value}" in (await http.get("/metrics")).text

    async with worker(arguments, store_url) as (process, url), httpx.AsyncClient(base_url=url) as http:
        assert await models() == {"m"}
        good = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(good | {"models": good["models"] | {"new": good["models"]["m"]}}))
        process.send_signal(signal.SIGHUP)

        async def known() -> bool:
            return await models() == {"m", "new"}

        await eventually(known)
        file.write_text("models: [")
        process.send_signal(signal.SIGHUP)
        await eventually(lambda: succeeded("0.0"))
        assert await models() == {"m", "new"}
        file.write_text(yaml.safe_dump(good))
        process.send_signal(signal.SIGHUP)
        await eventually(lambda: succeeded("1.0"))
        assert await models() == {"m"}


async def test_a_socket_of_systemd_outlives_the_process_and_nobody_is_refused(folder, store_url):
    """`systemctl restart` of the only process: who comes in between waits in the socket's queue."""
    arguments = written(folder, 1)
    file = folder / "rewake.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"store": {"url": store_url}}))
    with socket.create_server(("127.0.0.1", 0)) as ours:
        url = f"http://127.0.0.1:{ours.getsockname()[1]}"
        # As systemd does it: the socket is number 3, and the variables name the process that they are for.
        script = f'export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@" 3<&{ours.fileno()}'
        argv = ["bash", "-c", script, "-", sys.executable, str(ROOT / "rewake.py"), "gateway", "-c", arguments[1]]
        for _ in range(2):
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                early = asyncio.create_task(http.get("/health"))
                process = await asyncio.create_subprocess_exec(*argv, pass_fds=[ours.fileno()], cwd=ROOT)
                try:
                    assert (await early).status_code == 200
                    process.send_signal(signal.SIGTERM)
                    assert await asyncio.wait_for(process.wait(), 60) == 0
                finally:
                    if process.returncode is None:
                        process.kill()
                        await process.wait()


async def test_tls_from_the_first_byte_with_a_key_that_is_roots_alone(folder, store_url):
    pair = make(folder, "server")
    pair.key.chmod(0o600)
    arguments = written(folder, free_port(), tls={"certificate": str(pair.certificate), "key": str(pair.key)})
    async with worker(arguments, store_url) as (process, url):
        assert url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=url, verify=pair.client(), headers=ADMIN) as http:
            assert (await http.get("/health")).status_code == 200
            if os.geteuid() == 0:
                # It has given root up, and says what to do about it.
                answer = await http.post("/admin/v1/reload")
                assert answer.status_code == 400
                assert "may not be read by the user of this process" in answer.json()["error"]["message"]
            assert (await http.get("/health")).status_code == 200
        async with httpx.AsyncClient(base_url=url.replace("https", "http")) as plain:
            answer = await plain.get("/health")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_scheme")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "rewake.yaml").write_text("models: {}"), "models"),
        (lambda folder: (folder / "rewake.yaml").write_text("models: ["), "not YAML"),
        (lambda folder: (folder / "rewake.yaml").unlink(), "cannot be read"),
        (lambda folder: (folder / "token").write_text("\n"), "token is empty"),
        (lambda folder: (folder / "run").write_text("a file"), "set run_dir"),
        (lambda folder: written(folder, 1, tls={"certificate": "/no/such", "key": "/no/such"}), "gateway.tls.certificate"),
        (lambda folder: written(folder, 1, tls={"certificate": f"{folder}/token", "key": f"{folder}/token"}), "not PEM"),
    ],
)
def test_what_cannot_start_says_why_and_exits_2(folder, change, says):
    arguments = written(folder, free_port())
    change(folder)
    argv = [sys.executable, "-m", "gateway", *arguments, "--store", "unix:///nowhere"]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_taken_port_and_a_missing_account_are_clear(folder):
    argv = [sys.executable, "-m", "gateway", "--store", "unix:///nowhere"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = written(folder, taken.getsockname()[1])
        ended = subprocess.run([*argv, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, "gateway.port" in ended.stderr) == (2, True)
    if os.geteuid() == 0:
        for user, says in (("no-such-account", "no account"), ("root", "is root")):
            arguments = written(folder, free_port(), user=user)
            ended = subprocess.run([*argv, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
            assert (ended.returncode, says in ended.stderr) == (2, True)


async def test_a_process_that_has_given_root_up_sends_its_spans_and_waits_for_none_at_its_end(folder, store_url):
    """What the libraries load when they first send something was loaded before."""
    with collector() as found:
        arguments = written(folder, free_port(), top={"tracing": {"endpoint": found.url, "sample": 1.0}})
        async with worker(arguments, store_url) as (process, url), httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.post(CHAT, json={"model": "nobody-knows"})).status_code == 404
            await eventually(lambda: found.spans)
            assert found.spans[0].error == "model_not_found"
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_metrics_at_an_address_of_their_own(folder, store_url):
    port = free_port()
    arguments = written(folder, free_port(), top={"metrics": {"address": f"127.0.0.1:{port}"}})
    async with (
        worker(arguments, store_url, 0) as (first, url),
        worker(arguments, store_url, 1) as (second, _),
        httpx.AsyncClient(base_url=url) as clients,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as scraper,
    ):
        refused = await clients.get("/metrics")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found"), refused.text
        assert "metrics.address" in refused.json()["error"]["message"]
        shown = await scraper.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert shown.headers["content-type"].startswith("application/openmetrics-text")
        assert "rewake_build_info" in shown.text
        for path in ("/v1/models", "/health", "/admin/v1/overview", "/console"):
            assert (await scraper.get(path)).status_code == 404, path
        # Either worker answers, for both.
        first.send_signal(signal.SIGTERM)
        assert await first.wait() == 0
        async with httpx.AsyncClient() as again:
            assert (await again.get(f"http://127.0.0.1:{port}/metrics")).status_code == 200
        second.send_signal(signal.SIGTERM)
        assert await second.wait() == 0


async def test_metrics_at_their_own_address_want_their_key_too(folder, store_url):
    port, key = free_port(), "a-key-for-prometheus"
    hashed = "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    arguments = written(folder, free_port(), top={"metrics": {"address": f"127.0.0.1:{port}", "keys": [hashed]}})
    async with worker(arguments, store_url), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as scraper:
        assert (await scraper.get("/metrics")).status_code == 401
        assert (await scraper.get("/metrics", headers={"Authorization": f"Bearer {key}"})).status_code == 200


async def test_it_serves_although_its_own_files_lie_where_only_root_can_read(folder, store_url, tmp_path):
    """A clone in root's home."""
    require_root()
    closed = tmp_path / "root"
    for package in ("gateway", "policies"):
        shutil.copytree(ROOT / package, closed / package, ignore=shutil.ignore_patterns("__pycache__"))
    closed.chmod(0o700)
    arguments = written(folder, free_port())
    async with worker(arguments, store_url, root=closed) as (process, url), httpx.AsyncClient(base_url=url) as http:
        assert re.search(rf"^Uid:(\s{NOBODY.pw_uid}){{4}}$", status_of(process.pid), re.MULTILINE)
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/console")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
