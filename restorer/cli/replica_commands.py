"""``rewake ps``, ``scale``, ``drain`` and ``move``: the replicas, and what a person does with them by the admin API."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from policies.replica import TERMINAL, Replica
from restorer.cli.commands import AsJson, ConfigFile, NoWait, Timeout, finish, model_named
from restorer.cli.console import print_json, print_start, print_table, when
from restorer.cli.operator import USAGE, Admin, Failed, load
from restorer.cli.why import cause


def ps(
    config: ConfigFile = None,
    json_: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say where each restore's time went, and why so.")] = False,
) -> None:
    """List the replicas."""
    with Admin(load(config)[1]) as admin:
        replicas = admin.replicas()
    if json_:
        return print_json(replicas)
    titles = ["REPLICA", "STATE", "HOST", "START", "SNAPSHOT", "INFLIGHT", "ADDRESS", "INCARNATION", "SINCE", "REASON"]
    print_table(titles, [_replica_row(replica) for replica in replicas], below="REASON", spare=("ADDRESS", "INCARNATION"))
    if any(replica["reason"] for replica in replicas):
        print("The line that decided, and what mends it: rewake why REPLICA", file=sys.stderr)
    if verbose:
        for replica in replicas:
            print_start(Replica.model_validate(replica))


def _replica_row(r: Mapping[str, Any]) -> list[str]:
    # Of an older gateway's record the last two may be missing.
    address = r.get("door") or (f"{r['address']}:{r['port']}" if r["address"] else "-")
    life = [r["start"] or "-", r["snapshot"] or "-", str(r["inflight"]), address, r["incarnation"] or "-"]
    return [r["id"], r["state"], r["host"] or "-", *life, when(r["updated_ms"]), cause(r["reason"] or r.get("barred", ""))]


def scale(
    model: str,
    replicas: Annotated[int, typer.Argument(min=0, metavar="N")],
    config: ConfigFile = None,
    no_wait: NoWait = False,
    timeout: Timeout = 3600.0,
) -> None:
    """Run N replicas of MODEL: start or park what that takes."""
    parsed = load(config)[1]
    name, spec = model_named(parsed, model)
    if replicas > spec.max_replicas:
        raise Failed(f"models.{name}.max_replicas is {spec.max_replicas}; raise it to run {replicas}", USAGE)
    with Admin(parsed) as admin:
        now = sum(r["model"] == name and r["state"] not in TERMINAL and r["state"] != "draining" for r in admin.replicas())
        if now == replicas:
            print(f"{name} has {now} replica{'s' * (now != 1)} already")
            return
        verb = "scale-up" if replicas > now else "scale-down"
        finish(admin, admin.begin(verb, {"model": name, "replicas": replicas}), no_wait, timeout)


def drain(replica: str, config: ConfigFile = None, no_wait: NoWait = False, timeout: Timeout = 3600.0) -> None:
    """Stop one REPLICA (model#slot, or an incarnation) once its requests have ended."""
    with Admin(load(config)[1]) as admin:
        finish(admin, admin.begin("drain", {"replica": admin.replica(replica)["id"]}), no_wait, timeout)


def move(
    replica: str,
    to: Annotated[str, typer.Option(metavar="HOST", help="The host that shall have it. Default: the best of the others.")] = "",
    config: ConfigFile = None,
    no_wait: NoWait = False,
    timeout: Timeout = 3600.0,
) -> None:
    """Start REPLICA (model#slot, or an incarnation) anew on another host; once that serves, drain it where it is."""
    with Admin(load(config)[1]) as admin:
        finish(admin, admin.begin("move", {"replica": admin.replica(replica)["id"], "to": to}), no_wait, timeout)
