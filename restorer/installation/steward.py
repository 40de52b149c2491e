"""The configuration in force of an installation: read, offered to its processes, put in force or refused; and their restart.

One process decides for all: the file is read once, by whoever started the installation, and a fault anywhere leaves everything
as it was. A process that starts later gets what is in force, whatever stands in the file by then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from policies.config import Config
from policies.control import Ask, Refused, Told, Verdict
from policies.reload import Changes, merge
from restorer.errors import Environment
from restorer.installation.channel import GONE, Channel
from restorer.installation.child import Talk
from restorer.installation.supervisor import Supervisor

READY_S = 30.0
"""A new worker that does not serve by then is given up, and the old one stays."""
WATCH_S = 5.0
"""How often it is looked whether a certificate was renewed."""
_TAKE_S = 10.0


class Steward:
    """One per ``rewake up``.

    Args:
        config: in force from the start.
        read: reads the file again; raises an exception whose text is for the operator. Blocks.
        say: prints a line for people.

    Raises:
        Environment: the certificate or its key cannot be read.
    """

    def __init__(self, config: Config, *, read: Callable[[], Config], say: Callable[[str], None]) -> None:
        self.config = config
        self._read = read
        self._say = say
        self._pem = _pem(config)
        self._numbers = itertools.count(1)
        self._busy = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.supervisor: Supervisor | None = None
        self.gateways: tuple[str, ...] = ()
        """Names of the gateway workers."""
        self.others: tuple[str, ...] = ()
        """Names of other processes that are told the configuration."""

    @property
    def talk(self) -> Talk:
        """What a child's line is used for."""
        return Talk(first=lambda: self._told(self.config, self._pem), on_ask=self._asked)

    async def reload(self) -> Verdict:
        """Read the file again, and put it in force everywhere or nowhere."""
        async with self._busy:
            try:
                wished = await asyncio.to_thread(self._read)
                merged, changes = merge(self.config, wished)
                pem = await asyncio.to_thread(_pem, merged)
            except Exception as error:  # whatever is wrong with a file, the installation goes on
                return self._refuse(str(error))
            return await self._offer(merged, pem, changes)

    async def restart(self) -> Verdict:
        """New processes take the places of the gateway workers, one after the other, without a gap."""
        if self.supervisor is None or not self.gateways:
            return Verdict(number=0, fault="no worker has been started yet; try again in a moment")
        async with self._busy:
            done: list[str] = []
            for name in self.gateways:
                why = await self.supervisor.replace(name, within_s=READY_S)
                if why:
                    self._say(f"restart of {name}: {why}")
                    return Verdict(number=0, fault=why, applied=tuple(done))
                done.append(name)
            self._say(f"restarted {', '.join(done)}; what the old ones have open may finish")
            return Verdict(number=0, applied=tuple(done))

    def soon(self, work: Coroutine[Any, Any, Verdict]) -> None:
        """Do it in the background; its outcome is said."""
        self._keep(asyncio.create_task(work))

    async def watch(self) -> None:
        """Until cancelled: offer a renewed certificate to the workers as soon as it and its key fit."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                pem = await asyncio.to_thread(_pem, self.config)
            except Environment:
                continue  # it is being written; what is in force stays
            if pem != self._pem:
                async with self._busy:
                    await self._offer(self.config, pem, Changes())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _offer(self, config: Config, pem: tuple[str, str], changes: Changes) -> Verdict:
        """To one worker first: what that cannot use, nobody gets."""
        told, fault = self._told(config, pem), GONE
        gateways = [channel for name in self.gateways if (channel := self._channel(name)) is not None]
        while gateways and fault == GONE:
            fault = await gateways.pop(0).tell(told, within_s=_TAKE_S)
        if fault not in ("", GONE):
            return self._refuse(fault)
        before, self.config, self._pem = self.config, config, pem
        others = [channel for name in self.others if (channel := self._channel(name)) is not None]
        faults = await asyncio.gather(*(channel.tell(told, within_s=_TAKE_S) for channel in (*gateways, *others)))
        for fault in faults:
            if fault not in ("", GONE):
                self._say(f"one process keeps its old configuration: {fault}; restart it")
        if self.supervisor is not None:
            for name in self.gateways:
                self.supervisor.amend(name, stop_s=gateway_stop_s(config))
        if config is not before or changes != Changes():
            self._say(_summary(changes))
        else:
            self._say("another certificate is in force")
        return Verdict(number=0, applied=changes.applied, next_start=changes.next_start, restart=changes.restart)

    def _refuse(self, fault: str) -> Verdict:
        self._say(f"reload rejected, the old configuration stays in force: {fault}")
        for name in self.gateways:
            if (channel := self._channel(name)) is not None:
                channel.say(Refused())
        return Verdict(number=0, fault=fault)

    def _channel(self, name: str) -> Channel | None:
        return None if self.supervisor is None else self.supervisor.channel(name)

    def _told(self, config: Config, pem: tuple[str, str]) -> Told:
        number = next(self._numbers)
        return Told(number=number, config=config.model_dump(mode="json"), certificate=pem[0], key=pem[1])

    def _asked(self, channel: Channel, ask: Ask) -> None:
        self._keep(asyncio.create_task(self._answer(channel, ask)))

    async def _answer(self, channel: Channel, ask: Ask) -> None:
        verdict = await (self.reload() if ask.what == "reload" else self.restart())
        channel.say(verdict.model_copy(update={"number": ask.number}))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def gateway_stop_s(config: Config) -> float:
    """How long a gateway worker may take to end: its drain, its last refusals, its own clean-up."""
    return config.gateway.drain_s + 5.0


def _pem(config: Config) -> tuple[str, str]:
    """Certificate and key as texts, or two empty ones without TLS. Blocks.

    Raises:
        Environment: one cannot be read.
    """
    tls = config.gateway.tls
    if tls is None:
        return "", ""
    try:
        return Path(tls.certificate).read_text(), Path(tls.key).read_text()
    except OSError as error:
        raise Environment(f"gateway.tls: {error.filename} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Environment("gateway.tls: the certificate and the key must be PEM, which is text") from None


def _summary(changes: Changes) -> str:
    parts = [
        f"{what}: {', '.join(paths)}"
        for what, paths in (
            ("in force", changes.applied),
            ("for replicas that start from now on", changes.next_start),
            ("only after a restart of everything", changes.restart),
        )
        if paths
    ]
    return f"reloaded; {'; '.join(parts) or 'no setting has changed'}"
