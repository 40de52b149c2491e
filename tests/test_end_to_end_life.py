"""A whole installation with real engines changes under its clients: workers are replaced, models come and go."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from collections.abc import Iterator

import pytest
from e2e_installation import Installation, a_place, eventually, network, small

pytestmark = pytest.mark.criu


@pytest.fixture
def system() -> Iterator[Installation]:
    with a_place("life") as place:
        (place / "mapped").write_bytes(b"x" * 4096)
        with Installation(place, network(16), {"old": small(place / "mapped", place / "hold")}).running() as system:
            yield system


def test_gateway_case_42_workers_and_models_change_and_the_open_request_ends_well(system: Installation) -> None:
    assert system.complete("old").status_code == 200
    (replica,) = system.replicas("old")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with system.held("answer"):
            open_one = pool.submit(system.complete, "old")
            eventually(lambda: system.replicas("old")[0]["inflight"] == 1, "the request at the replica")
            # New workers know at once what the old ones knew: the replica is the same.
            assert system.cli("restart").returncode == 0
            assert [one["incarnation"] for one in system.replicas("old")] == [replica["incarnation"]]
            # The configuration has another model now, in every process.
            system.configure(models={"new": small(system.folder / "mapped", system.folder / "other", preload=True)})
            told = system.cli("reload")
            assert (told.returncode, told.stdout) == (0, "models.new: in force\nmodels.old: in force\n"), told.stderr
            assert system.complete("old").json()["error"]["code"] == "model_not_found"
            eventually(lambda: system.replicas("new"), "the new model to be preloaded", 30)
            assert system.complete("new").status_code == 200
            eventually(lambda: system.replicas("old", "draining"), "the old model's replica to drain")
            assert system.engines(replica["incarnation"]), "an engine was stopped under an open request"
        assert open_one.result(30).status_code == 200
    eventually(lambda: not system.engines(replica["incarnation"]), "the old model's engine to end", 30)
    # A worker and the restorer that die now come back with the configuration in force.
    system.config.write_text("models: [")
    assert system.cli("reload").returncode == 2
    system.kill_restorer()
    assert system.up is not None
    system.up.send_signal(signal.SIGUSR2)
    eventually(lambda: system.complete("new").status_code == 200, "the new model to be served")
    assert system.stop() == 0
    eventually(system.nothing_left, "nothing to be left")


def test_what_a_restorer_has_left_ends_with_the_installation(system: Installation) -> None:
    """It is told to end while none runs that could know of the engine: the next restorer is not there yet."""
    assert system.complete("old").status_code == 200
    (replica,) = system.replicas("old")
    for _ in range(4):
        system.kill_restorer()
    # By now the pause before the next one is longer than a second.
    pid = system.restorer_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert system.stop() == 0
    assert system.nothing_left()
    assert f"box {replica['incarnation']} was left by the restorer, and was ended" in (system.folder / "up.log").read_text()
