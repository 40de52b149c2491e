"""One suite for all backends, run by `rewake up` with the real CRIU, the real runc and a real engine where there is one.

``sleep`` needs an engine whose API can put it to sleep. vLLM's build for CPUs cannot (its allocator is for GPUs), so that there
it is the small engine of :mod:`e2e_gpu_engine`, which speaks vLLM's routes and forgets its weights as vLLM does at level 2.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import require_root
from e2e_installation import Installation, eventually, llama, manifest_of, needed, network, small

from restorer import cgroups
from restorer.backend import Can
from restorer.backends import Backend, OwnCriu, Runc

pytestmark = pytest.mark.criu
BACKENDS: dict[str, type[Backend]] = {"criu": OwnCriu, "runc": Runc, "cold": Backend}
SNAPSHOTS = [name for name, kind in BACKENDS.items() if kind.can.snapshot]


def on(backend: str, model: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """The settings of a model with another backend."""
    return {**model, "engine": {**model["engine"], "backend": backend, **engine}}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    require_root()
    # Not pytest's folder: socket paths are short, and the gateway's account must be able to pass.
    folder = Path(tempfile.mkdtemp(prefix="rewake-backends-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def system(place: Path) -> Iterator[Installation]:
    mapped, hold = place / "lib.bin", place / "hold"
    mapped.write_bytes(b"version 1")
    models = {name: on(name, llama(max_replicas=3, concurrency=1)) for name in BACKENDS}
    models |= {f"{name}-small": on(name, small(mapped, hold)) for name in BACKENDS}
    system = Installation(place, network(19), models, runc=needed("REWAKE_RUNC"))
    try:
        system.start()
        yield system
    finally:
        system.close()
    assert system.nothing_left()
    assert not groups()


@pytest.fixture(autouse=True)
def nothing_half_made_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: what runs is admitted or spare. Prints what was said meanwhile, which is shown of a failed test."""
    log = request.getfixturevalue("place") / "up.log"
    begun = log.stat().st_size if log.exists() else 0
    yield
    print(log.read_bytes()[begun:].decode(errors="replace") if log.exists() else "")
    system: Installation = request.getfixturevalue("system")
    eventually(system.nothing_half_made, "what was half-made to be gone")


def groups() -> list[str]:
    """Names of the control groups there are, of boxes whatever installation's."""
    return sorted({child.name for folder in cgroups.folders(cgroups.PARENT) for child in folder.iterdir() if child.is_dir()})


def again(can: Can) -> str:
    """How a replica starts whose model had one before."""
    return "restored" if can.snapshot else "cold"


@pytest.fixture(scope="module")
def first(system: Installation) -> dict[str, str]:
    """Each backend's model, started cold, has answered; what."""
    texts = {}
    for name in BACKENDS:
        answer = system.complete(name)
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, "cold"), answer.text
        texts[name] = answer.json()["choices"][0]["text"]
        system.park(name)
    assert len(set(texts.values())) == 1
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
    eventually(lambda: not groups(), "no control group of an engine that has ended")
    seen = set()
    for _ in range(2):
        answer = system.complete(name)
        assert (answer.status_code, answer.headers["x-rewake-start"]) == (200, again(can)), answer.text
        assert answer.json()["choices"][0]["text"] == first[name]
        seen.add(answer.headers["x-rewake-incarnation"])
        system.park(name)
        assert not [pid for id in seen for pid in system.engines(id)]
    assert len(seen) == 2
