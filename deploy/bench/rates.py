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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HELPER = (sys.executable, "-P", "-m", "restorer.gpu.cuda_helper")
"""argv of the product's GPU helper."""
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


def host(helper: Sequence[str], fill_bytes: int) -> dict[str, Any]:
    """Facts and rates of this host. ``helper``: argv of a GPU helper, ``fill_bytes``: memory to measure with."""
    facts = ask(helper, {"op": "facts"})[0].result
    gpu = facts["gpus"][0]
    return {
        "gpu": gpu["name"],
        "gpus": len(facts["gpus"]),
        "driver": facts["driver"],
        "topology": facts.get("topology"),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "pcie_bytes_per_s": round(ask(helper, {"op": "bandwidth", "gpu": gpu["uuid"]})[0].result["bytes_per_s"]),
        "fill_bytes_per_s": round(fill(fill_bytes)),
    }


class Answer(NamedTuple):
    """What a GPU helper answered to one request, and after how many seconds."""

    result: dict[str, Any]
    seconds: float


def ask(helper: Sequence[str], *requests: dict[str, Any]) -> list[Answer]:
    """Questions to one GPU helper that is started for them, one after another."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    answers = []
    # It ends with its stdin, answered or not.
    with subprocess.Popen(helper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for id, request in enumerate(requests):
            begun = time.monotonic()
            process.stdin.write(json.dumps({"id": id, **request}) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or "{}")
            if "result" not in answer:
                raise OSError(f"the GPU helper does not answer {request['op']}: {answer.get('error')}")
            answers.append(Answer(dict(answer["result"]), time.monotonic() - begun))
        process.stdin.close()
    return answers


def bus_ids() -> dict[str, str]:
    """UUID -> where on the PCI bus each GPU is."""
    argv = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return dict(line.split(", ", 1) for line in lines)


def fill(size: int) -> float:
    """Bytes a second that all processors together put into fresh memory, in huge pages where there are any."""
    workers = min(16, os.cpu_count() or 1)
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


def forget(paths: Iterable[Path]) -> None:
    """Put files out of the page cache."""
    os.sync()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


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
            # In huge pages, so that the device is asked for few pieces.
            with mmap.mmap(-1, _BLOCK) as buffer:
                with contextlib.suppress(OSError):
                    buffer.madvise(mmap.MADV_HUGEPAGE)
                os.preadv(fd, [buffer], job[1])
        finally:
            os.close(fd)

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, jobs))
    return round(len(jobs) * _BLOCK / (time.monotonic() - began))


@contextlib.contextmanager
def hog(python: str, env: Sequence[str], leave_gib: int, gpu: str) -> Iterator[int]:
    """A process that takes all memory of a GPU but a little; its pid."""
    environment = {**os.environ, **dict(pair.split("=", 1) for pair in env)}
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
