"""What the GPU bench measures: starts of all kinds, and what the driver has to do with them. Each step returns what it found."""

from __future__ import annotations

import concurrent.futures
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import rates
from installation import Bench, BenchError, console


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
    for name in bench.names:
        bench.manifest(name)
    before, second, after = (bench.restored(bench.names[name]) for name in ("7b", "14b", "7b"))
    if before["text"] != after["text"]:
        raise BenchError("after another model had the GPU, the answer was another")
    return {"restore_s": round(after["seconds"], 3), "other_restore_s": round(second["seconds"], 3), "equal": True}


def swap(bench: Bench) -> dict[str, Any]:
    """Two models in turn on one GPU, several clients at a time; each waits for the other to make way."""
    rounds: list[dict[str, Any]] = []
    bench.stop_all()
    for number in range(2 * bench.options.swaps):
        model = bench.names[("7b", "14b")[number % 2]]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _, model=model: bench.ask(model), range(4)))
        if len({answer["text"] for answer in answers}) != 1:
            raise BenchError(f"{model} gave its clients different answers: {[answer['text'] for answer in answers]}")
        last = max(answers, key=lambda answer: answer["seconds"])
        found = {"model": model, "start": last["start"], "first_token_s": round(last["seconds"], 3)}
        rounds.append(found)
        console.print(
            f"swap to {model}, {found['start']}: four clients, the last one's first token after {last['seconds']:.2f} s"
        )
    bench.stop_all()
    return {"requests": 4 * len(rounds), "failed": 0, "rounds": rounds}


def disk(bench: Bench, name: str) -> dict[str, Any]:
    """From a cold page cache: the snapshot alone, and all of it with the weights."""
    model, manifest = bench.names[name], bench.manifest(name)
    found: dict[str, Any] = {"disk_bytes_per_s": rates.disk(parts(bench, manifest))}
    for key, warm in (("snapshot_s", parts(bench, manifest)), ("snapshot_and_weights_s", [])):
        bench.stop_all()
        folder = bench.work / "state/snapshots" / bench.snapshot(model)
        rates.forget([*folder.rglob("*.img"), *parts(bench, manifest)])
        for path in warm:
            rates.read(path)
        answer = bench.restored(model)
        found |= {key: round(answer["seconds"], 3), key.replace("_s", "_stages"): answer["stages"]}
    return found


def driver(bench: Bench, name: str, log: Path) -> dict[str, Any]:
    """What the driver and the helper took of one life: a restore and its end. One helper must have done all of it.

    A GPU's state is moved by the driver alone; how fast tells whether it has a fast way to the host's memory.

    Args:
        log: what stands between the restorer and its helper writes there.
    """
    manifest = bench.manifest(name)
    bench.stop_all()
    before = len(log.read_text().splitlines())
    bench.restored(bench.names[name])
    bench.stop_all()
    every = [json.loads(line) for line in log.read_text().splitlines()]
    lines = every[before:]
    helpers = sum(line["op"] == "start" for line in every)
    if helpers != 1:
        raise BenchError(f"{helpers} GPU helpers were started by one restorer")
    calls: dict[str, dict[str, Any]] = {}
    for line in lines:
        call = calls.setdefault(line["op"], {"calls": 0, "pids": 0, "first_s": round(line["seconds"], 4), "max_s": 0.0})
        call["calls"] += 1
        call["pids"] += line["pids"]
        call["max_s"] = max(call["max_s"], round(line["seconds"], 4))
    thaw = _numbers(lines, "thaw")
    load = _numbers(lines, "loaded")
    state = manifest["gpu"]["state_bytes"] / len(manifest["gpu"]["used"])
    pcie = rates.ask(bench.helper, {"op": "bandwidth", "gpu": manifest["gpu"]["used"][0]})[0].result["bytes_per_s"]
    return {
        "helpers": helpers,
        "calls": calls,
        "state_bytes_each_gpu": round(state),
        "restore_each_gpu_s": thaw["restore_s"],
        "off_each_gpu_s": calls["quiet"]["max_s"],
        "load_s": load["seconds"],
        "load_bytes_per_s": round(load["bytes"] / load["seconds"]),
        "load_share_of_pcie": round(load["bytes"] / load["seconds"] / pcie, 3),
        **_asked_of_all(bench),
    }


def _asked_of_all(bench: Bench) -> dict[str, Any]:
    """Which of this host's processes use CUDA, asked twice of one helper: the second time nothing has to be initialised."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    first, again = rates.ask(bench.helper, *({"op": "find", "pids": pids},) * 2)
    return {"find_pids": len(pids), "find_first_s": round(first.seconds, 4), "find_again_s": round(again.seconds, 4)}


def _numbers(lines: list[dict[str, Any]], op: str) -> dict[str, Any]:
    """The numbers of an operation's last answer."""
    found = [line["numbers"] for line in lines if line["op"] == op]
    if not found:
        raise BenchError(f"the GPU helper was never asked to {op}")
    return dict(found[-1])


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
            bench.http.post(exchange["path"], json=exchange["request"], timeout=60).raise_for_status()
        best = min(best, time.monotonic() - began)
    return round(best, 4)


def _sizes(bench: Bench, manifest: dict[str, Any]) -> dict[str, int]:
    return {
        "bytes": sum(item["bytes"] for item in manifest["objects"]),
        "bytes_on_disk": manifest["bytes"],
        "weights_bytes": sum(path.stat().st_size for path in parts(bench, manifest)),
        "gpu_state_bytes": manifest["gpu"]["state_bytes"],
    }


def parts(bench: Bench, manifest: dict[str, Any]) -> list[Path]:
    """The files of a snapshot's weights."""
    root = bench.work / "state/weights"
    return [root / one["digest"] / part["name"] for one in manifest["gpu"]["weights"] for part in one["parts"]]
