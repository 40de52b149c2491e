"""Everything at a glance, in one bounded document: what the console and ``rewake top`` show.

Who watches asks for what came after the version that it has, and is answered when there is something new: a watcher sees each
stage of a restore as it happens, and costs nothing while nothing does. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from gateway import whereabouts
from gateway.current import Current
from gateway.errors import InvalidRequest, StoreUnavailable
from gateway.eta import Eta
from gateway.exchange import Call, Reply, reply
from gateway.registry import Registry
from gateway.report import Reporter
from gateway.store import Store
from gateway.version import version
from policies.floor import account
from policies.replica import COMING, Replica, State
from policies.tasks import Progress, Task
from policies.wire import Hint, HostReport, Operation

MAX_WAIT_S = 30.0
MAX_REPLICAS = 500
MAX_HELD = 100
SHOWN = 30
"""Operations and tasks."""
_CALM_S = 0.1
"""Changes within this time are one, however many hints come."""


class Overview:
    """One per gateway process."""

    def __init__(self, current: Current, *, registry: Registry, reporter: Reporter, store: Store, eta: Eta) -> None:
        self._current = current
        self._registry = registry
        self._reporter = reporter
        self._store = store
        self._eta = eta
        self._changed = asyncio.Event()
        self._begun_ms = time.time_ns() // 1_000_000
        self._version = 0

    def hinted(self, hint: Hint) -> None:
        """Something in the store has changed."""
        if hint.permits is None and hint.debtor is None:
            self.touch()

    def touch(self) -> None:
        """Something that is shown has changed."""
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, call: Call) -> Reply:
        """``?after=VERSION&wait=SECONDS``: at once when there is something newer, else when there is, or then."""
        after, wait_s = call.query.get("after", ""), seconds(call.query.get("wait", "0"), MAX_WAIT_S)
        if after == self._name() and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
                    await asyncio.sleep(_CALM_S)
        return reply(await self._document())

    def _name(self) -> str:
        """Of what there is now. Other workers have other names, so that whoever comes from one of them is answered at once."""
        return f"{self._begun_ms:x}-{self._version}"

    async def _document(self) -> dict[str, Any]:
        name = self._name()
        hosts: Sequence[HostReport] = ()
        progress: Sequence[Progress] = ()
        operations: Sequence[Operation] = ()
        tasks: Sequence[Task] = ()
        reachable = True
        try:
            hosts = await self._store.hosts()
            progress = await self._store.progress([host.host for host in hosts])
            operations, tasks = await self._store.recent(SHOWN)
        except StoreUnavailable:
            # What this process knows is worth showing just then.
            reachable = False
        inflight, replicas, held = self._reporter.inflight(), self._registry.replicas(), self._reporter.held()
        return {
            "version": name,
            "now_ms": time.time_ns() // 1_000_000,
            "rewake": version(),
            "store": reachable,
            "gateways": self._reporter.gateways,
            "models": [self._model(model, hosts) for model in self._current.config.models],
            "held": [one.request.model_dump() | {"gateway": one.gateway, "of": one.of} for one in held[:MAX_HELD]],
            "replicas": [_replica(one, inflight.get(one.incarnation, 0)) for one in replicas[:MAX_REPLICAS]],
            "progress": progress,
            "operations": operations,
            "tasks": [task.model_copy(update={"result": {}}) for task in tasks],
            "hosts": hosts,
            "remotes": list(self._current.config.storage.remotes),
        }

    def _model(self, name: str, hosts: Sequence[HostReport]) -> dict[str, Any]:
        spec, registry, load = self._current.config.models[name], self._registry, self._reporter.load(name)
        failure, eta_s = registry.failure(name), self._eta.seconds(name)
        cold_s = [one.cold_start_s for host in hosts for one in host.snapshots if one.model == name and one.cold_start_s]
        return {
            "name": name,
            "aliases": list(spec.aliases),
            "engine": spec.engine.kind,
            "group": spec.group,
            "state": registry.state(name),
            "admitted": registry.count(name, {State.ADMITTED}),
            "coming": registry.count(name, COMING),
            "draining": registry.count(name, {State.DRAINING}),
            "demand": load.demand,
            "held": load.held,
            "inflight": load.inflight,
            "keep": spec.keep,
            "max_replicas": spec.max_replicas,
            "concurrency": spec.concurrency,
            "on_cold": spec.on_cold,
            "idle_park_s": spec.idle_park_s,
            "eta_s": None if eta_s is None else round(eta_s, 1),
            "failure": None if failure is None else failure.detail,
            "usual_s": self._eta.kinds_s(name),
            "cold_start_s": max(cold_s, default=None),
        }


def _replica(record: Replica, inflight: int) -> dict[str, Any]:
    """A record, its requests in flight, and where the time of its start went."""
    spent = account(record)
    more = {"inflight": inflight, "account": "" if spent is None else spent.text, "barred": whereabouts.barred(record)}
    return record.model_dump(mode="json") | more


def seconds(text: str, most: float) -> float:
    """A time to wait, out of a query; raises InvalidRequest."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= most:
        raise InvalidRequest(f"wait is {text!r}; it must be a number of seconds from 0 to {most:g}.", "invalid_request")
    return found
