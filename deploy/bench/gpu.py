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
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import rates
import report
import shapes
import yaml
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
OUTPUT = BUILD / "bench-gpu.json"
STEPS = ("restore", "repeat", "other", "swap", "disk", "faults")
START_S, OPERATION_S, GONE_S = 60.0, 1800.0, 60.0
PROMPT = "Name the first ten prime numbers."
console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())


class BenchError(Exception):
    """A step that did not do what it must."""


class Refused(BenchError):
    """The gateway answered with an error."""


class Bench:
    """One installation, and what is asked of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work = Path(options.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.base = f"http://127.0.0.1:{options.port}"
        self.run_dir = Path("/run/rewake-bench-gpu")
        self.names = {name: f"qwen2.5-{name}" for name in ("7b", "14b")}
        self.folders = {name: Path(folder) for name, folder in (pair.split("=", 1) for pair in options.model)}
        self.up: subprocess.Popen[bytes] | None = None

    # ---------------------------------------------------------------- the installation

    def model(self, name: str) -> dict[str, Any]:
        """Configuration of one model."""
        served, folder = self.names[name], self.folders.get(name)
        more = () if folder else ("--load-format=dummy",)
        folder = folder or shapes.write(served, self.work / "models" / served)
        caches = self.work / "caches" / name
        return {
            "engine": {
                "kind": "vllm",
                "gpu": {"count": 1, "wait_s": 60},
                "command": [
                    *(self.options.python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *more),
                    *("--served-model-name", served, f"{served}-cold", "--host=0.0.0.0", "--port=8000"),
                    *(f"--kv-cache-memory-bytes={self.options.kv_gib << 30}", *self.options.engine_arg),
                ],
                "env": {
                    "HF_HUB_OFFLINE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "UV_USE_IO_URING": "0",
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                    # The engine's own compile caches are kept between starts; the first one fills them.
                    "VLLM_CACHE_ROOT": str(caches / "vllm"),
                    "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
                    "TRITON_CACHE_DIR": str(caches / "triton"),
                    **dict(pair.split("=", 1) for pair in self.options.env),
                },
            },
            # A failure must be seen, and not be hidden by a cold start.
            "on_no_snapshot": "reject",
            "on_restore_failure": "reject",
            "snapshot": {"create": "manual", "rehearse": self.options.rehearse},
            "canary": {"max_tokens": 32},
        }

    def configuration(self, **changes: Any) -> dict[str, Any]:
        """The whole file. ``changes``: to every model but the cold one; ``restorer``: to that section."""
        restorer = changes.pop("restorer", {})
        models = {self.names[name]: {**self.model(name), **changes} for name in self.names}
        models[f"{self.names['7b']}-cold"] = {**self.model("7b"), "on_no_snapshot": "cold"}
        return {
            "state_dir": str(self.work / "state"),
            "run_dir": str(self.run_dir),
            "gateway": {"port": self.options.port},
            "restorer": {
                **({"criu": self.options.criu} if self.options.criu else {}),
                "network": "198.18.80.0/20",
                "max_attempts": 1,
                "failure_backoff_s": 0.5,
                **restorer,
            },
            "models": models,
        }

    @contextlib.contextmanager
    def installation(self, **changes: Any) -> Iterator[None]:
        """`rewake up`, until the block ends; then Ctrl-C, which leaves nothing behind."""
        config = self.work / "rewake.yaml"
        config.write_text(yaml.safe_dump(self.configuration(**changes), sort_keys=False))
        argv = [sys.executable, str(ROOT / "rewake.py"), "up", "-c", str(config)]
        with (self.work / "up.log").open("ab") as log:
            self.up = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            self.wait(lambda: self.get("/ready", check=False) is not None, START_S, "the gateway to be ready")
            self.wait(lambda: bool(self.hosts()), START_S, "the restorer to report")
            yield
        finally:
            if self.up.poll() is None:
                self.up.send_signal(signal.SIGINT)
                self.up.wait(180)

    def wait(self, check: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll until it is so."""
        deadline = time.monotonic() + seconds
        while not check():
            if self.up is not None and self.up.poll() is not None:
                raise BenchError(f"`rewake up` ended with status {self.up.returncode}; see {self.work / 'up.log'}")
            if time.monotonic() > deadline:
                raise BenchError(f"waited {seconds:g} s for {what}; see {self.work / 'up.log'}")
            time.sleep(0.05)

    # ---------------------------------------------------------------- its API

    def _authorization(self) -> dict[str, str]:
        try:
            return {"Authorization": f"Bearer {(self.run_dir / 'admin-token').read_text().strip()}"}
        except OSError:
            return {}

    def get(self, path: str, *, check: bool = True) -> Any:
        try:
            answer = httpx.get(self.base + path, headers=self._authorization(), timeout=70)
        except httpx.HTTPError:
            if check:
                raise
            return None
        if answer.status_code != httpx.codes.OK:
            if check:
                raise BenchError(f"GET {path} answered {answer.status_code}: {answer.text}")
            return None
        return answer.json()

    def hosts(self) -> list[Any]:
        found = self.get("/admin/v1/snapshots", check=False)
        return [] if found is None else list(found["hosts"])

    def operate(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An admin operation, until it has ended."""
        answer = httpx.post(self.base + path, json=body, headers=self._authorization(), timeout=70)
        if answer.status_code != httpx.codes.ACCEPTED:
            raise BenchError(f"POST {path} answered {answer.status_code}: {answer.text}")
        operation: dict[str, Any] = answer.json()
        deadline = time.monotonic() + OPERATION_S
        while operation["state"] == "running":
            if time.monotonic() > deadline:
                raise BenchError(f"{path} did not end within {OPERATION_S:g} s")
            operation = self.get(f"/admin/v1/operations/{operation['id']}?wait=20")
        if operation["state"] != "succeeded":
            raise BenchError(f"{path}: {operation['detail']}")
        return operation

    def stop_all(self) -> None:
        """Every replica is stopped, and nothing is left on the GPU."""
        for replica in self.get("/admin/v1/replicas")["replicas"]:
            if replica["state"] in ("admitted", "draining"):
                self.operate("/admin/v1/scale-down", {"model": replica["model"], "replicas": 0})
        self.gone()

    def gone(self) -> None:
        """Nothing of ours is left on the GPU."""
        self.wait(lambda: not self.on_gpu(), GONE_S, "the GPU to be free")

    def on_gpu(self) -> list[str]:
        """``pid, memory`` of each process that the driver names, but those that were there before us."""
        return [line for line in rates.compute_processes() if line.split(",")[0] not in self.options.strangers]

    def ask(self, model: str, *, tokens: int = 8) -> dict[str, Any]:
        """A streaming request: ``seconds`` to the first token, ``text``, ``start``, ``incarnation``."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "seed": 1, "stream": True}
        began, first, text = time.monotonic(), None, ""
        with httpx.stream("POST", f"{self.base}/v1/completions", json=body, timeout=None) as answer:
            if answer.status_code != httpx.codes.OK:
                raise Refused(f"{answer.status_code}: {answer.read().decode(errors='replace')}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                if choices[0].get("text") and first is None:
                    first = time.monotonic() - began
                text += choices[0].get("text") or ""
            headers = answer.headers
        if first is None:
            raise BenchError(f"{model} answered without a token")
        return {
            "seconds": first,
            "text": text,
            "start": headers["x-rewake-start"],
            "incarnation": headers["x-rewake-incarnation"],
        }

    def stages(self, incarnation: str) -> list[dict[str, Any]]:
        for replica in self.get("/admin/v1/replicas")["replicas"]:
            if replica["incarnation"] == incarnation:
                return list(replica["stages"])
        raise BenchError(f"no replica has the incarnation {incarnation} that answered")

    def manifest(self, name: str) -> dict[str, Any]:
        """The newest fitting snapshot's manifest; a snapshot is made when there is none."""
        model = self.names[name]
        host = self.hosts()[0]
        if not host["capable"]:
            raise BenchError(f"no snapshots on this host: {host['capability']}")
        fitting = [one for one in host["snapshots"] if one["model"] == model and one["fits"]]
        if fitting:
            id = max(fitting, key=lambda one: one["created_ms"])["id"]
        else:
            self.stop_all()
            console.print(f"{model}: starting a donor cold, capturing, rehearsing, publishing …")
            began = time.monotonic()
            id = self.operate("/admin/v1/snapshots", {"model": model})["snapshot"]
            console.print(f"{model}: snapshot {id} was made in {time.monotonic() - began:.1f} s")
        return dict(json.loads((self.work / "state/snapshots" / id / "manifest.json").read_bytes()))

    def restored(self, model: str) -> dict[str, Any]:
        """A request with nothing running, answered by a restored replica; with its stages."""
        self.stop_all()
        found = self.ask(model)
        if found["start"] != "restored":
            raise BenchError(f"{model} was started {found['start']}, not restored; see {self.work / 'up.log'}")
        return {**found, "stages": self.stages(found["incarnation"])}


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
    """Two models in turn on one GPU, several clients at a time; each waits for the other to be parked."""
    texts: dict[str, set[str]] = {}
    seconds: dict[str, list[float]] = {}
    for number in range(2 * bench.options.swaps):
        model = bench.names[("7b", "14b")[number % 2]]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _, model=model: bench.ask(model), range(4)))
        texts.setdefault(model, set()).update(answer["text"] for answer in answers)
        seconds.setdefault(model, []).append(round(max(answer["seconds"] for answer in answers), 3))
        console.print(f"swap to {model}: four clients, the last one's first token after {seconds[model][-1]:.2f} s")
    return {"requests": 8 * bench.options.swaps, "failed": 0, "first_token_s": seconds}


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
    with bench.installation():
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
        result["host"] = rates.host(bench.hosts()[0], ROOT)
        for name in bench.options.models.split(","):
            for step in (restore, repeat):
                if step.__name__ in steps:
                    keep(name, step(bench, name))
            report.show(console, result, name)
            if "disk" in steps:
                keep(name, {"disk": disk(bench, name)})
        if "other" in steps:
            keep("other", other(bench))
        bench.stop_all()
    if "swap" in steps:
        with bench.installation(idle_park_s=bench.options.park_s):
            keep("swap", swap(bench))
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
    parser.add_argument("--kv-gib", type=int, default=2, help="size of the KV cache (default: %(default)s)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the engines")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="ARGUMENT", help="for the engines")
    parser.add_argument("--criu", default=os.environ.get("REWAKE_CRIU", ""), help="the CRIU binary")
    parser.add_argument("--work", default=str(BUILD / "bench-gpu"), help="everything is kept here (default: %(default)s)")
    parser.add_argument("--port", type=int, default=18180)
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="leave out the cold start with compile caches")
    parser.add_argument("--no-rehearse", dest="rehearse", action="store_false", help="publish snapshots without a rehearsal")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("nvidia-smi") is None:
        console.print("the bench makes namespaces and restores processes on an NVIDIA GPU: run it as root where nvidia-smi works")
        return 2
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
