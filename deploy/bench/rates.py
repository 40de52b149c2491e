"""What this host can do, and what is on its GPU: measured or asked, beside the product."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_BLOCK = 8 << 20
_HOG = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
"""


def compute_processes(fact: str = "used_memory") -> list[str]:
    """``pid, fact`` of each process that the driver names."""
    argv = ["nvidia-smi", f"--query-compute-apps=pid,{fact}", "--format=csv,noheader"]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[:-1]


def engine_workers() -> list[int]:
    """Processes of vLLM that compute."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{entry}/cmdline").read_bytes().startswith(b"VLLM::EngineCore"):
                found.append(int(entry))
    return found


def host(root: Path) -> dict[str, Any]:
    """Facts and rates of this host."""
    facts = _helper(root, "facts")
    gpu = facts["gpus"][0]
    return {
        "gpu": gpu["name"],
        "gpus": len(facts["gpus"]),
        "driver": facts["driver"],
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "pcie_bytes_per_s": round(_helper(root, "bandwidth", gpu=gpu["uuid"])["bytes_per_s"]),
        "fill_bytes_per_s": round(fill()),
    }


def _helper(root: Path, op: str, **more: Any) -> dict[str, Any]:
    """One question to the product's GPU helper."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}
    argv = [sys.executable, "-P", "-m", "restorer.cuda_helper"]
    # It ends with its stdin, answered or not.
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"id": 1, "op": op, **more}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or "{}")
        process.stdin.close()
    if "result" not in answer:
        raise OSError(f"the GPU helper does not answer {op}: {answer.get('error')}")
    return dict(answer["result"])


def fill() -> float:
    """Bytes a second that all processors together put into fresh memory, in huge pages where there are any."""
    size, workers = 2 << 30, min(16, os.cpu_count() or 1)
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(start)
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda at: ctypes.memset(address + at, 1, _BLOCK), range(0, size, _BLOCK)))
        seconds = time.monotonic() - began
        del start
    return size / seconds


def read(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(_BLOCK):
            pass


def disk(paths: Sequence[Path], most: int = 6 << 30) -> float:
    """Bytes a second that sixteen readers get of these files past the page cache."""
    jobs: list[tuple[Path, int]] = []
    for path in paths:
        jobs += [(path, at) for at in range(0, path.stat().st_size - _BLOCK + 1, _BLOCK)]
    jobs = jobs[: most // _BLOCK]

    def one(job: tuple[Path, int]) -> None:
        fd = os.open(job[0], os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _BLOCK) as buffer:
                os.preadv(fd, [buffer], job[1])
        finally:
            os.close(fd)

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, jobs))
    return round(len(jobs) * _BLOCK / (time.monotonic() - began))


@contextlib.contextmanager
def hog(python: str, env: Sequence[str], leave_gib: int, gpu: str = "") -> Iterator[int]:
    """A process that takes all memory of a GPU (default: the first) but a little; its pid."""
    environment = {**os.environ, **dict(pair.split("=", 1) for pair in env)}
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    argv = [python, "-c", _HOG, str(leave_gib << 30)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"ready\n":
                raise OSError("no process could take the GPU's memory; does the engine's Python have torch?")
            yield process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def flipped(path: Path, at: int) -> Iterator[None]:
    """One bit of a file is another, until the block ends."""

    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    flip()
    try:
        yield
    finally:
        flip()
