"""The restorer's connection to the shared store: one script, one subscription, and what becomes of the client's errors.

The one module of the restorer that knows the client library. Knows keys, and nothing of what is written under them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio
from pydantic import BaseModel, ValidationError
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from policies.wire import SCHEMA, Hint, Keys
from restorer.errors import StoreUnavailable, WrongSchema

T = TypeVar("T", bound=BaseModel)
_CALL_S = 5.0


class StoreClient:
    """Calls to one installation's keys.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        namespace: prefix of every key.
        script: the commands of :meth:`_call`.
    """

    def __init__(self, url: str, namespace: str, script: Path) -> None:
        self.keys = Keys(namespace)
        common: dict[str, Any] = {"decode_responses": True, "socket_connect_timeout": _CALL_S, "socket_timeout": _CALL_S}
        self._client: Any = redis.asyncio.from_url(url, retry=Retry(NoBackoff(), 1), **common)
        self._listener: Any = redis.asyncio.from_url(url, retry=Retry(NoBackoff(), 0), health_check_interval=5, **common)
        self._script = self._client.register_script(script.read_text())

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()
            await self._listener.aclose()

    async def check_schema(self) -> None:
        """Claim an empty store for this schema, or make sure that it has it; raises WrongSchema if not."""
        with translated():
            await self._client.set(self.keys.schema, SCHEMA, nx=True)
            found = await self._client.get(self.keys.schema)
        if found != SCHEMA:
            raise WrongSchema(
                f"the store's keys under {self.keys.prefix!r} have schema {found}, not {SCHEMA}; use another namespace"
            )

    async def hints(self) -> AsyncIterator[Hint | None]:
        """Hints as they come, and None about every second without one. Ends never; raises when the store is lost."""
        pubsub = self._listener.pubsub(ignore_subscribe_messages=True)
        try:
            with translated():
                await pubsub.subscribe(self.keys.events)
            while True:
                with translated():
                    message = await pubsub.get_message(timeout=1.0)
                yield None if message is None else decoded(Hint, message["data"])
        finally:
            with contextlib.suppress(RedisError, OSError):
                await pubsub.aclose()

    async def _call(self, command: str, **arguments: Any) -> Any:
        keys = [self.keys.replicas, self.keys.seq, self.keys.fence, self.keys.events]
        with translated():
            return await self._script(keys=keys, args=[command, json.dumps(arguments)])


@contextlib.contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        _heed_cancellation()
        raise StoreUnavailable(f"the shared store did not answer: {error}") from error
    _heed_cancellation()


def _heed_cancellation() -> None:
    """The client polls its sockets with time-outs that can swallow a cancellation: work whose lease was lost would go on."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def decoded(kind: type[T], text: str) -> T | None:
    """A record, or None when it cannot be read: one bad record must not stop the others."""
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None
