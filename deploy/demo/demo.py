#!/usr/bin/env python3
"""The main job, shown: a real engine comes back from a snapshot behind the gateway, and proves that it is the same.

Usage: demo.py --engine vllm|llama-server      (root; run by `make demo`, which installs what it needs)

Starts `rewake up` with the configuration beside this file, makes a snapshot unless a fitting one is there, sends a streaming
chat request with the unmodified `openai` client while no engine runs, and compares: restored, against a cold start. Writes
build/demo.json. Exit status 0: everything worked. Talks to the product through its command line and its HTTP API alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
MODEL, COLD = "smollm2", "smollm2-cold"
ROUNDS = 3
START_S, OPERATION_S, REQUEST_S = 120.0, 1800.0, 900.0

console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())


class DemoError(Exception):
    """A step that did not do what it must."""


class Demo:
    """One run against one installation."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        text = (Path(__file__).with_name(f"{engine}.yaml")).read_text().replace("@ROOT@", str(ROOT))
        self.settings: dict[str, Any] = yaml.safe_load(text)
        self.config = BUILD / "demo" / f"{engine}.yaml"
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(text)
        self.base = f"http://127.0.0.1:{self.settings['gateway']['port']}"
        self.notes = Path(self.settings["state_dir"]) / f"cold-{engine}.json"
        self.up: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """`rewake up`, until the gateway is ready."""
        log = (BUILD / "demo" / "up.log").open("wb")
        argv = [sys.executable, str(ROOT / "rewake.py"), "up", "-c", str(self.config)]
        self.up = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.wait(lambda: self.get("/ready", check=False) is not None, START_S, "the gateway to be ready")
        self.wait(lambda: bool(self.hosts()), START_S, "the restorer to report")

    def stop(self) -> None:
        """Ctrl-C, and wait: it leaves nothing behind."""
        if self.up is not None and self.up.poll() is None:
            self.up.send_signal(signal.SIGINT)
            self.up.wait(120)

    def wait(self, check: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not check():
            if self.up is not None and self.up.poll() is not None:
                raise DemoError(f"`rewake up` ended with status {self.up.returncode}; see {BUILD / 'demo' / 'up.log'}")
            if time.monotonic() > deadline:
                raise DemoError(f"waited {seconds:g} s for {what}; see {BUILD / 'demo' / 'up.log'}")
            time.sleep(0.05)

    def get(self, path: str, *, check: bool = True) -> Any:
        try:
            answer = httpx.get(self.base + path, headers=self.authorization(), timeout=70)
        except httpx.HTTPError:
            if check:
                raise
            return None
        if answer.status_code != 200:
            if check:
                raise DemoError(f"GET {path} answered {answer.status_code}: {answer.text}")
            return None
        return answer.json()

    def authorization(self) -> dict[str, str]:
        try:
            token = (Path(self.settings["run_dir"]) / "admin-token").read_text().strip()
        except OSError:
            return {}
        return {"Authorization": f"Bearer {token}"}

    def hosts(self) -> list[Any]:
        found = self.get("/admin/v1/snapshots", check=False)
        return [] if found is None else list(found["hosts"])

    def operate(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An admin operation, until it has ended."""
        answer = httpx.post(self.base + path, json=body, headers=self.authorization(), timeout=70)
        if answer.status_code != 202:
            raise DemoError(f"POST {path} answered {answer.status_code}: {answer.text}")
        operation: dict[str, Any] = answer.json()
        deadline = time.monotonic() + OPERATION_S
        while operation["state"] == "running":
            if time.monotonic() > deadline:
                raise DemoError(f"{path} did not end within {OPERATION_S:g} s")
            operation = self.get(f"/admin/v1/operations/{operation['id']}?wait=20")
        if operation["state"] != "succeeded":
            raise DemoError(f"{path}: {operation['detail']}")
        return operation

    def snapshot(self) -> str | None:
        """Id of a fitting snapshot; None where CRIU cannot run."""
        host = self.hosts()[0]
        if not host["capable"]:
            console.print(f"[bold]no snapshots on this machine:[/] {host['capability']}\nwhat follows are labelled cold starts")
            return None
        fitting = [one for one in host["snapshots"] if one["model"] == MODEL and one["fits"]]
        if fitting:
            found = str(max(fitting, key=lambda one: one["created_ms"])["id"])
            console.print(f"snapshot {found} is there already")
            return found
        with console.status("starting the donor cold, recording its canary, dumping, rehearsing, publishing …"):
            began = time.monotonic()
            found = str(self.operate("/admin/v1/snapshots", {"model": MODEL})["snapshot"])
        console.print(f"snapshot {found} was made in {time.monotonic() - began:.1f} s; the donor is gone")
        return found

    def nothing_runs(self) -> None:
        """Every replica is stopped, and no engine process is left."""
        for model in (MODEL, COLD):
            self.operate("/admin/v1/scale-down", {"model": model, "replicas": 0})
        command = self.settings["models"][MODEL]["engine"]["command"]
        self.wait(lambda: not _processes(command[0]), START_S, f"every {command[0]} to be gone")

    def first_token(self, model: str) -> tuple[float, str, str, str]:
        """A streaming chat request with nothing running: (seconds to the first token, text, start, incarnation)."""
        self.nothing_runs()
        client = openai.OpenAI(base_url=f"{self.base}/v1", api_key="none", timeout=REQUEST_S, max_retries=0)
        message: Any = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
        began, first, text = time.monotonic(), None, ""
        stream = client.chat.completions.create(
            model=model, messages=[message], stream=True, max_tokens=24, temperature=0, seed=1
        )
        for chunk in stream:
            piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if piece and first is None:
                first = time.monotonic() - began
            text += piece
        if first is None:
            raise DemoError(f"{model} answered without a token")
        # Not by the headers: an answer that had to begin before there was a replica cannot name it there.
        (replica,) = (
            one for one in self.get("/admin/v1/replicas")["replicas"] if (one["model"], one["state"]) == (model, "admitted")
        )
        return first, text.strip(), replica["start"], replica["incarnation"]

    def stages(self, incarnation: str) -> list[dict[str, Any]]:
        for replica in self.get("/admin/v1/replicas")["replicas"]:
            if replica["incarnation"] == incarnation:
                return list(replica["stages"])
        raise DemoError(f"no replica has the incarnation {incarnation} that answered")

    def manifest(self, id: str) -> dict[str, Any]:
        return dict(json.loads((Path(self.settings["state_dir"]) / "snapshots" / id / "manifest.json").read_bytes()))

    def cold(self, key: str) -> tuple[float, list[dict[str, Any]]]:
        """First token of a cold start with warm caches, and its stages; measured once for each snapshot."""
        if self.notes.exists() and (known := json.loads(self.notes.read_text())).get("key") == key:
            console.print(f"cold start with warm caches: {known['seconds']:.1f} s (measured before)")
            return known["seconds"], known["stages"]
        with console.status("the same request with a cold start …"):
            seconds, _, start, incarnation = self.first_token(COLD)
        if start != "cold":
            raise DemoError(f"{COLD} said that it was {start}")
        stages = self.stages(incarnation)
        self.notes.write_text(json.dumps({"key": key, "seconds": seconds, "stages": stages}))
        console.print(f"cold start with warm caches: {seconds:.1f} s to the first token")
        return seconds, stages

    def run(self) -> dict[str, Any]:
        id = self.snapshot()
        cold_s, cold_stages = self.cold(id or "none")
        if id is None:
            return {
                "start": "cold",
                "cold_start_warm_caches_s": cold_s,
                "stages": cold_stages,
                "why": self.hosts()[0]["capability"],
            }
        rounds = []
        for number in range(1, ROUNDS + 1):
            with console.status("a request arrives and nothing runs …"):
                seconds, text, start, incarnation = self.first_token(MODEL)
            rounds.append((seconds, self.stages(incarnation)))
            console.print(f"request {number}: first token after [bold]{seconds:.2f} s[/], {start} as {incarnation}: {text!r}")
            if start != "restored":
                raise DemoError(f"the replica was started {start}, not restored; see {BUILD / 'demo' / 'up.log'}")
        self.nothing_runs()
        restore_s = statistics.median(seconds for seconds, _ in rounds)
        stages = next(found for seconds, found in rounds if seconds == restore_s)
        manifest = self.manifest(id)
        result = {
            "engine": self.engine,
            "start": "restored",
            "cold_start_s": manifest["cold_start_s"],
            "cold_start_warm_caches_s": round(cold_s, 3),
            "restore_s": round(restore_s, 3),
            "restores_s": [round(seconds, 3) for seconds, _ in rounds],
            "speedup": round(manifest["cold_start_s"] / restore_s, 2),
            "speedup_warm_caches": round(cold_s / restore_s, 2),
            # Admission is the verdict: an answer that differs in one bit is never admitted.
            "canary": {
                "requests": len(manifest["canary"]),
                "tokens": sum(exchange["tokens"] for exchange in manifest["canary"]),
                "equal": True,
            },
            "snapshot": {
                "id": id,
                "bytes": sum(item["bytes"] for item in manifest["objects"]),
                "bytes_written": manifest["bytes_written"],
                # Pages of zeros are holes on the disk.
                "bytes_on_disk": manifest["bytes"],
            },
            "stages": stages,
        }
        _show(result, cold_stages)
        return result


def _processes(program: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                argv = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if program.encode() in argv:
                found.append(entry)
    return found


def _show(result: dict[str, Any], cold_stages: list[dict[str, Any]]) -> None:
    table = Table(title=f"{result['engine']}: one request with nothing running")
    for column in ("restored", "seconds", "bytes", "from", "cold, warm caches", "seconds"):
        table.add_column(column, justify="right" if column in ("seconds", "bytes") else "left")
    for number in range(max(len(result["stages"]), len(cold_stages))):
        row: list[str] = []
        for stages, full in ((result["stages"], True), (cold_stages, False)):
            stage = stages[number] if number < len(stages) else None
            row += ["", ""] if stage is None else [stage["name"], f"{stage['seconds']:.3f}"]
            if full:
                row += ["", ""] if stage is None else [_bytes(stage["bytes"]), stage["tier"] or ""]
        table.add_row(*row)
    warm = result["cold_start_warm_caches_s"]
    table.add_section()
    table.add_row("[bold]first token", f"[bold]{result['restore_s']:.3f}", "", "", "[bold]first token", f"[bold]{warm:.3f}")
    console.print(table)
    snapshot, canary = result["snapshot"], result["canary"]
    console.print(
        f"speed-up: {result['speedup']:.1f}x against the first cold start ({result['cold_start_s']:.1f} s), "
        f"{result['speedup_warm_caches']:.1f}x against one with warm caches"
    )
    console.print(f"canary: {canary['requests']} requests, {canary['tokens']} tokens, every bit of their answers equal")
    ratio = snapshot["bytes_written"] / snapshot["bytes"]
    console.print(
        f"snapshot {snapshot['id']}: {_bytes(snapshot['bytes'])}, {ratio:.2f} bytes written for each byte of it, "
        f"{_bytes(snapshot['bytes_on_disk'])} on disk without pages of zeros"
    )
    if result["speedup_warm_caches"] < 3:
        console.print("this engine starts fast by itself; `make demo` with vLLM shows what restoring is for")


def _bytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.1f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "llama-server"), default="vllm")
    demo = Demo(parser.parse_args().engine)
    if os.geteuid() != 0:
        console.print("the demo makes namespaces and runs CRIU: run it as root")
        return 2
    try:
        demo.start()
        result = demo.run()
    except (DemoError, httpx.HTTPError, openai.OpenAIError) as error:
        console.print(f"[bold red]the demo failed:[/] {error}")
        return 1
    finally:
        demo.stop()
    (BUILD / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written to {(BUILD / 'demo.json').relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
