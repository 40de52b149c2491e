"""What a remote has, as ``rewake snapshot ls --remote`` shows it."""

from __future__ import annotations

import asyncio
from typing import Any

from policies.config import Config
from policies.manifest import Manifest
from restorer.catalog import Catalog, Copy, chosen
from restorer.console import print_json, print_table, size, when
from restorer.errors import RestorerError

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
