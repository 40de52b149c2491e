"""The command line: the one place that knows both processes, and how a person speaks to them.

Owns the commands, what they print and their exit codes: 0 ok, 1 failed, 2 usage, 3 host incompatible. Knows nothing of
how a request is served or a replica restored: it starts processes, asks the admin API, and reads the snapshot store.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gateway import keys
from policies.config import Config
from policies.replica import TERMINAL, Replica
from restorer import (
    commands,
    explain_command,
    inspect_command,
    journal_commands,
    retention_commands,
    rundir,
    snapshot_commands,
    support,
    top,
    transfer_commands,
    trust_commands,
    why,
)
from restorer import doctor as doctors
from restorer.commands import AsJson, ConfigFile, NoWait, Timeout, finish, model_named
from restorer.console import print_json, print_start, print_table, when
from restorer.errors import RestorerError
from restorer.operator import DEFAULTS, FAILED, USAGE, Admin, Failed, load
from restorer.probes import Finding
from restorer.remains import ENGINE_LOG, Remains
from restorer.up import Up, command, environment
from restorer.why import cause

OK, INTERRUPTED = 0, 130
_FOLLOW_S = 0.25
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_ID = re.compile(r"[0-9a-f]{16}")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Cold starts that are none.")
transfer_commands.add(snapshot_commands.snapshots)
trust_commands.add(snapshot_commands.snapshots)
retention_commands.add(snapshot_commands.snapshots)
explain_command.add(snapshot_commands.snapshots)
snapshot_commands.snapshots.command("inspect")(inspect_command.inspect)
app.add_typer(snapshot_commands.snapshots, name="snapshot")

Worker = Annotated[int, typer.Option(min=0, help="Number of this worker; workers share one port.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    try:
        app(args=None if argv is None else list(argv), prog_name="rewake")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except Failed as error:
        return _refuse(str(error), error.code)
    except RestorerError as error:
        return _refuse(str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing may complain about that while Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return OK


def _refuse(message: str, code: int) -> int:
    print(f"rewake: {message}", file=sys.stderr)
    return code


def _version(wanted: bool) -> None:
    if wanted:
        with contextlib.suppress(metadata.PackageNotFoundError):
            print(f"rewake {metadata.version('rewake')}")
            raise typer.Exit
        raise Failed("not installed as a package, so it has no version; pip install it")


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


# ---------------------------------------------------------------- processes


@app.command()
def up(config: ConfigFile = None) -> None:
    """Run everything on this machine until Ctrl-C."""
    path, parsed = load(config)

    def pass_on(name: str, text: str) -> None:
        print(f"{name} | {text}", file=sys.stderr, flush=True)

    def say(text: str) -> None:
        print(f"rewake: {text}", flush=True)

    async def note() -> str:
        found = await doctors.criu(parsed)
        return "" if found.ok == "ok" else f"cold starts only, because CRIU is not usable: {found.found}; {found.remedy}"

    run = Up(parsed, path, say, pass_on, read=lambda: load(path)[1], note=lambda: asyncio.ensure_future(note()))
    raise typer.Exit(asyncio.run(run.run()))


@app.command()
def gateway(config: ConfigFile = None, worker: Worker = 0) -> None:
    """Run one gateway process against the store of the configuration."""
    path, parsed = load(config)
    token = rundir.admin_token(rundir.folder(Path(parsed.run_dir), 0o755, setting="run_dir"))
    _become(command("gateway", path, _store_url(path, parsed), "--admin-token-file", str(token), "--worker", str(worker)))


@app.command()
def restorer(config: ConfigFile = None) -> None:
    """Run this host's restorer against the store of the configuration."""
    path, parsed = load(config)
    _become(command("restorer", path, _store_url(path, parsed)))


def _store_url(path: Path, config: Config) -> str:
    if not config.store.url:
        raise Failed(f"{path}: store.url is empty; name the Redis where gateway and restorer meet, or use `rewake up`", USAGE)
    return config.store.url


def _become(argv: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    os.execve(argv[0], list(argv), environment())


# ---------------------------------------------------------------- the host


@app.command()
def doctor(config: ConfigFile = None, json_: AsJson = False) -> None:
    """Say what of this host works, and how to mend the rest. Exits with 1 if something failed."""
    host_only = config is None and not any(path.exists() for path in DEFAULTS)
    parsed = Config.model_construct(models={}) if host_only else load(config)[1]
    findings = asyncio.run(doctors.examine(parsed))
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


for _each in (keys.key, journal_commands.journal, commands.reload, commands.restart, top.top, why.why, support.support):
    app.command()(_each)

# ---------------------------------------------------------------- replicas


@app.command()
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


@app.command()
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


@app.command()
def drain(replica: str, config: ConfigFile = None, no_wait: NoWait = False, timeout: Timeout = 3600.0) -> None:
    """Stop one REPLICA (model#slot, or an incarnation) once its requests have ended."""
    with Admin(load(config)[1]) as admin:
        finish(admin, admin.begin("drain", {"replica": admin.replica(replica)["id"]}), no_wait, timeout)


@app.command()
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


@app.command()
def logs(
    replica: str,
    config: ConfigFile = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Print the end of the engine's log of one REPLICA (model#slot, or an incarnation); of the last that ended it is kept."""
    path = _log(load(config)[1], replica)
    try:
        # The engine can write to that folder: a link in it could lead anywhere.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            sys.stdout.buffer.writelines(collections.deque(file, maxlen=lines))
            while follow:
                sys.stdout.flush()
                time.sleep(_FOLLOW_S)
                sys.stdout.buffer.write(file.read())
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}; a log is on the replica's host, for its user") from None
    sys.stdout.flush()


def _log(config: Config, replica: str) -> Path:
    """Where the log of a replica is, running or ended."""
    state_dir, incarnation = Path(config.state_dir), replica
    if not (_SAFE.fullmatch(replica) and (state_dir / "boxes" / replica).is_dir()):
        ended = Remains(state_dir / "ended").find(replica)
        try:
            with Admin(config) as admin:
                incarnation = str(admin.replica(replica)["incarnation"])
        except Failed:
            # What has ended is found without a gateway.
            if ended is None:
                raise
            return ended.log()
    box = incarnation.partition("-")[0]
    running = state_dir / "boxes" / box / "private" / ENGINE_LOG
    if _SAFE.fullmatch(incarnation) and running.parent.is_dir():
        return running
    ended = Remains(state_dir / "ended").find(incarnation or replica) or Remains(state_dir / "ended").find(replica)
    if ended is None:
        raise Failed(f"{replica} does not run, and no log of it is kept here; a log is on the replica's host")
    return ended.log()


if __name__ == "__main__":
    sys.exit(main())
