"""``rewake snapshot gc``: remove now what the restorer would within a minute, or say what that is."""

from __future__ import annotations

from typing import Annotated

import typer

from restorer.collector import collect_on
from restorer.commands import AsJson, ConfigFile
from restorer.console import print_json, print_table, size
from restorer.operator import load
from restorer.this_host import this_host


def add(snapshots: typer.Typer) -> None:
    """Put the command beside the others of ``rewake snapshot``."""
    snapshots.command("gc")(gc)


def gc(
    config: ConfigFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; say what would go, and why.")] = False,
    json_: AsJson = False,
) -> None:
    """Remove the snapshots that the configuration's `retention` lets go, and weights that nothing names then.

    Nothing goes that is used, or that came a moment ago, or that is the newest usable one of its model.
    """
    parsed = load(config)[1]
    host = this_host(parsed)
    done = collect_on(host, dry=dry_run)
    if json_:
        return print_json(
            {
                "dry_run": dry_run,
                "removed": [removal._asdict() for removal in done.removed],
                "kept": dict(done.kept),
                "debris": list(done.debris),
                "weights": list(done.weights),
            }
        )
    rows = [[removal.id, size(removal.bytes), removal.reason] for removal in done.removed]
    if rows:
        print_table(["WOULD GO" if dry_run else "REMOVED", "SIZE", "WHY"], rows)
    else:
        print("nothing is to go")
    for id, why in done.kept.items():
        print(f"{id} was to go and stays: {why}")
    for name in (*done.debris, *done.weights):
        print(f"removed {name}: no snapshot is made of it, or needs it")
    return None
