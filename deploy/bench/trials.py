"""What must be refused or rolled back, and what may not survive a move; with what the client was told and what was left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import rates
from installation import Bench, BenchError, Refused, between, console
from measures import parts


def faults(bench: Bench) -> dict[str, Any]:
    """A killed worker, too little memory, a flipped byte; and after each of them all is well again, but for the last."""
    model = bench.names["7b"]
    found: dict[str, Any] = {}
    with bench.changed(gpu={"wait_s": 5}):
        bench.restored(model)
        os.kill(int(bench.on_gpu()[0].split(",")[0]), signal.SIGKILL)
        bench.gone()
        found["worker_killed"] = {"left_on_gpu": bench.on_gpu(), "then": bench.restored(model)["start"]}
        bench.stop_all()
        with contextlib.ExitStack() as hogs:
            for uuid in rates.bus_ids():
                hogs.enter_context(_taken(bench, uuid))
            found["little_memory"] = _refused(bench, model, "free of")
        found["little_memory"]["then"] = bench.restored(model)["start"]
        bench.stop_all()
    part = parts(bench, bench.manifest("7b"))[0]
    with rates.flipped(part, part.stat().st_size // 2):
        found["flipped_byte"] = _refused(bench, model, "sha256")
    return found


def another(bench: Bench, settings: str) -> dict[str, Any]:
    """Another driver than the donor's; and for a snapshot of two GPUs, other links between them. ``settings``: of that one."""
    argv = between(bench, "--fact", "driver=999.99", "--fact", "topology=NVLinks 0 0; bus 50")
    with bench.installation(restorer={"gpu_helper": argv}, pair=_settings(settings)):
        found = {"driver": _refused(bench, bench.names["7b"], "host.gpu.driver")}
        pair = f"{bench.names['7b']}-pair"
        if any(one["model"] == pair for one in bench.hosts()[0]["snapshots"]):
            found["topology"] = _refused(bench, pair, "host.gpu.topology")
    return found


def move(bench: Bench) -> dict[str, Any]:
    """Restored onto another GPU, because something else has the memory of the donor's."""
    manifest = bench.manifest("7b")
    used = manifest["gpu"]["used"][0]
    bench.stop_all()
    with _taken(bench, used):
        answer = bench.restored(bench.names["7b"])
        places = [line for line in rates.compute_processes("gpu_uuid") if line.split(",")[0] not in bench.options.strangers]
        bench.stop_all()
    moved, at = all(used not in line for line in places), rates.bus_ids()
    back = bench.restored(bench.names["7b"])
    return {
        "restore_s": round(answer["seconds"], 3),
        "moved": moved,
        "bus_ids": {"donor": at[used], "restored": sorted(at[line.split(", ")[1]] for line in places)},
        "equal": answer["text"] == back["text"],
        "stages": answer["stages"],
    }


def pair(bench: Bench) -> dict[str, Any]:
    """Two workers and NCCL, with one set of settings after another until one can be restored; what became of each."""
    tries: list[dict[str, Any]] = []
    for text in bench.options.pair_try or [""]:
        with bench.changed(pair=_settings(text)):
            tries.append({"settings": text, **_paired(bench)})
        console.print(f"two workers, {text or 'as they are'}: {tries[-1]}")
        if tries[-1]["restored"]:
            break
    return {**tries[-1], "tries": tries}


def _settings(text: str) -> dict[str, str]:
    return dict(one.split("=", 1) for one in text.split(",") if one)


@contextlib.contextmanager
def _taken(bench: Bench, uuid: str) -> Iterator[None]:
    """Something else has all but 8 GiB of a GPU's memory."""
    with rates.hog(bench.options.python, bench.options.env, leave_gib=8, gpu=uuid) as pid:
        bench.options.strangers.append(str(pid))
        try:
            yield
        finally:
            bench.options.strangers.remove(str(pid))


def _paired(bench: Bench) -> dict[str, Any]:
    model, log = f"{bench.names['7b']}-pair", bench.work / "up.log"
    bench.stop_all()
    begun = log.stat().st_size
    captured = False
    try:
        manifest = bench.manifest("7b", "-pair")
        captured = True
        answer = bench.restored(model)
        again = bench.restored(model)
    except BenchError as error:
        bench.gone()
        said = [
            line
            for line in log.read_bytes()[begun:].decode(errors="replace").splitlines()
            if " WARNING " in line or " ERROR " in line
        ]
        return {"captured": captured, "restored": False, "told": str(error), "said": said[-20:], "left_on_gpu": bench.on_gpu()}
    bench.stop_all()
    return {
        "captured": True,
        "restored": True,
        "cold_start_s": manifest["cold_start_s"],
        "workers": len(manifest["gpu"]["weights"]),
        "cuda_processes": len(manifest["gpu"]["pids"]),
        "gpus": manifest["gpu"]["used"],
        "restores_s": [round(one["seconds"], 3) for one in (answer, again)],
        "stages": again["stages"],
        "equal": answer["text"] == again["text"],
    }


def _refused(bench: Bench, model: str, named: str) -> dict[str, Any]:
    """What the client is told, in which something must be named."""
    try:
        answer = bench.ask(model)
    except Refused as error:
        told = str(error)
    else:
        raise BenchError(f"{model} was started {answer['start']} though it had to be refused")
    if named not in told:
        raise BenchError(f"{model} was refused without a word of {named}: {told}")
    time.sleep(0.5)
    console.print(f"refused: {told[:300]}")
    return {"told": told, "left_on_gpu": bench.on_gpu()}
