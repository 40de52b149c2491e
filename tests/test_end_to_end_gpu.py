"""The GPU path of the whole system with the real CRIU: a fake driver in the real helper, a small engine with vLLM's routes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from e2e_installation import ROOT, Installation, a_place, eventually, manifest_of, network, processes
from processes import alive

from policies.manifest import GpuState

pytestmark = pytest.mark.criu


def gpu_model(place: Path, *more: str, gpu: dict[str, Any] | None = None, kind: str = "vllm", **policy: Any) -> dict[str, Any]:
    """Settings of a model on the engine of :mod:`e2e_gpu_engine`."""
    command = [sys.executable, str(ROOT / "tests/e2e_gpu_engine.py"), "8000", str(place / "hold"), *more]
    engine = {"kind": kind, "command": command, "env": {"FAKE_CUDA": str(place / "cuda")}, "gpu": {"count": 1, "wait_s": 5}}
    return {
        "engine": engine | {"gpu": {**engine["gpu"], **(gpu or {})}},
        "snapshot": {"create": "manual"},
        "canary": {"max_tokens": 4, "prompts": ["one", "two"], "timeout_s": 20},
        "on_restore_failure": "reject",
        "on_no_snapshot": "cold" if "snapshot" in policy else "reject",
        **policy,
    }


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with a_place("gpu") as folder:
        yield folder


@pytest.fixture(scope="module")
def system(place: Path) -> Iterator[Installation]:
    helper = fake_cuda.written(place / "cuda", gpus=2, topology="NVLinks 18 18; bus 30")
    models = {
        "apart": gpu_model(place),
        "twin": gpu_model(place),
        "other": gpu_model(place, "--seed", "2"),
        "dumped": gpu_model(place, gpu={"weights": "dump"}),
        "auto": gpu_model(place, "--seed", "3", snapshot={"create": "auto"}, on_restore_failure="cold"),
        "victim": gpu_model(place, "--seed", "4", snapshot={"create": "auto"}),
        "garbled": gpu_model(place, "--seed", "5"),
        "spoilt": gpu_model(place, "--seed", "6"),
        "stale": gpu_model(place, "--seed", "7"),
        "broken": gpu_model(place, "--seed", "8"),
        "pair": gpu_model(place, "--seed", "14", "--tensor-parallel-size", "2", gpu={"count": 2}),
        "wide": gpu_model(place, gpu={"count": 2}, kind="http", snapshot={"create": "auto"}),
        "idle": gpu_model(place, "--no-cuda"),
        "nap": gpu_model(place, "--seed", "10", gpu={"suspend_s": 6}),
        "killed": gpu_model(place, "--seed", "11"),
        "full": gpu_model(place, "--seed", "12", snapshot={"create": "auto"}),
        "deaf": gpu_model(place, "--seed", "9", "--deaf", snapshot={"create": "auto"}),
    }
    system = Installation(place, network(19), models, gpu_helper=helper, failure_backoff_s=0.1, max_attempts=1)
    with system.running():
        yield system


@pytest.fixture(autouse=True)
def nothing_is_left_on_the_gpu(place: Path, system: Installation) -> Iterator[None]:
    """After every test: no fault is scripted, nothing runs, every GPU is as free as it was. Prints what was said meanwhile."""
    log = place / "up.log"
    begun = log.stat().st_size
    yield
    print(log.read_bytes()[begun:].decode(errors="replace"))
    if system.up is None or system.up.poll() is not None:
        return
    for path in [*place.glob("cuda/fault-*"), *place.glob("cuda/stranger-bytes"), *place.glob("hold-*")]:
        path.unlink()
    for one in {replica["model"] for replica in system.admin("replicas")["replicas"] if replica["state"] == "admitted"}:
        system.park(one)
    eventually(system.nothing_half_made, "what was half-made to be gone")
    # Two workers answer, and each may remember a failure for a moment longer than the other.
    for _ in range(4):
        eventually(lambda: "failed" not in {one["state"] for one in system.admin("models")["models"]}, "failures to be over")
    assert set(free(place).values()) == {8 << 30}
    assert not list(place.glob("state/weights/.staging-*"))


def fault(place: Path, op: str, **what: Any) -> None:
    (place / f"cuda/fault-{op}").write_text(json.dumps(what))


def calls(place: Path, *verbs: str) -> list[list[str]]:
    path = place / "cuda/calls"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if not verbs or line[0] in verbs]


def free(place: Path) -> dict[str, int]:
    """Bytes free on each GPU."""
    return {uuid: gpu["free"] for uuid, gpu in fake_cuda.FakeDriver(place / "cuda").memory().items()}


def state_of(folder: Path) -> GpuState:
    gpu = manifest_of(folder).gpu
    assert gpu is not None
    return gpu


def restored(system: Installation, model: str) -> dict[str, Any]:
    """Ask a model; its replica, which must have come out of a snapshot."""
    answer = system.complete(model)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rewake-start"] == "restored"
    (replica,) = system.replicas(model)
    return dict(replica)


def stages(replica: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in replica["stages"]}


def on_gpu_0(system: Installation, model: str) -> Path:
    """A snapshot whose donor had GPU 0, where its restores go if they can. A donor before it may not have left yet."""
    eventually(system.nothing_half_made, "the donor before to be gone")
    folder = system.snapshot(model)
    assert state_of(folder).used == ("GPU-0",)
    return folder


@pytest.fixture(scope="module")
def apart(system: Installation) -> Path:
    """Folder of the snapshot of the model ``apart``."""
    return on_gpu_0(system, "apart")


@pytest.fixture(scope="module")
def other(system: Installation) -> Path:
    """One of a model with other weights."""
    return on_gpu_0(system, "other")


@pytest.fixture(scope="module")
def twin(system: Installation, apart: Path) -> Path:
    """One of a model with the weights of ``apart``."""
    return on_gpu_0(system, "twin")


@pytest.fixture(scope="module")
def nap(system: Installation) -> Path:
    """One of a model that is suspended when it is stopped."""
    return on_gpu_0(system, "nap")


# ---------------------------------------------------------------- as it should be


def test_an_engine_comes_back_with_its_weights_from_beside_its_snapshot(system: Installation, apart: Path, place: Path) -> None:
    gpu = state_of(apart)
    assert len(gpu.pids) == 2
    assert (gpu.used, gpu.uuids) == (("GPU-0",), ("GPU-0", "GPU-1"))
    assert (gpu.state_bytes, gpu.awake_bytes) == (1 << 20, (5 << 20) + (192 << 10))
    (weights,) = gpu.weights
    assert weights.bytes == sum(run.bytes for run in weights.allocations) == 192 << 10
    assert (place / "state/weights" / weights.digest / "part-00000").stat().st_mode & 0o777 == 0o400
    took = stages(restored(system, "apart"))
    assert (took["weights"]["bytes"], took["weights"]["tier"]) == (192 << 10, "device memory")
    assert list(took)[-4:] == ["restore GPU", "weights", "wake", "canary"]


def test_three_restores_in_a_row_are_equal(system: Installation, apart: Path) -> None:
    texts = set()
    for _ in range(3):
        texts.add(system.complete("apart").json()["choices"][0]["text"])
        system.park("apart")
    assert len(texts) == 1


def test_two_snapshots_with_equal_weights_share_them(apart: Path, twin: Path, other: Path, place: Path) -> None:
    assert twin != apart
    assert state_of(twin).weights == state_of(apart).weights != state_of(other).weights
    digests = {one.digest for folder in (apart, twin, other) for one in state_of(folder).weights}
    assert len(digests) == 2
    assert digests <= set(os.listdir(place / "state/weights"))


def test_weights_can_be_left_in_the_dump(system: Installation) -> None:
    folder = system.snapshot("dumped")
    assert state_of(folder).weights == ()
    assert stages(restored(system, "dumped"))["weights"]["tier"] is None


def test_the_first_cold_start_is_captured_and_serves_on(system: Installation) -> None:
    answer = system.complete("auto")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    (replica,) = system.replicas("auto")
    assert "no snapshot was made" not in replica["reason"]
    assert "wake donor" in stages(replica)
    system.park("auto")
    restored(system, "auto")
    assert system.complete("auto").json() == answer.json()


@pytest.mark.usefixtures("apart", "other")
def test_a_gpu_that_is_taken_is_left_for_another_and_every_gpu_is_mapped(system: Installation, place: Path) -> None:
    system.complete("other")  # nobody holds GPU 0 but this
    # There an engine cannot map what another process holds: it reads its weights itself.
    assert stages(restored(system, "apart"))["weights"]["tier"] in ("page cache", "mixed", "disk")
    moves = [line[2:] for line in calls(place, "restore")[-2:]]
    assert moves == [["GPU-0=GPU-1", "GPU-1=GPU-0"]] * 2
    assert max(free(place).values()) < 8 << 30


@pytest.mark.usefixtures("apart", "other", "twin")
def test_a_start_without_a_free_gpu_waits_and_then_says_who_has_them(system: Installation) -> None:
    restored(system, "apart")
    system.complete("other")
    answer = system.complete("twin")
    assert (answer.status_code, answer.headers["x-rewake-error"]) == (503, "restore_failed")
    assert "no 1 free GPU(s) within 5 s: GPU 0: leased to " in answer.text


@pytest.mark.usefixtures("apart", "other", "twin")
def test_a_start_gets_the_gpu_that_becomes_free_while_it_waits(system: Installation) -> None:
    restored(system, "apart")
    system.complete("other")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(system.complete, "twin")
        eventually(lambda: system.replicas("twin", "matching"), "twin waits for a GPU")
        system.park("other")
        assert waiting.result().status_code == 200


@pytest.mark.usefixtures("apart", "other")
def test_leases_outlive_the_restorer(system: Installation, place: Path) -> None:
    restored(system, "apart")
    system.kill_restorer()
    eventually(lambda: system.replicas("apart"), "found again")
    begun = len(calls(place))
    system.complete("other")
    assert not [line for line in calls(place)[begun:] if line[0] == "lock" and "GPU-0" in line]
    assert max(free(place).values()) < 8 << 30


# ---------------------------------------------------------------- suspended in the host's memory


def test_a_stopped_engine_is_suspended_and_resumed_as_another_incarnation(system: Installation, place: Path, nap: Path) -> None:
    first = restored(system, "nap")
    text = system.complete("nap").json()["choices"][0]["text"]
    restores = system.calls("restore")
    system.park("nap")
    box = first["incarnation"]
    assert len(system.engines(box)) == 2, "its processes live on"
    assert set(free(place).values()) == {8 << 30}
    answer = system.complete("nap")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "resumed")
    assert answer.headers["x-rewake-incarnation"] == f"{box}-2"
    assert answer.json()["choices"][0]["text"] == text
    assert system.calls("restore") == restores
    (again,) = system.replicas("nap")
    assert list(stages(again)) == ["match", "lease GPU", "resume", "restore GPU", "weights", "wake", "canary"]
    assert "answered" not in system.cli("logs", f"{box}-2").stderr


@pytest.mark.usefixtures("apart", "other", "nap")
def test_models_swap_on_the_gpus_while_one_sleeps(system: Installation, place: Path) -> None:
    restored(system, "nap")
    system.park("nap")
    restored(system, "apart")
    system.complete("other")
    # Both GPUs are taken now: what sleeps has to wait for one, and wakes on whichever that is.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(system.complete, "nap")
        eventually(lambda: system.replicas("nap", "matching"), "it waits for a GPU")
        system.park("other")
        assert waiting.result().headers["x-rewake-start"] == "resumed"


@pytest.mark.usefixtures("nap")
def test_a_suspended_engine_that_cannot_be_resumed_gives_way_to_its_snapshot(system: Installation, place: Path) -> None:
    restored(system, "nap")
    system.park("nap")
    fault(place, "restore", do="CUDA_ERROR_UNKNOWN", first=1)
    restored(system, "nap")


def test_a_suspended_engine_that_died_gives_way_to_its_snapshot(system: Installation, nap: Path) -> None:
    replica = restored(system, "nap")
    system.park("nap")
    for pid in system.engines(replica["incarnation"]):
        os.kill(pid, signal.SIGKILL)
    restored(system, "nap")


def test_a_suspended_engine_ends_when_its_time_is_over(system: Installation, nap: Path) -> None:
    replica = restored(system, "nap")
    system.park("nap")
    eventually(lambda: not system.engines(replica["incarnation"]), "it is ended")


def test_a_suspended_engine_is_no_replica_to_the_next_restorer(system: Installation, nap: Path) -> None:
    replica = restored(system, "nap")
    system.park("nap")
    system.kill_restorer()
    eventually(system.ready, "ready")
    eventually(lambda: not system.engines(replica["incarnation"]), "it is removed")


# ---------------------------------------------------------------- the cases


def test_restore_case_54_out_of_memory_kills_frees_the_lease_and_keeps_the_snapshot(
    system: Installation, apart: Path, place: Path
) -> None:
    fault(place, "restore", do=fake_cuda.OUT_OF_MEMORY)
    answer = system.complete("apart")
    assert (answer.status_code, answer.headers["x-rewake-error"]) == (503, "restore_failed")
    assert "too little free memory" in answer.text
    eventually(lambda: not system.engines() or system.nothing_half_made(), "its processes are killed")
    (place / "cuda/fault-restore").unlink()
    eventually(lambda: "failed" not in {one["state"] for one in system.admin("models")["models"]}, "the failure is over")
    assert restored(system, "apart")["snapshot"] == apart.name


def test_restore_case_54_too_little_free_memory_is_seen_before_anything_is_restored(
    system: Installation, apart: Path, place: Path
) -> None:
    restores = system.calls("restore")
    (place / "cuda/stranger-bytes").write_text(str(8 << 30))
    answer = system.complete("apart")
    assert answer.status_code == 503
    assert "GPU 0: 0.0 GiB free of 0.5 GiB needed" in answer.text
    assert system.calls("restore") == restores


def test_restore_case_55_processes_are_off_the_gpu_before_they_are_killed(system: Installation, apart: Path, place: Path) -> None:
    restored(system, "apart")
    begun = len(calls(place))
    system.park("apart")
    assert [line[0] for line in calls(place)[begun:]] == ["lock", "lock", "checkpoint", "checkpoint"]


def test_restore_case_56_a_donor_that_cannot_be_locked_serves_without_a_snapshot(system: Installation, place: Path) -> None:
    fault(place, "lock", do="CUDA_ERROR_NOT_READY", after=1)
    answer = system.complete("victim")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    (replica,) = system.replicas("victim")
    assert "no snapshot was made: GPU freeze failed" in replica["reason"]
    # Both are locked at once, so that either may be the one to fail.
    assert re.search(r"\([12] of 2\): CUDA_ERROR_NOT_READY: scripted; undone on all others", replica["reason"])
    assert calls(place, "unlock")


def test_a_helper_that_dies_in_the_midst_of_a_freeze_costs_a_snapshot_and_no_engine(system: Installation, place: Path) -> None:
    fault(place, "checkpoint", do="die", once=True)
    answer = system.complete("victim")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    (replica,) = system.replicas("victim")
    assert "it ended in the midst of its work" in replica["reason"]


def test_restore_case_60_a_gpu_split_by_mig_is_refused_before_anything_is_touched(
    system: Installation, apart: Path, place: Path
) -> None:
    with changed(system, place, mig=True):
        answer = system.complete("apart")
        assert answer.status_code == 503
        assert "host.gpu.mig: expected no, found " in answer.text
        assert "switch MIG off" in answer.text


def test_a_driver_that_has_changed_is_refused_with_both_versions(system: Installation, apart: Path, place: Path) -> None:
    with changed(system, place, driver="590.2"):
        answer = system.complete("apart")
        assert answer.status_code == 503
        assert "host.gpu.driver: expected 580.1, found 590.2; install the donor's driver" in answer.text


@contextlib.contextmanager
def changed(system: Installation, place: Path, driver: str = "580.1", **gpu: Any) -> Iterator[None]:
    """Another fact, and a restorer that finds it."""
    path = place / "cuda/facts.json"
    before = path.read_text()
    document = json.loads(before)
    document["facts"]["driver"] = driver
    document["facts"]["gpus"] = [{**one, **gpu} for one in document["facts"]["gpus"]]
    try:
        for text in (json.dumps(document), before):
            path.write_text(text)
            system.kill_restorer()
            eventually(system.ready, "ready")
            if text != before:
                yield
    finally:
        path.write_text(before)


def test_restore_case_62_the_lock_waits_as_long_as_we_say(system: Installation, apart: Path, place: Path) -> None:
    assert ["timeout=30000"] in [line[2:] for line in calls(place, "lock")]


def test_restore_case_63_an_engine_without_cuda_state_is_no_donor(system: Installation) -> None:
    made = system.cli("snapshot", "create", "idle")
    assert made.returncode == 1
    assert "no process of the engine uses CUDA" in made.stdout + made.stderr


def test_restore_case_63_the_donor_has_answered_before_it_is_locked(system: Installation, place: Path) -> None:
    begun = len(calls(place))
    system.complete("auto")
    (replica,) = system.replicas("auto")
    if replica["start"] == "cold":
        order = list(stages(replica))
        assert order.index("start engine") < order.index("record canary") < order.index("freeze GPU") < order.index("dump")
    assert len(calls(place)) > begun


def test_restore_case_68_an_engine_on_more_gpus_than_it_is_known_to_survive_starts_cold(system: Installation) -> None:
    answer = system.complete("wide")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    (replica,) = system.replicas("wide")
    assert "http on 2 GPUs has not been seen to survive a checkpoint" in replica["reason"]


def test_restore_case_65_two_workers_on_two_gpus_come_back_with_their_weights_and_their_answers(
    system: Installation, place: Path
) -> None:
    folder = system.snapshot("pair")
    state = state_of(folder)
    assert (len(state.used), len(state.weights)) == (2, 2)
    begun = len(calls(place))
    for _ in range(2):
        replica = restored(system, "pair")
        assert stages(replica)["weights"]["tier"] == "device memory"
        system.park("pair")
    # One of them asleep is enough for neither to run: both are locked before either is checkpointed.
    verbs = [line[0] for line in calls(place)[begun:] if line[0] in ("lock", "checkpoint")]
    assert verbs.index("checkpoint") >= 2


def test_restore_case_69_only_the_processes_of_the_manifest_are_touched(system: Installation, apart: Path, place: Path) -> None:
    begun = len(calls(place))
    restored(system, "apart")
    touched = {line[1] for line in calls(place)[begun:] if line[0] in ("restore", "unlock")}
    inner = {Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1] for pid in touched}
    assert inner == {str(pid) for pid in state_of(apart).pids}


def test_restore_case_71_weights_that_come_back_wrong_are_never_admitted(system: Installation, place: Path) -> None:
    folder = system.snapshot("garbled")
    (place / "hold-garble").touch()
    answer = system.complete("garbled")
    assert answer.status_code == 503
    assert "weights of worker 0 are not what they were: 1 of 3 allocations differ, the first is number 0" in answer.text
    (place / "hold-garble").unlink()
    shown = system.cli("snapshot", "ls")
    assert folder.name in shown.stdout


def test_restore_case_72_one_stale_allocation_is_enough(system: Installation, place: Path) -> None:
    system.snapshot("stale")
    (place / "hold-stale").touch()
    answer = system.complete("stale")
    assert answer.status_code == 503
    assert "1 of 3 allocations differ, the first is number 2" in answer.text


def test_restore_case_73_what_an_engine_keeps_beside_its_weights_and_loses_shows_in_its_answers(
    system: Installation, place: Path
) -> None:
    """Every weight is what it was, so only the canary can tell."""
    system.snapshot("stale")
    (place / "hold-unset").touch()
    answer = system.complete("stale")
    assert answer.status_code == 503
    assert "the restored engine does not repeat its donor's answers" in answer.text
    assert system.replicas("stale") == []


def test_restore_case_74_what_an_engine_says_of_broken_state_blames_the_snapshot(system: Installation, place: Path) -> None:
    folder = system.snapshot("broken")
    (place / "hold-misaligned").touch()
    answer = system.complete("broken")
    assert answer.status_code == 503
    assert "what was restored is broken" in answer.text
    assert (place / f"state/snapshots/verdicts/{folder.name}.jsonl").exists()


def test_a_flipped_byte_in_a_weights_part_is_refused_before_criu(system: Installation, place: Path) -> None:
    folder = system.snapshot("spoilt")
    weights = state_of(folder).weights[0]
    part = place / "state/weights" / weights.digest / "part-00000"
    part.chmod(0o600)
    data = bytearray(part.read_bytes())
    data[1000] ^= 1
    part.write_bytes(data)
    part.chmod(0o400)
    restores = system.calls("restore")
    answer = system.complete("spoilt")
    assert answer.status_code == 503
    assert f"weights/{weights.digest[:16]}/part-00000: expected sha256" in answer.text
    verified = system.cli("snapshot", "verify", folder.name)
    assert verified.returncode == 1
    assert f"weights/{weights.digest[:16]}/part-00000: expected sha256" in verified.stdout
    assert system.calls("restore") == restores


def test_a_load_that_fails_leaves_the_reading_to_the_engine(system: Installation, apart: Path, place: Path) -> None:
    fault(place, "allocate", do=fake_cuda.OUT_OF_MEMORY)
    assert stages(restored(system, "apart"))["weights"]["tier"] in ("page cache", "mixed", "disk")


def test_an_engine_that_cannot_map_what_was_loaded_reads_it_itself(system: Installation, apart: Path, place: Path) -> None:
    (place / "hold-unmappable").touch()
    assert stages(restored(system, "apart"))["weights"]["tier"] in ("page cache", "mixed", "disk")


@pytest.mark.usefixtures("apart", "other", "nap")
def test_an_engine_that_was_moved_once_reads_its_weights_itself_ever_after(system: Installation) -> None:
    system.complete("other")  # has GPU 0
    assert stages(restored(system, "nap"))["weights"]["tier"] != "device memory"
    system.park("nap")
    assert system.complete("nap").headers["x-rewake-start"] == "resumed"
    (replica,) = system.replicas("nap")
    assert stages(replica)["weights"]["tier"] != "device memory"


def test_a_helper_that_dies_while_it_loads_is_started_again(system: Installation, apart: Path, place: Path) -> None:
    fault(place, "open", do="die", once=True)
    assert stages(restored(system, "apart"))["weights"]["tier"] in ("page cache", "mixed", "disk")


def test_a_killed_worker_frees_its_gpu(system: Installation, apart: Path) -> None:
    replica = restored(system, "apart")
    engine = max(system.engines(replica["incarnation"]))
    os.kill(min(system.engines(replica["incarnation"])), signal.SIGKILL)
    eventually(lambda: not system.replicas("apart"), f"its end is noticed ({engine})")
    restored(system, "apart")


def test_an_engine_that_does_not_fall_asleep_is_no_donor(system: Installation) -> None:
    made = system.cli("snapshot", "create", "deaf")
    assert made.returncode == 1
    assert "this vLLM has no route /is_sleeping" in made.stdout + made.stderr


@pytest.mark.parametrize("stage", ["before-dump", "before-restore"])
def test_kill_9_of_the_restorer_in_the_midst_leaves_nothing_on_the_gpu(system: Installation, place: Path, stage: str) -> None:
    """In mid-dump the donor is frozen, in mid-rehearsal its replica half-made: both go, and the operation is done again."""
    before = system.calls(stage.removeprefix("before-"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as held:
        held.enter_context(system.held(stage))
        making = pool.submit(system.cli, "snapshot", "create", "killed")
        eventually(lambda: system.calls(stage.removeprefix("before-")) > before, stage)
        system.kill_restorer()
        eventually(system.ready, "ready")
        eventually(lambda: set(free(place).values()) == {8 << 30} or system.calls("dump") > before, "off the GPU")
        held.close()
        assert making.result().returncode in (0, 1)
    eventually(lambda: not list(place.glob("state/weights/.staging-*")), "swept")


def test_a_full_disk_costs_a_snapshot_and_no_engine(system: Installation, place: Path) -> None:
    (place / "hold-full").touch()
    answer = system.complete("full")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    (replica,) = system.replicas("full")
    assert "no snapshot was made: full: rewake_export: OSError: [Errno 28] No space left on device" in replica["reason"]


def test_what_runs_is_said_as_it_is_run(system: Installation, apart: Path) -> None:
    shown = system.cli("snapshot", "show", apart.name).stdout
    assert "GPUs: 1 of 2, 1.0 MiB of state beside 0.2 MiB of weights; weights " in shown
    assert f"{apart.name}: whole" in system.cli("snapshot", "verify", apart.name).stdout
    command = manifest_of(apart).profile.command
    assert command[-3:] == ("--enable-sleep-mode", "--worker-extension-cls", "vllm_weights.RewakeWeights")
    assert manifest_of(apart).profile.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert manifest_of(apart).profile.gpus == 1


def test_weights_that_no_snapshot_names_go_when_the_restorer_starts(system: Installation, other: Path, place: Path) -> None:
    folder = next(
        path for path in (place / "state/snapshots").glob("*/manifest.json") if manifest_of(path.parent).profile.model == "other"
    )
    digest = state_of(folder.parent).weights[0].digest
    assert system.cli("snapshot", "rm", folder.parent.name).returncode == 0
    system.kill_restorer()
    eventually(system.ready, "ready")
    eventually(lambda: not (place / "state/weights" / digest).exists(), "swept")


def test_the_end_leaves_nothing(system: Installation, apart: Path, place: Path) -> None:
    restored(system, "apart")
    helper = [pid for pid, argv in processes() if str(place / "cuda").encode() in argv and b"fake_cuda" in argv]
    assert len(helper) == 1
    assert system.stop() == 0
    eventually(system.nothing_left, "nothing is left")
    assert not alive(helper[0])
