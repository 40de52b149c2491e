"""Every series that gateways count themselves; what restorers count is :mod:`gateway.hosts`' to show.

Labels are bounded: models come from the configuration, replicas are slots, never incarnations.

What every request counts is counted in plain dictionaries, and added to the series once a second and before a scrape
(:meth:`Metrics.flush`): a labelled series in a shared file costs ten times as much to touch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from gateway import logs
from gateway.exchange import Reply
from gateway.exemplars import Exemplars
from gateway.exposition import Source, render
from gateway.shared import Shared
from gateway.trail import Trail
from gateway.version import data_path
from policies.replica import Replica, State
from policies.series import SECONDS
from policies.wire import ModelLoad

OTHER = "_other"
"""The ``model`` of requests that named none of ours."""
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10)
_NOTABLE_S = 0.5
"""A shorter wait says nothing about an estimate."""
_FIRST_BYTE: Final = "rewake_time_to_first_byte_seconds"
disable_created_metrics()  # type: ignore[no-untyped-call]

_BOUNDS: Final = tuple(map(float, SECONDS))
_NAMES: Final = (*map(str, _BOUNDS), "+Inf")
"""Of the buckets, as they are shown."""
Labels = tuple[str, str | None, str, int, str]
"""Tenant, model, route, status, start: what requests that have ended are counted by."""


def _bucket(seconds: float) -> int:
    """The first one whose bound is not less. Most times are short, and a call of the library's search costs more than to look."""
    for at, bound in enumerate(_BOUNDS):
        if seconds <= bound:
            return at
    return len(_BOUNDS)


class Tally:
    """Values of one histogram since it was last flushed, as the series keeps them: a count for each bucket, and the sum."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[_bucket(seconds)] += 1
        self.sum += seconds

    def flush(self, series: Histogram) -> None:
        # prometheus_client has no public way to add many values at once.
        series._sum.inc(self.sum)
        for bucket, count in zip(series._buckets, self.counts, strict=True):
            if count:
                bucket.inc(count)


class Ended:
    """What requests with the same labels came to since the last flush."""

    __slots__ = ("completion", "durations", "first_bytes", "prompt", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt = self.completion = 0
        self.durations = Tally()
        self.first_bytes = Tally()


class Metrics:
    """The series; attributes are named as the series are, without prefix and unit.

    Args:
        models: the configured models.
        shared: this worker's place among others, None when it is alone.
    """

    def __init__(self, models: Iterable[str], *, version: str, shared: Shared | None = None) -> None:
        self._models: frozenset[str] = frozenset()
        self._tenants: frozenset[str] = frozenset()
        self._shared = shared
        self._slots: set[str] = set()
        # Since the last flush. No more entries than there are series of what they are flushed to.
        self._ended: dict[Labels, Ended] = {}
        self._begun: defaultdict[tuple[str | None, str], Tally] = defaultdict(Tally)
        """Streams whose first byte has come."""
        self._exemplars = Exemplars(None) if shared is None else Exemplars.shared(shared.folder, shared.place)
        self.gather: Callable[[], None] = lambda: None
        """Called before a flush: requests that have ended may still be waiting to be counted."""
        self._registry = CollectorRegistry()
        self._traffic()
        self._timing()
        self._fleet()
        self._tenancy()
        self._process(version)
        self.know(models)

    def succeed(self, id: str) -> str:
        """The id of the worker that had this one's place, if one died there."""
        return "" if self._shared is None else self._shared.succeed(id)

    def know(self, models: Iterable[str]) -> None:
        """Label these models with their own names; one that was known before keeps its series."""
        self._models |= frozenset(models)
        for model in self._models:
            # So that it begins at 0: of one that is first seen at 1, nobody could tell that it has just risen.
            self.eta_ratio.labels(model)

    def know_tenants(self, tenants: Iterable[str]) -> None:
        """Label these tenants with their own names."""
        self._tenants |= frozenset(tenants)

    def observe_tenants(self, held: Mapping[str, int], inflight: Mapping[str, int]) -> None:
        """Set the tenants' gauges; one that is in neither has no request."""
        for tenant in self._tenants:
            self.tenant_held_requests.labels(tenant).set(held.get(tenant, 0))
            self.tenant_inflight_requests.labels(tenant).set(inflight.get(tenant, 0))

    def tenant(self, name: str) -> str:
        """The value of a ``tenant`` label."""
        return name if name in self._tenants else OTHER

    def account(self, trails: Sequence[Trail]) -> None:
        """Count requests that have ended, and for their tenants, if they have one."""
        for trail in trails:
            try:
                self._account(trail)
            except Exception as error:  # one request's must not become another's
                logs.error("bug", error, request_id=trail.id)

    def _account(self, trail: Trail) -> None:
        labels = (trail.tenant, trail.model, trail.route, trail.status, trail.start)
        ended = self._ended.get(labels)
        if ended is None:
            ended = self._ended[labels] = Ended()
        ended.requests += 1
        if trail.prompt_tokens:
            ended.prompt += trail.prompt_tokens
        if trail.completion_tokens:
            ended.completion += trail.completion_tokens
        if trail.first_byte_s is not None:
            ended.durations.add(trail.seconds)
            if not trail.stream:
                ended.first_bytes.add(trail.first_byte_s)
            if trail.trace is not None:
                self._illustrate("rewake_request_seconds", trail, trail.start, trail.seconds)
                if not trail.stream:
                    self._illustrate(_FIRST_BYTE, trail, trail.start, trail.first_byte_s)
        if trail.code or trail.client_retry:
            self._unusual(trail)

    def _unusual(self, trail: Trail) -> None:
        if trail.status == 499:
            self.client_disconnects.labels(trail.phase).inc()
        elif trail.code:
            self.errors.labels(self.model(trail.model), trail.code).inc()
        if trail.client_retry:
            self.client_retries.labels(self.model(trail.model)).inc()

    def first_byte(self, trail: Trail, seconds: float) -> None:
        """Count how long a stream took to begin: it may go on for long, and all else is counted at the end."""
        self._begun[trail.model, trail.start].add(seconds)
        if trail.trace is not None:
            self._illustrate(_FIRST_BYTE, trail, trail.start, seconds)

    def _illustrate(self, series: str, trail: Trail, label: str, seconds: float) -> None:
        """Name the request's trace in its bucket of a histogram whose labels are the model and one more."""
        if trail.trace is None:
            return
        labels, bound = (self.model(trail.model), label), _NAMES[_bucket(seconds)]
        self._exemplars.note((series, labels, bound), trail.trace.id, seconds, time.time())

    def waited(self, trail: Trail, outcome: str, seconds: float) -> None:
        """Count how long a request was held, and how that ended."""
        self.queue_wait.labels(trail.model, outcome).observe(seconds)
        self._illustrate("rewake_queue_wait_seconds", trail, outcome, seconds)

    def promised(self, model: str, promised_s: float | None, waited_s: float) -> None:
        """Compare what a request was told when it began to wait with what it was."""
        if promised_s and max(promised_s, waited_s) >= _NOTABLE_S:
            self.eta_ratio.labels(model).observe(waited_s / promised_s)

    def reloaded(self, well: bool) -> None:
        """A reload has succeeded, or has failed and changed nothing."""
        self.config_last_reload_successful.set(well)
        if well:
            self.config_last_reload_success.set(time.time())

    def flush(self) -> None:
        """Add what was counted since the last time to the series."""
        self.gather()
        for (tenant, model, route, status, start), ended in self._ended.items():
            self._flush_ended(tenant, self.model(model), route, str(status), start, ended)
            for tally, series in ((ended.first_bytes, self.time_to_first_byte), (ended.durations, self.request_duration)):
                if any(tally.counts):
                    tally.flush(series.labels(model, start))
        self._ended.clear()
        for labels, tally in self._begun.items():
            tally.flush(self.time_to_first_byte.labels(*labels))
        self._begun.clear()
        self._exemplars.flush()

    def _flush_ended(self, tenant: str, model: str, route: str, status: str, start: str, ended: Ended) -> None:
        requests = ended.requests
        self.requests.labels(model, route, status, start).inc(requests)
        used = [(kind, tokens) for kind, tokens in (("prompt", ended.prompt), ("completion", ended.completion)) if tokens]
        for kind, tokens in used:
            self.tokens.labels(model, kind).inc(tokens)
        if not tenant:
            return
        tenant = self.tenant(tenant)
        self.tenant_requests.labels(tenant, model, status).inc(requests)
        for kind, tokens in used:
            self.tenant_tokens.labels(tenant, model, kind).inc(tokens)

    def model(self, name: str | None) -> str:
        """The value of a ``model`` label."""
        return name if name is not None and name in self._models else OTHER

    def observe(self, loads: Mapping[str, ModelLoad], held_bytes: Mapping[str, int], inflight: Mapping[str, int]) -> None:
        """Set the gauges and flush what was counted; ``inflight``: replica slot -> requests."""
        self.flush()
        for model in {*self._models, *loads}:
            load = loads.get(model)  # None: a reload took it away, and nothing is left of it
            self.queue_depth.labels(model).set(load.held if load else 0)
            self.queue_bytes.labels(model).set(held_bytes.get(model, 0))
            self.model_demand.labels(model).set(load.demand if load else 0)
        for replica in {*self._slots, *inflight}:
            self.inflight_requests.labels(replica.rpartition("#")[0], replica).set(inflight.get(replica, 0))
        self._slots |= inflight.keys()

    def bounded(self, limits: Mapping[str, int], failed: Mapping[str, bool]) -> None:
        """Set what each model's queue may hold here, and whether a failure stands against it."""
        for model in self._models:
            self.queue_limit_requests.labels(model).set(limits.get(model, 0))
            self.model_failed.labels(model).set(failed.get(model, False))

    def record(self, before: Replica | None, after: Replica) -> None:
        """Show the state that a replica's record says."""
        if after.model in self._models:
            for state in State:
                self.replica_state.labels(after.model, after.id, state).set(after.state is state)

    def expose(self, accept: str = "", more: Sequence[Source] = ()) -> Reply:
        """All series of all workers, and those of other sources, as ``accept`` asks for them."""
        self.flush()
        registry = self._registry if self._shared is None else self._shared.all()
        return render((registry, *more), self._exemplars.all(), accept)

    def _traffic(self) -> None:
        self.requests = self._counter(
            "requests", "Requests by outcome; 499: the client left.", ["model", "route", "code", "start"]
        )
        self.errors = self._counter("errors", "Errors that the gateway itself answered.", ["model", "code"])
        self.client_retries = self._counter("client_retries", "Requests that are a client's repetition.", ["model"])
        self.client_disconnects = self._counter("client_disconnects", "Clients that left early.", ["phase"])
        self.upstream_retries = self._counter("upstream_retries", "Requests sent a second time.", ["reason"])
        self.ejections = self._counter("ejections", "Replicas that failed and got nothing more for a while.", ["model"])
        self.truncated_responses = self._counter("truncated_responses", "Responses that broke off.", ["model", "reason"])
        self.tokens = self._counter("tokens", "Tokens as the engines count them.", ["model", "kind"])
        self.queue_depth = self._gauge("queue_depth", "Requests held.", ["model"])
        self.queue_bytes = self._gauge("queue_bytes", "Bytes of held bodies.", ["model"])
        self.queue_limit_requests = self._gauge("queue_limit_requests", "Requests that may be held.", ["model"])
        self.inflight_requests = self._gauge("inflight_requests", "Requests on a replica.", ["model", "replica"])

    def _timing(self) -> None:
        self.queue_wait = self._histogram("queue_wait_seconds", "Time held.", ["model", "outcome"])
        self.time_to_first_byte = self._histogram(
            "time_to_first_byte_seconds", "From the request's head to the answer's first byte.", ["model", "start"]
        )
        self.request_duration = self._histogram(
            "request_seconds", "From the request's head to the answer's end.", ["model", "start"]
        )
        self.eta_ratio = self._histogram(
            "eta_ratio", "Time held by the time that was expected when it began.", ["model"], _RATIOS
        )

    def _tenancy(self) -> None:
        self.tenant_requests = self._counter(
            "tenant_requests", "Requests by outcome; 499: the client left.", ["tenant", "model", "code"]
        )
        self.tenant_held_requests = self._gauge("tenant_held_requests", "Requests held.", ["tenant"])
        self.tenant_inflight_requests = self._gauge("tenant_inflight_requests", "Requests on replicas.", ["tenant"])
        self.tenant_tokens = self._counter("tenant_tokens", "Tokens as the engines count them.", ["tenant", "model", "kind"])
        self.rate_limited = self._counter("rate_limited", "Requests turned away by a limit a minute.", ["tenant", "limit"])
        self.access_log_lost_lines = self._counter("access_log_lost_lines", "Lines that nobody read in time.", [])

    def _fleet(self) -> None:
        self.model_demand = self._gauge("model_demand", "Requests held, in flight or turned away a moment ago.", ["model"])
        self.model_failed = self._gauge("model_failed", "1 while no start is tried, since one failed.", ["model"], "livemax")
        self.replica_state = self._gauge(
            "replica_state", "1 for the state a slot is in.", ["model", "replica", "state"], mode="livemax"
        )
        self.scale_up_triggers = self._counter("scale_up_triggers", "Requests for replicas.", ["model", "deduped"])
        self.session_expires = self._gauge(
            "session_expires_at_timestamp_seconds",
            "When the model would be parked if nothing more came.",
            ["model"],
            mode="livemax",
        )

    def _process(self, version: str) -> None:
        info = self._gauge(
            "build_info", "Always 1; data_path: compiled or interpreted.", ["version", "data_path"], mode="livemax"
        )
        info.labels(version, data_path()).set(1)
        self.config_last_reload_successful = self._gauge(
            "config_last_reload_successful", "1: the configuration was read.", mode="livemin"
        )
        self.config_last_reload_success = self._gauge(
            "config_last_reload_success_timestamp_seconds", "When it was last read.", mode="livemin"
        )
        self.reloaded(True)
        self.certificate_expires = self._gauge(
            "certificate_expires_at_timestamp_seconds", "When the server's certificate ends; 0: it has none.", mode="livemin"
        )
        self.store_connected = self._gauge("store_connected", "1 while the store answers.", mode="livemin")
        self.gateways = self._gauge("gateways", "Gateway workers, over all hosts.", mode="livemax")
        self.spans = self._counter("spans", "Spans of traces, by what became of them.", ["result"])
        for result in ("exported", "failed", "dropped"):
            # From 0: of one that is first seen at 1, nobody could tell that it has just risen.
            self.spans.labels(result)
        self.loop_lag = self._gauge("loop_lag_seconds", "How late the last look at the clock was.", mode="livemax")

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"rewake_{name}_total", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, labels: Iterable[str] = (), mode: str = "livesum") -> Gauge:
        return Gauge(f"rewake_{name}", text, list(labels), registry=self._registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def _histogram(self, name: str, text: str, labels: list[str], bounds: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"rewake_{name}", text, labels, registry=self._registry, buckets=bounds)
