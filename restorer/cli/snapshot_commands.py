"""``rewake snapshot``: commands over the snapshots of this host.

They read the store's folder; only ``create`` needs a restorer that runs.
"""

from __future__ import annotations

import functools
import re
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from policies import reading
from policies.config import Config
from policies.floor import foretold
from policies.manifest import Manifest
from policies.trust import shown
from policies.verdicts import Note, Standing
from restorer.cli.commands import OK, AsJson, ConfigFile, NoWait, Timeout, finish, model_named
from restorer.cli.console import bytes_bar, on_gpu, print_json, print_table, size, when
from restorer.cli.operator import FAILED, Admin, Failed, load
from restorer.errors import SnapshotError
from restorer.machine.floor import known
from restorer.storage.holds import users_of
from restorer.storage.signatures import Judge
from restorer.storage.snapshots import SnapshotStore, verify_files, verify_weights
from restorer.storage.stamps import Stamps
from restorer.storage.statefolder import judge_of, stamps_of

_ID = re.compile(r"[0-9a-f]{16}")


def create(model: str, config: ConfigFile = None, no_wait: NoWait = False, timeout: Timeout = 7200.0) -> None:
    """Start a donor of MODEL, capture it, and publish the snapshot."""
    parsed = load(config)[1]
    name, _ = model_named(parsed, model)
    with Admin(parsed) as admin:
        finish(admin, admin.begin("snapshots", {"model": name}), no_wait, timeout)


def ls(
    config: ConfigFile = None,
    json_: AsJson = False,
    remote: Annotated[str | None, typer.Option("--remote", metavar="NAME", help="List what this remote has instead.")] = None,
) -> None:
    """List the snapshots of this host, or those that a remote has copies of."""
    parsed = load(config)[1]
    if remote is not None:
        # What is here is listed without the clients of object stores.
        from restorer.cli.transfer_commands import list_remote  # noqa: PLC0415

        return list_remote(parsed, remote, json_)
    store, judge = store_of(parsed), judge_of(parsed)
    found = [_summary(store, manifest, judge) for manifest in store.list()]
    whole = {summary["id"] for summary in found}
    for id in sorted(path.name for path in store.root.iterdir() if _ID.fullmatch(path.name)):
        if id not in whole:
            found.append(dict.fromkeys(found[0] if found else ("id", "model"), None) | {"id": id, "state": _damage(store, id)})
    if json_:
        return print_json(found)
    print_table(_TITLES, [_row(summary) for summary in found])


def show(id: str, config: ConfigFile = None, json_: AsJson = False) -> None:
    """Print what a snapshot is: by its ID, or by the beginning of it."""
    parsed = load(config)[1]
    store, judge = store_of(parsed), judge_of(parsed)
    manifest = store.load(id)
    verdict = judge.judge(store.folder(manifest.id), manifest)
    if json_:
        reason = store.verdicts.standing(manifest.id).quarantined
        document = {"id": manifest.id, "quarantined": reason, "signature": shown(verdict)}
        return print_json(document | {"manifest": manifest.model_dump(mode="json")})
    host, profile = manifest.host, manifest.profile
    rows = {
        **dict(zip(_TITLES[1:], _row(_summary(store, manifest, judge))[1:], strict=True)),
        **({"MISSING": str(verdict.mismatch)} if verdict.mismatch else {}),
        "COMMAND": shlex.join(profile.command),
        "WEIGHTS": "\n".join(f"{path} sha256 {sha256[:16]}…" for path, sha256 in profile.weights.items()) or "none listed",
        "HOST": f"{host.hostname}: {host.cpu_model}, Linux {host.kernel}, CRIU {host.criu_version}",
        "OBJECTS": f"{len(manifest.objects)}, {size(sum(one.bytes for one in manifest.objects))} apparent{on_gpu(manifest.gpu)}",
        "FILES": f"{len(manifest.files)} outside the snapshot must be unchanged",
        "CANARY": f"{len(manifest.canary)} requests, {sum(exchange.tokens for exchange in manifest.canary)} tokens",
        "PROCESSES": f"{len(manifest.pids)} pids and tids under {manifest.root_pid}",
        **_restores(parsed, manifest),
        "FOLDER": str(store.folder(manifest.id)),
    }
    print_table(["SNAPSHOT", manifest.id], list(rows.items()))


def verify(id: str, config: ConfigFile = None, json_: AsJson = False) -> None:
    """Read every byte of a snapshot, and what it needs besides, and compare it with what was committed."""
    parsed = load(config)[1]
    store = store_of(parsed)
    manifest, began = store.load(id), time.monotonic()
    verdict = judge_of(parsed).judge(store.folder(manifest.id), manifest)
    total = sum(item.bytes for item in manifest.objects)
    with store.use(manifest.id), bytes_bar(manifest.id, total) as report:
        faults = [*store.verify(manifest.id, full=True, progress=report)]
    faults += [*verify_files(manifest, _stamps(parsed)), *verify_weights(manifest, Path(parsed.state_dir), _stamps(parsed))]
    seconds = time.monotonic() - began
    if json_:
        document = {"id": manifest.id, "faults": [str(fault) for fault in faults], "signature": shown(verdict)}
        print_json(document | {"bytes": total, "seconds": round(seconds, 3)})
    else:
        for fault in faults:
            print(fault)
        if verdict.mismatch is not None:
            print(verdict.mismatch)
        state = f"faults: {len(faults)}" if faults else "whole"
        signature = "" if verdict.state == "not checked" else f", {verdict}"
        print(f"{manifest.id}: {state}{signature}; {size(total)} in {seconds:.1f} s ({total / seconds / 1e6:.0f} MB/s)")
    raise typer.Exit(FAILED if faults or not verdict.allowed else OK)


def rm(
    ids: Annotated[list[str], typer.Argument(metavar="ID...")],
    config: ConfigFile = None,
    remote: Annotated[str | None, typer.Option("--remote", metavar="NAME", help="Remove this remote's copies instead.")] = None,
) -> None:
    """Remove snapshots, each given by its ID or the beginning of it."""
    parsed = load(config)[1]
    if remote is not None:
        from restorer.cli.transfer_commands import remove_copies  # noqa: PLC0415

        return remove_copies(parsed, remote, ids)
    store = store_of(parsed)
    # A damaged one has no manifest to load: its whole id must be given.
    exact = [id if _ID.fullmatch(id) else store.load(id).id for id in ids]
    for id in dict.fromkeys(exact):
        store.remove(id)
        print(f"removed {id}")
    return None


def release(id: str, config: ConfigFile = None) -> None:
    """Let a quarantined snapshot be restored again, here and, as soon as they hear of it, on other hosts."""
    store = store_of(load(config)[1])
    manifest, verdicts = store.load(id), store.verdicts
    before = verdicts.standing(manifest.id)
    if before == Standing():
        print(f"{manifest.id} is neither quarantined nor held back")
        return
    verdicts.note(manifest.id, Note(what="released", host=verdicts.host, at_ms=time.time_ns() // 1_000_000))
    print(f"released {manifest.id}, which was {f'quarantined: {before.quarantined}' if before.quarantined else before.held}")


def _restores(config: Config, manifest: Manifest) -> dict[str, str]:
    """What a restore of it does on this host, why, and what it takes at the least."""
    rates, model = known(Path(config.state_dir)), config.models.get(manifest.profile.model)
    rows = {}
    if model is not None:
        rows["RESTORE"] = "\n".join(reading.choices(model.restore, manifest, rates))
    if rates is not None:
        rows["FLOOR"] = foretold(manifest, rates)
    return rows


def store_of(config: Config) -> SnapshotStore:
    """The snapshots of this host. Raises Failed."""
    try:
        users = functools.partial(users_of, Path(config.run_dir))
        return SnapshotStore(Path(config.state_dir) / "snapshots", _stamps(config), users=users, host=config.restorer.host or "")
    except OSError as error:
        raise Failed(f"{error.filename}: {error.strerror}; snapshots are read by the user that runs the restorer") from None


def _stamps(config: Config) -> Stamps:
    """Stamps of our own: a restorer that runs now writes its file at any time."""
    return stamps_of(config, "stamps.cli.json")


def _summary(store: SnapshotStore, manifest: Manifest, judge: Judge) -> dict[str, Any]:
    reason = store.verdicts.standing(manifest.id).quarantined
    verdict = judge.judge(store.folder(manifest.id), manifest)
    return {
        "id": manifest.id,
        "model": manifest.profile.model,
        "engine": manifest.profile.engine,
        "created_ms": manifest.created_ms,
        "bytes": manifest.bytes,
        "cold_start_s": manifest.cold_start_s,
        "signature": str(verdict) if verdict.allowed else f"refused: {verdict}",
        "state": f"quarantined: {reason}" if reason else "committed",
    }


def _damage(store: SnapshotStore, id: str) -> str:
    try:
        store.load(id)
    except SnapshotError as error:
        return f"damaged: {error}"
    return "committed just now"


_TITLES = ["SNAPSHOT", "MODEL", "ENGINE", "MADE", "SIZE", "COLD START", "SIGNATURE", "STATE"]
_COLUMNS: Mapping[str, Callable[[Any], str]] = {
    "id": str,
    "model": str,
    "engine": str,
    "created_ms": when,
    "bytes": size,
    "cold_start_s": "{:.1f} s".format,
    "signature": str,
    "state": str,
}


def _row(summary: Mapping[str, Any]) -> list[str]:
    return ["-" if summary.get(key) is None else show(summary[key]) for key, show in _COLUMNS.items()]
