"""The whole system as a user runs it: `rewake up`, the real CRIU, a real engine, and what can go wrong with each."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from e2e_installation import PROMPT, Installation, a_place, argv_of, eventually, llama, manifest_of, network, rewritten, small

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with a_place("e2e") as folder:
        yield folder


@pytest.fixture(scope="module")
def system(place: Path) -> Iterator[Installation]:
    mapped, edited, extra, other = (place / name for name in ("lib.bin", "edited.bin", "adapter.bin", "other.bin"))
    for file in (mapped, edited, extra, other):
        file.write_bytes(b"version 1")
    hold = place / "hold"
    models = {
        "base": llama(),
        "trio": llama(max_replicas=3, concurrency=1),
        "eager": llama(on_cold="reject"),
        "stages": small(mapped, hold),
        "patient": small(mapped, hold, on_restore_failure="reject"),
        "fresh": small(mapped, hold),
        "donor": small(mapped, hold),
        "poison": small(mapped, hold),
        "auto": small(mapped, hold, snapshot={"create": "auto"}),
        "flipped": small(mapped, hold),
        "short": small(mapped, hold),
        "strict": small(mapped, hold, on_restore_failure="reject"),
        "edited": small(edited, hold, on_restore_failure="reject"),
        "picky": small(mapped, hold, on_no_snapshot="reject", weights=[str(extra), str(other)]),
    }
    system = Installation(place, network(18), models)
    with system.running():
        yield system


@pytest.fixture(autouse=True)
def nothing_half_made_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: what runs is admitted or spare. Prints what was said meanwhile, which is shown of a failed test."""
    log = request.getfixturevalue("place") / "up.log"
    begun = log.stat().st_size if log.exists() else 0
    yield
    print(log.read_bytes()[begun:].decode(errors="replace") if log.exists() else "")
    if "system" in request.fixturenames and (system := request.getfixturevalue("system")).up.poll() is None:
        eventually(system.nothing_half_made, "what was half-made to be gone")


# ---------------------------------------------------------------- as it should be


@pytest.fixture(scope="module")
def base(system: Installation) -> Path:
    """Folder of the snapshot of the model ``base``."""
    return system.snapshot("base")


@pytest.fixture(scope="module")
def trio(system: Installation) -> Path:
    return system.snapshot("trio")


@pytest.fixture(scope="module")
def made(system: Installation) -> Path:
    """Folder of the snapshot of the model ``stages``."""
    return system.snapshot("stages")


@pytest.fixture
def stages(system: Installation, made: Path) -> Path:
    """That folder; no failure of an earlier test holds the snapshot back."""
    system.release(made.name)
    return made


def test_gateway_case_60_polling_wakes_nothing(system: Installation, base: Path) -> None:
    for verb, path in (("GET", "/v1/models"), ("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics")):
        assert system.http.request(verb, path).status_code == 200
    system.http.request("HEAD", "/v1/completions")
    system.http.request("OPTIONS", "/v1/completions")
    assert system.http.post("/admin/v1/scale-up", json={"model": "base", "replicas": 1}).status_code == 401
    states = {one["name"]: (one["demand"], one["admitted"], one["coming"]) for one in system.admin("models")["models"]}
    assert set(states.values()) == {(0, 0, 0)}


def test_gateway_case_21_fifty_first_requests_share_one_restore(system: Installation, base: Path) -> None:
    before = system.calls("restore")
    limits = httpx.Limits(max_connections=50)
    with (
        httpx.Client(base_url=system.base, timeout=60, trust_env=False, limits=limits) as client,
        concurrent.futures.ThreadPoolExecutor(50) as pool,
    ):
        body = {**PROMPT, "model": "base"}
        answers = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(50)))
    assert [answer.status_code for answer in answers] == [200] * 50
    assert {answer.headers["x-rewake-start"] for answer in answers} == {"restored"}
    assert len({answer.headers["x-rewake-incarnation"] for answer in answers}) == 1
    assert system.calls("restore") == before + 1


def test_restore_case_11_ten_restores_in_a_row_repeat_the_donor_bit_for_bit(system: Installation, base: Path) -> None:
    """Each has passed its canary, which compares every number of the donor's answers."""
    texts, incarnations = set(), set()
    for _ in range(10):
        system.park("base")
        answer = system.complete("base")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-rewake-start"] == "restored"
        texts.add(answer.json()["choices"][0]["text"])
        incarnations.add(answer.headers["x-rewake-incarnation"])
    assert len(texts) == 1
    assert len(incarnations) == 10


def test_restore_cases_01_08_09_three_clones_at_once_answer_for_themselves(system: Installation, trio: Path) -> None:
    """Also cases 1 and 8: each has the donor's pids, ports and sockets, and all are restored at the same time."""
    scaled = system.cli("scale", "trio", "3")
    assert scaled.returncode == 0, scaled.stderr
    clones = system.replicas("trio")
    assert {one["start"] for one in clones} == {"restored"}
    assert len({one["incarnation"] for one in clones}) == len({one["address"] for one in clones}) == 3
    answers = [system.http.post(f"http://{one['address']}:{one['port']}/v1/completions", json=PROMPT) for one in clones]
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    through = {system.complete("trio").headers["x-rewake-incarnation"]}
    assert through <= {one["incarnation"] for one in clones}
    system.park("trio")


def test_restore_cases_15_19_20_logs_grow_and_unlinked_semaphores_come_back(system: Installation, stages: Path) -> None:
    """The engine is two processes that talk over multiprocessing queues; its log is longer at each turn."""
    texts = set()
    for _ in range(3):
        answer = system.complete("stages")
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored")
        texts.add(answer.json()["choices"][0]["text"])
        log = system.folder / "state/boxes" / answer.headers["x-rewake-incarnation"] / "private/engine.log"
        assert log.read_text().count(PROMPT["prompt"]) == 1
        system.park("stages")
    assert len(texts) == 1


def test_on_cold_reject_and_the_unmodified_client_comes_back_in_time(system: Installation) -> None:
    system.snapshot("eager")
    refused = system.complete("eager")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_loading"
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert refused.headers["x-should-retry"] == "true"
    eventually(lambda: system.replicas("eager"), "the start that the refusal asked for")
    system.park("eager")
    with openai.OpenAI(base_url=f"{system.base}/v1", api_key="none") as client:
        message: Any = {"role": "user", "content": "Hello"}
        answer = client.chat.completions.with_raw_response.create(model="eager", messages=[message], max_tokens=4)
    assert answer.headers["x-rewake-start"] == "restored"
    system.park("eager")


def test_gateway_case_22_the_sole_client_leaves_and_no_restore_starts(system: Installation, trio: Path, base: Path) -> None:
    system.park("base")
    before = system.calls("restore")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.held("before-restore"):
            # Every place for a start is taken by restores that are held ...
            busy = pool.submit(system.cli, "scale", "trio", "3")
            eventually(lambda: system.calls("restore") == before + 3, "three restores under way")
            # ... so this client's start is still to be claimed when it leaves.
            with pytest.raises(httpx.ReadTimeout):
                system.complete("base", timeout=0.5)
        assert busy.result().returncode == 0
    eventually(lambda: system.replicas("base", "cancelled"), "the start to be cancelled")
    assert system.calls("restore") == before + 3
    system.park("trio")


# ---------------------------------------------------------------- kill -9


@pytest.mark.parametrize("stage", ["before-restore", "after-restore", "answer"])
def test_gateway_case_18_kill_9_of_the_restorer_in_mid_restore_and_the_waiter_is_served(
    system: Installation, stages: Path, stage: str
) -> None:
    """Before CRIU runs, when the engine is back but not ours yet, and in the middle of the canary."""
    system.park("stages")
    state = "verifying" if stage == "answer" else "restoring"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.held(stage):
            waiter = pool.submit(system.complete, "stages")
            if stage == "after-restore":
                done = system.calls("restore-done")
                eventually(lambda: system.calls("restore-done") > done, "the engine to be back")
            (doomed,) = eventually(lambda: system.replicas("stages", state), f"a replica that is {state}")
            system.kill_restorer()
        answer = waiter.result(timeout=60)
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored"), answer.text
    assert answer.headers["x-rewake-incarnation"] != doomed["incarnation"]
    assert not system.engines(doomed["incarnation"])


def test_kill_9_of_the_restorer_during_a_cold_start_and_the_waiter_is_served(system: Installation) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.held("start"):
            waiter = pool.submit(system.complete, "fresh")
            (doomed,) = eventually(lambda: system.replicas("fresh", "starting"), "a cold start")
            eventually(lambda: system.engines(doomed["incarnation"]), "its engine")
            system.kill_restorer()
        answer = waiter.result(timeout=60)
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
    assert not system.engines(doomed["incarnation"])


@pytest.mark.parametrize("stage", ["before-dump", "after-dump"])
def test_kill_9_of_the_restorer_during_a_dump_and_the_snapshot_is_made_all_the_same(system: Installation, stage: str) -> None:
    before, done = system.calls("dump"), system.calls("dump-done")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.held(stage):
            made = pool.submit(system.cli, "snapshot", "create", "donor")
            wanted = (before + 1, done + (stage == "after-dump"))
            eventually(lambda: (system.calls("dump"), system.calls("dump-done")) == wanted, "a dump under way")
            system.kill_restorer()
        assert made.result(timeout=60).returncode == 0
    assert system.cli("snapshot", "verify", system.newest().name).returncode == 0


def test_kill_9_of_the_restorer_while_serving_keeps_the_replica(system: Installation, base: Path) -> None:
    before = system.complete("base")
    system.kill_restorer()
    during = system.complete("base")
    incarnation = before.headers["x-rewake-incarnation"]
    eventually(lambda: f"({incarnation}) was found running" in (system.folder / "up.log").read_text(), "its adoption")
    after = system.complete("base")
    assert [one.status_code for one in (before, during, after)] == [200, 200, 200]
    assert {one.headers["x-rewake-incarnation"] for one in (before, during, after)} == {incarnation}
    # The new restorer can end what it adopted.
    system.park("base")
    assert not system.engines(incarnation)


def test_kill_9_of_the_engine_while_serving_and_the_next_request_is_restored(system: Installation, base: Path) -> None:
    first = system.complete("base")
    incarnation = first.headers["x-rewake-incarnation"]
    (engine,) = system.engines(incarnation)
    os.kill(engine, signal.SIGKILL)
    eventually(lambda: all(one["incarnation"] != incarnation for one in system.replicas("base")), "the death to be noticed")
    second = system.complete("base")
    assert (first.status_code, second.status_code, second.headers["x-rewake-start"]) == (200, 200, "restored")
    assert second.headers["x-rewake-incarnation"] != incarnation


@pytest.mark.parametrize("stage", ["after-restore", "answer"])
def test_kill_9_of_the_engine_during_its_restore_and_the_waiter_is_served_and_told(
    system: Installation, stages: Path, stage: str
) -> None:
    """Back from CRIU but not answering yet, and in the middle of the canary."""
    system.park("stages")
    done = system.calls("restore-done")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.held(stage):
            waiter = pool.submit(system.complete, "stages")
            if stage == "after-restore":
                eventually(lambda: system.calls("restore-done") > done, "the engine to be back")
            state = "verifying" if stage == "answer" else "restoring"
            (doomed,) = eventually(lambda: system.replicas("stages", state), f"a replica that is {state}")
            engine = [pid for pid in system.engines(doomed["incarnation"]) if b"e2e_engine.py" in argv_of(pid)]
            assert len(engine) == 2
            for pid in engine:
                # One may have followed the other already.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        answer = waiter.result(timeout=60)
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
    (replica,) = system.replicas("stages")
    assert "engine ended" in replica["reason"]
    system.park("stages")


def test_a_start_that_takes_the_restorer_with_it_each_time_ends_with_the_reason(system: Installation) -> None:
    system.snapshot("poison")
    with (
        redis.Redis(unix_socket_path=str(system.run_dir / "store/store.sock"), decode_responses=True) as store,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        with system.held("before-restore"):
            waiter = pool.submit(system.complete, "poison")
            eventually(lambda: system.replicas("poison", "restoring"), "the restore")
            # As if this were the third time.
            store.hset(f"rewake:job:{store.zrange('rewake:jobs', 0, -1)[0]}", "attempts", 3)
            system.kill_restorer()
        answer = waiter.result(timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "restore_failed")
    assert "begun 3 times" in answer.json()["error"]["message"]


# ---------------------------------------------------------------- snapshots that must not be used


def _page_image(folder: Path) -> Path:
    return max((folder / "images").glob("pages-*.img"), key=lambda path: path.stat().st_blocks)


def test_a_flipped_byte_is_refused_before_criu_and_the_snapshot_is_quarantined(system: Installation) -> None:
    """Also restore case 77: the fallback says that it is one."""
    damaged = _page_image(system.snapshot("flipped"))
    with damaged.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    before = system.calls("restore")
    answer = system.complete("flipped")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    assert system.calls("restore") == before
    (replica,) = system.replicas("flipped")
    assert damaged.name in replica["reason"]
    listed = json.loads(system.cli("snapshot", "ls", "--json").stdout)
    assert [one["model"] for one in listed if "quarantined" in one["state"]] == ["flipped"]
    system.park("flipped")


def test_restore_case_25_a_truncated_image_is_refused_before_criu(system: Installation) -> None:
    damaged = _page_image(system.snapshot("short"))
    os.truncate(damaged, damaged.stat().st_size - 4096)
    before = system.calls("restore")
    answer = system.complete("short")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
    assert system.calls("restore") == before
    system.park("short")


def test_restore_case_15_a_mapped_file_that_changed_is_refused_by_name_before_criu(system: Installation) -> None:
    system.snapshot("edited")
    (system.folder / "edited.bin").write_bytes(b"version 2")
    before = system.calls("restore")
    answer = system.complete("edited")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "restore_failed")
    assert "edited.bin" in answer.json()["error"]["message"]
    assert system.cli("scale", "edited", "1").returncode == 3
    assert system.calls("restore") == before


def test_gateway_case_45_a_canary_that_differs_is_never_admitted(system: Installation) -> None:
    """The bytes are whole and the manifest is canonical, but its canary asks for an answer the engine does not give."""
    folder = system.snapshot("strict")
    canary = manifest_of(folder).canary
    wrong = {"choices": [{**canary[0].answer["choices"][0], "text": "something else"}]}
    rewritten(folder, canary=(canary[0].model_copy(update={"answer": wrong}), *canary[1:]))
    answer = system.complete("strict")
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "restore_failed"
    assert answer.headers["x-should-retry"] == "false"
    assert "Retry-After" not in answer.headers
    assert system.replicas("strict") == []
    assert len(system.replicas("strict", "quarantined")) == 1


def test_a_host_mismatch_is_refused_at_once_with_every_reason_and_exit_code_3(system: Installation) -> None:
    folder = system.snapshot("picky")
    rewritten(folder, host=manifest_of(folder).host.model_copy(update={"kernel": "9.9.9-other"}))
    for name in ("adapter.bin", "other.bin"):
        (system.folder / name).write_bytes(b"version 2")
    before, asked = system.calls("restore"), time.monotonic()
    answer = system.complete("picky")
    took = time.monotonic() - asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "restore_failed")
    assert answer.headers["x-should-retry"] == "false"
    assert took < 1.0
    scaled = system.cli("scale", "picky", "1")
    assert scaled.returncode == 3
    for text in (answer.json()["error"]["message"], scaled.stdout + scaled.stderr):
        assert all(reason in text for reason in ("9.9.9-other", "adapter.bin", "other.bin")), text
    assert system.calls("restore") == before


# ---------------------------------------------------------------- tools that hang, disks that fill


def test_a_criu_that_hangs_is_ended_with_its_namespaces_and_the_next_attempt_serves(system: Installation) -> None:
    system.snapshot("patient")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.held("before-restore"):
            waiter = pool.submit(system.complete, "patient")
            (doomed,) = eventually(lambda: system.replicas("patient", "restoring"), "the restore")
            (queued,) = eventually(lambda: system.replicas("patient", "queued"), "the watchdog")
        answer = waiter.result(timeout=60)
    assert "did not end within" in queued["reason"]
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored"), answer.text
    assert not system.engines(doomed["incarnation"])
    system.park("patient")


def test_a_criu_that_hangs_and_the_waiter_gets_a_labelled_cold_start(system: Installation, stages: Path) -> None:
    system.park("stages")
    with concurrent.futures.ThreadPoolExecutor(1) as pool, system.held("before-restore"):
        waiter = pool.submit(system.complete, "stages")
        (doomed,) = eventually(lambda: system.replicas("stages", "restoring"), "the restore")
        answer = waiter.result(timeout=60)
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
    (replica,) = system.replicas("stages")
    assert "did not end within" in replica["reason"]
    assert not system.engines(doomed["incarnation"])


def test_a_criu_that_hangs_in_the_dump_leaves_the_donor_serving(system: Installation) -> None:
    with system.held("before-dump"):
        answer = system.complete("auto")
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
    (replica,) = system.replicas("auto")
    assert "no snapshot was made" in replica["reason"]
    assert "did not end within" in replica["reason"]
    assert system.complete("auto").json()["choices"] == answer.json()["choices"]
    system.park("auto")


def test_ctrl_c_leaves_nothing_behind(system: Installation, base: Path) -> None:
    assert system.complete("base").status_code == 200
    assert system.stop() == 0
    eventually(system.nothing_left, "processes, links and mounts to be gone")
    assert list((system.folder / "state/boxes").iterdir()) == []
    assert list((system.run_dir / "boxes").iterdir()) == []


def test_a_full_disk_during_the_dump_leaves_the_donor_serving(place: Path) -> None:
    folder = place / "full"
    (folder / "state").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder / "state")], check=True)
    mapped = folder / "lib.bin"
    mapped.write_bytes(b"version 1")
    tight = Installation(folder, network(19), {"tight": small(mapped, folder / "hold", snapshot={"create": "auto"})})
    try:
        tight.start()
        answer = tight.complete("tight")
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold")
        (replica,) = tight.replicas("tight")
        assert "no snapshot was made" in replica["reason"]
        assert "disk full" in replica["reason"]
        assert tight.complete("tight").json()["choices"] == answer.json()["choices"]
        assert json.loads(tight.cli("snapshot", "ls", "--json").stdout) == []
        eventually(tight.nothing_half_made, "the half-made snapshot to be gone")
        assert tight.stop() == 0
        eventually(tight.nothing_left, "processes, links and mounts to be gone")
    finally:
        tight.close()
        subprocess.run(["umount", str(folder / "state")], check=True)
