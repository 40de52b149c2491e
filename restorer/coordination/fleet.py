"""The other hosts, as this one sees them: what they report, how long each has been silent, and who may take which job.

What was on a host that is lost is given up here (:meth:`Fleet.look`), for others to start it anew; whether it is lost the store
decides, by what it holds at that moment. Judges by :mod:`policies.placement`; starts nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from policies import placement
from policies.config import Config, Model
from policies.failures import Class
from policies.placement import NOBODY_S, Rank, Tier
from policies.replica import TERMINAL, Replica
from policies.wire import REPORT_TTL_MS, HostReport, JobKind
from restorer.coordination.jobs import JobStore, Ranking

log = logging.getLogger("rewake.restorer")
_QUEUES_EVERY = 5


class Fleet:
    """One per restorer.

    Args:
        name: of this host.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._others: dict[str, HostReport] = {}
        self._silent: dict[str, float] = {}
        """Host -> monotonic time at which its report was first missed."""
        self._looks = 0
        self.mine: Callable[[], HostReport] | None = None
        """What this host would report now."""

    @property
    def alone(self) -> bool:
        """No other host reports: there is nobody to leave anything to."""
        return not self._others or self.mine is None

    def see(self, reports: Mapping[str, HostReport | None], now: float) -> None:
        """Take in who reports what, and who does not any more."""
        self._others = {name: one for name, one in reports.items() if one is not None and name != self._name}
        missed = {name for name, one in reports.items() if one is None and name != self._name}
        self._silent = {name: self._silent.get(name, now) for name in missed}

    def lost(self, now: float, after_s: float) -> list[str]:
        """Hosts whose last report was made at least ``after_s`` seconds ago."""
        # It is missed only when it has expired.
        return [name for name, since in self._silent.items() if now - since + REPORT_TTL_MS / 1000 >= after_s]

    async def read(self, jobs: JobStore) -> None:
        """Read who reports what; raises StoreUnavailable."""
        self.see(await jobs.hosts(), time.monotonic())

    async def look(self, jobs: JobStore, after_s: float) -> None:
        """Read the other hosts' reports, and give up what was on those that are lost; called about every second.

        Raises:
            StoreUnavailable: nothing has changed.
        """
        await self.read(jobs)
        self._looks += 1
        lost = self.lost(time.monotonic(), after_s)
        if not lost:
            return
        records = [one for one in (await jobs.replicas()).values() if one.state not in TERMINAL]
        for name in lost:
            there = [one for one in records if one.host == name]
            if there or self._looks % _QUEUES_EVERY == 0:
                detail = f"host {name} is lost: its restorer does not report, and no gateway can connect to what ran there"
                for replica in await jobs.bury(name, there, detail):
                    log.error("replica %s is given up: %s", replica, detail)

    def ranking(self, wanted: Iterable[tuple[JobKind, str]], config: Config, replicas: Collection[Replica]) -> Ranking:
        """For each kind of job and model, which hosts may take it. Not to be asked while this host is alone."""
        reports, found = self._all(), {}
        for kind, name in wanted:
            model = config.models.get(name)
            if model is None:
                # Another host may know it; if none takes it, this one says why.
                found[kind, name] = [Rank(self._name, NOBODY_S)]
            else:
                found[kind, name] = placement.ranking(name, model, reports, replicas, kind)
        return found

    def elsewhere(self, name: str, model: Model, fault: Class, tried: Collection[str], kind: JobKind = JobKind.START) -> bool:
        """A job that failed here for such a reason is worth a try on another host; ``tried``: where it failed before."""
        besides = {self._name, *tried}
        if fault in placement.ELSEWHERE:
            return bool(placement.others(name, model, self._others.values(), besides, kind))
        # Another host has another copy.
        return fault == "snapshot" and self.restores(name, model, tried)

    def restores(self, name: str, model: Model, tried: Collection[str]) -> bool:
        """Another host, none of ``tried``, has a snapshot of the model that fits there."""
        return bool(placement.others(name, model, self._others.values(), {self._name, *tried}, worst=Tier.HERE))

    def nobody(self, name: str, model: Model, kind: JobKind = JobKind.START) -> str:
        """What each of the other hosts lacks for such a job, in one line; empty: one could do it, or there is no other."""
        return placement.nobody(name, model, list(self._others.values()), kind) if self._others else ""

    def _all(self) -> list[HostReport]:
        assert self.mine is not None
        return [self.mine(), *self._others.values()]
