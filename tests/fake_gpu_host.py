"""A host with GPUs and vLLM for who looks at it from outside: `nvidia-smi`, and a Python that has vLLM and torch.

:func:`written` makes the two commands in a folder. Behind them are the driver of :mod:`fake_cuda` and the engine of
:mod:`e2e_gpu_engine`; whoever asks that Python for all of a GPU's memory holds it as long as it lives.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_cuda import FakeDriver

HERE = Path(__file__).resolve()


def written(folder: Path, driver: Path) -> Path:
    """Commands ``python`` and ``nvidia-smi``; the folder that they are in."""
    for name in ("python", "nvidia-smi"):
        folder.mkdir(exist_ok=True)
        words = [sys.executable, "-S", str(HERE), name, str(driver)]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def nvidia_smi(driver: FakeDriver, query: str) -> None:
    gpus = [gpu["uuid"] for gpu in driver.facts()["gpus"]]
    if query.startswith("--query-gpu="):
        print("\n".join(f"{uuid}, 00000000:0{number}:00.0" for number, uuid in enumerate(gpus)))
        return
    for uuid, found in driver.memory().items():
        for pid in found["pids"]:
            if used := driver.used(pid):
                print(f"{pid}, {uuid if query.endswith('gpu_uuid') else f'{used >> 20} MiB'}")


def python(driver: FakeDriver, arguments: list[str]) -> None:
    """vLLM's server, or a program that takes memory."""
    if arguments[0] == "-c":
        hold(driver, int(arguments[2]))
    served = arguments[arguments.index("--served-model-name") + 1]
    kept = [word for word in arguments if word.startswith("--tensor-parallel-size=") or word == "--enable-sleep-mode"]
    if "--worker-extension-cls" in arguments:
        at = arguments.index("--worker-extension-cls")
        kept += arguments[at : at + 2]
    engine = [sys.executable, "-S", str(HERE.with_name("e2e_gpu_engine.py")), "8000", "/nowhere", "--seed", served]
    os.execv(engine[0], [*engine, "--claims", str(20 << 30), *kept])


def hold(driver: FakeDriver, leave: int) -> None:
    uuids = [gpu["uuid"] for gpu in driver.facts()["gpus"]]
    uuid = os.environ.get("CUDA_VISIBLE_DEVICES", uuids[0])
    state = {"state": "running", "index": uuids.index(uuid), "bytes": driver.memory()[uuid]["free"] - leave}
    home = tempfile.mkdtemp(dir=driver.folder)
    (Path(home) / f"cuda-{os.getpid()}").write_text(json.dumps(state))
    program = "import sys; print('ready', flush=True); sys.stdin.read()"
    os.execve(sys.executable, [sys.executable, "-c", program], {"FAKE_CUDA": str(driver.folder), "HOME": home})


if __name__ == "__main__":
    if sys.argv[1] == "python":
        python(FakeDriver(Path(sys.argv[2])), sys.argv[3:])
    else:
        nvidia_smi(FakeDriver(Path(sys.argv[2])), sys.argv[3])
