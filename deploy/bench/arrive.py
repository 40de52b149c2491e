"""What a snapshot costs that lies in a remote: pulled, then restored; or asked for, and restored beside the last of its weights.

The remote is a folder of this host, so how fast it is says little; how much later than the last byte the first token comes does.
It is pulled from as fast as it goes, and once more with one request at a time. The last byte's time is that of the last write to
any file of the snapshot.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from typing import Any

import measures
from installation import ROOT, Bench, BenchError, console

AT_A_TIME = {"fast": 16, "slow": 1}
"""Requests to the remote at a time."""


def storage(bench: Bench, way: str, **more: str) -> dict[str, Any]:
    """The section of the configuration."""
    folder = bench.work / "remote"
    folder.mkdir(exist_ok=True)
    remote = {"url": f"file://{folder}", "zstd": 0, "concurrency": AT_A_TIME[way]}
    return {"remotes": {"bench": remote}, "reserve_bytes": 0, **more}


def arrive(bench: Bench, name: str) -> dict[str, Any]:
    """Pushed once; then removed here and asked for, in each way."""
    model, manifest = bench.names[name], bench.manifest(name)
    bench.stop_all()
    id, weights = bench.snapshot(model), sum(path.stat().st_size for path in measures.parts(bench, manifest))
    found: dict[str, Any] = {"snapshot_bytes": manifest["bytes"], "weights_bytes": weights}
    try:
        with bench.changed(storage=storage(bench, "fast")):
            found["push"] = bench.task("push", id)
        for way in AT_A_TIME:
            _forget(bench, manifest)
            with bench.changed(storage=storage(bench, way)):
                found[f"{way}_after"] = _told(way, "after", _after(bench, model, id, manifest))
            _forget(bench, manifest)
            with bench.changed(storage=storage(bench, way, pull="bench")):
                found[f"{way}_beside"] = _told(way, "beside", _beside(bench, model, manifest))
    finally:
        shutil.rmtree(bench.work / "remote", ignore_errors=True)
    return found


def _told(way: str, order: str, found: dict[str, Any]) -> dict[str, Any]:
    shown = ", ".join(f"{key} {value}" for key, value in found.items() if key != "stages")
    console.print(f"{way} remote, restored {order} the pull: {shown}", markup=False)
    return found


def _after(bench: Bench, model: str, id: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """All of it is pulled, and then restored."""
    moved = bench.task("pull", id)
    ended, last = time.time(), _last_write(bench, manifest)
    answer = bench.restored(model)
    return {
        "seconds": round(moved["seconds"] + answer["seconds"], 3),
        "pull_s": moved["seconds"],
        "pull_bytes_per_s": round(moved["bytes"] / moved["seconds"]),
        "restore_s": round(answer["seconds"], 3),
        "last_byte_to_token_s": round(ended - last + answer["seconds"], 3),
        "stages": answer["stages"],
    }


def _beside(bench: Bench, model: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """A request pulls it, and need not wait for the last of its weights."""
    began = time.time()
    answer = bench.ask(model)
    record = next(one for one in bench.get("/admin/v1/replicas")["replicas"] if one["incarnation"] == answer["incarnation"])
    stages = {stage["name"]: stage for stage in record["stages"]}
    if answer["start"] != "restored" or "pull" not in stages:
        raise BenchError(f"{model} was started {answer['start']}, and not out of the remote; see {bench.work / 'up.log'}")
    last, pulling = _last_write(bench, manifest), stages["pull"]["begun_ms"] / 1e3
    # What is there several times, as in weights that were made up, has come once.
    size = sum(stages[one]["bytes"] or 0 for one in ("pull", "arriving") if one in stages)
    return {
        "seconds": round(answer["seconds"], 3),
        "pull_s": round(last - pulling, 3),
        "pull_bytes_per_s": round(size / (last - pulling)),
        "last_byte_to_token_s": round(began + answer["seconds"] - last, 3),
        "beside": "arriving" in stages,
        "gpu_waited_s": stages["arriving"]["seconds"] if "arriving" in stages else 0.0,
        "processes_before_last_byte_s": round(last - stages["restore processes"]["begun_ms"] / 1e3, 3),
        "choice": record["choices"][0],
        "stages": record["stages"],
    }


def _forget(bench: Bench, manifest: dict[str, Any]) -> None:
    """Its weights are not on this host any more, nor any snapshot that names them."""
    bench.stop_all()
    digests = {one["digest"] for one in manifest["gpu"]["weights"]}
    for path in (bench.work / "state/snapshots").glob("*/manifest.json"):
        other = json.loads(path.read_bytes())
        if digests & {one["digest"] for one in (other["gpu"] or {}).get("weights", ())}:
            argv = [sys.executable, str(ROOT / "rewake.py"), "snapshot", "rm", path.parent.name, "-c", str(bench.config)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                raise BenchError(f"{path.parent.name} cannot be removed: {done.stdout}{done.stderr}")
    for digest in digests:
        shutil.rmtree(bench.work / "state/weights" / digest)
    model = manifest["profile"]["model"]
    bench.wait(lambda: not bench.snapshot(model), 60.0, f"the snapshots of {model} to be gone")


def _last_write(bench: Bench, manifest: dict[str, Any]) -> float:
    """Unix time at which the last byte of the weights was written here; they come last."""
    return max(path.stat().st_mtime for path in measures.parts(bench, manifest))
