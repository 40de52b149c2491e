"""The shared store's contract: its keys, its records, their one writer, their codecs. Names only: no client lives here.

::

    key (after the namespace)     type    holds                                        writer
    :schema                       string  SCHEMA; a process refuses another number     first process
    :seq                          int     position of the latest replica write         restorer (inside Lua)
    :fence                        int     number of the latest claim                   restorer (inside Lua)
    :replicas                     hash    replica id -> Replica                        restorer holding its fence, or burying
    :operation:{id}               string  Operation, expires a day after its end       gateway creates, restorer settles
    :active:{model}               string  id of the model's running scale-up           gateway (Lua), restorer (Lua)
    :job:{id}                     hash    record (Job), fence, owner, attempts         gateway creates, restorer settles
    :jobs                         zset    job id -> ms (store clock) claimable from    gateway adds, restorer moves
    :jobs:{host}                  zset    the same, for one host: stops, moves to it   gateway adds, restorer moves
    :starts:{model}               hash    slot -> job id of each start not settled     gateway (Lua), restorer (Lua)
    :stages:{model}               hash    StageKey.field -> JSON list of its seconds   restorer
    :group:{name}                 hash    model -> Waiting: who waits for a place      gateway (Lua)
    :tenure:{model}               string  ms (store clock) since when it serves        restorer (Lua), gateway (Lua)
    :preloaded                    set     models that were preloaded                   gateway adds, restorer clears
    :budget:{name}                hash    what a tenant may use now; expires when full gateway (Lua)
    :permits:{name}               hash    gateway -> its part of a pool (permits.lua)  gateway (Lua)
    :failure:{model}              string  Failure; expires when it may be tried again  restorer
    :tally:{host}                 hash    Point.field -> what this host has counted    that restorer
    :spans                        list    Span, the newest last; at most SPANS_KEPT    restorer adds, gateway takes
    :gateways / :gateway:{id}     set, string (expires)   GatewayReport                that gateway
    :hosts / :host:{name}         set, string (expires)   HostReport                   that restorer
    :facts:{name}                 string  HostFacts of a host; expires with its report that restorer
    :verdicts                     hash    snapshot, tab, host -> JSON list of its last Notes   that host's restorer
    :journal                      list    Trail: the last attempts that ended, newest first   restorers push
    :suspects                     hash    incarnation -> reason                        gateway adds, its restorer removes
    :recent                       zset    operation or task id -> ms it was made at    gateway; the last RECENT stay
    :task:{id}                    string  Task; expires                                gateway creates, restorer settles
    :tasks:{host}                 list    ids of tasks that its restorer has not taken gateway adds, restorer takes
    :progress:{host}              hash    job or task id -> Progress; expires          that restorer
    :events                       pubsub  Hint: a record changed, read it again        everyone

Events hint, records rule: a lost message costs a moment (readers re-read every few seconds), never a wrong state.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from policies.replica import Replica, State

SCHEMA = "1"

REPORT_TTL_MS = 6_000
"""A gateway or host that has not reported for this long is gone; reports are renewed every second."""
OPERATION_TTL_S = 86_400
TALLY_TTL_S = 86_400
"""What a host has counted is kept for so long after its last report; then the host is forgotten."""
REJECTED_DEMAND_S = 30.0
"""A request that was turned away counts as demand for this long, so that the start it asked for is not cancelled."""
RECENT = 64
"""Operations and tasks that can be listed."""
MAX_WAITING = 32
"""Held requests that one gateway's report names."""


class Keys:
    """The keys of one installation."""

    def __init__(self, namespace: str) -> None:
        self.prefix = namespace
        self.schema = f"{namespace}:schema"
        self.seq = f"{namespace}:seq"
        self.fence = f"{namespace}:fence"
        self.replicas = f"{namespace}:replicas"
        self.jobs = f"{namespace}:jobs"
        self.gateways = f"{namespace}:gateways"
        self.hosts = f"{namespace}:hosts"
        self.verdicts = f"{namespace}:verdicts"
        self.journal = f"{namespace}:journal"
        self.suspects = f"{namespace}:suspects"
        self.preloaded = f"{namespace}:preloaded"
        self.recent = f"{namespace}:recent"
        self.events = f"{namespace}:events"
        self.spans = f"{namespace}:spans"

    def operation(self, id: str) -> str:
        return f"{self.prefix}:operation:{id}"

    def active(self, model: str) -> str:
        return f"{self.prefix}:active:{model}"

    def job(self, id: str) -> str:
        return f"{self.prefix}:job:{id}"

    def host_jobs(self, host: str) -> str:
        return f"{self.prefix}:jobs:{host}"

    def starts(self, model: str) -> str:
        return f"{self.prefix}:starts:{model}"

    def stages(self, model: str) -> str:
        return f"{self.prefix}:stages:{model}"

    def group(self, name: str) -> str:
        return f"{self.prefix}:group:{name}"

    def tenure(self, model: str) -> str:
        return f"{self.prefix}:tenure:{model}"

    def budget(self, tenant: str) -> str:
        return f"{self.prefix}:budget:{tenant}"

    def permits(self, pool: str) -> str:
        return f"{self.prefix}:permits:{pool}"

    def failure(self, model: str) -> str:
        return f"{self.prefix}:failure:{model}"

    def gateway(self, id: str) -> str:
        return f"{self.prefix}:gateway:{id}"

    def tally(self, host: str) -> str:
        return f"{self.prefix}:tally:{host}"

    def facts(self, host: str) -> str:
        return f"{self.prefix}:facts:{host}"

    def host(self, name: str) -> str:
        return f"{self.prefix}:host:{name}"

    def task(self, id: str) -> str:
        return f"{self.prefix}:task:{id}"

    def host_tasks(self, host: str) -> str:
        return f"{self.prefix}:tasks:{host}"

    def progress(self, host: str) -> str:
        return f"{self.prefix}:progress:{host}"


COLD = "cold"
"""The origin of an engine that was not restored."""
TRAILS = 100
"""Ended attempts kept in :journal."""
STAGE_SAMPLES = 32
"""Durations kept for each stage, the newest last."""


class StageKey(NamedTuple):
    """What one list of durations in :stages:{model} is about."""

    host: str
    origin: str
    """The snapshot restored, or :data:`COLD`."""
    stage: str

    @property
    def field(self) -> str:
        return "\t".join(self)

    @classmethod
    def of(cls, field: str) -> StageKey | None:
        """The key of a hash field; None for one that was not made here."""
        parts = field.split("\t")
        return cls(*parts) if len(parts) == 3 else None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class JobKind(enum.StrEnum):
    START = "start"
    """Bring one replica to ADMITTED, by restore or cold start."""
    STOP = "stop"
    """Drain one replica and stop it."""
    SNAPSHOT = "snapshot"
    """Start a donor, capture it, publish the snapshot, let the donor go."""


Reason = Literal["demand", "admin", "keep", "schedule", "preload", "group"]
"""Why work was asked for; ``group``: to make room for another model. Only ``demand`` is cancelled when the demand is gone."""


class Replaced(_Record):
    """A replica that moves to another host."""

    replica: str
    incarnation: str
    host: str


class Job(_Record):
    """One unit of a restorer's work. Its id is ``operation/slot``."""

    id: str
    kind: JobKind
    model: str
    operation: str
    reason: Reason
    replica: str = ""
    """Slot to start or stop."""
    incarnation: str = ""
    """STOP only: the incarnation meant; another one is left alone."""
    detail: str = ""
    """STOP only: why, in words that the replica's record keeps."""
    trace: str = ""
    """``traceparent`` of the operation, when somebody traces it."""
    replaces: Replaced | None = None
    """START only: what is stopped once this one is admitted."""


class OperationState(enum.StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Operation(_Record):
    """One scale-up, scale-down, snapshot or move, as a caller follows it. A repeated call while it runs gets the same id."""

    id: str
    kind: Literal["scale_up", "scale_down", "snapshot", "move"]
    model: str
    reason: Reason
    state: OperationState
    jobs: tuple[str, ...]
    """Jobs not settled yet."""
    target: int = 0
    """scale_up: replicas asked for."""
    detail: str = ""
    """Why it failed or was cancelled."""
    code: int = 0
    """Exit code for the command line: 0 ok, 1 failed, 3 host incompatible."""
    snapshot: str | None = None
    """snapshot: the id that was published."""
    trace: str = ""
    """Its ``traceparent``, when somebody traces it."""
    created_ms: int = 0
    updated_ms: int = 0


WAITING_TTL_MS = 3_000
"""A model that nobody has asked a place for within this time does not wait for one any more."""


class Waiting(_Record):
    """A model that found its group full. Asked for again every second, for as long as somebody wants it."""

    since_ms: int
    seen_ms: int
    yields: bool = False
    """Nobody waits: it is to be kept warm. Demand goes first, and it displaces only who is idle."""


class Failure(_Record):
    """Why no replica of a model can come for now; gateways answer with it until the key expires."""

    code: Literal["restore_failed"]
    detail: str
    operation: str


class ModelLoad(_Record):
    """One model as one gateway sees it."""

    held: int
    inflight: int
    rejected: int
    """Requests turned away with a promise (``model_loading``, ``cold_start_timeout``) within the last REJECTED_DEMAND_S."""
    arrivals: int
    """Requests ever accepted as demand; a change means activity even if all else is 0."""

    @property
    def demand(self) -> int:
        return self.held + self.inflight + self.rejected


class Held(_Record):
    """One request that waits, as an operator sees it."""

    model: str
    tenant: str
    position: int
    """In the queue of its gateway worker; 1 is next. Each worker has a queue of its own, and slots of its own for those in it."""
    waited_s: float
    eta_s: float | None


class GatewayReport(_Record):
    """What one gateway worker says of itself, every second and at once when something turns to or from zero."""

    id: str
    seq: int
    """Every replica write up to this one is known to this gateway: a drain may trust its ``replicas`` counts."""
    models: Mapping[str, ModelLoad]
    replicas: Mapping[str, int]
    """incarnation -> requests in flight; absent means 0."""
    draining: bool = False
    waiting: tuple[Held, ...] = ()
    """The first MAX_WAITING of those that are held; their number is in ``models``."""
    knocked: Mapping[str, bool] = {}
    """incarnation -> whether this gateway could connect to it a moment ago, of each whose host does not report."""


class SnapshotSummary(_Record):
    """A snapshot as the admin API and ``rewake snapshot ls`` list it."""

    id: str
    model: str
    created_ms: int
    bytes: int
    fits: bool
    """It fits the host that reports it, and the model's present settings."""
    quarantined: str | None = None
    signature: str = ""
    """What its signatures are worth to the host that reports it."""
    mismatches: tuple[str, ...] = ()
    engine: str = ""
    cold_start_s: float = 0.0
    """What the donor's start took, from exec to its first token."""


class HostReport(_Record):
    """What one restorer says of its host."""

    host: str
    capable: bool
    """CRIU works here; otherwise only cold starts are possible."""
    capability: str
    """How CRIU was found, or what is missing."""
    snapshots: tuple[SnapshotSummary, ...]
    running: int
    parallel_starts: int
    starting: int = 0
    """Starts and snapshots under way, of ``parallel_starts``."""
    models: tuple[str, ...] | None = None
    """Those of its configuration."""
    resting: tuple[str, ...] = ()
    """Models of which an engine sleeps in its memory, to be resumed."""
    gpus: int = 0
    free_gpus: int = 0
    """Those that no box has."""
    pulls: bool = False
    """Starts may pull snapshots from a remote."""
    obstacles: Mapping[str, str] = {}
    """Each backend that cannot make or restore snapshots here, and why."""
    place: str = ""
    """Which restorer this is, among several that may have been given one name."""
    backends: Mapping[str, str] = {}
    """Each backend that a model here uses, and what it has found: its tools, or what is missing."""
    gauges: Mapping[str, float] = {}
    """:attr:`policies.series.Point.field` -> value, of every gauge of :data:`policies.series.SERIES` that is known."""


class Hint(_Record):
    """The payload of :events. Every field is a hint; readers re-read the records."""

    replica: Replica | None = None
    """The record just written, so that an admission needs no second round trip."""
    model: str | None = None
    """A failure was written or cleared, or an operation of this model changed."""
    operation: str | None = None
    gateway: str | None = None
    """This gateway's report changed in a way that somebody may wait for."""
    job: str | None = None
    """A job was added."""
    permits: str | None = None
    """Somebody waits for permits of this pool, or gave some back."""
    debtor: str | None = None
    """This tenant has just used more tokens than it had."""
    task: str | None = None
    """A task was made, or settled."""
    progress: str | None = None
    """The restorer of this host has got on with something."""


def demand(reports: Sequence[GatewayReport], model: str) -> int:
    """Live requests for a model over all gateways: held, in flight, or turned away a moment ago."""
    return sum(load.demand for report in reports if (load := report.models.get(model)) is not None)


def durations(record: Replica) -> Iterator[tuple[StageKey, float]]:
    """What an admitted replica's start took, stage by stage."""
    if record.state is State.ADMITTED:
        kept = record.start if record.start in ("resumed", "woken") else None
        origin = kept or (record.snapshot if record.start == "restored" and record.snapshot else COLD)
        yield from ((StageKey(record.host, origin, stage.name), stage.seconds) for stage in record.stages)
