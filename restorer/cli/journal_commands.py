"""``rewake journal``: what was done to this host of late, attempt by attempt, step by step. Only reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from policies.journal import Step, Trail
from restorer.cli.commands import AsJson, ConfigFile
from restorer.cli.console import print_json, print_table, size, when
from restorer.cli.operator import USAGE, Failed, load
from restorer.records.journal import Journals


def journal(
    id: Annotated[str, typer.Argument(help="An attempt, an operation, or a replica; or how it begins.")] = "",
    config: ConfigFile = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many attempts, the latest first.")] = 20,
    json_: AsJson = False,
) -> None:
    """List the last starts and captures of this host, with their outcome; all steps of one, with times and undo."""
    folder = Path(load(config)[1].state_dir) / "journal"
    try:
        trails = Journals(folder).history()
    except OSError as error:
        raise Failed(f"{error.filename}: {error.strerror}; journals are read by the user that runs the restorer") from None
    if id:
        trails = [one for one in trails if any(key.startswith(id) for key in (one.id, one.operation, one.job, one.replica))]
        if not trails:
            raise Failed(f"no attempt in {folder} is called {id!r}; `rewake journal` lists them", USAGE)
    trails = trails[:last]
    if json_:
        return print_json([one.model_dump(mode="json") for one in trails])
    if id:
        for one in trails:
            _show(one)
        return
    titles = ["ATTEMPT", "WHAT", "OF", "BEGAN", "TOOK", "OUTCOME", "LAST STEP", "DETAIL"]
    print_table(titles, [_row(one) for one in trails], below="DETAIL")


def _row(one: Trail) -> list[str]:
    detail = str(one.verdict) if one.verdict is not None else one.detail
    what = [one.id, one.kind, one.replica or one.model, when(one.at_ms)]
    return [*what, _took(one), one.outcome or "under way", one.last, detail]


def _took(one: Trail) -> str:
    return "-" if one.ended_ms is None else f"{(one.ended_ms - one.at_ms) / 1000:.2f} s"


def _show(one: Trail) -> None:
    print(f"{one.id}: {one.kind} of {one.replica or one.model}, job {one.job}, attempt {one.attempt}, on {one.host}")
    print(f"began {when(one.at_ms)}, {one.outcome or 'under way'} after {_took(one)}{': ' + one.detail if one.detail else ''}")
    if one.verdict is not None:
        print(f"fault: {one.verdict}")
    print_table(["AT", "STEP", "TOOK", "MOVED", "UNDO", ""], [_step(one, step) for step in one.steps])


def _step(one: Trail, step: Step) -> list[str]:
    moved = "" if not step.bytes else size(step.bytes) + (f" ({step.tier})" if step.tier else "")
    undo = "" if step.undo is None else f"{step.undo.what} {step.undo.name}"
    said = "; ".join(text for text in (step.error and f"failed: {step.error}", step.undone and f"undone: {step.undone}") if text)
    took = "did not end" if step.ms is None else f"{step.ms:.1f} ms"
    return [f"+{(step.at_ms - one.at_ms) / 1000:.3f} s", step.name, took, moved, undo, said]
