#!/usr/bin/env python3
"""How near restores come to what this host can do at all: ``make bench-restore``.

Usage: restore.py [--gigabytes N] [--rounds N] [--cold N] [--only memory,mapped] [--clones 1,2,4] [--no-lazy] [--prefetch HOW]

A model with random weights is made on the spot and served by llama-server, once with its weights read into memory and once
mapped. In each round, in turns: a cold start, a plain `criu restore`, one with lazy pages, and Rewake's restore, each from a
cold and from a warm page cache, each to the first token of the same request. The host is measured right before and right
after each restore of ours, and what both say together is what that restore is compared with. At last a cold restore and the
next one, when the restorer has read the snapshot again by itself in between (`restorer.warm`). Cold means that every file it
reads was put out of the page cache, and that the kernel was asked whether it is. Writes build/bench-restore.json. As root,
with REWAKE_CRIU, REWAKE_LLAMA_SERVER and REWAKE_MODEL (whose tokenizer is used).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import random_gguf  # noqa: E402
from plain import Plain  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from service import BenchError, Service  # noqa: E402

from policies import floor  # noqa: E402
from policies.floor import Rates  # noqa: E402
from policies.replica import Replica  # noqa: E402
from restorer.errors import RestorerError  # noqa: E402
from restorer.machine.floor import FILE, measure  # noqa: E402
from restorer.system import pagecache  # noqa: E402

BUILD = ROOT / "build"
WORK = BUILD / "bench-restore"
BODY = {"prompt": "One", "max_tokens": 1, "temperature": 0, "seed": 1}
CONTENDERS = ("cold start", "criu", "criu lazy", "rewake")
TIERS = ("disk", "page cache")
REWARM_S = 90.0
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def settings(variant: str, gguf: Path, **more: Any) -> dict[str, Any]:
    """One model: its weights in memory, or mapped."""
    options = ["--host", "0.0.0.0", "--port", "8000", "--ctx-size", "512", "--parallel", "1", "--no-webui"]
    loading = ["--load-mode", "none"] if variant == "memory" else []
    command = [os.environ["REWAKE_LLAMA_SERVER"], "--model", str(gguf), *options, *loading]
    return {
        "engine": {"kind": "llama-server", "command": command},
        "weights": [str(gguf)],
        "snapshot": {"create": "manual"},
        "on_no_snapshot": "reject",
        "on_restore_failure": "reject",
        "canary": {"prompts": [BODY["prompt"]], "max_tokens": 1},
        "max_replicas": 4,
        "idle_park_s": 3600,
        **more,
    }


def warm(paths: Iterable[Path]) -> None:
    """Bring files into the page cache."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 23):
                pass


def files_in(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


class Variant:
    """One way of having weights: its engine, its snapshot, its plain dump."""

    def __init__(self, name: str, gguf: Path, service: Service, plain: Plain) -> None:
        self.name, self.gguf, self.service, self.plain = name, gguf, service, plain
        self.manifest = service.snapshot(name)
        snapshot = service.state / "snapshots" / self.manifest["id"]
        self.images = files_in(snapshot / "images")
        mapped = [Path(file["path"]) for file in self.manifest["files"]]
        own = [] if name == "memory" else [gguf]
        self.moves = [*self.images, *own]
        """What the yardstick reads: all that must be read until the canary is answered."""
        libraries = [path for path in mapped if path != gguf]
        self.reads = {
            "cold start": [gguf, *libraries],
            "criu": [*files_in(plain.images), *own, *libraries],
            "criu lazy": [*files_in(plain.images), *own, *libraries],
            "rewake": [*files_in(snapshot / "images", snapshot / "scratch"), *own, *libraries],
        }

    def run(self, contender: str, tier: str) -> dict[str, Any]:
        """One measurement. ``cached`` is what the page cache held of what it reads when it began."""
        everything = sorted({path for paths in self.reads.values() for path in paths})
        pagecache.evict(everything)
        if tier == "page cache":
            warm(self.reads[contender])
        there, total = pagecache.share(self.reads[contender])
        found: dict[str, Any]
        if contender == "rewake":
            found = self.service.first_token(self.name, BODY, start="restored")
        elif contender == "cold start":
            found = self.service.first_token(f"{self.name}-cold", BODY, start="cold")
        else:
            found = asyncio.run(self.plain.restore({**BODY, "model": self.name}, lazy=contender == "criu lazy"))
        return {"variant": self.name, "contender": contender, "tier": tier, "cached": round(there / total, 3), **found}


@dataclass(frozen=True, slots=True)
class Speed:
    """What this host could do at one moment: by Rewake's own probe, and by the yardstick."""

    rates: Rates
    stick: dict[str, float]

    def between(self, other: Speed) -> Speed:
        """What it could do between the two, as far as one can tell: the mean of what each byte takes."""
        mine, others = self.rates.model_dump(exclude={"measured_ms", "pcie"}), other.rates.model_dump()
        rates = {name: statistics.harmonic_mean([value, others[name]]) for name, value in mine.items()}
        stick = {name: statistics.fmean([value, other.stick[name]]) for name, value in self.stick.items()}
        return Speed(Rates(measured_ms=other.rates.measured_ms, **rates), stick)


def speed(variant: Variant, tier: str) -> Speed:
    """This host's speed now: nothing that was seen before counts."""
    (WORK / FILE).unlink(missing_ok=True)
    rates = asyncio.run(measure(WORK))
    cold = "mapped" if variant.name == "mapped" else "disk,fill"
    wanted = cold if tier == "disk" else "cache"
    argv = [sys.executable, str(ROOT / "deploy/bench/yardstick.py"), wanted, *map(str, variant.moves)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True, env=environment)
    return Speed(rates, json.loads(done.stdout))


def judged(found: dict[str, Any], now: Speed, manifest: dict[str, Any]) -> dict[str, Any]:
    """One restore of ours: beside the floor that Rewake's own probe makes, and beside the yardstick.

    Beside that goes what moves its bytes: without the canary if they are the engine's memory, with it if they are mapped, since
    then the canary is what needs them.
    """
    record = Replica.model_validate(found.pop("record"))
    stages, floor_s = floor.judged(record.stages, now.rates, canary_s=manifest["canary_s"])
    account = floor.account(record.model_copy(update={"stages": tuple(stages), "floor_s": floor_s}))
    assert account is not None
    canary_s = sum(stage.seconds for stage in stages if stage.name == "canary")
    mapped, cold = found["variant"] == "mapped", found["tier"] == "disk"
    moved_s = account.took_s - (0.0 if mapped else canary_s)
    # What is mapped is used in the page cache: it is put nowhere, and nothing of it moves when it is there.
    stick = now.stick
    least_s = stick.get("mapped") if mapped else max(stick["disk"], stick["fill"]) if cold else stick["cache"]
    return {
        **found,
        "took_s": record.took_s,
        "floor_s": floor_s,
        "ratio": account.ratio,
        "moved_s": moved_s,
        "without_canary_s": account.took_s - canary_s,
        **({"least_s": least_s, "moved_ratio": moved_s / least_s} if least_s is not None else {}),
        "account": account.text,
        "choices": record.choices,
        "stages": [stage.model_dump() for stage in stages],
        "yardstick": now.stick,
        "rates": now.rates.model_dump(),
    }


def rounds(variants: Sequence[Variant], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every contender in turn; the host is measured right before and right after each restore of ours."""
    found = []
    for number in range(options.rounds):
        for variant in variants:
            for tier in TIERS:
                for contender in CONTENDERS:
                    if (contender == "criu lazy" and options.no_lazy) or (contender == "cold start" and number >= options.cold):
                        continue
                    before = speed(variant, tier) if contender == "rewake" else None
                    one = {"round": number, **variant.run(contender, tier)}
                    if before is not None:
                        one = judged(one, before.between(speed(variant, tier)), variant.manifest)
                    found.append(one)
                    with (WORK / "runs.jsonl").open("a") as file:
                        file.write(json.dumps(one) + "\n")
                    more = f"; {one['account']}" if "account" in one else ""
                    console.print(f"{number} {variant.name}, {tier}, {contender}: {one['seconds']:.2f} s{more}")
    return found


def rewarmed(variants: Sequence[Variant], service: Service) -> list[dict[str, Any]]:
    """What the restore after a cold one takes when the restorer may read its snapshot again in between, and how long that is."""
    found = []
    service.warming(True)
    for variant in variants:
        pagecache.evict(sorted({path for paths in variant.reads.values() for path in paths}))
        cold_s = service.first_token(variant.name, BODY, start="restored")["seconds"]
        begun = time.monotonic()
        while (tier := pagecache.tier(variant.moves)) != "page cache" and time.monotonic() - begun < REWARM_S:
            time.sleep(0.1)
        waited_s = time.monotonic() - begun
        next_s = service.first_token(variant.name, BODY, start="restored")["seconds"]
        found.append({"variant": variant.name, "cold_s": cold_s, "waited_s": waited_s, "tier": tier, "next_s": next_s})
        console.print(
            f"{variant.name}: {cold_s:.2f} s from the disk, then {next_s:.2f} s from the {tier}, {waited_s:.1f} s later"
        )
    service.warming(False)
    return found


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def median(found: Sequence[dict[str, Any]], key: str, **which: Any) -> float | None:
    values = [one[key] for one in found if all(one[name] == value for name, value in which.items()) and key in one]
    return round(statistics.median(values), 3) if values else None


def ratios(found: Sequence[dict[str, Any]], variant: str, tier: str) -> dict[str, float]:
    """Ratios of medians."""

    def seconds(contender: str) -> list[float]:
        return [one["seconds"] for one in found if _is(one, variant, tier, contender)]

    ours = [one for one in found if _is(one, variant, tier, "rewake")]
    result = {"vs_floor": statistics.median(one["ratio"] for one in ours)}
    if moved := [one["moved_ratio"] for one in ours if "moved_ratio" in one]:
        result["vs_yardstick"] = statistics.median(moved)
    for name, contender in (("cold_start", "cold start"), ("plain_criu", "criu"), ("lazy_criu", "criu lazy")):
        if theirs := seconds(contender):
            result[f"times_faster_than_{name}"] = statistics.median(theirs) / statistics.median(seconds("rewake"))
    alive = [one["restored"] for one in found if _is(one, variant, tier, "criu")]
    result["without_canary_times_faster_than_plain_criu"] = statistics.median(alive) / statistics.median(
        one["without_canary_s"] for one in ours
    )
    return {name: round(value, 2) for name, value in result.items()}


def _is(one: dict[str, Any], variant: str, tier: str, contender: str) -> bool:
    return bool(one["variant"] == variant and one["tier"] == tier and one["contender"] == contender)


def show(result: dict[str, Any]) -> None:
    for variant in result["ratios"]:
        table = Table(title=f"weights {variant}: seconds to the first token, medians", title_justify="left")
        for title in ("", *CONTENDERS, "floor", "x floor", "without canary", "its bytes", "yardstick", "x yardstick"):
            table.add_column(title, justify="right" if title else "left")
        for tier in TIERS:
            seconds = [median(result["runs"], "seconds", variant=variant, tier=tier, contender=one) for one in CONTENDERS]
            least = median(result["runs"], "floor_s", variant=variant, tier=tier)
            found = result["ratios"][variant][tier]
            cells = ["-" if value is None else f"{value:.2f}" for value in (*seconds, least)]
            alive, moved, stick = (
                median(result["runs"], key, variant=variant, tier=tier) for key in ("without_canary_s", "moved_s", "least_s")
            )
            cells += [f"{found['vs_floor']:.2f}", f"{alive:.2f}"]
            if stick is not None:
                cells += [f"{moved:.2f}", f"{stick:.2f}", f"{found['vs_yardstick']:.2f}"]
            table.add_row(tier, *cells)
        console.print(table)
    table = Table(title="clones of one snapshot, from the page cache", title_justify="left")
    for title in ("clones", "all admitted", "slowest / fastest", "RSS", "PSS"):
        table.add_column(title, justify="right")
    for one in result["clones"]:
        sizes = [f"{one[name] / 1e6:.0f} MB" for name in ("rss_bytes", "pss_bytes")]
        table.add_row(f"{one['clones']} ({one['variant']})", f"{one['seconds']:.2f} s", f"{one['spread']:.2f}", *sizes)
    console.print(table)
    console.print(f"the restorer's memory at its most: {result['restorer_peak_bytes'] / 1e6:.0f} MB")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    gguf = WORK / f"random-{options.gigabytes:g}.gguf"
    if not gguf.exists():
        console.print(f"writing {gguf} …")
        random_gguf.write(gguf, Path(os.environ["REWAKE_MODEL"]), gigabytes=options.gigabytes)
    names = options.only.split(",")
    models = {name: settings(name, gguf, restore={"prefetch": options.prefetch}) for name in names}
    cold = {f"{name}-cold": settings(name, gguf, on_no_snapshot="cold") for name in names}
    for model in cold.values():
        model["engine"] = {**model["engine"], "backend": "cold"}
    criu = Path(shutil.which(os.environ["REWAKE_CRIU"]) or "criu")
    with Service(WORK, {**models, **cold}, criu) as service:
        variants = []
        for name in names:
            plain = Plain(WORK / f"plain-{name}", service.run_dir / name, criu, "198.18.88.0/24")
            asyncio.run(plain.dump(name, models[name]))
            variants.append(Variant(name, gguf, service, plain))
        found = rounds(variants, options)
        again = rewarmed(variants, service)
        clones = []
        for variant in variants:
            for count in map(int, filter(None, options.clones.split(","))):
                if count * variant.manifest["bytes"] > available_bytes() // 2:
                    console.print(f"{count} clones with weights in {variant.name} are left out: too little memory is free")
                    continue
                warm(variant.reads["rewake"])
                clones.append({"variant": variant.name, "clones": count, **service.clones(variant.name, count)})
        peak = service.restorer_peak_bytes()
    by_tier = {name: {tier: ratios(found, name, tier) for tier in TIERS} for name in names}
    first = by_tier[names[0]]["disk"]
    return {
        "host": {"cpus": os.cpu_count(), "kernel": os.uname().release},
        "model_bytes": gguf.stat().st_size,
        "snapshot_bytes": {variant.name: variant.manifest["bytes"] for variant in variants},
        "headline": {
            "restore_cold_vs_floor": first["vs_yardstick"],
            "restore_cold_vs_own_floor": first["vs_floor"],
            # Without cold starts (--cold 0) there is none to be compared with.
            "restore_vs_cold_start": first.get("times_faster_than_cold_start"),
            "restore_vs_plain_criu": first["times_faster_than_plain_criu"],
            "restore_vs_plain_criu_without_canary": first["without_canary_times_faster_than_plain_criu"],
        },
        "ratios": by_tier,
        "restorer_peak_bytes": peak,
        "clones": clones,
        "rewarmed": again,
        "runs": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.3, help="of the model; default: 2.3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", type=int, default=1, help="rounds with a cold start, the longest of all; default: 1")
    parser.add_argument("--only", default="memory,mapped")
    parser.add_argument("--clones", default="1,2,4")
    parser.add_argument("--prefetch", choices=("auto", "on", "off"), default="auto", help="restore.prefetch; default: auto")
    parser.add_argument("--no-lazy", action="store_true", help="leave CRIU's lazy pages out")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    # Snapshots of earlier runs are of no use.
    shutil.rmtree(WORK / "state", ignore_errors=True)
    (WORK / "runs.jsonl").unlink(missing_ok=True)
    begun = time.monotonic()
    try:
        result = measured(options)
    except (BenchError, RestorerError, OSError, KeyError, subprocess.SubprocessError) as error:
        console.print(f"restore.py: {type(error).__name__}: {error}")
        return 1
    (BUILD / "bench-restore.json").write_text(json.dumps(result, indent=1))
    show(result)
    console.print(f"{BUILD / 'bench-restore.json'} was written; {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
