"""One installation over several hosts: starts go where they fit best, a lost host is a pause, a replica moves under traffic."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from e2e_installation import PROMPT, eventually, needed
from fleet import STREAM, Fleet, FleetGateway, fleet, streaming

from gateway.upstream import KEEP_IDLE_S

pytestmark = pytest.mark.criu

LOST_S = 120.0
"""Within this a lost host's replica is given up and runs elsewhere, on a machine that has other things to do."""


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hold") / "m"


@pytest.fixture(scope="module")
def pair(hold: Path) -> Iterator[Fleet]:
    """Two hosts and two gateways; what is ``kept`` is restored, the other models start cold."""
    models = {
        "m": streaming(hold),
        "bound": streaming(hold),
        "nowhere": streaming(hold),
        "kept": streaming(hold.with_name("kept"), backend="criu"),
    }
    models["bound"]["engine"]["hosts"] = ["b"]
    models["nowhere"]["engine"]["hosts"] = ["elsewhere-*"]
    with fleet(models, gateways=2, lost_after_s=6, parallel_starts=2, criu=needed("REWAKE_CRIU")) as made:
        made.start()
        yield made


def other(host: str) -> str:
    return "b" if host == "a" else "a"


def serving_on(gateway: FleetGateway) -> str:
    """The host that serves the model; it is started if there is none."""
    answer = gateway.complete("m", timeout=LOST_S)
    assert answer.status_code == 200, answer.text
    (replica,) = gateway.replicas("m")
    return str(replica["host"])


def _let_connections_go() -> None:
    """A request on a kept connection may have reached the engine when its host goes, and is answered so: it is not sent again."""
    time.sleep(KEEP_IDLE_S + 0.5)


class Streaming:
    """One client that reads a stream until it ends, in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, gateway: FleetGateway) -> None:
        self.text = ""
        self.begun = threading.Event()
        self._gateway = gateway
        self.ended: Future[str] = pool.submit(self._read)

    def _read(self) -> str:
        """How it ended: ``done``, ``error`` or ``cut``."""
        body = {**STREAM, "model": "m"}
        try:
            with self._gateway.http.stream("POST", "/v1/completions", json=body, timeout=LOST_S) as answer:
                for piece in answer.iter_text():
                    self.text += piece
                    self.begun.set()
        except httpx.HTTPError:
            return "cut"
        return "done" if "[DONE]" in self.text else "error"


def test_a_model_runs_only_on_the_hosts_that_it_names(pair: Fleet) -> None:
    gateway = pair.gateways[0]
    assert gateway.complete("bound").status_code == 200
    (replica,) = gateway.replicas("bound")
    assert replica["host"] == "b"
    refused = gateway.http.post("/admin/v1/move", json={"replica": replica["id"]}, headers=gateway.headers)
    assert refused.status_code == 409
    assert "a: engine.hosts names b" in refused.json()["error"]["message"]
    ended = gateway.operation("scale-up", {"model": "nowhere"})
    assert (ended["state"], ended["code"]) == ("failed", 3)
    assert "no other host can" in ended["detail"]
    assert "engine.hosts names elsewhere-*" in ended["detail"]
    gateway.park("bound")


def test_a_replica_moves_under_traffic_and_no_request_is_lost(pair: Fleet, hold: Path) -> None:
    gateway = pair.gateways[0]
    here = serving_on(gateway)
    there = other(here)
    stream_file, stop, statuses = hold.with_name("m-stream"), threading.Event(), []

    def traffic(one: FleetGateway) -> None:
        while not stop.is_set():
            statuses.append(one.http.post("/v1/completions", json={**PROMPT, "model": "m"}, timeout=LOST_S).status_code)

    stream_file.touch()
    try:
        with ThreadPoolExecutor(8) as pool:
            stream = Streaming(pool, pair.gateways[1])
            assert stream.begun.wait(60)
            loops = [pool.submit(traffic, one) for one in pair.gateways]
            eventually(lambda: len(statuses) > 10, "traffic")
            begun = gateway.admin("move", {"replica": gateway.replicas("m")[0]["id"], "to": there})
            eventually(lambda: gateway.replicas("m", "draining"), "the old one to drain")
            before = len(statuses)
            eventually(lambda: len(statuses) > before + 10, "the new one to serve")
            assert stream.ended.running(), "what has begun goes on where it is"
            stream_file.unlink()
            assert stream.ended.result(60) == "done"
            found = eventually(lambda: _ended(gateway, begun["id"]), "the move to end")
            stop.set()
            for loop in loops:
                loop.result(60)
    finally:
        stop.set()
        stream_file.unlink(missing_ok=True)
    assert found["state"] == "succeeded", found
    assert set(statuses) == {200}
    (replica,) = gateway.replicas("m")
    assert replica["host"] == there
    eventually(lambda: len(pair.hosts[here].boxes()) <= 2, "its engine to be gone")


def _ended(gateway: FleetGateway, id: str) -> dict[str, object] | None:
    found = dict(gateway.admin(f"operations/{id}"))
    return None if found["state"] == "running" else found


def test_a_restorer_that_is_gone_and_a_gateway_that_is_cut_off_alone_bury_nobody(pair: Fleet, hold: Path) -> None:
    """Its host does not report, and one gateway cannot reach it; but the other one does, and its stream goes on."""
    near, blind = pair.gateways
    here = serving_on(near)
    host, stream_file = pair.hosts[here], hold.with_name("m-stream")
    (replica,) = near.replicas("m")
    stream_file.touch()
    route = ["ip", "-n", blind.node.namespace, "route"]
    try:
        with ThreadPoolExecutor(2) as pool:
            stream = Streaming(pool, near)
            assert stream.begun.wait(60)
            subprocess.run([*route, "add", "blackhole", host.node.address], check=True)
            host.kill_restorer()
            eventually(lambda: here not in pair.reporting(), "its report to end")
            eventually(lambda: "cannot be connected to" in blind.log.read_text(), "the one that is cut off to knock in vain")
            # Longer than it takes to give a host up.
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                assert [one["incarnation"] for one in near.replicas("m")] == [replica["incarnation"]]
                time.sleep(0.2)
            assert stream.ended.running()
            assert near.complete("m").status_code == 200
            stream_file.unlink()
            assert stream.ended.result(60) == "done"
    finally:
        subprocess.run([*route, "del", "blackhole", host.node.address], check=False)
        stream_file.unlink(missing_ok=True)
        pair.start(here)
    assert [one["incarnation"] for one in near.replicas("m")] == [replica["incarnation"]], "it was found again"


def test_a_host_that_is_cut_off_is_a_pause_and_gives_way_when_it_is_back(pair: Fleet, hold: Path) -> None:
    gateway = pair.gateways[0]
    here = serving_on(gateway)
    there, host, stream_file = other(here), pair.hosts[here], hold.with_name("m-stream")
    (replica,) = gateway.replicas("m")
    stream_file.touch()
    spares = 2
    try:
        with ThreadPoolExecutor(24) as pool:
            streams = [Streaming(pool, one) for one in pair.gateways]
            assert all(stream.begun.wait(60) for stream in streams)
            _let_connections_go()
            host.cut()
            waiting = [pool.submit(pair.gateways[n % 2].complete, "m", timeout=LOST_S) for n in range(20)]
            answers = [one.result(LOST_S) for one in waiting]
            assert all(stream.ended.result(60) in ("error", "cut") for stream in streams), "never as if they were whole"
            assert [answer.status_code for answer in answers] == [200] * 20, [answer.text for answer in answers]
            assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
            (successor,) = gateway.replicas("m")
            assert successor["host"] == there
            assert host.running, "its restorer lives, and its engine too"
            assert len(host.boxes()) > 0
            host.heal()
            eventually(
                lambda: f"({replica['incarnation']}) was given up meanwhile" in host.log.read_text(), "the host to give way"
            )
            eventually(lambda: len(host.boxes()) <= spares, "the outranked engine to be ended")
            eventually(lambda: here in pair.reporting(), "the host to report again")
            assert [one["incarnation"] for one in gateway.replicas("m")] == [successor["incarnation"]]
            assert gateway.complete("m").status_code == 200
    finally:
        host.heal()
        stream_file.unlink(missing_ok=True)


def test_a_start_goes_where_its_snapshot_is_and_a_machine_that_is_gone_for_good_is_a_pause(pair: Fleet) -> None:
    gateway = pair.gateways[0]
    made = gateway.operation("snapshots", {"model": "kept"}, 120)
    assert made["state"] == "succeeded", made
    host, heir = sorted(pair.hosts.values(), key=lambda one: not one.snapshots())
    eventually(lambda: _knows(gateway, host.name, made["snapshot"]), "its report to tell of the snapshot")
    first = gateway.complete("kept")
    assert (first.status_code, first.headers["x-rewake-start"]) == (200, "restored"), first.text
    assert [one["host"] for one in gateway.replicas("kept")] == [host.name]
    heir.take(host.snapshots()[0])
    eventually(lambda: _knows(gateway, heir.name, made["snapshot"]), "the other host's report to tell of its copy")
    _let_connections_go()
    host.lose()
    answer = gateway.complete("kept", timeout=LOST_S)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rewake-start"] == "restored", heir.said()
    assert answer.json()["choices"] == first.json()["choices"]
    (replica,) = gateway.replicas("kept")
    assert replica["host"] == heir.name
    ghosts = [one for one in gateway.admin("replicas")["replicas"] if one["host"] == host.name]
    assert all(one["state"] in ("failed", "stopped") for one in ghosts), ghosts


def _knows(gateway: FleetGateway, host: str, snapshot: str) -> bool:
    reports = {one["host"]: one for one in gateway.admin("snapshots")["hosts"]}
    return any(one["id"] == snapshot and one["fits"] for one in reports.get(host, {"snapshots": []})["snapshots"])
