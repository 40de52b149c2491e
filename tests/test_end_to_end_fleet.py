"""One installation over several hosts: replicas are reached through their doors, what ends one's part ends no other's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_installation import eventually, needed
from fleet import STREAM, Fleet, FleetGateway, FleetHost, fleet, streaming
from fleet_engine import words
from processes import alive, uid_of

pytestmark = pytest.mark.criu
NOBODY = 65534
BACKENDS = {"c": "criu", "r": "runc"}
SAID = " ".join(words("The capital of France is", 4))


class Stream:
    """A stream through a gateway that goes on for as long as a file is there."""

    def __init__(self, gateway: FleetGateway, model: str) -> None:
        self._held = contextlib.ExitStack()
        asked = gateway.http.stream("POST", "/v1/completions", json={**STREAM, "model": model})
        self._answer = self._held.enter_context(asked)
        assert self._answer.status_code == 200, self._answer.read()
        self._lines = self._answer.iter_lines()
        self.text = ""

    def go_on(self, lines: int = 6) -> None:
        """So many more lines come."""
        for _ in range(lines):
            self.text += next(self._lines) + "\n"

    def rest(self) -> bool:
        """Read to the end; whether it ended well."""
        with self._held, contextlib.suppress(httpx.HTTPError):
            for line in self._lines:
                self.text += line + "\n"
            return self.text.rstrip().endswith("data: [DONE]")
        return False


def served_by(gateway: FleetGateway, all: Fleet, model: str) -> tuple[dict[str, Any], FleetHost]:
    """The one replica of a model that has a request answered, and its host."""
    answer = gateway.complete(model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == SAID
    (replica,) = gateway.replicas(model)
    return replica, all.hosts[replica["host"]]


def door_of(host: FleetHost, replica: dict[str, Any]) -> int:
    """The pid of the door that listens at what the record says."""
    listening = f"{int(replica['door'].rpartition(':')[2]):04X}"

    def found() -> int | None:
        for pid in host.doors():
            with contextlib.suppress(OSError):
                inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
                rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
                if any(row[1].endswith(f":{listening}") and row[3] == "0A" and f"socket:[{row[9]}]" in inodes for row in rows):
                    return pid
        return None

    try:
        return eventually(found, f"a door at {replica['door']}", 60)
    except AssertionError:
        print(host.said())
        raise


def shut_out(door: str) -> bool:
    """Whether this process, which is on the hosts' network, is sent away without a byte."""
    address, _, port = door.rpartition(":")
    try:
        with socket.create_connection((address, int(port)), timeout=30) as connection:
            return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hold")


@pytest.fixture(scope="module")
def pair(hold: Path) -> Iterator[Fleet]:
    """Two hosts: ``m`` starts cold, ``c`` is restored, ``r`` is a container."""
    models = {"m": streaming(hold / "m"), **{name: streaming(hold / name, backend=kind) for name, kind in BACKENDS.items()}}
    with fleet(models, criu=needed("REWAKE_CRIU"), runc=needed("REWAKE_RUNC")) as made:
        made.start()
        yield made


def test_a_gateway_elsewhere_is_served_through_a_door(pair: Fleet) -> None:
    replica, host = served_by(pair.gateways[0], pair, "m")
    assert replica["door"].startswith(f"{host.node.address}:20")
    assert replica["place"].endswith(f"/{host.node.inode}")
    assert replica["barred"] == ""
    door = door_of(host, replica)
    assert uid_of(door) == NOBODY
    counted = pair.gateways[0].http.get("/metrics").text
    assert f'rewake_door_connections_open{{host="{host.name}"}}' in counted


def test_kill_9_of_the_restorer_keeps_streams_through_its_doors(pair: Fleet, hold: Path) -> None:
    gateway, flag = pair.gateways[0], hold / "m-stream"
    replica, host = served_by(gateway, pair, "m")
    door = door_of(host, replica)
    flag.touch()
    stream = Stream(gateway, "m")
    stream.go_on()
    host.kill_restorer()
    stream.go_on()
    pair.start(host.name)
    stream.go_on()
    flag.unlink()
    assert stream.rest(), stream.text
    after, _ = served_by(gateway, pair, "m")
    assert (after["incarnation"], after["door"]) == (replica["incarnation"], replica["door"])
    assert alive(door)
    # Found by the successor, it is watched by it, too. Not before: without either the host would be taken for lost.
    eventually(lambda: f"({replica['incarnation']}) was found running" in host.said(), "the successor to find it", 60)
    os.kill(door, signal.SIGKILL)
    eventually(lambda: not alive(door) and door_of(host, replica), "another door", 30)
    assert served_by(gateway, pair, "m")[0]["incarnation"] == replica["incarnation"]


def test_kill_9_of_a_door_cuts_its_streams_and_the_next_request_is_served(pair: Fleet, hold: Path) -> None:
    gateway, flag = pair.gateways[0], hold / "m-stream"
    replica, host = served_by(gateway, pair, "m")
    flag.touch()
    stream = Stream(gateway, "m")
    stream.go_on()
    door = door_of(host, replica)
    os.kill(door, signal.SIGKILL)
    assert not stream.rest(), "a stream that was cut looks whole"
    flag.unlink()
    eventually(lambda: not alive(door) and door_of(host, replica), "another door", 30)
    assert served_by(gateway, pair, "m")[0]["incarnation"] == replica["incarnation"]


@pytest.mark.parametrize("model", BACKENDS)
def test_an_engine_that_is_restored_is_reached_through_a_door_and_answers_the_same(pair: Fleet, model: str) -> None:
    """The dump knows nothing of doors: the boxes have them before an engine is in them."""
    gateway, before = pair.gateways[0], {name: set(host.snapshots()) for name, host in pair.hosts.items()}
    made = gateway.operation("snapshots", {"model": model}, 120)
    assert made["state"] == "succeeded", made
    (snapshot,) = [path for name, host in pair.hosts.items() for path in set(host.snapshots()) - before[name]]
    for host in pair.hosts.values():
        if snapshot.name not in [path.name for path in host.snapshots()]:
            host.take(snapshot)
    for _ in range(2):
        answer = gateway.complete(model)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-rewake-start"] == "restored", pair.hosts["a"].said() + pair.hosts["b"].said()
        assert answer.json()["choices"][0]["text"] == SAID
        (replica,) = gateway.replicas(model)
        ended = door_of(pair.hosts[replica["host"]], replica)
        gateway.park(model)
        eventually(lambda ended=ended: not alive(ended), "the door to end with its box")


def test_without_a_door_a_gateway_elsewhere_says_why_and_expose_mends_it(hold: Path) -> None:
    with fleet({"m": streaming(hold / "m", keep=1)}, hosts=("a",)) as lone:
        gateway, host = lone.gateways[0], lone.hosts["a"]
        expose = host.settings["restorer"].pop("expose")
        lone.start()
        (replica,) = eventually(lambda: gateway.replicas("m"), "a replica", 60)
        why = "it is on a, and has no door there: set restorer.expose on that host, or use a gateway on it"
        assert (replica["door"], replica["barred"]) == ("", why)
        assert host.doors() == []
        assert gateway.admin("why?of=m")["brief"] == f"m#0: {why}"
        assert gateway.log.read_text().count(why) == 1
        # Its next restorer gives it one.
        host.kill_restorer()
        host.settings["restorer"]["expose"] = expose
        lone.start()
        eventually(lambda: gateway.replicas("m")[0]["door"], "a door", 60)
        assert served_by(gateway, lone, "m")[0]["incarnation"] == replica["incarnation"]
        # Who is not allowed gets nothing, and it is counted.
        host.stop()
        host.settings["restorer"]["expose"] = {**expose, "allow": ["192.0.2.0/24"]}
        lone.start()
        (replica,) = eventually(lambda: gateway.replicas("m"), "a replica", 60)
        assert shut_out(replica["door"])
        counted = 'rewake_door_connections_total{host="a",result="barred"}'

        def barred() -> bool:
            lines = gateway.http.get("/metrics").text.splitlines()
            return any(line.startswith(counted) and float(line.split()[-1]) > 0 for line in lines)

        eventually(barred, "the refusal to be counted", 30)
