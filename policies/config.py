"""The configuration file as types: every setting, its default, its bounds.

Owns validation and the wording of its errors. Knows nothing of files or environment: callers read the YAML and pass the
parsed mapping to :func:`parse`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from policies.balance import Balance
from policies.groups import Group
from policies.holding import Bounds, Hold
from policies.matching import Matching
from policies.observing import Metrics, Tracing
from policies.reading import Restore
from policies.restoring import Restorer
from policies.retention import Retention
from policies.scalars import Bytes, Count, Network, PositiveSeconds, Seconds, Section
from policies.schedule import Window
from policies.sleeping import Sleep
from policies.storage import Storage
from policies.tenancy import Tenant
from policies.trust import Trust
from policies.warmup import Warmup

_MODEL_NAME = re.compile(r"[^\s\x00-\x1f\x7f#]{1,200}")


class ConfigError(ValueError):
    """The configuration is not usable. The message lists every fault, one a line: ``path: what is wrong``."""


class Gpu(Section):
    """What an engine has of the host's GPUs."""

    count: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs that are leased to each replica, and that it alone sees; 0: it runs on the CPU."""
    weights: Literal["apart", "dump"] = "apart"
    """``apart``: vLLM's weights are stored once beside its snapshots, and copied back while the rest is restored. ``dump``:
    they are part of each dump, as those of every other engine are."""
    wait_s: PositiveSeconds = 60.0
    """How long a start waits for GPUs that are free."""
    suspend_s: Seconds = 0.0
    """How long a stopped replica is kept asleep in the host's memory, off the GPU, for the next start to resume; 0: never."""
    untested: bool = False
    """Capture this engine on more GPUs than it is known to survive: a driver that cannot may hang for minutes."""


class Engine(Section):
    """How one engine is started and spoken to."""

    kind: Literal["llama-server", "vllm", "sglang", "tensorrt-llm", "http"]
    """Which adapter speaks to it; ``http`` is any server with an OpenAI-compatible ``/v1/completions``."""
    backend: Literal["criu", "runc", "sleep", "cold"] = "criu"
    """How its replicas are had: ``criu`` and ``runc`` restore them from snapshots, ``runc`` as OCI containers; ``sleep`` keeps a
    stopped engine alive, asleep by its own API; ``cold`` starts each by its command."""
    bundle: Annotated[str, Field(pattern="^/")] | None = None
    """``runc`` only: the folder of an OCI bundle to run the command in. None: it sees this host's file system, read-only."""
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """argv; the first element is an absolute path. The engine must listen on 0.0.0.0 at :attr:`port`."""
    env: Mapping[str, str] = {}
    """Its whole environment besides PATH, LANG, HOME and TMPDIR: nothing is inherited from the restorer."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Where it listens, in its own network namespace."""
    health_path: Annotated[str, Field(pattern="^/")] = "/health"
    """200 there means that it has started."""
    ready_timeout_s: PositiveSeconds = 1800.0
    """A cold start that takes longer has failed."""
    deterministic: bool = False
    """Its answers do not depend on what it computes at the same time, nor differ from one time to the next, which costs it speed.
    vLLM gets ``VLLM_BATCH_INVARIANT=1``, SGLang ``--enable-deterministic-inference``."""
    gpu: Gpu = Gpu()
    sleep: Sleep = Sleep()
    hosts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The hosts that may run it, by name or pattern (``gpu-*``); none named: any."""

    @model_validator(mode="after")
    def _backend_fits(self) -> Engine:
        if self.bundle is not None and self.backend != "runc":
            raise ValueError(f"bundle is for backend: runc, but backend is {self.backend}")
        if self.backend == "sleep" and self.kind not in ("vllm", "sglang"):
            raise ValueError(f"backend: sleep wants an engine with an API for it, vllm or sglang, but kind is {self.kind}")
        if self.deterministic and self.kind not in ("vllm", "sglang"):
            raise ValueError(f"deterministic is known of vllm and sglang alone, but kind is {self.kind}")
        if self.backend == "runc" and self.gpu.count:
            raise ValueError("backend: runc does not put GPUs into its containers; use backend: criu, or gpu.count: 0")
        return self

    @field_validator("command")
    @classmethod
    def _absolute(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not command[0].startswith("/"):
            raise ValueError(f"{command[0]!r} must be an absolute path: engines run with an environment of their own")
        return command


class Canary(Section):
    """The fixed requests whose answers a replica must repeat bit for bit."""

    prompts: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "The capital of France is",
        "Rewake restores a warmed inference engine from a snapshot. Before it may answer anyone, it must repeat what the "
        "donor said, token for token. List the numbers from one to twenty in words: one, two, three,",
    )
    """The fixed requests."""
    max_tokens: Count = 16
    """Tokens generated for each prompt, greedily."""
    timeout_s: PositiveSeconds = 120.0
    """How long each of them may take."""


class SnapshotPolicy(Section):
    """When snapshots of a model are made."""

    create: Literal["auto", "manual"] = "auto"
    """``auto``: the first cold start is captured on its way to admission. ``manual``: by ``rewake snapshot create``."""
    rehearse: bool = True
    """Restore the new snapshot once and compare its canary before the manifest is written."""


class Model(Section):
    """One model that clients can name."""

    engine: Engine
    aliases: tuple[str, ...] = ()
    """Other names for it. Without :attr:`served_name` the engine gets a request's name unchanged, so it must know them."""
    served_name: str | None = None
    """What the engine knows it by: put into each request in place of the client's name for it. None: that one stays."""
    weights: tuple[str, ...] = ()
    """Files or folders whose content is part of the snapshot's identity; a changed byte makes old snapshots unfit."""
    on_cold: Literal["hold", "reject"] = "hold"
    """With no admitted replica: keep the request waiting, or answer 503 ``model_loading`` at once. Both ask for one."""
    on_restore_failure: Literal["cold", "reject"] = "cold"
    """After a failed restore: start the engine cold (and say so), or answer 503 ``restore_failed``."""
    on_no_snapshot: Literal["cold", "reject"] = "cold"
    """The same, where no snapshot fits."""
    hold: Hold = Hold()
    defaults: Mapping[str, JsonValue] = {}
    """Parameters put into a request's body where the client left them out (or where :attr:`strip` took them out)."""
    strip: tuple[str, ...] = ()
    """Parameters taken out of a request's body before the engine sees it."""
    balance: Balance = "least_outstanding"
    """Which of several replicas gets a request; ``session`` and ``prefix`` keep what belongs together on one replica."""
    concurrency: Count = 8
    """Requests in flight on one replica, over all gateways."""
    max_replicas: Count = 1
    """The most that run at once."""
    keep: Annotated[int, Field(ge=0)] = 0
    """Replicas kept running however idle."""
    schedule: tuple[Window, ...] = ()
    """Times of the week at which more are kept."""
    preload: bool = False
    """Start one replica when the installation starts; it is parked when idle, unless it is kept."""
    group: str | None = None
    """The group whose members exclude each other."""
    pinned: bool = False
    """Never displaced by another member of its group."""
    idle_park_s: PositiveSeconds = 300.0
    """A replica beyond :attr:`keep` is parked (stopped, its snapshot kept) after this long without a request."""
    drain_s: Seconds = 60.0
    """How long a stopping replica may finish what it has begun."""
    first_byte_timeout_s: PositiveSeconds = 600.0
    """From dispatch to the response head; the time spent held does not count."""
    idle_body_timeout_s: PositiveSeconds = 300.0
    """The longest silence within a response body."""
    total_timeout_s: PositiveSeconds | None = None
    """From dispatch to the end of the response; None: for as long as it moves."""
    snapshot: SnapshotPolicy = SnapshotPolicy()
    restore: Restore = Restore()
    canary: Canary = Canary()
    warmup: Warmup = Warmup()

    @model_validator(mode="after")
    def _routing_is_fixed(self) -> Model:
        for key in {"model", "stream"} & {*self.defaults, *self.strip}:
            raise ValueError(f"defaults and strip cannot change {key!r}: requests are routed and answered by it")
        return self

    @model_validator(mode="after")
    def _keep_fits(self) -> Model:
        if self.keep > self.max_replicas:
            raise ValueError(f"keep is {self.keep} but max_replicas is {self.max_replicas}; raise max_replicas")
        most = max((window.replicas for window in self.schedule), default=0)
        if most > self.max_replicas:
            raise ValueError(f"schedule wants {most} replicas but max_replicas is {self.max_replicas}; raise max_replicas")
        return self


class Tls(Section):
    """Certificate and key, PEM files; read again when they change."""

    certificate: Annotated[str, Field(pattern="^/")]
    """The chain, the server's own certificate first."""
    key: Annotated[str, Field(pattern="^/")]
    """Its private key; under ``rewake up`` it is read as root, so it may be root's alone."""


class Cors(Section):
    """Browsers' permission to call from other origins."""

    origins: tuple[str, ...] = ()
    """Exact origins, or ``*`` for any. None: no headers are added."""
    max_age_s: Count = 600
    """How long browsers may remember it."""


class Gateway(Section):
    """The HTTP front."""

    host: str = "127.0.0.1"
    """The address it listens at: loopback unless told otherwise. Before you open it, give it a certificate and tenants."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """The port of that address."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share the port, so that more than one core serves."""
    user: str = "nobody"
    """The account the gateway runs as when started by root."""
    max_body_bytes: Bytes = 64 << 20
    """The largest body of a request; beyond it is 413."""
    spool_bytes: Bytes = 8 << 20
    """A body larger than this is kept in a temporary file, in the folder that ``TMPDIR`` names, until it has been sent."""
    tls: Tls | None = None
    trusted_proxies: tuple[Network, ...] = ()
    """Networks whose X-Forwarded-For, -Proto and -Host are believed."""
    cors: Cors = Cors()
    access_log: bool = True
    """One JSON line for each request, probes and scrapes aside, on standard output; never a prompt or a key."""
    console: bool = True
    """Serve the operator's console at /console: a page that asks for the admin token."""
    hold: Bounds = Bounds(max_requests=10_000, max_bytes=512 << 20)
    """Bounds over all models together, in each worker."""
    drain_s: Seconds = 30.0
    """How long open responses may finish, and held requests may still be served, after SIGTERM, Ctrl-C or ``rewake restart``."""


class Store(Section):
    """Where gateway and restorer meet."""

    url: str | None = None
    """``redis://``, ``rediss://`` or ``unix://`` of a Redis; empty: ``rewake up`` runs an embedded one."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "rewake"
    """Prefix of every key, so that one Redis can serve several installations. All hosts of an installation have the same."""


class Config(Section):
    """The whole file."""

    models: Annotated[Mapping[str, Model], Field(min_length=1)]
    gateway: Gateway = Gateway()
    restorer: Restorer = Restorer()
    store: Store = Store()
    storage: Storage = Storage()
    tenants: Mapping[str, Tenant] = {}
    """Who may ask. None: there are no API keys and everybody is one tenant."""
    groups: Mapping[str, Group] = {}
    """Models that exclude each other: each names its group."""
    matching: Matching = Matching()
    retention: Retention = Retention()
    """How long snapshots are kept on this host."""
    trust: Trust = Trust()
    """Whose snapshots may be restored on this host, and what may be in them."""
    metrics: Metrics = Metrics()
    tracing: Tracing = Tracing()
    state_dir: Annotated[str, Field(pattern="^/")] = "/var/lib/rewake"
    """Snapshots, engine logs and verification stamps; on a disk with room for them."""
    run_dir: Annotated[str, Field(pattern="^/")] = "/run/rewake"
    """Sockets, pid files and the admin token; every parent must be open to the gateway's user."""

    @model_validator(mode="after")
    def _names(self) -> Config:
        taken: dict[str, str] = {}
        for name, model in self.models.items():
            for alias in (name, *model.aliases):
                if not _MODEL_NAME.fullmatch(alias):
                    raise ValueError(f"models.{name}: {alias!r} is not a usable model name (no spaces, control characters or #)")
                if alias in taken:
                    raise ValueError(f"models.{name}: the name {alias!r} already belongs to {taken[alias]!r}")
                taken[alias] = name
            if model.group is not None and model.group not in self.groups:
                raise ValueError(f"models.{name}.group: there is no group {model.group!r}; add it under groups")
            if model.pinned and model.group is None:
                raise ValueError(f"models.{name}.pinned: it is in no group that could displace it; name its group")
        return self

    @model_validator(mode="after")
    def _places(self) -> Config:
        """Nobody can ever displace what is pinned and always kept; the rest of its group needs a place too."""
        for name, group in self.groups.items():
            inside = [model for model in self.models.values() if model.group == name]
            fixed = sum(model.pinned and model.keep > 0 for model in inside)
            if fixed >= group.members and fixed < len(inside):
                raise ValueError(f"groups.{name}: its pinned and kept models fill it for ever; raise members, or unpin one")
        return self

    @model_validator(mode="after")
    def _tenants(self) -> Config:
        owners: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for key in tenant.keys:
                if key in owners:
                    raise ValueError(f"tenants.{name}.keys: the same key already belongs to {owners[key]!r}")
                owners[key] = name
            for model in tenant.models or ():
                if model not in self.models:
                    raise ValueError(f"tenants.{name}.models: there is no model {model!r}")
        return self

    def resolve(self, name: str) -> str | None:
        """The model that ``name`` (its own name or an alias) means, or None."""
        if name in self.models:
            return name
        return next((model for model, spec in self.models.items() if name in spec.aliases), None)


def parse(document: object) -> Config:
    """Validate a parsed YAML document.

    Raises:
        ConfigError: with every fault, one a line, as ``path: reason``.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"the file must be a mapping of settings, but it holds {_kind(document)}")
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(fault) for fault in error.errors())) from None


def _line(fault: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in fault["loc"])
    reason = "unknown setting; remove it or mend its spelling" if fault["type"] == "extra_forbidden" else fault["msg"]
    reason = str(reason).removeprefix("Value error, ")
    # A fault between models belongs to the whole file; its reason names the path itself.
    return f"{path}: {reason}" if path else reason


def _kind(document: object) -> str:
    return "nothing" if document is None else f"a {type(document).__name__}"
