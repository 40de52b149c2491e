"""Every series of the gateway, and how the workers of one host share them.

Workers are separate processes behind one port, so a scrape reaches any one of them: with :func:`share` each keeps its
values in files of its own in a common folder, and each answers for all. Labels are bounded: models come from the
configuration, replicas are slots, never incarnations.

What every request counts is counted in plain dictionaries, and added to the series once a second and before a scrape
(:meth:`Metrics.flush`): a labelled series in a shared file costs ten times as much to touch.
"""

from __future__ import annotations

import fcntl
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import prometheus_client.values
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from gateway.exchange import Reply
from gateway.trail import Trail
from policies.replica import TERMINAL, Replica, State
from policies.wire import ModelLoad

OTHER = "_other"
"""The ``model`` of requests that named none of ours."""
_MAX_WORKERS = 256
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)


class Shared:
    """This worker's place in the common folder; kept for the life of the process.

    A worker takes the first place that no living process holds, goes on with the counters of the one that had it before
    and drops its gauges. So counters never go back, and the folder does not grow with restarts.
    """

    def __init__(self, folder: Path, place: int, lock: IO[bytes]) -> None:
        self.folder = folder
        self.place = place
        self._lock = lock

    def succeed(self, id: str) -> str:
        """Leave this process's id here for the next one; the id of the one before, which is dead, or nothing."""
        note = self.folder / f"{self.place}.lock"
        before = note.read_text(errors="replace").strip()
        note.write_text(id)
        return before

    def forget_dead(self) -> None:
        """Remove the gauges of workers that are gone."""
        for file in self.folder.glob("gauge_live*.db"):
            place = int(file.stem.rpartition("_")[2])
            if place == self.place:
                continue
            lock = _hold(self.folder, place)
            if lock is not None:
                with lock:
                    file.unlink(missing_ok=True)


def share(folder: Path) -> Shared:
    """Keep the values of all series made from now on in ``folder``. Call once, before :class:`Metrics` is made.

    Raises:
        OSError: the folder cannot be written.
    """
    place, lock = _free_place(folder)
    for file in folder.glob(f"gauge_*_{place}.db"):
        file.unlink(missing_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values = prometheus_client.values
    values.ValueClass = values.MultiProcessValue(lambda: place)  # type: ignore[no-untyped-call]
    return Shared(folder, place, lock)


def _free_place(folder: Path) -> tuple[int, IO[bytes]]:
    for place in range(_MAX_WORKERS):
        lock = _hold(folder, place)
        if lock is not None:
            return place, lock
    raise OSError(f"all {_MAX_WORKERS} places in {folder} are taken; does something else write there?")


def _hold(folder: Path, place: int) -> IO[bytes] | None:
    """The lock of a place, or None when a living process has it."""
    lock = (folder / f"{place}.lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


Ended = tuple[str, str | None, str, int, str]
"""Tenant, model, route, status, start: what requests that have ended are counted by."""


class Tally:
    """Values of one histogram since it was last flushed, as the series keeps them: a count for each bucket, and the sum."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.sum += seconds

    def flush(self, series: Histogram) -> None:
        # prometheus_client has no public way to add many values at once.
        series._sum.inc(self.sum)
        for bucket, count in zip(series._buckets, self.counts, strict=True):
            if count:
                bucket.inc(count)


class Metrics:
    """The series; attributes are named as the series are, without prefix and unit.

    Args:
        models: the configured models.
        shared: this worker's place among others, None when it is alone.
        observer: count what is seen in the records; true for one worker of a host, or starts would be counted several
            times.
    """

    def __init__(self, models: Iterable[str], *, version: str, shared: Shared | None = None, observer: bool = True) -> None:
        self._models = frozenset(models)
        self._tenants: frozenset[str] = frozenset()
        self._shared = shared
        self.observer = observer
        self._slots: set[str] = set()
        # Since the last flush. No more entries than there are series of what they are flushed to.
        self._ended: defaultdict[Ended, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._first_bytes: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        self._registry = CollectorRegistry()
        self._traffic()
        self._fleet()
        self._tenancy()
        self.config_last_reload_successful = self._gauge(
            "config_last_reload_successful", "1: the configuration was read.", mode="livemin"
        )
        self.config_last_reload_successful.set(1)
        self._gauge("build_info", "Always 1.", ["version"], mode="livemax").labels(version).set(1)
        self.store_connected = self._gauge("store_connected", "1 while the store answers.", mode="livemin")

    def succeed(self, id: str) -> str:
        """The id of the worker that had this one's place, if one died there."""
        return "" if self._shared is None else self._shared.succeed(id)

    def know(self, models: Iterable[str]) -> None:
        """Label these models with their own names; one that was known before keeps its series."""
        self._models |= frozenset(models)

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

    def account(self, trail: Trail) -> None:
        """Count a request that has ended, and for its tenant, if it has one."""
        ended = self._ended[trail.tenant, trail.model, trail.route, trail.status, trail.start]
        ended[0] += 1
        if trail.prompt_tokens:
            ended[1] += trail.prompt_tokens
        if trail.completion_tokens:
            ended[2] += trail.completion_tokens

    def first_byte(self, model: str, start: str, seconds: float) -> None:
        """Count how long a request's answer took to begin."""
        self._first_bytes[model, start].add(seconds)

    def flush(self) -> None:
        """Add what was counted since the last time to the series."""
        for (tenant, model, route, status, start), counts in self._ended.items():
            self._flush_ended(tenant, self.model(model), route, str(status), start, counts)
        self._ended.clear()
        for labels, tally in self._first_bytes.items():
            tally.flush(self.time_to_first_byte.labels(*labels))
        self._first_bytes.clear()

    def _flush_ended(self, tenant: str, model: str, route: str, status: str, start: str, counts: list[int]) -> None:
        requests, prompt, completion = counts
        self.requests.labels(model, route, status, start).inc(requests)
        if not tenant:
            return
        tenant = self.tenant(tenant)
        self.tenant_requests.labels(tenant, model, status).inc(requests)
        for kind, tokens in (("prompt", prompt), ("completion", completion)):
            if tokens:
                self.tenant_tokens.labels(tenant, model, kind).inc(tokens)

    def model(self, name: str | None) -> str:
        """The value of a ``model`` label."""
        return name if name is not None and name in self._models else OTHER

    def observe(self, loads: Mapping[str, ModelLoad], held_bytes: Mapping[str, int], inflight: Mapping[str, int]) -> None:
        """Set the gauges and flush what was counted; ``inflight``: replica slot -> requests."""
        self.flush()
        for model in self._models | loads.keys():
            load = loads.get(model)  # None: a reload took it away, and nothing is left of it
            self.queue_depth.labels(model).set(load.held if load else 0)
            self.queue_bytes.labels(model).set(held_bytes.get(model, 0))
            self.model_demand.labels(model).set(load.demand if load else 0)
        for replica in self._slots | inflight.keys():
            self.inflight_requests.labels(replica.rpartition("#")[0], replica).set(inflight.get(replica, 0))
        self._slots |= inflight.keys()

    def record(self, before: Replica | None, after: Replica) -> None:
        """Count what a replica's record says: starts by result, canaries, stages."""
        if after.model not in self._models:
            return
        for state in State:
            self.replica_state.labels(after.id, state).set(after.state is state)
        known = before is not None and before.state is after.state and before.incarnation == after.incarnation
        if before is None or known or not self.observer:
            return
        if after.state is State.ADMITTED:
            for stage in after.stages:
                self.cold_start.labels(after.model, stage.name).observe(stage.seconds)
        if after.start == "restored" and after.state in (State.ADMITTED, State.QUARANTINED):
            self.canary.labels(after.model, "equal" if after.state is State.ADMITTED else "different").inc()
        if after.state is State.ADMITTED or after.state in TERMINAL - {State.STOPPED}:
            self.restores.labels(after.model, after.state, after.start or "none").inc()

    def expose(self) -> Reply:
        """All series of all workers, in Prometheus' text format."""
        self.flush()
        registry = self._registry
        if self._shared is not None:
            self._shared.forget_dead()
            registry = CollectorRegistry()
            MultiProcessCollector(registry, str(self._shared.folder))  # type: ignore[no-untyped-call]
        return Reply(200, generate_latest(registry), content_type="text/plain; version=0.0.4; charset=utf-8")

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
        self.queue_depth = self._gauge("queue_depth", "Requests held.", ["model"])
        self.queue_bytes = self._gauge("queue_bytes", "Bytes of held bodies.", ["model"])
        self.queue_wait = self._histogram("queue_wait_seconds", "Time held.", ["model", "outcome"])
        self.time_to_first_byte = self._histogram(
            "time_to_first_byte_seconds", "From the request's head to the answer's first byte.", ["model", "start"]
        )
        self.inflight_requests = self._gauge("inflight_requests", "Requests on a replica.", ["model", "replica"])

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
        self.replica_state = self._gauge("replica_state", "1 for the state a slot is in.", ["replica", "state"], mode="livemax")
        self.restores = self._counter("restores", "Starts that ended, by result and kind.", ["model", "result", "start"])
        self.canary = self._counter("canary", "Canaries by result.", ["model", "result"])
        self.cold_start = self._histogram("cold_start_seconds", "Stages of starts that were admitted.", ["model", "stage"])
        self.scale_up_triggers = self._counter("scale_up_triggers", "Requests for replicas.", ["model", "deduped"])
        self.session_expires = self._gauge(
            "session_expires_at_timestamp_seconds",
            "When the model would be parked if nothing more came.",
            ["model"],
            mode="livemax",
        )

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"rewake_{name}_total", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, labels: Iterable[str] = (), mode: str = "livesum") -> Gauge:
        return Gauge(f"rewake_{name}", text, list(labels), registry=self._registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def _histogram(self, name: str, text: str, labels: list[str]) -> Histogram:
        return Histogram(f"rewake_{name}", text, labels, registry=self._registry, buckets=_SECONDS)
