"""The operator's API under /admin/v1: what there is, and operations on it. Every call carries the admin token.

Bodies are validated here; the operations themselves are :mod:`gateway.operations`'. Knows no web framework.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway import whereabouts
from gateway.current import Current
from gateway.errors import Busy, InvalidRequest, ModelNotFound, NotFound, Unauthorized
from gateway.exchange import Call, Reply, reply
from gateway.life import Handler
from gateway.operations import Events, Operations, Outcome
from gateway.overview import Overview, seconds
from gateway.registry import Registry
from gateway.report import Reporter
from gateway.store import Store
from gateway.tasks import Tasks
from gateway.why import Why
from policies import placement
from policies.replica import COMING, Replica, State
from policies.tasks import MAX_LOG_LINES, Task, TaskKind
from policies.wire import HostReport

MAX_WAIT_S = 60.0
MAX_BODY_BYTES = 64 << 10


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Snapshot(_Body):
    model: str


class _ScaleUp(_Body):
    model: str
    replicas: Annotated[int, Field(ge=1)] = 1


class _ScaleDown(_Body):
    model: str
    replicas: Annotated[int, Field(ge=0)] = 0
    if_idle: bool = False


class _Drain(_Body):
    replica: str


class _Move(_Body):
    replica: str
    to: str = ""
    """Host that shall have it; empty: the best of the others."""


class _Task(_Body):
    kind: TaskKind
    host: str = ""
    """Whose restorer is asked; empty: that of the replica, or the first one that has the snapshot."""
    snapshot: str = ""
    replica: str = ""
    lines: Annotated[int, Field(ge=0, le=MAX_LOG_LINES)] = 200
    offset: Annotated[int, Field(ge=0)] | None = None


B = TypeVar("B", bound=_Body)
BODIES: Mapping[str, type[BaseModel]] = {
    "admin.create_snapshot": _Snapshot,
    "admin.scale_up": _ScaleUp,
    "admin.scale_down": _ScaleDown,
    "admin.drain": _Drain,
    "admin.move": _Move,
    "admin.create_task": _Task,
}
"""What each call takes, by its name in the table of routes."""


class Admin:
    """The handlers. All raise :class:`gateway.errors.Unauthorized` without the right token."""

    def __init__(
        self,
        current: Current,
        token: str,
        *,
        store: Store,
        registry: Registry,
        reporter: Reporter,
        operations: Operations,
        events: Events,
        overview: Overview,
    ) -> None:
        self._current = current
        self._token = token.encode()
        self._store = store
        self._registry = registry
        self._reporter = reporter
        self._operations = operations
        self._tasks = Tasks(store, events)
        self._overview = overview
        self._why = Why(current, registry=registry, store=store)

    def handlers(self) -> dict[str, Handler]:
        """All of them, by their names in the table of routes."""
        return {
            "admin.overview": self.overview,
            "admin.why": self.why,
            "admin.models": self.models,
            "admin.replicas": self.replicas,
            "admin.hosts": self.hosts,
            "admin.snapshots": self.snapshots,
            "admin.create_snapshot": self.create_snapshot,
            "admin.scale_up": self.scale_up,
            "admin.scale_down": self.scale_down,
            "admin.drain": self.drain,
            "admin.move": self.move,
            "admin.operation": self.operation,
            "admin.create_task": self.create_task,
            "admin.task": self.task,
        }

    async def overview(self, call: Call) -> Reply:
        """Everything at a glance; ``?after=VERSION&wait=SECONDS`` (at most 30) answers when there is something new."""
        self.authorize(call)
        return await self._overview.answer(call)

    async def why(self, call: Call) -> Reply:
        """Why a model or a replica is not what it should be: ``?of=NAME``."""
        self.authorize(call)
        return await self._why.answer(call)

    async def models(self, call: Call) -> Reply:
        self.authorize(call)
        return reply({"models": [self._model(name) for name in self._current.config.models]})

    async def replicas(self, call: Call) -> Reply:
        """Every replica's record, its requests in flight over all gateways, and why this one cannot reach it, if so."""
        self.authorize(call)
        inflight = self._reporter.inflight()
        return reply(
            {
                "replicas": [
                    r.model_dump(mode="json") | {"inflight": inflight.get(r.incarnation, 0), "barred": whereabouts.barred(r)}
                    for r in self._registry.replicas()
                ]
            }
        )

    async def snapshots(self, call: Call) -> Reply:
        """What each host's restorer says it has."""
        self.authorize(call)
        return reply({"hosts": list(await self._store.hosts())})

    async def hosts(self, call: Call) -> Reply:
        """What each host is, as far as a snapshot cares: by these facts it is decided where one can be restored."""
        self.authorize(call)
        facts = await self._store.facts()
        return reply({"hosts": [{"host": name, "facts": one.model_dump(mode="json")} for name, one in facts.items()]})

    async def create_snapshot(self, call: Call) -> Reply:
        self.authorize(call)
        return _accepted(await self._operations.create_snapshot(self._known(_parsed(_Snapshot, call).model)))

    async def scale_up(self, call: Call) -> Reply:
        self.authorize(call)
        body = _parsed(_ScaleUp, call)
        model = self._known(body.model)
        most = self._current.config.models[model].max_replicas
        if body.replicas > most:
            raise InvalidRequest(f"replicas is {body.replicas}, but models.{model}.max_replicas is {most}.", "invalid_request")
        outcome = await self._operations.scale_up(model, body.replicas, "admin")
        if outcome is None:
            raise Busy(f"Model {model!r} cannot be scaled up now.")
        return _accepted(outcome)

    async def scale_down(self, call: Call) -> Reply:
        """202 and an operation that drains and stops; with ``if_idle`` 409 while anybody uses the model."""
        self.authorize(call)
        body = _parsed(_ScaleDown, call)
        model = self._known(body.model)
        await self._reporter.look()
        demand = self._reporter.demand(model)
        if body.if_idle and demand:
            raise Busy(f"Model {model!r} is in use: {demand} requests are held, in flight or about to return.")
        outcome = await self._operations.scale_down(model, body.replicas, self._reporter.inflight())
        if outcome is None:
            raise Busy(f"Model {model!r} cannot be scaled down now.")
        return _accepted(outcome)

    async def drain(self, call: Call) -> Reply:
        """Stop one replica, given by its slot (``model#slot``), once its requests have ended."""
        self.authorize(call)
        replica = _parsed(_Drain, call).replica
        record = next((r for r in self._registry.replicas() if r.id == replica), None)
        outcome = None
        if record is not None:
            outcome = await self._operations.scale_down(record.model, 0, self._reporter.inflight(), replica)
        if outcome is None:
            raise NotFound(f"Replica {replica!r} is not admitted.")
        return _accepted(outcome)

    async def move(self, call: Call) -> Reply:
        """Start one on another host, and drain ``replica`` when that serves; 409 with every reason if no host can have it."""
        self.authorize(call)
        body = _parsed(_Move, call)
        record = next((r for r in self._registry.replicas() if r.id == body.replica), None)
        if record is None or record.model not in self._current.config.models:
            raise NotFound(f"Replica {body.replica!r} is not admitted.")
        to = self._target(record, body.to, await self._store.hosts())
        outcome = await self._operations.move(record.model, record.id, to)
        if outcome is None:
            raise NotFound(f"Replica {body.replica!r} is not admitted.")
        return _accepted(outcome)

    def _target(self, record: Replica, to: str, reports: Sequence[HostReport]) -> str:
        """The host that a replica moves to; raises InvalidRequest, NotFound or Busy if there is none."""
        if to == record.host:
            raise InvalidRequest(f"Replica {record.id!r} is on {to} already.", "invalid_request")
        others = [one for one in reports if one.host != record.host and to in ("", one.host)]
        if not others:
            raise NotFound(f"No restorer reports from host {to!r}." if to else "No restorer reports from another host.")
        spec = self._current.config.models[record.model]
        lacking = placement.nobody(record.model, spec, others)
        if lacking:
            raise Busy(f"Replica {record.id!r} cannot be moved. {lacking}.")
        return placement.ranking(record.model, spec, others, self._registry.replicas())[0].host

    async def operation(self, call: Call) -> Reply:
        """An operation; ``?wait=SECONDS`` (at most 60) answers when it has ended, or then."""
        self.authorize(call)
        id = call.params["id"]
        found = await self._operations.wait(id, seconds(call.query.get("wait", "0"), MAX_WAIT_S))
        if found is None:
            raise NotFound(f"There is no operation {id!r}; they are forgotten a day after their end.")
        return reply(found)

    async def create_task(self, call: Call) -> Reply:
        """202 and a task: one question or chore for one host's restorer."""
        self.authorize(call)
        body = _parsed(_Task, call)
        host = await self._host(body)
        task = Task(id="", kind=body.kind, host=host, **body.model_dump(exclude={"kind", "host"}))
        return reply(await self._tasks.create(task), 202)

    async def task(self, call: Call) -> Reply:
        """A task and what was found; ``?wait=SECONDS`` (at most 60) answers when it has ended, or then."""
        self.authorize(call)
        id = call.params["id"]
        found = await self._tasks.wait(id, seconds(call.query.get("wait", "0"), MAX_WAIT_S))
        if found is None:
            raise NotFound(f"There is no task {id!r}; they are forgotten an hour after they were made.")
        return reply(found)

    async def _host(self, body: _Task) -> str:
        """Whose restorer can do it; raises NotFound when nobody's can."""
        hosts = await self._store.hosts()
        if body.kind == "log":
            record = next((r for r in self._registry.replicas() if body.replica in (r.id, r.incarnation)), None)
            wanted = body.host or ("" if record is None else record.host)
            fits = [host.host for host in hosts if host.host == wanted or not wanted]
            missing = f"replica {body.replica!r}"
        elif body.kind in ("pull", "remote"):
            fits = [host.host for host in hosts if body.host in ("", host.host)]
            missing = "a place"
        else:
            having = [host for host in hosts if any(one.id == body.snapshot for one in host.snapshots)]
            fits = [host.host for host in having if body.host in ("", host.host)]
            missing = f"snapshot {body.snapshot!r}"
        if not fits:
            where = f" on {body.host}" if body.host else ""
            raise NotFound(f"No restorer that is there has {missing}{where}.")
        return fits[0]

    def authorize(self, call: Call) -> None:
        """Raises Unauthorized unless the call carries the token."""
        scheme, _, token = (call.authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
            raise Unauthorized("The admin API needs `Authorization: Bearer TOKEN`.", headers={"WWW-Authenticate": "Bearer"})

    def _known(self, name: str) -> str:
        model = self._current.config.resolve(name)
        if model is None:
            raise ModelNotFound(f"The configuration has no model {name!r}.")
        return model

    def _model(self, name: str) -> dict[str, object]:
        spec, registry = self._current.config.models[name], self._registry
        failure = registry.failure(name)
        return {
            "name": name,
            "aliases": list(spec.aliases),
            "state": registry.state(name),
            "admitted": registry.count(name, {State.ADMITTED}),
            "coming": registry.count(name, COMING),
            "demand": self._reporter.demand(name),
            "keep": spec.keep,
            "max_replicas": spec.max_replicas,
            "on_cold": spec.on_cold,
            "failure": None if failure is None else failure.detail,
        }


def _accepted(outcome: Outcome) -> Reply:
    return reply(outcome.operation, 202)


def _parsed(kind: type[B], call: Call) -> B:
    try:
        return kind.model_validate_json(call.body or b"{}")
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in error.errors())
        raise InvalidRequest(f"The request body does not fit: {faults}.", "invalid_request") from None
