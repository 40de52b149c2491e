"""What the bench found, as tables and as the keys of its JSON; and what each stage takes at least on this host."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

GOALS = {"restore_s": 2.5, "speedup": 35.0, "speedup_warm_caches": 20.0}
_OTHER = "gateway, store and job"


def headline(result: dict[str, Any]) -> None:
    """Each model's floors, and the keys of the first model at the top."""
    for found in result.get("models", {}).values():
        if "stages" in found:
            least = floors(found["stages"], found, result["host"])
            found |= {"floors": {key: round(value, 4) for key, value in least.items()}, "floor_s": round(sum(least.values()), 3)}
    first = result.get("models", {}).get("7b")
    if not first or "restores_s" not in first:
        return
    seconds = first.get("restore_s", first["restores_s"][0])
    # A step that failed has left its figures out.
    cold, warm = first.get("cold_start_s"), first.get("cold_start_warm_caches_s")
    result |= {
        "cold_start_s": cold,
        "cold_start_warm_caches_s": warm,
        "restore_s": seconds,
        "speedup": None if cold is None else round(cold / seconds, 1),
        "speedup_warm_caches": None if warm is None else round(warm / seconds, 1),
        "canary_equal": first.get("canary_equal", True),
        "tier": first["tier"],
        "restores_in_a_row": first.get("restores_in_a_row", 1),
        "stages": first["stages"],
    }


def floors(stages: list[dict[str, Any]], found: dict[str, Any], host: dict[str, Any]) -> dict[str, float]:
    """Seconds that each stage takes at least: its bytes over what this host moves at most.

    Weights travel while processes are restored, so that they have a floor of their own: the longer of both counts.
    """
    rates = {"restore processes": "fill_bytes_per_s", "fill memory": "fill_bytes_per_s", "restore GPU": "pcie_bytes_per_s"}
    known = {}
    for stage in stages:
        rate = rates.get(stage["name"])
        known[stage["name"]] = (stage["bytes"] or 0) / host[rate] if rate else 0.0
    if "canary" in known:
        known["canary"] = found.get("warm_canary_s", 0.0)
    return known


def show(console: Console, result: dict[str, Any], name: str) -> None:
    """One model's restore by stage, and how it compares."""
    found, host = result.get("models", {}).get(name), result["host"]
    if not found or "stages" not in found:
        return
    seconds = found.get("restore_s", found["restores_s"][0])
    least = floors(found["stages"], found, host)
    table = Table(title=f"{found['model']} on {host['gpu']}: one request with nothing running")
    for column in ("stage", "seconds", "floor", "bytes", "from"):
        table.add_column(column, justify="left" if column in ("stage", "from") else "right")
    for stage in found["stages"]:
        size = "" if stage["bytes"] is None else f"{stage['bytes'] / 1e9:.2f} GB"
        floor = least[stage["name"]]
        table.add_row(stage["name"], f"{stage['seconds']:.3f}", f"{floor:.3f}" if floor else "0", size, stage["tier"] or "")
    rest = seconds - sum(stage["seconds"] for stage in found["stages"])
    table.add_row(_OTHER, f"{rest:.3f}", "0", "", "")
    table.add_section()
    table.add_row("[bold]first token", f"[bold]{seconds:.3f}", f"{sum(least.values()):.3f}", "", "")
    console.print(table)
    console.print(f"cold start without compile caches {found['cold_start_s']:.1f} s: {found['cold_start_s'] / seconds:.1f} x")
    if warm := found.get("cold_start_warm_caches_s"):
        console.print(f"cold start with compile caches {warm:.1f} s: {warm / seconds:.1f} x")
