"""A donor goes through every shape of request in its profile, so that compiled kernels and graphs are part of its snapshot."""

from __future__ import annotations

import asyncio

import httpx

from policies import warmup
from policies.warmup import Shape
from restorer.adapters.engines import HttpEngine
from restorer.errors import EngineNotReady, SnapshotError


async def run(client: httpx.AsyncClient, engine: HttpEngine) -> tuple[Shape, ...]:
    """Serve each shape once; which ones there were.

    Raises:
        SnapshotError: the engine refuses one: the settings ask for what it cannot do. EngineNotReady: it did not answer in time.
    """
    model = engine.model
    found = warmup.shapes(model.warmup, model.canary.prompts[0], model.concurrency)
    serial = 0
    for shape in found:
        requests = [
            engine.shaped(shape.prompt, shape.embeddings, serial + n, model.warmup.max_tokens) for n in range(shape.at_once)
        ]
        serial += shape.at_once
        try:
            async with asyncio.TaskGroup() as group:
                sent = [
                    group.create_task(engine.post(client, path, engine.as_sent(body), model.warmup.timeout_s))
                    for path, body in requests
                ]
        except* EngineNotReady as errors:
            raise errors.exceptions[0] from None
        for answer in (task.result() for task in sent):
            if answer.status_code != httpx.codes.OK:
                raise SnapshotError(
                    f"models.{engine.name}.warmup: {shape} was answered {answer.status_code}: {answer.text[:200]}; "
                    "change the setting, or the engine's limits"
                )
    return found
