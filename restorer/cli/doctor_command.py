"""``rewake doctor``: what of this host works, as a person reads it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import typer

from policies.config import Config
from restorer.boxes.probes import Finding
from restorer.checks.doctor import examine
from restorer.cli.commands import OK, AsJson, ConfigFile
from restorer.cli.console import print_json, print_table
from restorer.cli.operator import DEFAULTS, FAILED, load


def doctor(config: ConfigFile = None, json_: AsJson = False) -> None:
    """Say what of this host works, and how to mend the rest. Exits with 1 if something failed."""
    host_only = config is None and not any(path.exists() for path in DEFAULTS)
    parsed = Config.model_construct(models={}) if host_only else load(config)[1]
    findings = asyncio.run(examine(parsed))
    if json_:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        rows = [[finding.ok, finding.name, finding.found, finding.remedy] for finding in findings]
        print_table(["", "CHECK", "FOUND", "TO MEND"], rows)
        print(_summed_up(findings))
        if host_only:
            print("No configuration file was found: only the host was checked, with default settings.")
    raise typer.Exit(FAILED if any(finding.ok == "fail" for finding in findings) else OK)


def _summed_up(findings: Sequence[Finding]) -> str:
    failed, warned = ([one.name for one in findings if one.ok == ok] for ok in ("fail", "warn"))
    parts = [f"cannot work: {', '.join(failed)}"] * bool(failed) + [f"works with limits: {', '.join(warned)}"] * bool(warned)
    return "; ".join(parts) or "everything works"
