"""``rewake snapshot gc``: remove what the restorer would within a minute, or what a remote need not keep; or say what that is."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated

import typer

from restorer.cli.commands import AsJson, ConfigFile
from restorer.cli.console import print_json, print_table, size
from restorer.cli.operator import load
from restorer.cli.this_host import this_host
from restorer.operations.collector import collect_on
from restorer.remotes.catalog import Catalog, chosen
from restorer.remotes.sweeper import collect


def gc(
    config: ConfigFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; say what would go, and why.")] = False,
    remote: Annotated[str | None, typer.Option("--remote", metavar="NAME", help="Clear up this remote instead.")] = None,
    json_: AsJson = False,
) -> None:
    """Remove the snapshots that the configuration's `retention` lets go, and weights that nothing names then.

    Nothing goes that is used, or that came a moment ago, or that is the newest usable one of its model. In a remote, it removes
    the copies that the remote's `retention` lets go, and everything that no copy is made of.
    """
    parsed = load(config)[1]
    if remote is not None:
        return _gc_remote(chosen(parsed.storage, remote), dry_run, json_)
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


def _gc_remote(catalog: Catalog, dry_run: bool, json_: bool) -> None:
    rules = catalog.remote.settings.retention
    done = asyncio.run(collect(catalog, rules, dry=dry_run))
    if json_:
        return print_json({"dry_run": dry_run, **dataclasses.asdict(done), "removed": [one._asdict() for one in done.removed]})
    if done.removed:
        rows = [[removal.id, size(removal.bytes), removal.reason] for removal in done.removed]
        print_table(["WOULD GO" if dry_run else "REMOVED", "SIZE", "WHY"], rows)
        if rules.grace_s:
            print(f"what only they are made of stays for {rules.grace_s:g} s more (retention.grace_s); run this again after that")
    what = f"{done.objects} objects that no copy is made of, {size(done.bytes)}"
    print(f"would remove {what}" if dry_run else f"removed {what}")
    if done.left:
        print(f"{'would leave' if dry_run else 'left'} the rest: {done.left}")
    return None
