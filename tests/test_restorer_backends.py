"""One suite for all backends, run by `rewake up` with the real CRIU, the real runc and a real engine where there is one.

``sleep`` needs an engine whose API can put it to sleep. vLLM's build for CPUs cannot (its allocator is for GPUs), so that there
it is the small engine of :mod:`e2e_gpu_engine`, which speaks vLLM's routes and forgets its weights as vLLM does at level 2.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_installation import PROMPT, ROOT, Installation, a_place, argv_of, eventually, llama, manifest_of, needed, network, small

from restorer.boxes import cgroups
from restorer.checkpoint.backend import Can
from restorer.checkpoint.backends import Backend, OwnCriu, Runc, Sleep

pytestmark = pytest.mark.criu
BACKENDS: dict[str, type[Backend]] = {"criu": OwnCriu, "runc": Runc, "sleep": Sleep, "cold": Backend}
SNAPSHOTS = [name for name, kind in BACKENDS.items() if kind.can.snapshot]
CLONES = [name for name, kind in BACKENDS.items() if kind.can.clone]
KEPT = [*SNAPSHOTS, "sleep"]


def on(backend: str, hold: Path, model: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model with another backend; on an engine that can sleep where it is to."""
    engine = {**model["engine"], "backend": backend}
    if backend == "sleep":
        command = [sys.executable, str(ROOT / "tests/e2e_gpu_engine.py"), "8000", str(hold), "--no-cuda"]
        engine = {"kind": "vllm", "command": command, "backend": "sleep"}
    return {**model, "engine": engine}


def bundled(place: Path) -> dict[str, Any]:
    """The real engine in a bundle of the operator's: a root of its own, and a few mounts."""
    model, root = llama(), place / "bundle/image"
    root.mkdir(parents=True)
    for entry in Path("/").iterdir():
        if entry.is_symlink():
            (root / entry.name).symlink_to(entry.readlink())
    program, gguf = Path(model["engine"]["command"][0]).resolve(), Path(model["weights"][0]).resolve()
    mounts = [("/usr", "/usr"), ("/engine", str(program.parents[1])), (str(program.parents[1]), str(program.parents[1]))]
    config = {
        "root": {"path": "image"},
        "process": {"env": ["PATH=/usr/bin:/bin", "SEEN=theirs"]},
        "mounts": [
            {"destination": at, "type": "bind", "source": source, "options": ["bind", "ro"]}
            for at, source in [*mounts, ("/models", str(gguf.parent))]
        ],
    }
    (place / "bundle/config.json").write_text(json.dumps(config))
    command = [f"/engine/bin/{program.name}", "--model", f"/models/{gguf.name}", *model["engine"]["command"][3:]]
    return {**model, "engine": {**model["engine"], "backend": "runc", "bundle": str(place / "bundle"), "command": command}}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with a_place("backends") as folder:
        yield folder


@pytest.fixture(scope="module")
def system(place: Path) -> Iterator[Installation]:
    mapped, hold = place / "lib.bin", place / "hold"
    mapped.write_bytes(b"version 1")
    models = {name: on(name, hold, llama(max_replicas=3, concurrency=1)) for name in BACKENDS}
    models |= {f"{name}-small": on(name, hold, small(mapped, hold)) for name in BACKENDS}
    models |= {f"{name}-strict": on(name, hold, small(mapped, hold, on_restore_failure="reject")) for name in KEPT}
    deep = on("sleep", hold, small(mapped, hold))
    models["deep"] = {**deep, "engine": {**deep["engine"], "sleep": {"level": 2}}}
    models["brief"] = {**deep, "engine": {**deep["engine"], "sleep": {"keep_s": 2}}}
    models["bundled"] = bundled(place)
    system = Installation(place, network(19), models, runc=needed("REWAKE_RUNC"), lease_s=8)
    with system.running():
        yield system
    assert system.nothing_left()
    eventually(lambda: not left_over(), "no control group of engines that have ended")


@pytest.fixture(autouse=True)
def nothing_half_made_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: what runs is admitted, asleep or spare. Prints what was said meanwhile, shown of a failed test."""
    log = request.getfixturevalue("place") / "up.log"
    begun = log.stat().st_size if log.exists() else 0
    yield
    print(log.read_bytes()[begun:].decode(errors="replace") if log.exists() else "")
    system: Installation = request.getfixturevalue("system")
    for model in system.settings["models"]:
        if system.replicas(model):
            system.park(model)
    for pid in sleepers(system):
        os.kill(pid, signal.SIGKILL)
    eventually(system.nothing_half_made, "what was half-made to be gone")


def sleepers(system: Installation) -> list[int]:
    """Root processes of the engines that can sleep; with no replica admitted, they do."""
    found = [pid for pid in system.engines() if b"e2e_gpu_engine" in argv_of(pid)]
    return [pid for pid in found if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] not in map(str, found)]


def groups(system: Installation) -> list[str]:
    """Control groups of this installation's boxes."""
    boxes = {path.name for path in (system.folder / "state/boxes").glob("*")}
    return sorted(boxes & {child.name for child in _groups()})


def left_over() -> list[Path]:
    """Control groups that hold nobody."""
    return [child for child in _groups() if not (child / "cgroup.procs").read_text()]


def _groups() -> list[Path]:
    return [child for folder in cgroups.folders(cgroups.PARENT) for child in folder.iterdir() if child.is_dir()]


def again(can: Can) -> str:
    """How a replica starts whose model had one before."""
    return "restored" if can.snapshot else "woken" if can.sleep else "cold"


@pytest.fixture(scope="module")
def first(system: Installation) -> dict[str, str]:
    """Each backend's model, started cold, has answered; what."""
    texts = {}
    for name in BACKENDS:
        answer = system.complete(name)
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
        texts[name] = answer.json()["choices"][0]["text"]
        system.park(name)
    return texts


@pytest.mark.parametrize("name", BACKENDS)
def test_captured_ended_and_back_with_the_same_answer(system: Installation, first: dict[str, str], name: str) -> None:
    can, made = BACKENDS[name].can, system.cli("snapshot", "create", name)
    if can.snapshot:
        assert made.returncode == 0, made.stdout + made.stderr
        assert manifest_of(system.newest()).profile.backend == (None if name == "criu" else name)
    else:
        assert made.returncode == 1
        assert f"engine.backend is {name}" in made.stdout + made.stderr
    if can.sleep:
        # Every test ends who sleeps.
        assert system.complete(name).status_code == 200
        system.park(name)
    seen = set()
    for _ in range(2):
        answer = system.complete(name)
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, again(can)), answer.text
        assert answer.json()["choices"][0]["text"] == first[name]
        seen.add(answer.headers["x-rewake-incarnation"])
        system.park(name)
    assert len(seen) == 2
    if not can.sleep:
        assert not [pid for box in seen for pid in system.engines(box)]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_drain_loses_no_request_and_nothing_stays_of_what_was_ended(
    system: Installation, place: Path, first: dict[str, str], name: str
) -> None:
    model = f"{name}-small" if name != "sleep" else name
    assert system.complete(model).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.held("answer"):
            under_way = pool.submit(system.complete, model)
            eventually(lambda: under_way.done() or system.replicas(model)[0]["inflight"] == 1, "the request to be at the engine")
            operation = system.admin("scale-down", {"model": model, "replicas": 0})
            eventually(lambda: system.replicas(model, "draining") or under_way.done(), "a drain")
        assert under_way.result().status_code == 200
    assert system.admin(f"operations/{operation['id']}?wait=30")["state"] == "succeeded"
    eventually(lambda: not system.replicas(model), "no replica")
    if name == "runc":
        eventually(lambda: not groups(system), "its control group to be gone")


def test_an_engine_in_a_bundle_of_the_operators_is_captured_and_restored_and_a_changed_bundle_is_another_engine(
    system: Installation, place: Path, first: dict[str, str]
) -> None:
    assert system.complete("bundled").headers["x-rewake-start"] == "cold"
    system.park("bundled")
    manifest = manifest_of(system.snapshot("bundled"))
    seen = {one.path for one in manifest.files}
    assert str(Path(needed("REWAKE_MODEL")).resolve()) in seen
    assert not [path for path in seen if path.startswith(("/engine/", "/models/"))]
    answer = system.complete("bundled")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored"), answer.text
    assert answer.json()["choices"][0]["text"] == first["criu"]
    (replica,) = system.replicas("bundled")
    (pid,) = [pid for pid in system.engines(replica["incarnation"]) if b"--model" in argv_of(pid)]
    assert b"SEEN=theirs" in Path(f"/proc/{pid}/environ").read_bytes()
    system.park("bundled")
    text = (place / "bundle/config.json").read_text()
    (place / "bundle/config.json").write_text(text.replace("SEEN=theirs", "SEEN=others"))
    answer = system.complete("bundled")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    assert "config.json" in system.replicas("bundled")[0]["reason"]


@pytest.mark.parametrize("name", CLONES)
def test_restore_case_46_three_clones_live_side_by_side_each_in_places_of_its_own(
    system: Installation, first: dict[str, str], name: str
) -> None:
    if not any(manifest.profile.model == name for manifest in manifests(system)):
        system.snapshot(name)
    scaled = system.cli("scale", name, "3")
    assert scaled.returncode == 0, scaled.stderr
    clones = system.replicas(name)
    assert {one["start"] for one in clones} == {"restored"}
    assert len({one["incarnation"] for one in clones}) == len({one["address"] for one in clones}) == 3
    answers = [system.http.post(f"http://{one['address']}:{one['port']}/v1/completions", json=PROMPT) for one in clones]
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {first[name]}
    if name == "runc":
        assert groups(system) == sorted(one["incarnation"] for one in clones)
        for one in clones:
            pids = system.engines(one["incarnation"])
            for pid in pids:
                lines = Path(f"/proc/{pid}/cgroup").read_text().split()
                assert {line.rpartition("/")[2] for line in lines} == {one["incarnation"]}, lines


def manifests(system: Installation) -> list[Any]:
    return [manifest_of(path.parent) for path in (system.folder / "state/snapshots").glob("*/manifest.json")]


@pytest.mark.parametrize("name", SNAPSHOTS)
@pytest.mark.parametrize("stage", ["before", "after"])
def test_kill_9_of_the_restorer_in_mid_restore_and_the_waiter_is_served(system: Installation, name: str, stage: str) -> None:
    model = f"{name}-small"
    if not any(manifest.profile.model == model for manifest in manifests(system)):
        system.snapshot(model)
    verb = "restore" if name == "criu" else "swrk"
    before = system.calls(verb) + system.calls(f"{verb}-done")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.held(f"{stage}-{verb}"):
            waiting = pool.submit(system.complete, model)
            wanted = before + (1 if stage == "before" else 2)
            eventually(lambda: system.calls(verb) + system.calls(f"{verb}-done") >= wanted, "a restore under way")
            system.kill_restorer()
        answer = waiting.result()
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored"), answer.text


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_kill_9_of_the_restorer_in_mid_capture_leaves_no_snapshot_and_the_next_try_makes_one(
    system: Installation, name: str
) -> None:
    model, verb = f"{name}-strict", "dump" if name == "criu" else "swrk"
    before, known = system.calls(f"{verb}-done"), len(manifests(system))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.held(f"after-{verb}"):
            making = pool.submit(system.cli, "snapshot", "create", model)
            eventually(lambda: system.calls(f"{verb}-done") > before, "a dump that is done")
            system.kill_restorer()
            eventually(lambda: system.calls(f"{verb}-done") > before + 1, "the next try's dump", 60)
        made = making.result()
    assert made.returncode == 0, made.stdout + made.stderr
    assert len(manifests(system)) == known + 1


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_tool_that_fails_ends_in_a_labelled_cold_start_or_in_a_refusal_that_says_why(
    system: Installation, place: Path, name: str
) -> None:
    verb = "restore" if name == "criu" else "swrk"
    for model in (f"{name}-small", f"{name}-strict"):
        if not any(manifest.profile.model == model for manifest in manifests(system)):
            system.snapshot(model)
    (place / f"fail-{verb}").touch()
    try:
        answer = system.complete(f"{name}-small")
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
        reason = system.replicas(f"{name}-small")[0]["reason"]
        assert f"{'criu' if name == 'criu' else 'runc'} restore failed with status 1" in reason
        refused = system.complete(f"{name}-strict")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "restore_failed"
    finally:
        (place / f"fail-{verb}").unlink()


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_tool_that_hangs_is_ended_with_its_box_and_the_waiter_gets_a_labelled_cold_start(
    system: Installation, name: str
) -> None:
    model, verb = f"{name}-small", "restore" if name == "criu" else "swrk"
    if not any(manifest.profile.model == model for manifest in manifests(system)):
        system.snapshot(model)
    for manifest in manifests(system):
        if manifest.profile.model == model:
            # The test before may have it held back.
            system.release(manifest.id)
    with system.held(f"before-{verb}"):
        answer = system.complete(model)
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
    assert "did not end within" in system.replicas(model)[0]["reason"]


# ---------------------------------------------------------------- sleep alone


def test_an_engine_sleeps_and_wakes_as_the_same_process_and_another_incarnation(system: Installation) -> None:
    incarnations = []
    for start in ("cold", "woken", "woken"):
        answer = system.complete("deep")
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, start), answer.text
        incarnations.append(answer.headers["x-rewake-incarnation"])
        system.park("deep")
        (pid,) = eventually(lambda: sleepers(system), "an engine asleep")
        assert asleep(pid)
    assert len({one.partition("-")[0] for one in incarnations}) == 1
    assert len(set(incarnations)) == 3


def asleep(pid: int) -> bool:
    """An engine says of itself that it sleeps."""
    argv = ["nsenter", "-t", str(pid), "-n", sys.executable, "-c", _ASK]
    return bool(json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)["is_sleeping"])


_ASK = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/is_sleeping', timeout=5).read().decode())"


def test_restore_case_71_weights_that_are_not_what_they_were_are_never_admitted(system: Installation, place: Path) -> None:
    for fault, reason in (("garble", "does not repeat its donor's answers"), ("oversleep", "answered 500")):
        model = "deep" if fault == "garble" else "sleep-small"
        text = system.complete(model).json()["choices"][0]["text"]
        system.park(model)
        eventually(lambda: sleepers(system), "an engine asleep")
        (place / f"hold-{fault}").touch()
        try:
            answer = system.complete(model)
        finally:
            (place / f"hold-{fault}").unlink()
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
        assert answer.json()["choices"][0]["text"] == text
        assert reason in system.replicas(model)[0]["reason"]
        system.park(model)
    # What did not wake as it was is not put to sleep again; what merely failed is.
    assert system.complete("deep").headers["x-rewake-start"] == "cold"
    assert system.complete("sleep-small").headers["x-rewake-start"] == "woken"


def test_an_engine_that_does_not_wake_is_refused_where_the_model_says_so(system: Installation, place: Path) -> None:
    assert system.complete("sleep-strict").status_code == 200
    system.park("sleep-strict")
    eventually(lambda: sleepers(system), "an engine asleep")
    (place / "hold-oversleep").touch()
    try:
        refused = system.complete("sleep-strict")
    finally:
        (place / "hold-oversleep").unlink()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "restore_failed")


def test_kill_9_of_the_restorer_ends_who_sleeps_and_keeps_who_serves(system: Installation) -> None:
    assert system.complete("sleep-small").status_code == 200
    system.park("sleep-small")
    eventually(lambda: sleepers(system), "an engine asleep")
    serving = system.complete("deep").headers["x-rewake-incarnation"]
    system.kill_restorer()
    eventually(lambda: len(sleepers(system)) == 1, "the sleeper to be ended")
    assert system.complete("deep").headers["x-rewake-incarnation"] == serving
    system.park("deep")
    eventually(lambda: sleepers(system), "who was adopted to be asleep")


def test_who_has_slept_long_enough_is_ended_and_so_is_who_dies_asleep(system: Installation) -> None:
    assert system.complete("brief").status_code == 200
    system.park("brief")
    eventually(lambda: not sleepers(system), "the sleeper to be ended", 15)
    assert system.complete("sleep-small").status_code == 200
    system.park("sleep-small")
    (pid,) = eventually(lambda: sleepers(system), "an engine asleep")
    os.kill(pid, signal.SIGKILL)
    answer = system.complete("sleep-small")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
