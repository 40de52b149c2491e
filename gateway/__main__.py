"""``python -m gateway``: one worker process, from its arguments to its exit code.

Reads what it must as whoever started it, binds its port, and gives root up before it speaks to anybody. Exit codes:
0 ended by a signal, 1 failed, 2 cannot start as told.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pwd
import signal
import socket
import sys
from importlib import metadata
from pathlib import Path

import uvloop
from aiohttp import web

from gateway import app as application
from gateway import logs, metrics, server, settings
from gateway.errors import StoreUnavailable
from gateway.settings import Settings, SettingsError
from gateway.store import Store, WrongSchema

_BACKLOG = 4096


def main(argv: list[str] | None = None) -> int:
    """Run one worker until SIGTERM or SIGINT."""
    logs.setup()
    try:
        told = _settings(argv)
        listener = _bind(told.config.gateway.host, told.config.gateway.port)
        folder = _metrics_folder(Path(told.config.run_dir))
        if os.geteuid() == 0:
            _drop_root(told.config.gateway.user, folder)
        return uvloop.run(_serve(told, listener, folder))
    except (SettingsError, WrongSchema) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2


def _settings(argv: list[str] | None) -> Settings:
    parser = argparse.ArgumentParser("python -m gateway", description="One gateway worker.")
    parser.add_argument("--config", type=Path, required=True, help="the YAML file")
    parser.add_argument("--store", required=True, help="URL of the store: redis://, rediss:// or unix://")
    parser.add_argument("--admin-token-file", type=Path, required=True, help="file with the token of the admin API")
    parser.add_argument("--worker", type=int, default=0, help="number of this worker; workers share one port")
    told = parser.parse_args(argv)
    return settings.load(config=told.config, store_url=told.store, admin_token_file=told.admin_token_file, worker=told.worker)


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket's address is taken here, as root if need be, and shared with the other workers."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; change gateway.host or gateway.port, or stop what has it"
        ) from None
    return listener


def _metrics_folder(run_dir: Path) -> Path:
    folder = run_dir / "metrics"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    except OSError as error:
        raise SettingsError(
            f"{folder}: cannot be made: {error.strerror}; set run_dir to a folder that this user may write"
        ) from None
    return folder


def _drop_root(user: str, folder: Path) -> None:
    """Become ``user`` for good. Everything that only root may do has been done, and everything is imported."""
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise SettingsError(f"gateway.user: there is no account {user!r}; create it or name another") from None
    if account.pw_uid == 0:
        raise SettingsError(f"gateway.user: {user!r} is root; name an account without rights")
    for path in (folder, *folder.iterdir()):
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
    os.setgroups([])
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    if set(os.getresuid()) != {account.pw_uid} or set(os.getresgid()) != {account.pw_gid}:
        raise SettingsError("root could not be given up; is the process restricted in changing its user?")
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise SettingsError("root was given up and could be regained; refusing to serve")


async def _serve(told: Settings, listener: socket.socket, folder: Path) -> int:
    """Serve until a signal comes or a vital part dies; drain; say how it ended."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await _check_schema(told)
    series = metrics.Metrics(told.config.models, version=_version(), shared=metrics.share(folder), observer=told.worker == 0)
    app = application.build(told, series)
    life, runner = app[server.LIFE], server.Runner(app)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        host, port = listener.getsockname()[:2]
        print(f"gateway {told.id} listening on http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
        await _first(stop, life.crashed)
        life.drain()
        for site in runner.sites:
            await site.stop()
        drained = await life.quiet(told.config.gateway.drain_s)
        logs.info("stopping", drained=drained, open=life.open)
    finally:
        await runner.cleanup()
    return 1 if life.crashed.is_set() else 0


async def _check_schema(told: Settings) -> None:
    """A store of another version is refused at once; one that does not answer yet is waited for while serving."""
    store = Store(told.store_url, told.config.store.namespace)
    try:
        await store.check_schema()
    except StoreUnavailable as error:
        logs.warning("store not reached yet", reason=str(error))
    finally:
        await store.close()


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _version() -> str:
    try:
        return metadata.version("rewake")
    except metadata.PackageNotFoundError:
        return "unpackaged"


if __name__ == "__main__":
    sys.exit(main())
