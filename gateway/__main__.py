"""``python -m gateway``: one worker process, from its arguments to its exit code.

Reads what it must as whoever started it, takes or binds its sockets, and gives root up before it speaks to anybody. SIGHUP
reads the configuration again; SIGTERM drains. Exit codes: 0 ended by a signal, 1 failed, 2 cannot start as told.
"""

from __future__ import annotations

import argparse
import asyncio
import encodings.idna  # noqa: F401 - every connection needs it, and it may lie where only root can read
import gc
import os
import pwd
import select
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import uvloop
from aiohttp import web

from gateway import app as application
from gateway import logs, metrics, server, settings, tls, tracing, whereabouts
from gateway.errors import StoreUnavailable
from gateway.handover import Line, NoAnswer, listeners, notify
from gateway.life import Life
from gateway.reload import Rejected, Reloader
from gateway.scraping import Scraping
from gateway.settings import Settings, SettingsError
from gateway.shared import share
from gateway.store import Store, WrongSchema
from gateway.tls import CertificateError
from gateway.version import version

_BACKLOG = 4096
_FIRST_LOOK_S = 2.0
"""How long a new process waits for its first look at the store before it serves without."""
_ACCEPT_TURNS = 1000
"""Turns of the loop, each of which accepts some, before a socket is closed although somebody is always in its queue."""
_IDLE_S = 2.0
"""While draining, a connection that a client keeps may bring one more request within this time."""
_YOUNG = 10_000
"""Objects made, less those that have ended, before the collector looks at them."""
_REFUSE_S = 1.0
"""How long the refusals at the end of the drain, and then the last frames of what is cut, may take to reach their clients."""


def main(argv: list[str] | None = None) -> int:
    """Run one worker until SIGTERM or SIGINT."""
    logs.setup()
    try:
        told, line, sockets, metrics_at = _told(argv)
        folder = _metrics_folder(Path(told.config.run_dir))
        tracing.load(told.config)
        if told.pem is not None:
            tls.preload()
        _find_itself()
        if os.geteuid() == 0:
            _drop_root(told.config.gateway.user, folder)
        return uvloop.run(_serve(told, line, sockets, metrics_at, folder))
    except (SettingsError, WrongSchema, CertificateError, tracing.Missing) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2


def _told(argv: list[str] | None) -> tuple[Settings, Line | None, list[socket.socket], socket.socket | None]:
    """What the arguments say; the line to a supervisor, if there is one; the sockets to serve on, and one for metrics alone."""
    parser = argparse.ArgumentParser("python -m gateway", description="One gateway worker.")
    parser.add_argument("--config", type=Path, required=True, help="the YAML file")
    parser.add_argument("--store", required=True, help="URL of the store: redis://, rediss:// or unix://")
    parser.add_argument("--admin-token-file", type=Path, required=True, help="file with the token of the admin API")
    parser.add_argument("--worker", type=int, default=0, help="number of this worker; workers share one port")
    parser.add_argument("--listen-fd", type=int, help="a bound socket to serve on, instead of one of our own")
    parser.add_argument("--metrics-fd", type=int, help="the same for metrics.address")
    parser.add_argument("--control-fd", type=int, help="the line to a supervisor, which has the configuration")
    told = parser.parse_args(argv)
    line = None if told.control_fd is None else Line(told.control_fd)
    try:
        source = told.config if line is None else line.first()
        sockets = listeners(os.environ, told.listen_fd)
    except (ValueError, OSError) as error:
        raise SettingsError(f"what this process was started with is not usable: {error}") from None
    found = settings.load(config=source, store_url=told.store, admin_token_file=told.admin_token_file, worker=told.worker)
    gateway, metrics_at = found.config.gateway, None
    if told.metrics_fd is not None:
        os.set_inheritable(told.metrics_fd, False)
        metrics_at = socket.socket(fileno=told.metrics_fd)
    elif found.config.metrics.at is not None:
        metrics_at = _bind(*found.config.metrics.at, "metrics.address")
    return found, line, sockets or [_bind(gateway.host, gateway.port, "gateway.host or gateway.port")], metrics_at


def _find_itself() -> None:
    """Where this process is decides how it reaches replicas; found out now, since it fails at the first of them otherwise."""
    try:
        whereabouts.here()
    except OSError as error:
        remedy = "it must be readable for gateways (under systemd: without ProcSubset=pid)"
        raise SettingsError(f"{error.filename}: {error.strerror or error}; {remedy}") from None


def _bind(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket's address is taken here, as root if need be, and shared with the other workers."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; change {setting}, or stop what has it"
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


async def _serve(
    told: Settings, line: Line | None, sockets: list[socket.socket], metrics_at: socket.socket | None, folder: Path
) -> int:
    """Serve until a signal comes or a vital part dies; drain; say how it ended."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await _check_schema(told)
    series = metrics.Metrics(told.config.models, version=version(), shared=share(folder))
    if line is not None:
        await line.open()
    app = application.build(told, series, line)
    gateway, life = app[application.GATEWAY], app[server.LIFE]
    runner = server.Runner(app, gateway.serving.fast)
    scraping = Scraping(gateway.gauges.show)
    hangup = _Hangup(gateway.reloader)
    loop.add_signal_handler(signal.SIGHUP, hangup)
    await runner.setup()
    _settle_memory()
    try:
        await _first(stop, life.crashed, gateway.link.connected, within_s=_FIRST_LOOK_S)
        for listener in sockets:
            secured = None if gateway.certificates is None else gateway.certificates.context
            await web.SockSite(runner, listener, backlog=_BACKLOG, ssl_context=secured).start()
            print(f"gateway {told.id} listening on {_url(listener, secured is not None)}", file=sys.stderr, flush=True)
        if metrics_at is not None:
            await scraping.start(metrics_at)
        if line is not None:
            line.ready(connected=gateway.link.connected.is_set())
        notify("READY=1")
        await _first(stop, life.crashed)
        notify("STOPPING=1")
        await _drain(life, runner, sockets, gateway.current.config.gateway.drain_s)
    finally:
        await scraping.stop()
        await runner.cleanup()
    return 1 if life.crashed.is_set() else 0


def _settle_memory() -> None:
    """What the process has made so far stays as long as it does: the collector need not look at it again and again. Requests
    leave no cycles but for errors' tracebacks, so it may look at what is young less often, too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 50)


class _Hangup:
    """What SIGHUP does: one reload after the other, each with its outcome in the log."""

    def __init__(self, reloader: Reloader) -> None:
        self._reloader = reloader
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    def __call__(self) -> None:
        task = asyncio.create_task(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        async with self._lock:
            try:
                changes = await self._reloader.reload()
            except NoAnswer as error:
                logs.warning("reload", reason=str(error))
            except Rejected:
                pass  # whoever read the file has said why
            else:
                logs.info("reloaded", restart_needed=list(changes.restart))


async def _drain(life: Life, runner: server.Runner, sockets: Iterable[socket.socket], drain_s: float) -> None:
    """Accept nothing new, finish what is open or held; when the time is over, refuse what is held and cut what streams."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + drain_s
    life.drain()
    for listener in sockets:
        await _accepted(listener)
    for site in list(runner.sites):
        await site.stop()
    drained = await life.quiet(drain_s)
    if drained:
        await runner.emptied(min(_IDLE_S, deadline - loop.time()))
        drained = await life.quiet(deadline - loop.time())
    life.refuse()
    cut = 0
    if not drained and not await life.quiet(_REFUSE_S):
        cut = life.open
        life.cut()
        await life.quiet(_REFUSE_S)
    logs.info("stopping", drained=drained, cut=cut)


async def _accepted(listener: socket.socket) -> None:
    """Wait a moment until the loop has accepted what stands in the kernel's queue: closing the socket would reset it."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    for _ in range(_ACCEPT_TURNS):
        if not waiting.poll(0):
            return
        await asyncio.sleep(0)


def _url(listener: socket.socket, tls: bool) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


async def _check_schema(told: Settings) -> None:
    """A store of another version is refused at once; one that does not answer yet is waited for while serving."""
    store = Store(told.store_url, told.config.store.namespace)
    try:
        await store.check_schema()
    except StoreUnavailable as error:
        logs.warning("store not reached yet", reason=str(error))
    finally:
        await store.close()


async def _first(*events: asyncio.Event, within_s: float | None = None) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


if __name__ == "__main__":
    sys.exit(main())
