"""Engines that are restored while the last of their weights still comes, with the real CRIU, a fake driver and a real S3 server.

The server holds the weights back, so that what happens before they are here, happens before they are here.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from conftest import require_root
from e2e_installation import Installation, a_place, eventually, manifest_of, network
from s3_server import S3, s3_server
from test_end_to_end_gpu import fault, free, gpu_model, stages

from policies.floor import Rates
from restorer.machine import floor
from restorer.storage import chunks
from restorer.storage.partial import PREFIX

pytestmark = pytest.mark.criu
GB = 1e9
RATES = Rates(measured_ms=1, disk=GB, disk_cached=GB, cache=GB, fill=GB, fill_huge=GB, spawn_s=600.0, pcie=GB)
"""Of a host that takes so long to begin with that whatever still comes is here in time."""
FAULTS = ("flip", "stall")
WHOLE = {"GPU-0": 8 << 30, "GPU-1": 8 << 30}


class Remote:
    """A server with copies, of which the weights come when they are let."""

    def __init__(self, s3: S3) -> None:
        self.s3, self.how = s3, "hold"
        self.names: set[str] = set()
        """Of the chunks of all weights."""
        self.asked = threading.Event()
        """For one of them."""

    def fault(self, method: str, path: str) -> str | None:
        if method == "GET" and path.rpartition("/")[2] in self.names:
            self.asked.set()
            return self.how or None
        return None

    def fetched(self) -> list[str]:
        """Names of all chunks that have left it."""
        paths = [one.path for one in self.s3.requests if one.method == "GET" and one.status == 200 and "/chunks/" in one.path]
        return [path.rpartition("/")[2] for path in paths]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with a_place("arrive") as folder:
        yield folder


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    require_root()
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def system(place: Path, s3: S3) -> Iterator[Installation]:
    helper = fake_cuda.written(place / "cuda", gpus=2)
    models = {
        "early": gpu_model(place),
        "two": gpu_model(place, "--seed", "2", max_replicas=2),
        "killed": gpu_model(place, "--seed", "3"),
        "itself": gpu_model(place, "--seed", "5"),
        "broken": gpu_model(place, "--seed", "6", on_restore_failure="cold"),
        **{how: gpu_model(place, "--seed", f"4{n}", on_restore_failure="cold") for n, how in enumerate(FAULTS)},
    }
    system = Installation(place, network(24), models, gpu_helper=helper, failure_backoff_s=0.1)
    remote = s3.remote("team", timeout_s=4).model_dump(mode="json", exclude_defaults=True)
    system.configure(storage={"remotes": {"team": remote}, "pull": "team", "reserve_bytes": 0})
    (place / "state").mkdir()
    record = {"host": floor._host(), "rates": RATES.model_dump(mode="json")}
    (place / "state" / floor.FILE).write_text(json.dumps(record))
    with system.running():
        yield system


@pytest.fixture
def remote(system: Installation, s3: S3, place: Path) -> Iterator[Remote]:
    """The one that the installation pulls from; at the end nothing runs, and every GPU is as free as it was."""
    remote = Remote(s3)
    s3.fault = remote.fault
    s3.requests.clear()
    yield remote
    s3.fault = lambda _method, _path: None
    for model in {one["model"] for one in system.admin("replicas")["replicas"] if one["state"] == "admitted"}:
        system.park(model)
    eventually(system.nothing_half_made, "what was half-made to be gone")
    eventually(lambda: free(place) == WHOLE, "the GPUs to be free")


def away(system: Installation, model: str, remote: Remote) -> str:
    """A snapshot that is in the remote, and nowhere else; its id."""
    eventually(system.nothing_half_made, "the donor before to be gone")
    folder = system.snapshot(model)
    manifest = manifest_of(folder)
    assert manifest.gpu is not None
    weights = system.folder / "state/weights"
    for one in manifest.gpu.weights:
        listed = chunks.cut(weights / one.digest, [part.name for part in one.parts])
        remote.names |= {chunk.name for pieces in listed.values() for chunk in pieces}
    for words in (("push", folder.name, "team"), ("rm", folder.name)):
        done = system.cli("snapshot", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    for one in manifest.gpu.weights:
        shutil.rmtree(weights / one.digest, ignore_errors=True)
    remote.s3.requests.clear()
    return folder.name


def waits(system: Installation, model: str, count: int = 1) -> bool:
    """Engines of a model have their processes and GPU state back, and wait for weights."""
    found = [one for one in system.admin("overview")["progress"] if one["model"] == model]
    return sum("arriving" in {stage["name"] for stage in one["doing"]} for one in found) == count


def test_an_engine_is_back_before_the_last_of_its_weights_is_here(system: Installation, place: Path, remote: Remote) -> None:
    id = away(system, "early", remote)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(system.complete, "early")
        eventually(lambda: waits(system, "early"), "the engine to wait for its weights")
        # All of this is so while no byte of the weights has left the remote.
        assert not set(remote.fetched()) & remote.names
        assert len(system.engines()) >= 2
        assert min(free(place).values()) < 8 << 30
        assert not (place / f"state/snapshots/{id}").exists(), "what is not whole is not published"
        assert not waiting.done()
        assert system.replicas("early", "restoring")
        remote.how = ""
        answer = waiting.result()
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored"), answer.text
    (replica,) = system.replicas("early")
    found = stages(replica)
    order = list(found)
    assert order.index("pull") < order.index("restore processes") < order.index("arriving") < order.index("weights")
    assert found["arriving"]["tier"] == "network"
    assert found["arriving"]["bytes"] > 0
    assert found["weights"]["tier"] == "device memory"
    assert "the last of its weights came" in replica["choices"][0]
    assert replica["snapshot"] == id
    assert system.newest().name == id
    assert system.cli("snapshot", "verify", id).returncode == 0
    assert len(remote.fetched()) == len(set(remote.fetched())), "each once"
    system.park("early")
    assert "pull" not in stages(answered(system, "early")), "it is here now"


def answered(system: Installation, model: str) -> dict[str, Any]:
    """The replica that has answered, restored."""
    answer = system.complete(model)
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored"), answer.text
    (replica,) = system.replicas(model)
    return dict(replica)


def test_an_engine_that_must_read_its_weights_itself_waits_until_all_is_published(
    system: Installation, place: Path, remote: Remote
) -> None:
    id = away(system, "itself", remote)
    fault(place, "allocate", do=fake_cuda.OUT_OF_MEMORY)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(system.complete, "itself")
        eventually(lambda: waits(system, "itself"), "the engine to wait for its weights")
        remote.how = ""
        answer = waiting.result()
    (place / "cuda/fault-allocate").unlink()
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored"), answer.text
    (replica,) = system.replicas("itself")
    assert replica["snapshot"] == id
    assert stages(replica)["weights"]["tier"] in ("page cache", "mixed", "disk")


def test_an_engine_that_fails_while_its_weights_come_ends_the_pull(system: Installation, place: Path, remote: Remote) -> None:
    id = away(system, "broken", remote)
    fault(place, "restore", do="CUDA_ERROR_UNKNOWN")
    answer = system.complete("broken")
    (place / "cuda/fault-restore").unlink()
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
    assert not (place / f"state/snapshots/{id}").exists()
    had = len(remote.fetched())
    (replica,) = system.replicas("broken")
    assert "CUDA_ERROR_UNKNOWN" in replica["reason"]
    remote.how = ""
    pulled = system.cli("snapshot", "pull", id, "team")
    assert pulled.returncode == 0, pulled.stderr
    assert set(remote.fetched()[had:]) <= remote.names, "what had come is there"


@pytest.mark.parametrize("how", FAULTS)
def test_a_rest_that_does_not_come_frees_the_gpu_and_is_not_the_snapshots_fault(
    system: Installation, place: Path, remote: Remote, how: str
) -> None:
    """What is damaged, refused, or not answered: the client is served all the same, and told why it was cold."""
    id = away(system, how, remote)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(system.complete, how)
        eventually(lambda: waits(system, how), "the engine to wait for its weights")
        remote.how = how
        answer = waiting.result()
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
    (replica,) = system.replicas(how)
    why = {"flip": "is damaged", "stall": "did not end within 4 s"}[how]
    assert re.search(f"the rest of the snapshot did not come: remote team .*{why}", replica["reason"])
    assert not (place / f"state/snapshots/{id}").exists()
    assert not (place / f"state/snapshots/verdicts/{id}.jsonl").exists(), "nothing is held against it"
    assert [path.name for path in (place / "state/snapshots").glob(f"{PREFIX}*")] == [f"{PREFIX}{id}"]
    assert len(system.engines()) == len(system.engines(replica["incarnation"])), "of the other engine nothing is left"
    system.park(how)
    # The next start goes on with what has come.
    had = set(remote.fetched())
    remote.how, remote.s3.requests[:] = "", []
    assert answered(system, how)["snapshot"] == id
    assert set(remote.fetched()) <= remote.names
    assert had - remote.names


def test_kill_9_of_the_restorer_while_weights_come_and_the_waiter_is_served(
    system: Installation, place: Path, remote: Remote
) -> None:
    id = away(system, "killed", remote)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(system.complete, "killed")
        eventually(lambda: waits(system, "killed"), "the engine to wait for its weights")
        had = len(remote.fetched())
        system.kill_restorer()
        eventually(lambda: len(remote.fetched()) > had or waits(system, "killed"), "the next restorer to go on")
        assert not (place / f"state/snapshots/{id}").exists()
        remote.how = ""
        answer = waiting.result()
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored"), answer.text
    images = [name for name in remote.fetched() if name not in remote.names]
    assert len(images) == len(set(images)), "what had come was not fetched again"
    assert system.cli("snapshot", "verify", id).returncode == 0


def test_two_starts_at_once_pull_once_and_both_are_restored(system: Installation, remote: Remote) -> None:
    id = away(system, "two", remote)
    system.admin("scale-up", {"model": "two", "replicas": 2})
    eventually(lambda: waits(system, "two"), "the first engine to wait for its weights")
    remote.how = ""
    eventually(lambda: len(system.replicas("two")) == 2, "both to be admitted")
    assert {replica["snapshot"] for replica in system.replicas("two")} == {id}
    assert sum("arriving" in stages(replica) for replica in system.replicas("two")) == 1
    assert len(remote.fetched()) == len(set(remote.fetched())), "each once"
