#!/usr/bin/env python3
"""Measures Rewake on this host's GPU: cold starts, restores, swaps and faults, all through the gateway of a real `rewake up`.

Usage: gpu.py [--python PYTHON] [--model 7b=FOLDER …] [--steps …]      (root; run by `make bench-gpu`; see docs/benchmarks.md)

Needs an NVIDIA driver, CRIU, and vLLM in some Python. Without a folder, models have the shape of Qwen2.5 7B and 14B and
weights that vLLM makes up, the same at each start. Prints tables and writes build/bench-gpu.json; steps of a later call are
added to it. Talks to the product through its configuration and its HTTP API, and asks nvidia-smi what is left on the GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import rates
import report
from installation import ROOT, Bench, BenchError, Refused, console

BUILD = ROOT / "build"
OUTPUT = BUILD / "bench-gpu.json"
STEPS = ("restore", "repeat", "disk", "other", "swap", "faults", "move", "pair")


# -------------------------------------------------------------------- steps


def restore(bench: Bench, name: str) -> dict[str, Any]:
    """Cold, cold with compile caches, restored; with stages and floors."""
    model = bench.names[name]
    manifest = bench.manifest(name)
    first = bench.restored(model)
    result: dict[str, Any] = {"model": model, "cold_start_s": manifest["cold_start_s"], "canary": _canary(manifest)}
    result["warm_canary_s"] = _warm_canary(bench, manifest)
    result |= {"snapshot": _sizes(bench, manifest), "restores_s": [round(first["seconds"], 3)], "text": first["text"]}
    if name == "7b" and bench.options.cold:
        bench.stop_all()
        cold = bench.ask(f"{model}-cold")
        result |= {"cold_start_warm_caches_s": round(cold["seconds"], 3), "cold_stages": bench.stages(cold["incarnation"])}
        # Another process, so that its kernels may be others: worth knowing, no fault.
        result["cold_answer_equal"] = cold["text"] == first["text"]
    return _summed(result, first["stages"])


def repeat(bench: Bench, name: str) -> dict[str, Any]:
    """Many restores in a row, each with the same answer."""
    rounds = []
    for number in range(1, bench.options.restores + 1):
        rounds.append(found := bench.restored(bench.names[name]))
        console.print(f"{bench.names[name]}: restore {number}: first token after [bold]{found['seconds']:.3f} s")
    if len({found["text"] for found in rounds}) != 1:
        raise BenchError("restored replicas answered differently")
    seconds = [round(found["seconds"], 3) for found in rounds]
    middle = sorted(rounds, key=lambda found: found["seconds"])[len(rounds) // 2]
    # Admission is the verdict: an answer that differs in one bit is never admitted.
    result = {"restores_in_a_row": len(rounds), "restores_s": seconds, "restore_s": round(statistics.median(seconds), 3)}
    return _summed({**result, "canary_equal": True, "text": middle["text"]}, middle["stages"])


def other(bench: Bench) -> dict[str, Any]:
    """Restored onto a GPU that another model has used meanwhile."""
    before, between, after = (bench.restored(bench.names[name]) for name in ("7b", "14b", "7b"))
    if before["text"] != after["text"]:
        raise BenchError("after another model had the GPU, the answer was another")
    return {"restore_s": round(after["seconds"], 3), "other_restore_s": round(between["seconds"], 3), "equal": True}


def swap(bench: Bench) -> dict[str, Any]:
    """Two models in turn on one GPU, several clients at a time; each waits for the other to make way."""
    rounds: list[dict[str, Any]] = []
    for number in range(2 * bench.options.swaps):
        model = bench.names[("7b", "14b")[number % 2]]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _, model=model: bench.ask(model), range(4)))
        last = max(answers, key=lambda answer: answer["seconds"])
        found = {"model": model, "start": last["start"], "first_token_s": round(last["seconds"], 3)}
        rounds.append({**found, "answers": len({answer["text"] for answer in answers})})
        console.print(
            f"swap to {model}, {found['start']}: four clients, the last one's first token after {last['seconds']:.2f} s"
        )
    return {"requests": 4 * len(rounds), "failed": 0, "rounds": rounds}


def disk(bench: Bench, name: str) -> dict[str, Any]:
    """From a cold page cache: the snapshot alone, and all of it with the weights."""
    model, manifest = bench.names[name], bench.manifest(name)
    found: dict[str, Any] = {"disk_bytes_per_s": rates.disk(_parts(bench, manifest))}
    for key, warm in (("snapshot_s", _parts(bench, manifest)), ("snapshot_and_weights_s", [])):
        bench.stop_all()
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        for path in [*warm, *(Path(file["path"]) for file in manifest["files"])]:
            rates.read(path)
        answer = bench.restored(model)
        found |= {key: round(answer["seconds"], 3), key.replace("_s", "_stages"): answer["stages"]}
    return found


def faults(bench: Bench) -> dict[str, Any]:
    """What must be refused or rolled back, each with what the client was told and what was left on the GPU."""
    model = bench.names["7b"]
    found: dict[str, Any] = {}
    with bench.installation(gpu={"wait_s": 5}):
        bench.restored(model)
        worker = next(pid for pid in rates.engine_workers() if any(line.startswith(f"{pid},") for line in bench.on_gpu()))
        os.kill(worker, signal.SIGKILL)
        bench.gone()
        found["worker_killed"] = {"left_on_gpu": bench.on_gpu(), "then": bench.restored(model)["start"]}
        bench.stop_all()
        with rates.hog(bench.options.python, bench.options.env, leave_gib=8) as pid:
            bench.options.strangers.append(str(pid))
            found["little_memory"] = _refused(bench, model)
            bench.options.strangers.remove(str(pid))
        found["little_memory"]["then"] = bench.restored(model)["start"]
        bench.stop_all()
    helper = [sys.executable, "-P", str(Path(__file__).with_name("other_driver.py"))]
    with bench.installation(restorer={"gpu_helper": helper}):
        found["another_driver"] = _refused(bench, model)
    with bench.installation():
        part = _parts(bench, bench.manifest("7b"))[0]
        with rates.flipped(part, part.stat().st_size // 2):
            found["flipped_byte"] = _refused(bench, model)
    return found


def move(bench: Bench) -> dict[str, Any]:
    """Restored onto another GPU, because something else has the memory of the donor's."""
    manifest = bench.manifest("7b")
    used = manifest["gpu"]["used"][0]
    bench.stop_all()
    with rates.hog(bench.options.python, bench.options.env, leave_gib=8, gpu=used) as pid:
        bench.options.strangers.append(str(pid))
        answer = bench.restored(bench.names["7b"])
        places = [line for line in rates.compute_processes("gpu_uuid") if line.split(",")[0] not in bench.options.strangers]
        bench.stop_all()
        bench.options.strangers.remove(str(pid))
    moved = all(used not in line for line in places)
    back = bench.restored(bench.names["7b"])
    return {
        "restore_s": round(answer["seconds"], 3),
        "moved": moved,
        "equal": answer["text"] == back["text"],
        "stages": answer["stages"],
    }


def pair(bench: Bench) -> dict[str, Any]:
    """Two GPUs and NCCL: restored, or why not; a cold start must still serve."""
    model = f"{bench.names['7b']}-pair"
    bench.stop_all()
    try:
        manifest = bench.manifest("7b", "-pair")
    except BenchError as error:
        bench.gone()
        return {"captured": False, "told": str(error), "left_on_gpu": bench.on_gpu()}
    try:
        answer = bench.restored(model)
    except Refused as error:
        bench.gone()
        return {"captured": True, "restored": False, "told": str(error), "left_on_gpu": bench.on_gpu()}
    return {
        "captured": True,
        "restored": True,
        "cold_start_s": manifest["cold_start_s"],
        "restore_s": round(answer["seconds"], 3),
        "stages": answer["stages"],
        "again_equal": bench.restored(model)["text"] == answer["text"],
    }


def _refused(bench: Bench, model: str) -> dict[str, Any]:
    try:
        answer = bench.ask(model)
    except Refused as error:
        told = str(error)
    else:
        raise BenchError(f"{model} was started {answer['start']} though it had to be refused")
    time.sleep(0.5)
    console.print(f"refused: {told[:300]}")
    return {"told": told, "left_on_gpu": bench.on_gpu()}


def _summed(result: dict[str, Any], stages: list[dict[str, Any]]) -> dict[str, Any]:
    tier = next((stage["tier"] for stage in stages if stage["name"] == "restore processes"), None)
    return {**result, "tier": tier, "stages": stages}


def _canary(manifest: dict[str, Any]) -> dict[str, Any]:
    return {"requests": len(manifest["canary"]), "tokens": sum(one["tokens"] for one in manifest["canary"])}


def _warm_canary(bench: Bench, manifest: dict[str, Any]) -> float:
    """The canary's requests to a replica that is warm and idle: what they take at least. Seconds."""
    best = float("inf")
    for _ in range(3):
        began = time.monotonic()
        for exchange in manifest["canary"]:
            httpx.post(bench.base + exchange["path"], json=exchange["request"], timeout=60).raise_for_status()
        best = min(best, time.monotonic() - began)
    return round(best, 4)


def _sizes(bench: Bench, manifest: dict[str, Any]) -> dict[str, int]:
    return {
        "bytes": sum(item["bytes"] for item in manifest["objects"]),
        "bytes_on_disk": manifest["bytes"],
        "weights_bytes": sum(path.stat().st_size for path in _parts(bench, manifest)),
        "gpu_state_bytes": manifest["gpu"]["state_bytes"],
    }


def _parts(bench: Bench, manifest: dict[str, Any]) -> list[Path]:
    root = bench.work / "state/weights"
    return [root / one["digest"] / part["name"] for one in manifest["gpu"]["weights"] for part in one["parts"]]


# -------------------------------------------------------------------- the run


def run(bench: Bench, steps: list[str], result: dict[str, Any]) -> None:
    """The steps, each adding to ``result``, which is written after each."""

    def keep(key: str, found: dict[str, Any]) -> None:
        into = result.setdefault("models", {}).setdefault(key, {}) if key in bench.names else result.setdefault(key, {})
        into.update(found)
        report.headline(result)
        OUTPUT.write_text(json.dumps(result, indent=2) + "\n")

    with bench.installation():
        result["host"] = rates.host(ROOT)
        for name in bench.options.models.split(","):
            for step in (restore, repeat):
                if step.__name__ in steps:
                    keep(name, step(bench, name))
            report.show(console, result, name)
            if "disk" in steps:
                keep(name, {"disk": disk(bench, name)})
        if "other" in steps:
            keep("other", other(bench))
        if "move" in steps and result["host"]["gpus"] > 1:
            keep("move", move(bench))
        if "pair" in steps and result["host"]["gpus"] > 1:
            keep("pair", pair(bench))
        bench.stop_all()
    if "swap" in steps:
        for key, gpu in (("swap", {}), ("swap_suspended", {"suspend_s": 600})):
            with bench.installation(idle_park_s=bench.options.park_s, gpu=gpu):
                keep(key, swap(bench))
            bench.gone()
    if "faults" in steps:
        keep("faults", faults(bench))


def main() -> int:
    """The command line; 0: every step did what it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--model", action="append", default=[], metavar="7b=FOLDER", help="real weights for one of the models")
    parser.add_argument("--models", default="7b,14b", help="which of them to measure (default: %(default)s)")
    parser.add_argument("--steps", default=",".join(STEPS), help="default: %(default)s")
    parser.add_argument("--restores", type=int, default=10, help="restores in a row (default: %(default)s)")
    parser.add_argument("--swaps", type=int, default=3, help="times that each of two models gets the GPU")
    parser.add_argument("--park-s", type=float, default=1.0, help="idle seconds before a model makes way in the swap step")
    parser.add_argument("--kv-gib", type=int, default=2, help="the 7B model's KV cache; 14B: four times that")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the engines")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="ARGUMENT", help="for the engines")
    parser.add_argument("--pair-arg", action="append", default=[], metavar="ARGUMENT", help="for the engine on two GPUs")
    parser.add_argument("--criu", default=os.environ.get("REWAKE_CRIU", ""), help="the CRIU binary")
    parser.add_argument("--work", default=str(BUILD / "bench-gpu"), help="everything is kept here (default: %(default)s)")
    parser.add_argument("--port", type=int, default=18180)
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="leave out the cold start with compile caches")
    parser.add_argument("--no-rehearse", dest="rehearse", action="store_false", help="publish snapshots without a rehearsal")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("nvidia-smi") is None:
        console.print("the bench makes namespaces and restores processes on an NVIDIA GPU: run it as root where nvidia-smi works")
        return 2
    options.python = os.path.abspath(options.python)
    options.strangers = [line.split(",")[0] for line in rates.compute_processes()]
    BUILD.mkdir(exist_ok=True)
    result: dict[str, Any] = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    try:
        run(Bench(options), options.steps.split(","), result)
    except (BenchError, httpx.HTTPError, OSError) as error:
        console.print(f"[bold red]the bench failed:[/] {error}")
        return 1
    console.print(f"written to {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
