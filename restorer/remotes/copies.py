"""What a remote has: ``rewake snapshot ls --remote`` shows it, ``rm --remote`` removes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from policies.config import Config
from policies.manifest import Manifest
from restorer.cli.console import print_json, print_table, size, when
from restorer.errors import RestorerError
from restorer.remotes.catalog import Catalog, Copy, chosen

_AT_A_TIME = 16


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


async def listed(catalog: Catalog) -> list[dict[str, Any]]:
    """Every snapshot there, whole or not."""
    room = asyncio.Semaphore(_AT_A_TIME)

    async def row(copy: Copy) -> dict[str, Any]:
        manifest: Manifest | None = None
        state = "whole"
        try:
            async with room:
                manifest = await catalog.manifest(copy)
        except RestorerError as error:
            state = f"damaged: {error}"
        return {
            "id": copy.id,
            "model": manifest.profile.model if manifest else None,
            "created_ms": manifest.created_ms if manifest else 0,
            "bytes": manifest.bytes if manifest else 0,
            "pushed_ms": copy.pushed_ms,
            "state": state,
        }

    return list(await asyncio.gather(*map(row, await catalog.list())))
