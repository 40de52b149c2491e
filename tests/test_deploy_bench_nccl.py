"""The script that tells what a driver makes of NCCL, on a host without GPUs: stand-ins for its processes, the real helper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cuda
import pytest

pytestmark = pytest.mark.contract
SCRIPT = Path(__file__).resolve().parents[1] / "deploy/bench/nccl.py"
_TALKER = """#!{python} -S
import itertools, json, os, sys
words = sys.argv[2:]
with open(os.path.join(os.environ["HOME"], f"cuda-{{os.getpid()}}"), "w") as state:
    json.dump({{"state": "running", "index": int(words[1]), "bytes": 1}}, state)
for word in itertools.chain(["begin"], sys.stdin):
    if word.strip() == "join" and words[0] == "graph":
        print(json.dumps({{"error": "launch failure"}}), flush=True)
    elif word.strip() == "join" and words[0] == "anew":
        os._exit(1)
    else:
        print(json.dumps({{}}), flush=True)
"""


def found(place: Path, *cases: str) -> dict[str, Any]:
    helper = fake_cuda.written(place / "cuda", gpus=2)
    talker = place / "python"
    talker.write_text(_TALKER.format(python=sys.executable))
    talker.chmod(0o755)
    argv = [sys.executable, str(SCRIPT), "--python", str(talker), "--output", str(place / "found.json")]
    argv += [f"--gpu-helper={word}" for word in helper] + [f"--only={case}" for case in cases]
    env = {**os.environ, "HOME": str(place), "FAKE_CUDA": str(place / "cuda")}
    subprocess.run(argv, check=True, timeout=120, env=env)
    result: dict[str, Any] = json.loads((place / "found.json").read_text())
    return result


def test_each_case_says_how_far_it_came(tmp_path: Path) -> None:
    cases = found(tmp_path, "no NCCL", "sockets in a CUDA graph", "made anew")["cases"]
    assert cases["no NCCL"]["restored"]
    assert {*cases["no NCCL"]} == {"restored", "lock_s", "checkpoint_s", "restore_s", "unlock_s"}
    assert cases["sockets in a CUDA graph"]["told"] == "after, process 0: launch failure"
    assert cases["made anew"]["told"] == "after, process 0: it ended: "


def test_a_driver_that_refuses_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/fault-checkpoint").write_text(json.dumps({"do": "CUDA_ERROR_NOT_SUPPORTED"}))
    told = found(tmp_path, "sockets")["cases"]["sockets"]["told"]
    assert "CUDA_ERROR_NOT_SUPPORTED" in told


def test_a_host_with_one_gpu_is_told_that_it_takes_two(tmp_path: Path) -> None:
    helper = fake_cuda.written(tmp_path / "cuda", gpus=1)
    argv = [sys.executable, str(SCRIPT), *(f"--gpu-helper={word}" for word in helper)]
    env = {**os.environ, "HOME": str(tmp_path), "FAKE_CUDA": str(tmp_path / "cuda")}
    done = subprocess.run(argv, check=False, timeout=120, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "nccl.py needs 2 GPUs, and this host has 1\n")
