"""The GPU bench, end to end on a host without GPUs: the script must not rot while nobody has a GPU at hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import fake_cuda
import fake_gpu_host
import pytest
from e2e_installation import ROOT, a_place, needed, network

pytestmark = pytest.mark.criu
SCRIPT = ROOT / "deploy/bench/gpu.py"


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What all steps of one run wrote down."""
    with a_place("gpu-bench") as place:
        helper = fake_cuda.written(place / "cuda", gpus=2, total_bytes=140 << 30, topology="NVLinks 18 18; bus 30")
        commands = fake_gpu_host.written(place / "bin", place / "cuda")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        argv = [
            *(sys.executable, str(SCRIPT), "--python", str(commands / "python"), "--criu", needed("REWAKE_CRIU")),
            *(f"--gpu-helper={word}" for word in helper),
            *("--work", str(place / "work"), "--run-dir", str(place / "run"), "--network", network(18), "--port", str(port)),
            *("--env", f"FAKE_CUDA={place / 'cuda'}", "--output", str(place / "found.json"), "--pair-try", "NCCL_DEBUG=WARN"),
            *("--models=7b", "--restores=1", "--swaps=2", "--swap-ways=grouped", "--fill-mib=64", "--no-rehearse", "--no-cold"),
        ]
        environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "COLUMNS": "150"}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=900, env=environment, check=False)
        print(done.stdout, done.stderr, (place / "work/up.log").read_text(), sep="\n")
        assert done.returncode == 0
        yield json.loads((place / "found.json").read_text())


def test_every_step_ends_well(found: dict[str, Any]) -> None:
    assert not found.keys() & {"failed", "left_out"}
    model = found["models"]["7b"]
    assert (found["restores_in_a_row"], found["canary_equal"], model["canary"]["requests"]) == (1, True, 2)
    assert model["disk"]["snapshot_stages"]
    assert found["other"]["equal"]


def test_a_snapshot_that_is_elsewhere_is_pulled_in_both_ways(found: dict[str, Any]) -> None:
    arrive = found["models"]["7b"]["arrive"]
    assert arrive["weights_bytes"] > 0
    for way in ("fast_after", "fast_beside", "slow_after", "slow_beside"):
        assert min(arrive[way][key] for key in ("seconds", "pull_s", "pull_bytes_per_s", "last_byte_to_token_s")) > 0
        assert [stage for stage in arrive[way]["stages"] if stage["name"] == "weights"]


def test_restore_case_59_another_bus_and_other_links(found: dict[str, Any]) -> None:
    move, pair = found["move"], found["pair"]
    assert (move["moved"], move["equal"]) == (True, True)
    assert [move["bus_ids"]["donor"]] != move["bus_ids"]["restored"]
    assert (pair["restored"], pair["workers"], pair["cuda_processes"], pair["equal"]) == (True, 2, 3, True)
    assert "host.gpu.topology" in found["another"]["topology"]["told"]


def test_restore_case_61_what_the_driver_takes_for_each_gpu_is_measured(found: dict[str, Any]) -> None:
    driver = found["driver"]
    assert driver["state_bytes_each_gpu"] == 1 << 20
    assert min(driver["restore_each_gpu_s"], driver["off_each_gpu_s"], driver["load_s"], driver["load_share_of_pcie"]) > 0


def test_restore_case_70_one_helper_asks_for_all_processes(found: dict[str, Any]) -> None:
    driver = found["driver"]
    assert driver["helpers"] == 1
    assert driver["calls"]["find"]["pids"] >= 2
    assert driver["calls"]["thaw"]["calls"] == 1
    assert min(driver["find_pids"], driver["find_first_s"], driver["find_again_s"]) > 0


def test_two_models_swap_and_what_has_to_wait_is_resumed(found: dict[str, Any]) -> None:
    starts = [one["start"] for one in found["swap_grouped"]["rounds"]]
    assert starts[:2] == ["restored", "restored"]
    assert "resumed" in starts[2:]
    assert found["swap_grouped"]["failed"] == 0


def test_what_is_refused_is_told_and_leaves_nothing(found: dict[str, Any]) -> None:
    faults = found["faults"]
    assert (faults["worker_killed"]["then"], faults["little_memory"]["then"]) == ("restored", "restored")
    assert [faults[name]["left_on_gpu"] for name in ("worker_killed", "little_memory", "flipped_byte")] == [[], [], []]
    assert "host.gpu.driver: expected 580.1, found 999.99" in found["another"]["driver"]["told"]
