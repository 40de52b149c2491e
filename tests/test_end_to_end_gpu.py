"""The GPU path of the whole system with the real CRIU: a fake driver in the real helper, a small engine with vLLM's routes."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from conftest import require_root
from e2e_installation import ROOT, Installation, eventually, manifest_of, network

pytestmark = pytest.mark.criu


def gpu_model(place: Path, *more: str, gpu: dict[str, Any] | None = None, **policy: Any) -> dict[str, Any]:
    """Settings of a model on the engine of :mod:`e2e_gpu_engine`."""
    command = [sys.executable, str(ROOT / "tests/e2e_gpu_engine.py"), "8000", str(place / "hold"), *more]
    engine = {"kind": "vllm", "command": command, "env": {"FAKE_CUDA": str(place / "cuda")}, "gpu": {"count": 1, "wait_s": 5}}
    return {
        "engine": engine | {"gpu": {**engine["gpu"], **(gpu or {})}},
        "snapshot": {"create": "manual"},
        "canary": {"max_tokens": 4, "prompts": ["one", "two"], "timeout_s": 20},
        "on_restore_failure": "reject",
        **policy,
    }


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    require_root()
    folder = Path(tempfile.mkdtemp(prefix="rewake-gpu-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def system(place: Path) -> Iterator[Installation]:
    helper = fake_cuda.written(place / "cuda", gpus=2)
    models = {
        "apart": gpu_model(place),
        "dumped": gpu_model(place, gpu={"weights": "dump"}),
        "auto": gpu_model(place, "--seed", "2", snapshot={"create": "auto"}),
    }
    system = Installation(place, network(19), models, gpu_helper=helper)
    try:
        system.start()
        yield system
    finally:
        system.close()


@pytest.fixture(autouse=True)
def said(place: Path) -> Iterator[None]:
    log = place / "up.log"
    begun = log.stat().st_size if log.exists() else 0
    yield
    print(log.read_bytes()[begun:].decode(errors="replace") if log.exists() else "")


def calls(place: Path) -> list[str]:
    return (place / "cuda/calls").read_text().splitlines() if (place / "cuda/calls").exists() else []


def test_weights_travel_apart_and_the_engine_comes_back(system: Installation, place: Path) -> None:
    folder = system.snapshot("apart")
    gpu = manifest_of(folder).gpu
    assert gpu is not None
    assert len(gpu.pids) == 2
    answer = system.complete("apart")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rewake-start"] == "restored"
    (replica,) = system.replicas("apart")
    print(json.dumps(replica["stages"], indent=1))
    system.park("apart")
    eventually(system.nothing_half_made, "nothing")
