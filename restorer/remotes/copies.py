"""What a remote has, as one list."""

from __future__ import annotations

import asyncio
from typing import Any

from policies.manifest import Manifest
from restorer.errors import RestorerError
from restorer.remotes.catalog import Catalog, Copy

_AT_A_TIME = 16


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
