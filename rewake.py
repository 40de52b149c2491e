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
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from policies.config import Config, Model
from policies.manifest import Manifest
from policies.replica import TERMINAL
from policies.wire import Operation, OperationState
from restorer import doctor as doctors
from restorer import rundir
from restorer.console import bytes_bar, on_gpu, print_json, print_table, size, stages, when
from restorer.errors import RestorerError, SnapshotError
from restorer.operator import DEFAULTS, FAILED, USAGE, Admin, Failed, load
from restorer.snapshots import SnapshotStore, verify_files, verify_weights
from restorer.stamps import Stamps
from restorer.up import Up, command, environment

OK, INTERRUPTED = 0, 130
_FOLLOW_S = 0.25
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_ID = re.compile(r"[0-9a-f]{16}")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Cold starts that are none.")
snapshots = typer.Typer(no_args_is_help=True, help="Make, list, verify and remove snapshots.")
app.add_typer(snapshots, name="snapshot")

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help=f"Default: {' or '.join(map(str, DEFAULTS))}.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait for the end; print the operation's id.")]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Stop waiting (not the operation) after this long.")]
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

    run = Up(parsed, path, say, pass_on, note=lambda: asyncio.ensure_future(note()))
    raise typer.Exit(asyncio.run(run.run()))


@app.command()
def gateway(config: ConfigFile = None, worker: Worker = 0) -> None:
    """Run one gateway process against the store of the configuration."""
    path, parsed = load(config)
    url = _store_url(path, parsed)
    token = rundir.admin_token(rundir.folder(Path(parsed.run_dir), 0o755, setting="run_dir"))
    _become(command("gateway", path, url, "--admin-token-file", str(token), "--worker", str(worker)))


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
        if host_only:
            print("No configuration file was found: only the host was checked, with default settings.")
    raise typer.Exit(FAILED if any(finding.ok == "fail" for finding in findings) else OK)


# ---------------------------------------------------------------- replicas


@app.command()
def ps(config: ConfigFile = None, json_: AsJson = False) -> None:
    """List the replicas."""
    with Admin(load(config)[1]) as admin:
        replicas = admin.replicas()
    if json_:
        return print_json(replicas)
    titles = ["REPLICA", "STATE", "START", "SNAPSHOT", "INFLIGHT", "ADDRESS", "INCARNATION", "SINCE", "REASON"]
    print_table(titles, [_replica_row(replica) for replica in replicas])


def _replica_row(r: Mapping[str, Any]) -> list[str]:
    address = f"{r['address']}:{r['port']}" if r["address"] else "-"
    life = [r["start"] or "-", r["snapshot"] or "-", str(r["inflight"]), address, r["incarnation"] or "-"]
    return [r["id"], r["state"], *life, when(r["updated_ms"]), r["reason"]]


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
    name, spec = _model(parsed, model)
    if replicas > spec.max_replicas:
        raise Failed(f"models.{name}.max_replicas is {spec.max_replicas}; raise it to run {replicas}", USAGE)
    with Admin(parsed) as admin:
        now = sum(r["model"] == name and r["state"] not in TERMINAL and r["state"] != "draining" for r in admin.replicas())
        if now == replicas:
            print(f"{name} has {now} replicas already")
            return
        verb = "scale-up" if replicas > now else "scale-down"
        _finish(admin, admin.begin(verb, {"model": name, "replicas": replicas}), no_wait, timeout)


@app.command()
def drain(replica: str, config: ConfigFile = None, no_wait: NoWait = False, timeout: Timeout = 3600.0) -> None:
    """Stop one REPLICA (model#slot, or an incarnation) once its requests have ended."""
    with Admin(load(config)[1]) as admin:
        _finish(admin, admin.begin("drain", {"replica": admin.replica(replica)["id"]}), no_wait, timeout)


@app.command()
def logs(
    replica: str,
    config: ConfigFile = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Print the end of the engine's log of one REPLICA (model#slot, or an incarnation)."""
    parsed = load(config)[1]
    boxes, incarnation = Path(parsed.state_dir) / "boxes", replica
    if not (_SAFE.fullmatch(replica) and (boxes / replica).is_dir()):
        with Admin(parsed) as admin:
            incarnation = str(admin.replica(replica)["incarnation"])
    if not _SAFE.fullmatch(incarnation):
        raise Failed(f"{replica} does not run, so it has no log")
    path = boxes / incarnation.partition("-")[0] / "private" / "engine.log"
    try:
        # The engine can write to that folder: a link in it could lead anywhere.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            sys.stdout.buffer.writelines(collections.deque(file, maxlen=lines))
            while follow:
                sys.stdout.flush()
                time.sleep(_FOLLOW_S)
                sys.stdout.buffer.write(file.read())
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}; a log is on the replica's host, for its user, while the replica runs") from None
    sys.stdout.flush()


# ---------------------------------------------------------------- snapshots


@snapshots.command("create")
def create(model: str, config: ConfigFile = None, no_wait: NoWait = False, timeout: Timeout = 7200.0) -> None:
    """Start a donor of MODEL, capture it, and publish the snapshot."""
    parsed = load(config)[1]
    name, _ = _model(parsed, model)
    with Admin(parsed) as admin:
        _finish(admin, admin.begin("snapshots", {"model": name}), no_wait, timeout)


@snapshots.command("ls")
def ls(config: ConfigFile = None, json_: AsJson = False) -> None:
    """List the snapshots of this host."""
    store = _store(load(config)[1])
    found = [_summary(store, manifest) for manifest in store.list()]
    whole = {summary["id"] for summary in found}
    for id in sorted(path.name for path in store.root.iterdir() if _ID.fullmatch(path.name)):
        if id not in whole:
            found.append(dict.fromkeys(found[0] if found else ("id", "model"), None) | {"id": id, "state": _damage(store, id)})
    if json_:
        return print_json(found)
    print_table(_TITLES, [_row(summary) for summary in found])


@snapshots.command("show")
def show(id: str, config: ConfigFile = None, json_: AsJson = False) -> None:
    """Print what a snapshot is: by its ID, or by the beginning of it."""
    store = _store(load(config)[1])
    manifest = store.load(id)
    if json_:
        reason = store.quarantined(manifest.id)
        return print_json({"id": manifest.id, "quarantined": reason, "manifest": manifest.model_dump(mode="json")})
    host, profile = manifest.host, manifest.profile
    rows = {
        **dict(zip(_TITLES[1:], _row(_summary(store, manifest))[1:], strict=True)),
        "COMMAND": shlex.join(profile.command),
        "WEIGHTS": "\n".join(f"{path} sha256 {sha256[:16]}…" for path, sha256 in profile.weights.items()) or "none listed",
        "HOST": f"{host.hostname}: {host.cpu_model}, Linux {host.kernel}, CRIU {host.criu_version}",
        "OBJECTS": f"{len(manifest.objects)}, {size(sum(one.bytes for one in manifest.objects))} apparent{on_gpu(manifest.gpu)}",
        "FILES": f"{len(manifest.files)} outside the snapshot must be unchanged",
        "CANARY": f"{len(manifest.canary)} requests, {sum(exchange.tokens for exchange in manifest.canary)} tokens",
        "PROCESSES": f"{len(manifest.pids)} pids and tids under {manifest.root_pid}",
        "FOLDER": str(store.folder(manifest.id)),
    }
    print_table(["SNAPSHOT", manifest.id], list(rows.items()))


@snapshots.command("verify")
def verify(id: str, config: ConfigFile = None, json_: AsJson = False) -> None:
    """Read every byte of a snapshot, and what it needs besides, and compare it with what was committed."""
    parsed = load(config)[1]
    store = _store(parsed)
    manifest, began = store.load(id), time.monotonic()
    total = sum(item.bytes for item in manifest.objects)
    with bytes_bar(manifest.id, total) as report:
        faults = [*store.verify(manifest.id, full=True, progress=lambda done, _: report(done))]
    faults += [*verify_files(manifest, _stamps(parsed)), *verify_weights(manifest, Path(parsed.state_dir), _stamps(parsed))]
    seconds = time.monotonic() - began
    if json_:
        print_json({"id": manifest.id, "faults": [str(fault) for fault in faults], "bytes": total, "seconds": round(seconds, 3)})
    else:
        for fault in faults:
            print(fault)
        verdict = f"faults: {len(faults)}" if faults else "whole"
        print(f"{manifest.id}: {verdict}; {size(total)} in {seconds:.1f} s ({total / seconds / 1e6:.0f} MB/s)")
    raise typer.Exit(FAILED if faults else OK)


@snapshots.command("rm")
def rm(ids: Annotated[list[str], typer.Argument(metavar="ID...")], config: ConfigFile = None) -> None:
    """Remove snapshots, each given by its ID or the beginning of it."""
    store = _store(load(config)[1])
    # A damaged one has no manifest to load: its whole id must be given.
    exact = [id if _ID.fullmatch(id) else store.load(id).id for id in ids]
    for id in dict.fromkeys(exact):
        store.remove(id)
        print(f"removed {id}")


def _store(config: Config) -> SnapshotStore:
    try:
        return SnapshotStore(Path(config.state_dir) / "snapshots", _stamps(config))
    except OSError as error:
        raise Failed(f"{error.filename}: {error.strerror}; snapshots are read by the user that runs the restorer") from None


def _stamps(config: Config) -> Stamps:
    """Stamps of our own: a restorer that runs now writes its file at any time."""
    return Stamps(Path(config.state_dir) / "stamps.cli.json")


def _summary(store: SnapshotStore, manifest: Manifest) -> dict[str, Any]:
    reason = store.quarantined(manifest.id)
    return {
        "id": manifest.id,
        "model": manifest.profile.model,
        "engine": manifest.profile.engine,
        "created_ms": manifest.created_ms,
        "bytes": manifest.bytes,
        "cold_start_s": manifest.cold_start_s,
        "state": f"quarantined: {reason}" if reason else "committed",
    }


def _damage(store: SnapshotStore, id: str) -> str:
    try:
        store.load(id)
    except SnapshotError as error:
        return f"damaged: {error}"
    return "committed just now"


_TITLES = ["SNAPSHOT", "MODEL", "ENGINE", "MADE", "SIZE", "COLD START", "STATE"]
_COLUMNS: Mapping[str, Callable[[Any], str]] = {
    "id": str,
    "model": str,
    "engine": str,
    "created_ms": when,
    "bytes": size,
    "cold_start_s": "{:.1f} s".format,
    "state": str,
}


def _row(summary: Mapping[str, Any]) -> list[str]:
    return ["-" if summary.get(key) is None else show(summary[key]) for key, show in _COLUMNS.items()]


def _model(config: Config, name: str) -> tuple[str, Model]:
    found = config.resolve(name)
    if found is None:
        raise Failed(f"the configuration has no model {name!r}; it has {', '.join(config.models)}", USAGE)
    return found, config.models[found]


def _finish(admin: Admin, operation: Operation, no_wait: bool, timeout: float) -> NoReturn:
    """Show an operation until its end; exits with its code."""
    if no_wait:
        print(operation.id)
        raise typer.Exit(OK)
    began, what = time.monotonic(), f"{operation.kind.replace('_', '-')} of {operation.model}"
    with stages(what) as show:
        try:
            operation = admin.follow(operation, within=timeout, progress=show)
        except KeyboardInterrupt:
            raise Failed(f"operation {operation.id} goes on by itself", INTERRUPTED) from None
    made = f", snapshot {operation.snapshot}" if operation.snapshot else ""
    detail = f": {operation.detail}" if operation.detail else ""
    print(f"{what} {operation.state} after {time.monotonic() - began:.1f} s{made}{detail}", flush=True)
    succeeded = operation.state == OperationState.SUCCEEDED
    raise typer.Exit(operation.code if succeeded else operation.code or FAILED)


if __name__ == "__main__":
    sys.exit(main())
