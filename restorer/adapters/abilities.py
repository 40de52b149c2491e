"""What an engine can, as it says itself: its OpenAPI description, where it has one. Never a table of versions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class Abilities:
    """What was found."""

    routes: frozenset[str] | None = None
    """None: it does not say."""
    fields: frozenset[str] = frozenset()
    """What a completion's request may have."""

    def lacks(self, route: str) -> bool:
        """It says that it does not have a route. Whoever does not say is asked."""
        return self.routes is not None and route not in self.routes


async def probe(client: httpx.AsyncClient) -> Abilities:
    """Ask an engine. One that does not answer as expected simply does not say."""
    try:
        async with asyncio.timeout(_ASK_S):
            answer = await client.get("/openapi.json", timeout=None)
        found = answer.json() if answer.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, TimeoutError, ValueError):
        return Abilities()
    if not isinstance(found, dict) or not isinstance(paths := found.get("paths"), Mapping):
        return Abilities()
    return Abilities(frozenset(map(str, paths)), _fields(found, paths.get("/v1/completions")))


def _fields(document: Mapping[str, Any], route: Any) -> frozenset[str]:
    """Names of a route's request members."""
    schema: Any = route
    for key in ("post", "requestBody", "content", "application/json", "schema"):
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    if isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        schema = document
        for key in reference.removeprefix("#/").split("/"):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return frozenset(map(str, properties)) if isinstance(properties, Mapping) else frozenset()
