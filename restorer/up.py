"""A whole installation on one machine: what runs, as whom, and in which order it begins and ends.

::

    begin   store, until it answers -> restorer and gateways together
    end     gateways (streams finish) -> restorer (replicas stop, nothing is left) -> store

The other processes are argv here; this module imports none of them and holds no connection to the store.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from policies.config import Config
from restorer import embedded, rundir
from restorer.errors import Environment
from restorer.rundir import Account, Lock
from restorer.supervisor import Child, Supervisor, end

ROOT = Path(__file__).resolve().parents[1]
"""Where the packages lie, whatever the current folder is."""
_STORE_S = 15.0
_READY_S = 30.0
_RESTORER_STOP_S = 60.0
_GATEWAY_GRACE_S = 5.0

Say = Callable[[str], None]


def command(package: str, config_file: Path, store_url: str, *more: str) -> tuple[str, ...]:
    """argv of one process. The current folder is no place to import from (-P): a root process runs this."""
    return (sys.executable, "-P", "-m", package, "--config", str(config_file), "--store", store_url, *more)


def environment() -> dict[str, str]:
    """This process's environment, in which the packages are found."""
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}


def base_url(config: Config) -> str:
    """Where the gateway is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(config.gateway.host, config.gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}"


def prepare(config: Config) -> Account | None:
    """Make the folders; the gateway's account, or None if that is ours.

    Raises:
        Environment: something is not as it must be; says what and how to mend it.
    """
    account = rundir.account(config.gateway.user)
    rundir.folder(Path(config.state_dir), 0o700, setting="state_dir")
    run_dir = rundir.folder(Path(config.run_dir), 0o755, setting="run_dir")
    if account is not None and (closed := rundir.closed_to(run_dir, account)):
        raise Environment(
            f"{closed} is closed to {account.name}, the gateway's account: chmod o+x {closed}, or set run_dir to another place"
        )
    return account


@dataclass(slots=True)
class Up:
    """One run of everything.

    Args:
        config_file: absolute; the children read it themselves.
        say: prints a line for people.
        pass_on: prints a child's line: name, text.
        note: says in the background what of this host does not work, or nothing.
    """

    config: Config
    config_file: Path
    say: Say
    pass_on: Callable[[str, str], None]
    note: Callable[[], asyncio.Future[str]] | None = None

    async def run(self) -> int:
        """Until SIGINT, SIGTERM or SIGHUP, and then until all have ended. A second signal hurries the gateways.

        Raises:
            Environment: it cannot start; nothing is left running.
        """
        stop, hurry = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, stop, hurry)
        account, run_dir = prepare(self.config), Path(self.config.run_dir)
        with rundir.lock(run_dir) as lock:
            token = rundir.admin_token(run_dir)
            await self._end_leftovers(lock)
            supervisor = Supervisor(say=self._line, changed=lock.remember)
            running = asyncio.create_task(self._begin(supervisor, account, token))
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
                await stopped
            finally:
                for task in (running, stopped):
                    task.cancel()
                await asyncio.wait({running, stopped})
                await self._end(supervisor, hurry)
        return 0

    def _signalled(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        if stop.is_set():
            hurry.set()
            return
        stop.set()
        self.say("stopping: open responses may finish; once more to cut them off")

    def _line(self, name: str, text: str) -> None:
        if name:
            self.pass_on(name, text)
        else:
            self.say(text)

    async def _end_leftovers(self, lock: Lock) -> None:
        """A predecessor that was killed has told its children to end; wait for it, so that two never work at once."""
        if not lock.left:
            return
        names = ", ".join(f"{name} (pid {pid})" for name, pid in lock.left.items())
        self.say(f"an earlier `rewake up` was killed; waiting for what it left to end: {names}")
        within = _RESTORER_STOP_S + _GATEWAY_GRACE_S
        killed = await asyncio.gather(*(end(pid, within=within) for pid in lock.left.values()))
        for name in (name for name, late in zip(lock.left, killed, strict=True) if late):
            self.say(f"{name} did not end within {within:g} s and was killed")

    async def _begin(self, supervisor: Supervisor, account: Account | None, token: Path) -> None:
        gateway, url = self.config.gateway, self.config.store.url
        note = asyncio.ensure_future(self.note()) if self.note else None
        if not url:
            store, url = embedded.child(Path(self.config.run_dir), account)
            supervisor.start(store)
        await embedded.answers(url, within=_STORE_S)
        packages = environment()
        restorer = command("restorer", self.config_file, url)
        supervisor.start(Child("restorer", restorer, _RESTORER_STOP_S, env=packages))
        for number in range(gateway.workers):
            argv = command("gateway", self.config_file, url, "--admin-token-file", str(token), "--worker", str(number))
            supervisor.start(Child(f"gateway-{number}", argv, gateway.drain_s + _GATEWAY_GRACE_S, env=packages))
        await self._report(token)
        if note is not None and (text := await note):
            self.say(text)

    async def _report(self, token: Path) -> None:
        names = ", ".join(self.config.models)
        if self.config.gateway.port == 0:
            self.say(f"serving {names} at the port that the gateway names (gateway.port is 0); admin token in {token}")
        elif await _listens(self.config, within=_READY_S):
            self.say(f"serving {names} at {base_url(self.config)}/v1; admin token in {token}; Ctrl-C stops everything")
        else:
            self.say(f"the gateway does not answer at {base_url(self.config)} yet; its own lines say why")

    async def _end(self, supervisor: Supervisor, hurry: asyncio.Event) -> None:
        gateways = [f"gateway-{number}" for number in range(self.config.gateway.workers)]
        for names, cut in ((gateways, hurry), (["restorer"], None), (["store"], None)):
            killed = await supervisor.stop(*names, hurry=cut)
            if killed and not (cut and cut.is_set()):
                self.say(f"{', '.join(killed)} did not end in time and was killed; the next `rewake up` clears up after it")
        self.say("stopped")


async def _listens(config: Config, *, within: float) -> bool:
    host = base_url(config).removeprefix("http://").rpartition(":")[0].strip("[]")
    try:
        async with asyncio.timeout(within):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, config.gateway.port)
                except OSError:
                    await asyncio.sleep(0.1)
                    continue
                writer.close()
                return True
    except TimeoutError:
        return False
