"""Snapshots that travel, with the real CRIU: made by one installation, restored by another that has never seen the donor."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import require_root
from e2e_installation import PROMPT, Installation, a_place, eventually, llama, network, small
from s3_server import S3, s3_server

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    require_root()
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with a_place("e2e") as folder:
        yield folder


def context(size: int, **policy: Any) -> dict[str, Any]:
    """The real engine with its weights in its own memory, and a context of this size."""
    model = llama(**policy)
    command = list(model["engine"]["command"])
    command[command.index("--ctx-size") + 1] = str(size)
    model["engine"]["command"] = [*command, "--load-mode", "none"]
    return model


def installed(place: Path, name: str, second: int, models: dict[str, Any], storage: dict[str, Any]) -> Installation:
    folder = place / name
    folder.mkdir()
    folder.chmod(0o755)
    system = Installation(folder, network(second), models)
    system.configure(storage=storage)
    return system


@pytest.fixture(scope="module")
def donor(place: Path, s3: S3) -> Iterator[Installation]:
    """One that makes snapshots and pushes them."""
    (place / "lib.bin").write_bytes(b"version 1")
    (place / "edited.bin").write_bytes(b"version 1")
    storage = {"remotes": {"team": settings(s3)}}
    system = installed(place, "donor", 21, models(place), storage)
    with system.running():
        yield system


@pytest.fixture(scope="module")
def taker(place: Path, s3: S3, donor: Installation) -> Iterator[Installation]:
    """One that has no snapshots, and pulls them for its starts."""
    storage = {"remotes": {"team": settings(s3)}, "pull": "team", "pull_timeout_s": 60, "reserve_bytes": 0}
    system = installed(place, "taker", 22, models(place), storage)
    with system.running():
        yield system


def models(place: Path) -> dict[str, Any]:
    hold = place / "hold"
    return {
        "words": context(512),
        "longer": context(1024),
        "small": small(place / "lib.bin", hold),
        "edited": small(place / "edited.bin", hold),
        "unpushed": small(place / "lib.bin", hold),
        "refusing": small(place / "lib.bin", hold, on_no_snapshot="reject"),
        "leaving": small(place / "lib.bin", hold),
    }


def settings(s3: S3) -> dict[str, Any]:
    return s3.remote("team", timeout_s=10).model_dump(mode="json", exclude_defaults=True)


def pushed(system: Installation, model: str) -> str:
    id = system.snapshot(model).name
    done = system.cli("snapshot", "push", id[:6], "team", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["id"] == id
    return id


@pytest.fixture(scope="module")
def words(donor: Installation) -> str:
    """Id of a snapshot of the model ``words``, made and pushed."""
    return pushed(donor, "words")


def test_a_pushed_snapshot_is_pulled_and_restored_by_another_installation(
    donor: Installation, taker: Installation, words: str
) -> None:
    expected = donor.complete("words")
    answer = taker.complete("words")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rewake-start"] == "restored"
    assert answer.json()["choices"][0]["text"] == expected.json()["choices"][0]["text"]
    record = taker.replicas("words")[0]
    assert record["snapshot"] == words
    pull = next(stage for stage in record["stages"] if stage["name"] == "pull")
    assert pull["tier"] == "network"
    assert pull["bytes"] > 1 << 20
    print(f"pulled {pull['bytes'] / 1e6:.1f} MB over the network in {pull['seconds']:.2f} s")
    assert taker.newest().name == words
    taker.park("words")
    assert taker.complete("words").headers["x-rewake-start"] == "restored"
    record = taker.replicas("words")[0]
    assert not [stage for stage in record["stages"] if stage["name"] == "pull"], "it is here now"
    taker.park("words")
    donor.park("words")


def test_a_second_snapshot_with_another_context_stores_less_than_half_anew(
    donor: Installation, taker: Installation, words: str
) -> None:
    second = donor.snapshot("longer").name
    said = donor.cli("snapshot", "diff", words, second, "--json")
    assert said.returncode == 0, said.stderr
    total = json.loads(said.stdout)["total"]
    new = total["only_b"] / (total["only_b"] + total["shared"])
    pushed_again = json.loads(donor.cli("snapshot", "push", second, "team", "--json").stdout)
    print(f"anew: {new:.1%} of {(total['only_b'] + total['shared']) / 1e6:.0f} MB; over the network {pushed_again}")
    assert new < 0.5
    assert pushed_again["bytes_reused"] > pushed_again["bytes"] / 2
    pulled = json.loads(taker.cli("snapshot", "pull", second, "--json").stdout)
    assert pulled["bytes_reused"] > pulled["bytes"] / 2, "what the other snapshot has is not fetched again"


def test_without_a_copy_that_fits_it_starts_cold_and_says_why(donor: Installation, taker: Installation, place: Path) -> None:
    assert taker.complete("unpushed").headers["x-rewake-start"] == "cold"
    assert "has no snapshot of this model that fits" in taker.replicas("unpushed")[0]["reason"]
    pushed(donor, "edited")
    donor.park("edited")
    (place / "edited.bin").write_bytes(b"version 2")
    answer = taker.complete("edited")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rewake-start"] == "cold"
    assert "edited.bin" in taker.replicas("edited")[0]["reason"]
    assert "refused" not in taker.replicas("edited")[0]["state"]
    assert taker.complete("refusing").status_code == 503
    for model in ("unpushed", "edited"):
        taker.park(model)


@pytest.mark.parametrize("how", ["503", "stall"])
def test_a_remote_that_fails_costs_its_deadline_and_no_start(donor: Installation, taker: Installation, s3: S3, how: str) -> None:
    s3.fault = lambda _method, _path: how
    try:
        answer = taker.complete("unpushed")
    finally:
        s3.fault = lambda _method, _path: None
    assert answer.headers["x-rewake-start"] == "cold"
    assert "remote team" in taker.replicas("unpushed")[0]["reason"]
    taker.park("unpushed")


def test_a_pull_that_nobody_waits_for_any_more_is_ended(donor: Installation, taker: Installation, s3: S3) -> None:
    pushed(donor, "leaving")
    stalled = threading.Event()

    def fault(method: str, path: str) -> str | None:
        if method == "GET" and "/chunks/" in path:
            stalled.set()
            return "stall"
        return None

    s3.fault = fault
    try:
        with pytest.raises(Exception, match="timed out"):
            taker.http.post("/v1/completions", json={**PROMPT, "model": "leaving"}, timeout=2)
        assert stalled.wait(20)
        began = time.monotonic()
        eventually(lambda: not [r for r in taker.admin("replicas")["replicas"] if r["model"] == "leaving" and r["state"] not in
                                ("cancelled", "failed", "parked")], "the start to be cancelled", 20)  # fmt: skip
        assert time.monotonic() - began < 15
    finally:
        s3.fault = lambda _method, _path: None
    assert taker.complete("leaving").headers["x-rewake-start"] == "restored"
    taker.park("leaving")
