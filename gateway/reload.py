"""Takes up a new configuration while requests run: all of it or nothing, and says what it changes when.

Alone, a process reads its own file again; under a supervisor it asks that to do it for all of them. A fault leaves the old
configuration and the old certificate in force. What the parts do with a change is theirs: they hear of it by
:class:`gateway.current.Current`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway import logs
from gateway.current import Current
from gateway.errors import Busy, InvalidRequest, StoreUnavailable
from gateway.exchange import Call, Reply, reply
from gateway.handover import Line, NoAnswer
from gateway.settings import SettingsError, read, told
from gateway.tls import CertificateError, Certificates, Pem
from policies.config import Config
from policies.control import Told
from policies.reload import Changes, merge

WATCH_S = 5.0
"""How often a process that owns its files looks for a renewed certificate."""


class Rejected(Exception):
    """What was read cannot be put in force; the message lists every fault. Nothing has changed."""


class Reloader:
    """One per gateway process.

    Args:
        certificates: None without TLS.
        file: the configuration file; None when a supervisor has it.
        line: the line to the supervisor; None when there is none.
        authorize: raises unless a call carries the admin token.
        report: told whether the last reload succeeded.
    """

    def __init__(
        self,
        current: Current,
        *,
        certificates: Certificates | None,
        file: Path | None,
        line: Line | None,
        authorize: Callable[[Call], None],
        report: Callable[[bool], None],
    ) -> None:
        self._current = current
        self._certificates = certificates
        self._file = file
        self._line = line
        self._authorize = authorize
        self._report = report
        if line is not None:
            line.on_told = self._told
            line.on_refused = lambda: report(False)

    async def reload(self) -> Changes:
        """Have the configuration read again and put in force.

        Raises:
            Rejected: it has faults.
            NoAnswer: the supervisor does not say.
        """
        if self._line is not None:
            verdict = await self._line.ask("reload")
            if verdict.fault:
                raise Rejected(verdict.fault)
            return Changes(verdict.applied, verdict.next_start, verdict.restart)
        if self._file is None:
            raise Rejected("this process was given its configuration without a file")
        try:
            config, pem = await asyncio.to_thread(read, self._file)
            return self.put(config, pem)
        except (SettingsError, Rejected) as error:
            self._report(False)
            logs.error("reload rejected; the old configuration stays in force", reason=str(error))
            raise Rejected(str(error)) from None

    def put(self, config: Config, pem: Pem | None) -> Changes:
        """Put it in force, in one step.

        Raises:
            Rejected: certificate and key do not fit; everything stays as it was.
        """
        merged, changes = merge(self._current.config, config)
        if pem is not None and self._certificates is not None and pem != self._certificates.pem:
            try:
                self._certificates.replace(pem)
            except CertificateError as error:
                raise Rejected(f"gateway.tls: {error}") from None
            logs.info("another certificate is in force")
        if changes != Changes():
            self._current.replace(merged)
            logs.info("another configuration is in force", **{name: list(paths) for name, paths in _named(changes).items()})
        self._report(True)
        return changes

    async def watch(self) -> None:
        """Until cancelled: hear the supervisor; or, alone, take up a renewed certificate as soon as it and its key fit."""
        if self._line is not None:
            await self._line.run()
        seen: tuple[object, ...] | None = None
        while True:
            tls = self._current.config.gateway.tls
            if self._file is not None and self._certificates is not None and tls is not None:
                found = await asyncio.to_thread(signature, tls.certificate, tls.key)
                if seen not in (None, found):
                    await self._renew(tls.certificate, tls.key)
                seen = found
            await asyncio.sleep(WATCH_S)

    async def handle_reload(self, call: Call) -> Reply:
        """``POST /admin/v1/reload``: 200 with what changed, or 400 with every fault."""
        self._authorize(call)
        try:
            changes = await self.reload()
        except Rejected as error:
            raise InvalidRequest(
                f"The configuration was rejected, and the old one stays in force: {error}", "invalid_config"
            ) from None
        except NoAnswer as error:
            raise StoreUnavailable(f"It is not known what became of the reload: {error}.", retry_after_s=1.0) from None
        return reply(_named(changes))

    async def handle_restart(self, call: Call) -> Reply:
        """``POST /admin/v1/restart``: new processes take the places of all workers; 200 when they serve."""
        self._authorize(call)
        if self._line is None:
            raise Busy("Nobody could start this process's successor; under `rewake up`, workers are restarted one by one.")
        try:
            verdict = await self._line.ask("restart")
        except NoAnswer as error:
            raise StoreUnavailable(f"It is not known what became of the restart: {error}.", retry_after_s=1.0) from None
        if verdict.fault:
            raise Busy(f"Not all workers were restarted: {verdict.fault}")
        return reply({"restarted": list(verdict.applied)})

    async def _renew(self, certificate: str, key: str) -> None:
        assert self._certificates is not None
        try:
            pem = await asyncio.to_thread(lambda: Pem(Path(certificate).read_text(), Path(key).read_text()))
            if pem != self._certificates.pem:
                self._certificates.replace(pem)
                logs.info("another certificate is in force")
        except (OSError, UnicodeDecodeError, CertificateError) as error:
            logs.warning("a changed certificate cannot be used; the old one stays in force", reason=str(error))

    def _told(self, message: Told) -> str:
        """The supervisor's word; why it is not in force, or nothing."""
        try:
            self.put(*told(message))
        except (SettingsError, Rejected) as error:
            self._report(False)
            return str(error)
        return ""


def signature(*files: str) -> tuple[object, ...]:
    """Changes when one of the files does. Blocks."""
    found: list[object] = []
    for file in files:
        try:
            facts = Path(file).stat()
            found.append((facts.st_ino, facts.st_mtime_ns, facts.st_size))
        except OSError:
            found.append(None)
    return tuple(found)


def _named(changes: Changes) -> Mapping[str, tuple[str, ...]]:
    return dataclasses.asdict(changes)
