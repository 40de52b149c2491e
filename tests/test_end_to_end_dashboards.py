"""A real Prometheus scrapes a real installation: every panel has data, and every alert fires on its fault and resolves.

Faults are real: a CRIU that fails, an altered manifest, a flipped byte, a full disk, processes that are stopped or killed. Rules
are the project's own; only how long something must be so is shorter. ``make test-dashboards`` runs it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from certificates import make
from e2e_installation import (
    PROMPT,
    ROOT,
    Installation,
    a_place,
    eventually,
    llama,
    manifest_of,
    needed,
    network,
    processes,
    rewritten,
    small,
)
from otlp_receiver import Collector, collector
from prometheus import Prometheus, prometheus, promtool, questions

from policies.tenancy import key_hash

pytestmark = [pytest.mark.criu, pytest.mark.dashboards]

KEY = "rk-dashboards"
WAIT_S = 60.0
"""For an alert to fire, or to end, on a busy machine."""
NOT_HERE = {
    "gpu": "there is no GPU",
}
"""Dashboards that may have no data on a machine like this; what they ask for is valid all the same."""
WRAPPER = """#!/bin/sh
# CRIU, but for what a test wants to fail or to last.
[ -e {folder}/fail-$1 ] && {{ echo "made to fail" >&2; exit 1; }}
while [ -e {folder}/hold-before-$1 ]; do sleep 0.05; done
exec {criu} "$@"
"""
APART = "RewakeCertificateExpires"
"""Provoked with a gateway of its own: the installation here speaks plain HTTP."""
ALERTS = [rule for group in yaml.safe_load((ROOT / "grafana/alerts.yaml").read_text())["groups"] for rule in group["rules"]]


class Dashboards(Installation):
    """An installation that can be broken in every way that there is an alert for."""

    def __init__(self, folder: Path, collector_url: str) -> None:
        (folder / "mapped").write_bytes(os.urandom(1 << 16))
        soft = {"hold": {"max_wait_s": 60, "silent_s": 60}, "idle_park_s": 600}
        one = {name: small(folder / "mapped", folder / "hold") | soft for name in ("canary", "damaged", "erring")}
        slow = small(folder / "mapped", folder / "hold-slow", concurrency=16) | soft
        bound = {"max_requests": 3, "max_wait_s": 60, "silent_s": 60}
        stuck = small(folder / "mapped", folder / "hold-stuck") | {"hold": bound}
        models = {"base": llama(**soft), **one, "slow": slow, "stuck": stuck}
        super().__init__(folder, network(24), models, failure_backoff_s=1)
        (folder / "criu").write_text(WRAPPER.format(folder=folder, criu=needed("REWAKE_CRIU")))
        self.configure(
            tenants={"team": {"keys": [key_hash(KEY)], "limits": {"requests_per_minute": 1000}}},
            tracing={"endpoint": collector_url, "sample": 1.0},
        )
        self.http.headers["Authorization"] = f"Bearer {KEY}"

    def ask(self, model: str) -> int:
        """A request's status; 0: its client gave up."""
        with contextlib.suppress(httpx.HTTPError):
            return self.complete(model).status_code
        return 0

    def pids(self, *marks: str) -> list[int]:
        """Processes of this installation whose arguments have all of these."""
        return [pid for pid, argv in processes() if all(mark.encode() in argv for mark in (*marks, str(self.folder)))]

    @contextlib.contextmanager
    def stopped(self, *marks: str) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        pids = self.pids(*marks)
        assert pids, marks
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def collected() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def system(collected: Collector) -> Iterator[Dashboards]:
    with a_place("dash") as folder:
        state = folder / "state"
        state.mkdir()
        # A disk of its own, so that it can be full.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500m", "rewake-test", str(state)], check=True)
        try:
            with Dashboards(folder, collected.url).running() as system:
                yield system
        finally:
            subprocess.run(["umount", str(state)], check=True)


@pytest.fixture(scope="module")
def watch(system: Dashboards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{system.port}") as found:
        yield found


def fires(watch: Prometheus, *alerts: str) -> None:
    """All of them do."""
    eventually(lambda: watch.firing() >= {*alerts}, f"{alerts} to fire; firing: {watch.firing()}", WAIT_S)


def ends(watch: Prometheus, *alerts: str) -> None:
    """None of them does any more."""
    eventually(lambda: not watch.firing() & {*alerts}, f"{alerts} to end; firing: {watch.firing()}", WAIT_S)


def test_a_day_in_the_life(system: Dashboards, watch: Prometheus) -> None:
    """Snapshots, restores, cold starts, requests of a tenant: with that every panel has something to show, and no alert stays."""
    for model in ("base", "canary", "damaged"):
        system.snapshot(model)
    for model in ("base", "canary", "damaged", "erring", "slow"):
        assert system.ask(model) == 200
    assert system.http.post("/v1/completions", json={"model": "nobody"}).status_code == 404
    time.sleep(3)  # what is asked about rates needs two scrapes
    for _ in range(3):
        assert system.ask("base") == 200
    eventually(lambda: watch.query("rewake_restores_total"), "a scrape", WAIT_S)
    all_is_shown(system, watch)
    # With the times of the rules shortened to a second, a start on a busy machine is long enough to be told of, until it ends.
    eventually(lambda: not watch.firing(), f"silence; firing: {watch.firing()}", WAIT_S)


def all_is_shown(system: Dashboards, watch: Prometheus) -> None:
    """Every panel has data while there are requests."""
    unanswered = [*missing(watch)]
    deadline = time.monotonic() + WAIT_S
    while unanswered and time.monotonic() < deadline:
        # Rates are of what has risen: one request is held, for long enough to judge its estimate by; one is not.
        system.park("erring")
        hold = system.folder / "hold-start"
        hold.touch()
        threading.Timer(0.6, hold.unlink).start()
        assert system.ask("erring") == system.ask("base") == 200
        unanswered = [*missing(watch)]
    assert not unanswered


def missing(watch: Prometheus) -> Iterator[tuple[str, str, str]]:
    """Questions without an answer. All are valid, also where there is nothing to be had; that the series exist is
    :mod:`test_grafana`'s to say."""
    for board, panel, expression in questions():
        found = watch.query(expression)
        if all(sample["value"][1] == "NaN" for sample in found) and board not in NOT_HERE:
            yield board, panel, expression


def test_exemplars_lead_to_traces_that_the_collector_has(system: Dashboards, watch: Prometheus, collected: Collector) -> None:
    def traces() -> set[str]:
        found = watch.get(
            "query_exemplars",
            query="rewake_time_to_first_byte_seconds_bucket",
            start=str(time.time() - 300),
            end=str(time.time()),
        )
        return {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}

    # Whichever worker serves it, and whichever is scraped.
    assert system.complete("base").status_code == 200
    eventually(lambda: traces() & {span.trace for span in collected.spans}, "an exemplar of a known trace", WAIT_S)


def test_one_trace_from_the_request_through_a_real_restore_to_its_first_byte(system: Dashboards, collected: Collector) -> None:
    system.park("base")
    trace = "0123456789abcdef0123456789abcdef"
    answer = system.complete("base", headers={"traceparent": f"00-{trace}-0123456789abcdef-01"})
    assert answer.headers["x-rewake-start"] == "restored"
    wanted = {"POST /v1/completions", "hold", "scale_up base", "start base#0", "match", "verify bytes", "canary", "admit"}
    wanted |= {"text_completion base"}
    eventually(lambda: {span.name for span in collected.trace(trace)} >= wanted, "the whole trace", WAIT_S)
    spans = {span.name: span for span in collected.trace(trace)}
    path, span = [], spans["canary"]
    while span.parent in {one.id: one for one in spans.values()}:
        path.append(span.name)
        span = next(one for one in spans.values() if one.id == span.parent)
    assert [*path, span.name] == ["canary", "start base#0", "scale_up base", "hold", "POST /v1/completions"]
    assert spans["hold"].links == [(trace, spans["scale_up base"].id)]
    order = ["match", "verify bytes", "canary", "admit", "text_completion base"]
    assert sorted(order, key=lambda name: spans[name].begun_ns) == order
    assert spans["text_completion base"].events["first byte"] >= spans["admit"].ended_ns - 5_000_000
    assert spans["verify bytes"].attributes["rewake.bytes"] > 0


def test_failing_restores_a_canary_that_differs_a_flipped_byte_an_old_snapshot(system: Dashboards, watch: Prometheus) -> None:
    models = {manifest_of(path.parent).profile.model: path.parent for path in snapshots(system)}
    for model in ("base", "canary", "damaged"):
        system.park(model)
    month_ms = 40 * 86_400_000
    rewritten(models["base"], created_ms=manifest_of(models["base"]).created_ms - month_ms)
    first, *others = manifest_of(models["canary"]).canary
    rewritten(models["canary"], canary=(first.model_copy(update={"answer": {"never": "said"}}), *others))
    image = max(models["damaged"].glob("images/*"), key=lambda path: path.stat().st_size)
    image.chmod(0o600)
    with image.open("r+b") as file:
        file.seek(4096)
        byte = file.read(1)
        file.seek(4096)
        file.write(bytes([byte[0] ^ 1]))
    fires(watch, "RewakeSnapshotStale")
    (system.folder / "fail-restore").touch()
    try:
        assert system.ask("base") == 200, "it started cold"
    finally:
        (system.folder / "fail-restore").unlink()
    assert system.ask("canary") == 200
    assert system.ask("damaged") == 200
    fires(watch, "RewakeRestoreFailing", "RewakeCanaryDiffers", "RewakeSnapshotDamaged", "RewakeNoSnapshotFits")
    for model in ("base", "canary", "damaged"):
        system.snapshot(model)
    ends(
        watch,
        *("RewakeRestoreFailing", "RewakeCanaryDiffers", "RewakeSnapshotDamaged", "RewakeNoSnapshotFits", "RewakeSnapshotStale"),
    )


def snapshots(system: Dashboards) -> list[Path]:
    return list((system.folder / "state/snapshots").glob("*/manifest.json"))


@contextlib.contextmanager
def crowd(system: Dashboards, model: str, clients: int) -> Iterator[list[int]]:
    """So many clients that ask at once; all have their answer, or have left, at the end."""
    statuses: list[int] = []
    http = httpx.Client(base_url=system.base, timeout=90, trust_env=False, headers=system.http.headers)

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            statuses.append(http.post("/v1/completions", json={**PROMPT, "model": model}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        for thread in threads:
            thread.join(120)
        http.close()


def takeovers(watch: Prometheus) -> float:
    return sum(float(one["value"][1]) for one in watch.query("rewake_lease_takeovers_total"))


def test_a_full_queue_nobody_to_serve_it_and_restorers_that_are_killed(system: Dashboards, watch: Prometheus) -> None:
    hold = system.folder / "hold-stuck-start"
    hold.touch()
    with crowd(system, "stuck", 20) as statuses:
        fires(watch, "RewakeQueueNearlyFull", "RewakeNoReplica")
        eventually(lambda: watch.query('rewake_leases{kind="start"} >= 1'), "a start under way", WAIT_S)
        before = takeovers(watch)
        for more in (1, 2):
            # Not before the one before has the job: a restorer that dies without one takes nothing with it.
            system.kill_restorer()
            eventually(lambda: takeovers(watch) >= before + more, "its job to be taken over", WAIT_S)  # noqa: B023 - called now
        fires(watch, "RewakeLeaseFlapping")
        hold.unlink()
    assert 200 in statuses
    assert 503 in statuses, "beyond the bound"
    ends(watch, "RewakeQueueNearlyFull", "RewakeNoReplica", "RewakeLeaseFlapping")


def test_an_estimate_that_is_far_too_short(system: Dashboards, watch: Prometheus) -> None:
    system.park("slow")
    hold = system.folder / "hold-slow-start"
    hold.touch()
    with crowd(system, "slow", 8) as statuses:
        eventually(lambda: watch.query('rewake_queue_depth{model="slow"} >= 8'), "all to wait", WAIT_S)
        time.sleep(8)  # a start of it takes about one second
        hold.unlink()
    assert statuses == [200] * 8
    fires(watch, "RewakeEtaWrong")
    ends(watch, "RewakeEtaWrong")


def test_an_engine_that_resets_its_connections(system: Dashboards, watch: Prometheus) -> None:
    deadline = time.monotonic() + WAIT_S
    while "RewakeRequestsFailing" not in watch.firing():
        assert time.monotonic() < deadline
        # Without a prompt the engine's handler dies, and takes the connection with it.
        assert system.http.post("/v1/completions", json={"model": "erring", "max_tokens": 1}).status_code in (502, 503)
        time.sleep(0.3)
    ends(watch, "RewakeRequestsFailing")


def test_a_disk_that_is_nearly_full(system: Dashboards, watch: Prometheus) -> None:
    filler = system.folder / "state/filler"
    free = shutil.disk_usage(system.folder / "state").free
    subprocess.run(["fallocate", "-l", str(free - (60 << 20)), str(filler)], check=True)
    try:
        fires(watch, "RewakeStorageNearlyFull")
    finally:
        filler.unlink()
    ends(watch, "RewakeStorageNearlyFull")


def test_a_configuration_with_a_fault(system: Dashboards, watch: Prometheus) -> None:
    good = system.config.read_text()
    system.config.write_text("models: 3")
    assert system.up is not None
    # `rewake reload` would name the fault before it asked anybody: it reads the file, too.
    system.up.send_signal(signal.SIGHUP)
    fires(watch, "RewakeReloadFailed")
    system.config.write_text(good)
    assert system.cli("reload").returncode == 0
    ends(watch, "RewakeReloadFailed")


def test_a_collector_that_refuses(system: Dashboards, watch: Prometheus, collected: Collector) -> None:
    collected.status = 400
    for _ in range(3):
        system.ask("erring")
    fires(watch, "RewakeSpansLost")
    collected.status = 200
    ends(watch, "RewakeSpansLost")


def test_gateways_that_do_not_answer(system: Dashboards, watch: Prometheus) -> None:
    with system.stopped("-m\0gateway"):
        fires(watch, "RewakeGatewayDown")
    ends(watch, "RewakeGatewayDown")


def test_a_restorer_that_hangs_and_one_without_criu(system: Dashboards, watch: Prometheus) -> None:
    with system.stopped("-m\0restorer"):
        fires(watch, "RewakeHostDown")
    ends(watch, "RewakeHostDown")
    (system.folder / "fail-check").touch()
    system.kill_restorer()
    fires(watch, "RewakeHostCannotRestore")
    (system.folder / "fail-check").unlink()
    system.kill_restorer()
    ends(watch, "RewakeHostCannotRestore", "RewakeLeaseFlapping")


def test_a_store_that_hangs(system: Dashboards, watch: Prometheus) -> None:
    with system.stopped("valkey-server"):
        fires(watch, "RewakeStoreUnreachable")
    ends(watch, "RewakeStoreUnreachable")


def test_a_certificate_that_ends_soon() -> None:
    """A gateway by itself, which speaks TLS and needs no store for that: a renewed certificate ends it, without a reload."""
    with a_place("dash-tls") as folder, contextlib.ExitStack() as stack:
        pair, renewed = make(folder, "own", days=2), make(folder, "renewed", days=90)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            metrics = f"127.0.0.1:{probe.getsockname()[1]}"
        folder.chmod(0o755)
        gateway = {"port": 0, "user": "daemon", "tls": {"certificate": str(pair.certificate), "key": str(pair.key)}}
        models = {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}}}
        config = {"models": models, "gateway": gateway, "metrics": {"address": metrics}, "run_dir": str(folder / "run")}
        (folder / "rewake.yaml").write_text(yaml.safe_dump(config))
        (folder / "token").write_text("token")
        argv = [sys.executable, "-m", "gateway", "--config", str(folder / "rewake.yaml"), "--store", f"unix://{folder}/none"]
        log = stack.enter_context((folder / "gateway.log").open("wb"))
        process = subprocess.Popen([*argv, "--admin-token-file", str(folder / "token")], cwd=ROOT, stdout=log, stderr=log)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        (folder / "prometheus").mkdir()
        watch = stack.enter_context(prometheus(folder / "prometheus", metrics))
        fires(watch, APART)
        pair.install(renewed)
        ends(watch, APART)


def test_every_alert_was_provoked_and_in_the_end_all_is_well(system: Dashboards, watch: Prometheus) -> None:
    provoked = {one["metric"]["alertname"] for one in watch.query('max_over_time(ALERTS{alertstate="firing"}[1h])')}
    assert provoked | {APART} == {rule["alert"] for rule in ALERTS}
    eventually(lambda: system.ask("base") == 200, "requests to be served", WAIT_S)
    eventually(lambda: not watch.firing(), f"silence; firing: {watch.firing()}", WAIT_S)
    system.park("base")
    assert system.ask("base") == 200, "restored by the restorer that there is now"
    all_is_shown(system, watch)


def test_what_is_scraped_is_as_promtool_wants_it(system: Dashboards) -> None:
    checked = promtool("check", "metrics", input=system.http.get("/metrics").text)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
