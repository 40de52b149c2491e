"""``rewake snapshot explain``: on one screen, why a model would start cold here, and which hosts would do."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from policies.config import Config
from policies.manifest import HostFacts
from restorer.cli.commands import OK, AsJson, ConfigFile
from restorer.cli.console import print_json, print_table, short_hashes, when
from restorer.cli.operator import Admin, Failed, load
from restorer.cli.this_host import this_host
from restorer.machine.explain import Explanation, Snapshot, damaged, document, explain

HOST_INCOMPATIBLE = 3


def explain_(
    target: Annotated[
        str | None, typer.Argument(metavar="[ID|MODEL]", help="A snapshot or a model; left out: all models.")
    ] = None,
    config: ConfigFile = None,
    all_facts: Annotated[
        bool, typer.Option("--all", help="Show every fact that is compared with its rule, not only what differs.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Say from which snapshot a model would be restored on this host, or every reason why it would start cold.

    Compares settings, facts of the host, changed files, signatures, owners and quarantine, each with what mends it, and says
    which hosts of the installation would do. Exits with 3 when no snapshot of what was asked for fits this host.
    """
    parsed = load(config)[1]
    host = this_host(parsed)
    fleet, unknown = _fleet(parsed)
    found = explain(host, target, fleet)
    broken = damaged(host) if target is None else {}
    if json_:
        print_json(
            {"host": host.name, "fleet": unknown or sorted(fleet), "models": [document(one) for one in found], "damaged": broken}
        )
    else:
        for one in found:
            _show(one, host.name, all_facts)
        for id, why in broken.items():
            print(f"{id}: {why}")
        if unknown:
            print(f"other hosts: unknown, since {unknown}")
    raise typer.Exit(OK if any(one.fits for one in found) else HOST_INCOMPATIBLE)


def _fleet(config: Config) -> tuple[dict[str, HostFacts], str]:
    """(host -> what it is, why nobody could be asked)."""
    try:
        with Admin(config) as admin:
            listed = admin.call("GET", "hosts")["hosts"]
        return {str(one["host"]): HostFacts.model_validate(one["facts"]) for one in listed}, ""
    except Failed as error:
        return {}, str(error)
    except (ValidationError, KeyError, TypeError):
        return {}, "the gateway is of another version"


def _show(found: Explanation, here: str, all_facts: bool) -> None:
    print(f"{found.model} {found.why}")
    for one in found.snapshots:
        manifest = one.manifest
        version = f", {manifest.profile.engine} {manifest.engine_version}" if manifest.engine_version else ""
        revision = f", revision {manifest.model_revision[:12]}" if manifest.model_revision else ""
        signature = "" if one.signature == "not checked" else f", {one.signature}"
        print(f"\n  {manifest.id}  made {when(manifest.created_ms)} on {manifest.host.hostname}{version}{revision}{signature}")
        if one.quarantined is not None:
            print(f"  quarantined: {one.quarantined}")
        if one.held is not None:
            print(f"  {one.held}")
        if one.fits:
            print("  fits this host" + (f"; a restore takes {one.floor}" if one.floor else ""))
        if rows := _rows(one):
            print_table(["  DIFFERS", "EXPECTED", "FOUND", "RULE", "TO MEND"], rows)
        if all_facts:
            print_table(
                ["  FACT", "RULE", "EXPECTED", "FOUND"],
                [[f"  {fact.field}", fact.rule, _short(fact.expected), _short(fact.found)] for fact in one.facts],
            )
        others = {at: reasons for at, reasons in found.elsewhere.get(manifest.id, {}).items() if at != here}
        if others:
            said = [f"{at} {'fits' if not why else 'does not: ' + ', '.join(m.field for m in why)}" for at, why in others.items()]
            print(f"  other hosts: {'; '.join(said)}")
    print()


def _rows(one: Snapshot) -> list[list[str]]:
    rules = {f"host.{fact.field}": str(fact.rule) for fact in one.facts}
    rows = [[f"  {m.field}", _short(m.expected), _short(m.found), rules.get(m.field, "equal"), m.remedy] for m in one.reasons]
    rows += [[f"  {m.field}", _short(m.expected), _short(m.found), "allowed", m.remedy] for m in one.allowed]
    reported = [fact for fact in one.facts if fact.rule == "report" and fact.expected != fact.found and not fact.waived]
    return rows + [[f"  host.{fact.field}", _short(fact.expected), _short(fact.found), "report", "-"] for fact in reported]


def _short(text: str) -> str:
    text = short_hashes(text)
    return text if len(text) <= 60 else f"{text[:57]}…"
