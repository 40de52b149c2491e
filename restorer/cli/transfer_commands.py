"""``rewake snapshot push``, ``pull``, ``diff``, ``ls --remote``, ``rm --remote``: copies elsewhere, and what snapshots share.

They read the store's folder and speak to the remote themselves; no restorer needs to run.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from policies.config import Config
from restorer.cli.commands import AsJson, ConfigFile
from restorer.cli.console import bytes_bar, print_json, print_table, size, when
from restorer.cli.operator import load
from restorer.cli.snapshot_commands import store_of
from restorer.remotes import pulling, transfer
from restorer.remotes.catalog import chosen
from restorer.remotes.copies import listed
from restorer.remotes.transfer import Moved
from restorer.storage import difference
from restorer.storage.statefolder import judge_of, stamps_of
from restorer.storage.weights import WeightsStore

T = TypeVar("T")
RemoteName = Annotated[str | None, typer.Argument(metavar="[REMOTE]", help="A name under storage.remotes.")]


def list_remote(config: Config, name: str, json_: bool) -> None:
    """What ``ls --remote`` prints."""
    catalog = chosen(config.storage, name)
    found = asyncio.run(listed(catalog))
    if json_:
        return print_json(found)
    rows = [
        [one["id"], one["model"] or "-", when(one["created_ms"]), size(one["bytes"]), when(one["pushed_ms"]), one["state"]]
        for one in found
    ]
    print_table(["SNAPSHOT", "MODEL", "MADE", "SIZE", "PUSHED", "STATE"], rows)


def remove_copies(config: Config, name: str, ids: Sequence[str]) -> None:
    """What ``rm --remote`` does and prints. Raises SnapshotError for the first id that is none; those before it are removed."""
    catalog = chosen(config.storage, name)

    async def work() -> None:
        for id in ids:
            copy = await catalog.find(id)
            await catalog.withdraw(copy)
            print(f"removed {copy.id} from {catalog.what}")

    asyncio.run(work())
    grace_s = catalog.remote.settings.retention.grace_s
    print(f"what only they are made of goes when `rewake snapshot gc --remote {name}` runs {grace_s:g} s after this, or later")


def push(
    id: str,
    remote: RemoteName = None,
    config: ConfigFile = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Store everything anew: mends a damaged copy.")] = False,
    json_: AsJson = False,
) -> None:
    """Copy a snapshot to a remote: what is there already is not sent again. Cut off, it goes on where it ended."""
    parsed = load(config)[1]
    store, catalog = store_of(parsed), chosen(parsed.storage, remote)
    manifest, weights = store.load(id), _weights(parsed)

    async def work(report: Callable[[int, int], None]) -> Moved:
        return await transfer.push(catalog, store, weights, manifest, overwrite=overwrite, report=report)

    with store.use(manifest.id):
        moved = _followed(f"push {manifest.id}", work)
    _shown(manifest.id, f"pushed to {catalog.what}", moved, json_)


def pull(id: str, remote: RemoteName = None, config: ConfigFile = None, json_: AsJson = False) -> None:
    """Bring a snapshot of a remote to this host: only what this host has not got is fetched, and everything is verified."""
    parsed = load(config)[1]
    store, catalog, keys = store_of(parsed), chosen(parsed.storage, remote), judge_of(parsed).keys
    weights, reserve = _weights(parsed), parsed.storage.reserve_bytes
    found: list[str] = []

    async def work(report: Callable[[int, int], None]) -> Moved:
        copy = await catalog.find(id)
        found.append(copy.id)
        manifest = await catalog.manifest(copy)
        if any(manifest.id == one.id for one in store.list()):
            return Moved(chunks=manifest.chunks.count if manifest.chunks else 0)
        return await pulling.pull(catalog, store, weights, manifest, copy, keys=keys, reserve_bytes=reserve, report=report)

    moved = _followed(f"pull {id}", work)
    _shown(found[0], f"pulled from {catalog.what}", moved, json_)


def diff(a: str, b: str, config: ConfigFile = None, json_: AsJson = False) -> None:
    """Say what two snapshots of this host share, and in what they differ. IDs may be shortened."""
    store = store_of(load(config)[1])
    left, right = store.load(a), store.load(b)
    with store.use(left.id), store.use(right.id):
        found = difference.compare((left, store.folder(left.id)), (right, store.folder(right.id)))
    if json_:
        return print_json(found.document())
    titles = ["OBJECT", "SHARED", f"ONLY {found.a[:8]}", f"ONLY {found.b[:8]}", "CHUNKS SHARED"]
    rows = [[one.path, *map(size, (one.shared, one.only_a, one.only_b)), str(one.chunks_shared)] for one in found.objects]
    print_table(titles, rows)
    for field, (left, right) in found.fields.items():
        print(f"{field}: {left} | {right}")
    total = found.total
    new = total.only_b / (total.shared + total.only_b or 1)
    print(
        f"{found.b} is to {new:.0%} new: {size(total.only_b)} that {found.a} has not, beside {size(total.shared)} that both have"
    )


def _followed(what: str, work: Callable[[Callable[[int, int], None]], Coroutine[Any, Any, T]]) -> T:
    with bytes_bar(what, 0) as show:
        return asyncio.run(work(show))


def _shown(id: str, what: str, moved: Moved, json_: bool) -> None:
    document = {"id": id, **{key: value for key, value in dataclasses.asdict(moved).items() if key[0] != "_"}}
    if json_:
        return print_json(document)
    rate = moved.bytes / moved.seconds / 1e6 if moved.seconds else 0.0
    print(
        f"{id} {what}: {moved.chunks_moved} of {moved.chunks} chunks, {size(moved.bytes_moved)} over the network for "
        f"{size(moved.bytes)}, in {moved.seconds:.1f} s ({rate:.0f} MB/s)"
    )


def _weights(config: Config) -> WeightsStore:
    return WeightsStore(Path(config.state_dir) / "weights", stamps_of(config, "stamps.cli.json"))
