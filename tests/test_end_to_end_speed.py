"""How restores read, what they say of it, and clones side by side: one installation with the real CRIU."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_installation import ROOT, Installation, a_place, eventually, manifest_of, needed, network

from policies import floor
from policies.replica import Replica
from restorer.system import pagecache

pytestmark = pytest.mark.criu
MIB = 1 << 20
MEMORY_BYTES = 48 * MIB
"""Of the engine's anonymous memory, what is not zero."""


def engine(path: Path, **policy: Any) -> dict[str, Any]:
    command = [sys.executable, "-I", str(ROOT / "tests/e2e_memory_engine.py"), "8000", str(path)]
    return {
        "engine": {"kind": "http", "command": command},
        "snapshot": {"create": "manual"},
        "canary": {"max_tokens": 4, "prompts": ["one", "two"]},
        "on_restore_failure": "reject",
        **policy,
    }


@pytest.fixture(scope="module")
def system() -> Iterator[Installation]:
    with a_place("speed") as folder:
        mapped = folder / "mapped.bin"
        mapped.write_bytes(os.urandom(MIB) * 80)
        models = {"big": engine(mapped, max_replicas=4, concurrency=1), "contained": engine(mapped)}
        models["contained"]["engine"]["backend"] = "runc"
        more = {"parallel_starts": 2, "criu_timeout_s": 60, "lease_s": 10, "runc": needed("REWAKE_RUNC")}
        one = Installation(folder, network(21), models, **more)
        with one.running():
            yield one


@pytest.fixture(scope="module")
def snapshot(system: Installation) -> Path:
    return system.snapshot("big")


def evicted(*paths: Path) -> None:
    pagecache.evict(paths)
    if pagecache.tier(paths) != "disk":
        pytest.skip("this file system keeps its files in memory")


def restored(system: Installation, model: str = "big") -> Replica:
    answer = system.complete(model)
    assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "restored"), answer.text
    (record,) = system.replicas(model)
    return Replica.model_validate(record)


def test_a_rehearsal_tells_what_a_canary_takes_and_what_it_touches(system: Installation, snapshot: Path) -> None:
    manifest = manifest_of(snapshot)
    assert manifest.canary_s is not None
    assert 0 < manifest.canary_s < 60
    (mapped,) = (file for file in manifest.files if file.path == str(system.folder / "mapped.bin"))
    assert mapped.touched == mapped.bytes == 80 * MIB
    assert all(file.touched is not None for file in manifest.files)


def test_big_memory_is_taken_out_without_its_zeros(snapshot: Path) -> None:
    plan = json.loads((snapshot / "images/bulk.json").read_bytes())
    moved = sum(size for process in plan["processes"] for _, size, _ in process["runs"])
    assert MEMORY_BYTES <= moved < MEMORY_BYTES + 32 * MIB


def test_restore_case_31_what_criu_writes_is_written_once_and_no_more(snapshot: Path) -> None:
    """Zeros too, which are holes afterwards."""
    manifest, (bulk,) = manifest_of(snapshot), (snapshot / "images").glob("bulk-*.img")
    dump = sum(one.bytes for one in manifest.objects)
    assert 0.98 * bulk.stat().st_size <= manifest.bytes_written <= 1.02 * dump


def test_each_stage_says_from_which_tier_it_read_and_the_rest_is_accounted_for(system: Installation, snapshot: Path) -> None:
    """From a cold page cache first; memory is read past it there, so that a second restore finds it cold again."""
    (bulk,) = (snapshot / "images").glob("bulk-*.img")
    evicted(bulk, system.folder / "mapped.bin")
    record = restored(system)
    stages = {stage.name: stage for stage in record.stages}
    assert stages["fill memory"].tier == "disk"
    # What it has touched of libraries, which this test runs with too, is not cold.
    assert stages["canary"].tier in ("disk", "mixed")
    assert stages["fill memory"].bytes is not None
    assert stages["fill memory"].bytes >= MEMORY_BYTES
    assert stages["fill memory"].cached is not None
    assert stages["fill memory"].cached < 0.05
    account = floor.account(record)
    assert account is not None
    assert account.floor_s > 0
    assert account.took_s >= sum(stage.seconds for stage in record.stages)
    assert account.floor_s + sum(seconds for _, seconds in account.lost) == pytest.approx(account.took_s, abs=1e-3)
    assert any("mapped files are read ahead" in choice and choice.startswith("1 ") for choice in record.choices)
    shown = system.cli("ps", "-v").stdout
    assert account.text in shown
    assert "fill memory" in shown
    assert record.choices[0] in shown
    assert "FLOOR" in system.cli("snapshot", "show", snapshot.name).stdout
    system.park("big")
    bulk.read_bytes()
    again = {stage.name: stage for stage in restored(system).stages}
    assert (again["fill memory"].tier, again["fill memory"].cached) == ("page cache", 1.0)
    system.park("big")


def test_restore_case_23_two_hundred_memory_files_come_back_as_they_were(system: Installation, snapshot: Path) -> None:
    """The canary's answer is a hash over all of them, so that admission is the proof; asked once more all the same."""
    restored(system)
    body = {"model": "big", "prompt": "another", "max_tokens": 4}
    answers = {system.http.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2)}
    assert len(answers) == 1
    assert manifest_of(snapshot).canary[0].answer["choices"][0]["text"] != answers.pop()
    system.park("big")


def test_restore_case_10_one_two_and_four_clones_and_none_of_them_starves(system: Installation, snapshot: Path) -> None:
    """Two starts at once at most: four clones take two turns, not four, and no clone takes many times what another does."""
    took = {}
    for count in (1, 2, 4):
        assert system.cli("scale", "big", str(count)).returncode == 0
        clones = [Replica.model_validate(record) for record in system.replicas("big")]
        assert len(clones) == count
        assert {clone.start for clone in clones} == {"restored"}
        texts = {
            system.http.post(f"http://{one.address}:{one.port}/v1/completions", json={"prompt": "x", "max_tokens": 1}).text
            for one in clones
        }
        assert len(texts) == 1
        took[count] = [clone.took_s for clone in clones if clone.took_s is not None]
        assert len(took[count]) == count
        assert max(took[count]) < 5 * statistics.median(took[count]) + 2
        system.park("big")
    assert max(took[4]) < 8 * took[1][0] + 5, took


def test_what_was_read_past_the_page_cache_is_in_it_for_the_next_restore(system: Installation, snapshot: Path) -> None:
    """Read there while nothing is to be started, once the switch is on."""
    (bulk,) = (snapshot / "images").glob("bulk-*.img")
    off = system.settings["restorer"]
    system.configure(restorer={**off, "warm": {"keep_free": 0.05}})
    assert system.cli("reload").returncode == 0
    try:
        evicted(bulk)
        first = {stage.name: stage for stage in restored(system).stages}
        system.park("big")
        eventually(lambda: pagecache.tier([bulk]) == "page cache", "the snapshot in the page cache", 60)
        again = {stage.name: stage for stage in restored(system).stages}
        assert (first["fill memory"].tier, again["fill memory"].tier) == ("disk", "page cache")
        system.park("big")
    finally:
        system.configure(restorer=off)
        assert system.cli("reload").returncode == 0


def test_memory_of_a_container_is_taken_out_and_filled_too(system: Installation) -> None:
    """By runc CRIU is told to leave the tree stopped as well; the canary's answer is a hash over all of the memory."""
    snapshot = system.snapshot("contained")
    plan = json.loads((snapshot / "images/bulk.json").read_bytes())
    moved = sum(size for process in plan["processes"] for _, size, _ in process["runs"])
    assert MEMORY_BYTES <= moved < MEMORY_BYTES + 32 * MIB
    for tier in ("disk", "page cache"):
        (bulk,) = (snapshot / "images").glob("bulk-*.img")
        evicted(bulk)
        if tier == "page cache":
            bulk.read_bytes()
        stages = {stage.name: stage for stage in restored(system, "contained").stages}
        assert (stages["fill memory"].tier, stages["fill memory"].bytes) == (tier, moved)
        system.park("contained")
