"""One installation that is measured: its configuration, its life as `rewake up`, and what is asked of it over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import rates
import shapes
import yaml
from rich.console import Console

ROOT = rates.ROOT
START_S, GONE_S = 60.0, 60.0
KV = {"7b": 1, "14b": 4}
"""Cache for the same context, against the first model's."""
PROMPT = "Name the first ten prime numbers."
console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())


class BenchError(Exception):
    """A step that did not do what it must."""


class Refused(BenchError):
    """The gateway answered with an error."""


def between(bench: Bench, *options: str) -> list[str]:
    """argv of a GPU helper with something between it and the restorer; see helper.py."""
    return [sys.executable, str(Path(__file__).with_name("helper.py")), *options, "--", *bench.helper]


class Bench:
    """One installation, and what is asked of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work = Path(options.work)
        self.work.mkdir(parents=True, exist_ok=True)
        # Made once: to make a client takes longer than a gateway does. Each request has a connection of its own all the same.
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{options.port}", timeout=70, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self.run_dir = Path(options.run_dir)
        self.names = {name: f"qwen2.5-{name}" for name in ("7b", "14b")}
        self.folders = {name: Path(folder) for name, folder in (pair.split("=", 1) for pair in options.model)}
        self.up: subprocess.Popen[bytes] | None = None
        self.config = self.work / "rewake.yaml"

    @property
    def helper(self) -> list[str]:
        """argv of the GPU helper."""
        return list(self.options.gpu_helper or rates.HELPER)

    # ---------------------------------------------------------------- the installation

    def model(self, name: str, *arguments: str, **gpu: Any) -> dict[str, Any]:
        """Configuration of one model; ``arguments``: for its engine, ``gpu``: more of ``engine.gpu``."""
        served, folder = self.names[name], self.folders.get(name)
        more = () if folder else ("--load-format=dummy",)
        folder = folder or shapes.write(served, self.work / "models" / served)
        caches = self.work / "caches" / (f"{name}-pair" if gpu.get("count", 1) > 1 else name)
        return {
            "engine": {
                "kind": "vllm",
                "gpu": {"count": 1, "wait_s": 60, **gpu},
                "command": [
                    *(self.options.python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *more),
                    *("--served-model-name", served, f"{served}-cold", f"{served}-pair", "--host=0.0.0.0", "--port=8000"),
                    *(f"--kv-cache-memory-bytes={self.options.kv_gib * KV[name] << 30}", *self.options.engine_arg),
                    *arguments,
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
            "canary": {"max_tokens": self.options.canary_tokens},
        }

    def configuration(self, **changes: Any) -> dict[str, Any]:
        """The whole file.

        Args:
            changes: to both models; but ``restorer``: to that section, ``gpu``: to ``engine.gpu`` of both, ``groups`` and
                ``storage``: these sections, ``pair``: to the environment of the engine on two GPUs.
        """
        restorer, gpu, groups, storage = (changes.pop(name, {}) for name in ("restorer", "gpu", "groups", "storage"))
        # Untested, so that settings may be tried that are refused otherwise.
        pair = self.model("7b", "--tensor-parallel-size=2", *self.options.pair_arg, count=2, untested=True)
        pair["engine"]["env"] |= changes.pop("pair", {})
        models = {self.names[name]: {**self.model(name, **gpu), **changes} for name in self.names}
        models[f"{self.names['7b']}-cold"] = {**self.model("7b"), "on_no_snapshot": "cold"}
        models[f"{self.names['7b']}-pair"] = pair
        return {
            "groups": groups,
            "storage": storage,
            "state_dir": str(self.work / "state"),
            "run_dir": str(self.run_dir),
            "gateway": {"port": self.options.port},
            "restorer": {
                **({"criu": self.options.criu} if self.options.criu else {}),
                "gpu_helper": self.options.gpu_helper,
                "network": self.options.network,
                "max_attempts": 1,
                "failure_backoff_s": 0.5,
                # What is in the page cache is the bench's to decide.
                "warm": {"enabled": False},
                **restorer,
            },
            "models": models,
        }

    @contextlib.contextmanager
    def installation(self, **changes: Any) -> Iterator[None]:
        """`rewake up`, until the block ends; then Ctrl-C, which leaves nothing behind."""
        argv = [sys.executable, str(ROOT / "rewake.py"), "up", "-c", str(self._write(changes))]
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

    @contextlib.contextmanager
    def changed(self, **changes: Any) -> Iterator[None]:
        """The running installation with other settings, until the block ends."""
        self._reload(changes)
        try:
            yield
        finally:
            self._reload({})

    def _reload(self, changes: dict[str, Any]) -> None:
        self._write(changes)
        answer = self.http.post("/admin/v1/reload", headers=self._authorization())
        if answer.status_code != httpx.codes.OK:
            raise BenchError(f"POST /admin/v1/reload answered {answer.status_code}: {answer.text}")

    def _write(self, changes: dict[str, Any]) -> Path:
        self.config.write_text(yaml.safe_dump(self.configuration(**changes), sort_keys=False))
        return self.config

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
            answer = self.http.get(path, headers=self._authorization())
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
        return self._followed(path, "operations", self.post(path, body))

    def task(self, kind: str, snapshot: str) -> dict[str, Any]:
        """A chore of the restorer, until it has ended; what it found."""
        begun = self.post("/admin/v1/tasks", {"kind": kind, "snapshot": snapshot})
        return dict(self._followed(f"{kind} of {snapshot}", "tasks", begun)["result"])

    def _followed(self, what: str, where: str, record: dict[str, Any]) -> dict[str, Any]:
        """An operation or a task that was accepted, once it has succeeded."""
        deadline = time.monotonic() + self.options.operation_s
        while record["state"] == "running":
            if time.monotonic() > deadline:
                raise BenchError(f"{what} did not end within {self.options.operation_s:g} s")
            record = self.get(f"/admin/v1/{where}/{record['id']}?wait=20")
        if record["state"] != "succeeded":
            raise BenchError(f"{what}: {record['detail']}")
        return record

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What was accepted, as the admin API tells of it."""
        answer = self.http.post(path, json=body, headers=self._authorization())
        if answer.status_code != httpx.codes.ACCEPTED:
            raise BenchError(f"POST {path} answered {answer.status_code}: {answer.text}")
        return dict(answer.json())

    def stop_all(self) -> None:
        """Every replica is stopped, and nothing is left on the GPU."""
        for replica in self.get("/admin/v1/replicas")["replicas"]:
            if replica["state"] in ("admitted", "draining"):
                self.operate("/admin/v1/scale-down", {"model": replica["model"], "replicas": 0})
        self.gone()

    def gone(self) -> None:
        """Nothing of ours is left on the GPU."""
        deadline = time.monotonic() + GONE_S
        while left := self.on_gpu():
            if time.monotonic() > deadline:
                raise BenchError(f"still on the GPU after {GONE_S:g} s: {'; '.join(left)}")
            time.sleep(0.1)

    def on_gpu(self) -> list[str]:
        """``pid, memory`` of each process that the driver names, but those that were there before us."""
        return [line for line in rates.compute_processes() if line.split(",")[0] not in self.options.strangers]

    def ask(self, model: str, *, tokens: int = 8) -> dict[str, Any]:
        """A streaming request: ``seconds`` to the first token, ``text``; of the replica, ``start`` and ``incarnation``."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "seed": 1, "stream": True}
        began, first, text = time.monotonic(), None, ""
        with self.http.stream("POST", "/v1/completions", json=body, timeout=None) as answer:
            if answer.status_code != httpx.codes.OK:
                raise Refused(f"{answer.status_code}: {answer.read().decode(errors='replace')}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                if choices[0].get("text") and first is None:
                    first = time.monotonic() - began
                text += choices[0].get("text") or ""
        if first is None:
            raise BenchError(f"{model} answered without a token")
        return {"seconds": first, "text": text, **self._admitted(model)}

    def _admitted(self, model: str) -> dict[str, str]:
        """The one replica of a model: a stream that had to begin before its start ended cannot say in its head who answers."""
        replicas = self.get("/admin/v1/replicas")["replicas"]
        found = [one for one in replicas if (one["model"], one["state"]) == (model, "admitted")]
        if len(found) != 1:
            raise BenchError(f"{model} answered, and {len(found)} of its replicas are admitted")
        return {key: found[0][key] for key in ("start", "incarnation")}

    def stages(self, incarnation: str) -> list[dict[str, Any]]:
        for replica in self.get("/admin/v1/replicas")["replicas"]:
            if replica["incarnation"] == incarnation:
                return list(replica["stages"])
        raise BenchError(f"no replica has the incarnation {incarnation} that answered")

    def snapshot(self, model: str) -> str:
        """Id of the newest snapshot of a model that fits; empty: there is none."""
        host = self.hosts()[0]
        if not host["capable"]:
            raise BenchError(f"no snapshots on this host: {host['capability']}")
        fitting = [one for one in host["snapshots"] if one["model"] == model and one["fits"]]
        return str(max(fitting, key=lambda one: one["created_ms"])["id"]) if fitting else ""

    def manifest(self, name: str, suffix: str = "") -> dict[str, Any]:
        """The newest fitting snapshot's manifest; a snapshot is made when there is none."""
        model = self.names[name] + suffix
        id = self.snapshot(model)
        if not id:
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
