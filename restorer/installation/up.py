"""A whole installation on one machine: what runs, as whom, and in which order it begins and ends.

::

    begin   the address -> store, until it answers -> restorer and gateways together
    end     gateways (streams finish) -> restorer (replicas stop, nothing is left) -> store
    SIGHUP  the configuration is read again       SIGUSR2  new workers take the old ones' places

The other processes are argv here; this module imports none of them and holds no connection to the store.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from policies.config import Config
from restorer.boxes import network
from restorer.boxes.box import BoxFactory
from restorer.errors import Environment, RestorerError
from restorer.installation import embedded, listening, rundir
from restorer.installation.listening import base_url
from restorer.installation.rundir import Account, Lock
from restorer.installation.steward import Steward, gateway_stop_s
from restorer.installation.supervisor import Child, Supervisor, end
from restorer.system import modules

"""Where the packages lie, whatever the current folder is. Links stay as they are: what engines are told of it is part of their
snapshots, and where a host's installation lies behind a link changes with every upgrade."""
_STORE_S = 15.0
_READY_S = 30.0
_RESTORER_STOP_S = 60.0

Say = Callable[[str], None]


def command(package: str, config_file: Path, store_url: str, *more: str) -> tuple[str, ...]:
    """argv of one process."""
    return modules.command(package, "--config", str(config_file), "--store", store_url, *more)


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
        read: reads the configuration file again; raises what the operator shall see.
        note: says in the background what of this host does not work, or nothing.
    """

    config: Config
    config_file: Path
    say: Say
    pass_on: Callable[[str, str], None]
    read: Callable[[], Config]
    note: Callable[[], asyncio.Future[str]] | None = None
    _sockets: list[socket.socket] = field(default_factory=list)
    _metrics: list[socket.socket] = field(default_factory=list)

    async def run(self) -> int:
        """Until SIGINT or SIGTERM, and then until all have ended. A second signal hurries the gateways.

        Raises:
            Environment: it cannot start; nothing is left running.
        """
        stop, hurry, terminal = asyncio.Event(), asyncio.Event(), os.isatty(0)
        loop = asyncio.get_running_loop()
        account, run_dir = prepare(self.config), Path(self.config.run_dir)
        with rundir.lock(run_dir) as lock:
            steward = Steward(self.config, read=self.read, say=self.say)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._signalled, stop, hurry)
            loop.add_signal_handler(signal.SIGHUP, self._hung_up, steward, terminal, stop, hurry)
            loop.add_signal_handler(signal.SIGUSR2, lambda: steward.soon(steward.restart()))
            token = rundir.admin_token(run_dir)
            await self._end_leftovers(lock)
            supervisor = steward.supervisor = Supervisor(say=self._line, changed=lock.remember)
            running = asyncio.create_task(self._begin(steward, supervisor, account, token))
            stopped, watching = asyncio.create_task(stop.wait()), asyncio.create_task(steward.watch())
            try:
                await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
                await stopped
            finally:
                steward.close()
                for task in (running, stopped, watching):
                    task.cancel()
                await asyncio.wait({running, stopped, watching})
                await self._end(supervisor, hurry)
                for listener in (*self._sockets, *self._metrics):
                    listener.close()
        return 0

    def _hung_up(self, steward: Steward, terminal: bool, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """The terminal that this was started in has been closed, or somebody asks for a reload."""
        if terminal and not os.isatty(0):
            self._signalled(stop, hurry)
        else:
            steward.soon(steward.reload())

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
        within = _RESTORER_STOP_S
        killed = await asyncio.gather(*(end(pid, within=within) for pid in lock.left.values()))
        for name in (name for name, late in zip(lock.left, killed, strict=True) if late):
            self.say(f"{name} did not end within {within:g} s and was killed")

    async def _begin(self, steward: Steward, supervisor: Supervisor, account: Account | None, token: Path) -> None:
        url = self.config.store.url
        await network.free(self.config.restorer.network)
        note = asyncio.ensure_future(self.note()) if self.note else None
        self._sockets = listening.bind(self.config)
        self._metrics = listening.bind_metrics(self.config)
        tls = self.config.gateway.tls
        at = rundir.Address(
            url=base_url(self.config, self._sockets[0]),
            certificate=None if tls is None else tls.certificate,
            run_dir=self.config.run_dir,
        )
        rundir.announce(at, Path(self.config.state_dir))
        if not url:
            store, url = embedded.child(Path(self.config.run_dir), account)
            supervisor.start(store)
        await embedded.answers(url, within=_STORE_S)
        packages, talk = modules.environment(), steward.talk
        restorer = command("restorer", self.config_file, url)
        steward.others = ("restorer",)
        supervisor.start(Child("restorer", restorer, _RESTORER_STOP_S, env=packages, talk=talk))
        steward.gateways = tuple(f"gateway-{number}" for number in range(self.config.gateway.workers))
        sockets = itertools.zip_longest(steward.gateways, self._sockets, self._metrics)
        for number, (name, listener, metrics) in enumerate(sockets):
            argv = command("gateway", self.config_file, url, "--admin-token-file", str(token), "--worker", str(number))
            stop_s = gateway_stop_s(steward.config)
            supervisor.start(Child(name, argv, stop_s, env=packages, listener=listener, metrics=metrics, talk=talk))
        await self._report(supervisor, steward.gateways, token)
        if note is not None and (text := await note):
            self.say(text)

    async def _report(self, supervisor: Supervisor, gateways: tuple[str, ...], token: Path) -> None:
        names, url = ", ".join(self.config.models), base_url(self.config, self._sockets[0])
        if all(await asyncio.gather(*(supervisor.ready(name, within_s=_READY_S) for name in gateways))):
            self.say(f"serving {names} at {url}/v1; admin token in {token}; Ctrl-C stops everything")
        else:
            self.say(f"the gateway does not answer at {url} yet; its own lines say why")

    async def _end(self, supervisor: Supervisor, hurry: asyncio.Event) -> None:
        gateways = [f"gateway-{number}" for number in range(self.config.gateway.workers)]
        for names, cut in ((gateways, hurry), (["restorer"], None), (["store"], None)):
            killed = await supervisor.stop(*names, hurry=cut)
            if killed and not (cut and cut.is_set()):
                self.say(f"{', '.join(killed)} did not end in time and was killed")
            if "restorer" in names:
                await self._clear()
        self.say("stopped")

    async def _clear(self) -> None:
        """End the engines that the restorer did not: it was killed, or told to end before it had found them."""
        config = self.config
        boxes = BoxFactory(
            run_dir=Path(config.run_dir), state_dir=Path(config.state_dir), network=config.restorer.network, spare=0
        )
        try:
            for box in await boxes.survivors():
                await boxes.discard(box)
                self.say(f"box {box.id} was left by the restorer, and was ended")
        except (RestorerError, OSError) as error:
            self.say(f"not all engines could be ended, the next `rewake up` does it: {error}")
