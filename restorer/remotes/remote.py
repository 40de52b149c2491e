"""One store of objects outside this host: S3, GCS, Azure, or a folder; put, get, asked and listed, each within a deadline.

The one module that knows obstore: its errors become :class:`RemoteFailed`, which says what, where, and how to mend it. Knows
paths and bytes, not what they are.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, ObjectStore, from_url

from policies.storage import Remote as Settings
from restorer.errors import Environment, RemoteFailed

T = TypeVar("T")
Item = TypeVar("Item")
_TRIES = 4
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.2, 5.0
_CONNECT_S = 10.0
_SYNC_S = 600.0


class Held(NamedTuple):
    """One object of a listing."""

    path: str
    bytes: int
    modified_ms: int


class Remote:
    """A store that is open.

    Args:
        name: what the configuration calls it.

    Raises:
        Environment: its settings cannot be used; says which and why.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.what = f"remote {name} ({settings.url})"
        self._store = self._opened()

    async def put(self, path: str, data: bytes, *, create: bool = True) -> bool:
        """Store a whole object. False: ``create`` was asked for, and there is one already, which is left as it is."""

        async def once() -> bool:
            try:
                await obstore.put_async(self._store, path, data, mode="create" if create else "overwrite", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        return await self._tried(f"storing {path}", once)

    async def get(self, path: str, most: int) -> bytes | None:
        """A whole object; None: there is none.

        Raises:
            RemoteFailed: besides all else, it has more than ``most`` bytes.
        """

        async def once() -> bytes | None:
            try:
                found = await obstore.get_async(self._store, path)
            except FileNotFoundError as error:
                self._bucket(error)
                return None
            if found.meta["size"] > most:
                raise RemoteFailed(f"{self.what}: {path} has {found.meta['size']} bytes, more than {most}: it is not ours")
            return bytes(await found.bytes_async())

        return await self._tried(f"reading {path}", once)

    async def has(self, path: str) -> bool:
        """Whether there is an object of this name."""

        async def once() -> bool:
            try:
                await obstore.head_async(self._store, path)
            except FileNotFoundError as error:
                self._bucket(error)
                return False
            return True

        return await self._tried(f"asking for {path}", once)

    async def remove(self, path: str) -> None:
        """Remove an object, if there is one."""

        async def once() -> None:
            try:
                await obstore.delete_async(self._store, path)
            except FileNotFoundError as error:
                self._bucket(error)

        await self._tried(f"removing {path}", once)

    async def list(self, prefix: str) -> AsyncIterator[Held]:
        """Every object whose path begins with the folder ``prefix``."""
        pages = obstore.list(self._store, prefix, chunk_size=1000)

        async def once() -> list[Held]:
            try:
                page = await anext(pages)
            except StopAsyncIteration:
                return []
            except FileNotFoundError as error:
                self._bucket(error)
                return []
            return [Held(one["path"], one["size"], int(one["last_modified"].timestamp() * 1000)) for one in page]

        # A page that failed cannot be asked for again: the stream has ended.
        while page := await self._tried(f"listing {prefix}", once, tries=1):
            for one in page:
                yield one

    async def each(self, items: Iterable[Item], work: Callable[[Item], Awaitable[None]]) -> None:
        """``work`` on each item, as many at a time as the settings allow; the first failure ends all."""
        rest = iter(items)

        async def worker() -> None:
            for item in rest:
                await work(item)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.settings.concurrency):
                    group.create_task(worker())
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
            raise first from first.__cause__

    async def settle(self) -> None:
        """Make all that was stored durable. Object stores are; a folder is told to be."""
        if isinstance(self._store, LocalStore):
            async with asyncio.timeout(_SYNC_S):
                await asyncio.to_thread(self._synced)

    def _synced(self) -> None:
        fd = os.open(_folder(self.settings), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
                raise RemoteFailed(f"{self.what}: what was stored could not be made durable: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(fd)

    def _opened(self) -> ObjectStore:
        settings, wait = self.settings, timedelta(seconds=self.settings.timeout_s)
        config = dict(settings.settings)
        for key, variable in settings.env.items():
            if variable not in os.environ:
                raise Environment(f"{self.what}: env.{key} names the variable {variable}, which is not set for this process")
            config[key] = os.environ[variable]
        plain = any(value.startswith("http://") for key, value in config.items() if key.endswith(("endpoint", "base_url")))
        plain = plain or os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        try:
            if settings.is_folder:
                folder = _folder(settings)
                if not folder.is_dir():
                    raise Environment(f"{self.what}: {folder} is no folder; mount it, or make it")
                return LocalStore(folder)
            options: Any = config
            store: ObjectStore = from_url(
                settings.url,
                config=options,
                client_options={"timeout": wait, "connect_timeout": timedelta(seconds=_CONNECT_S), "allow_http": plain},
                retry_config={"max_retries": 2, "retry_timeout": wait},
            )
            return store
        except (BaseError, ValueError) as error:
            raise Environment(f"{self.what} cannot be used: {_said(error)}; see storage.remotes.{self.name}") from None

    async def _tried(self, doing: str, once: Callable[[], Awaitable[T]], *, tries: int = _TRIES) -> T:
        """Several times, with growing pauses, within the deadline of one request; errors in our words."""
        last = "it did not answer"
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                for attempt in range(1, tries + 1):
                    try:
                        return await once()
                    except (BaseError, OSError) as error:
                        last = _said(error)
                        if attempt == tries or not _passing(error):
                            raise RemoteFailed(f"{self.what}: {doing}: {last}; {_remedy(error, self.settings)}") from None
                    pause = min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        except TimeoutError:
            pass
        raise RemoteFailed(
            f"{self.what}: {doing} did not end within {self.settings.timeout_s:g} s ({last}); "
            f"see whether it can be reached from here, or raise storage.remotes.{self.name}.timeout_s"
        )

    def _bucket(self, error: Exception) -> None:
        """An object that is not there is an answer; a bucket that is not there is a fault."""
        if re.search(r"NoSuchBucket|ContainerNotFound|bucket does not exist", str(error)):
            raise RemoteFailed(f"{self.what}: there is no such bucket or container; make it, or mend the url") from None
        if isinstance(self._store, LocalStore) and not _folder(self.settings).is_dir():
            raise RemoteFailed(f"{self.what}: the folder is gone; is it still mounted?") from None


def _folder(settings: Settings) -> Path:
    return Path(unquote(urlsplit(settings.url).path))


def _said(error: Exception) -> str:
    """What an error says to people: the store's own words if it has some, never the client's inner state."""
    text = str(error).partition("\n\nDebug source")[0]
    if said := re.search(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>", text):
        return f"{said[1]}: {said[2]}"
    return " ".join(text.split())[:300]


def _passing(error: Exception) -> bool:
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return False
    return not re.search(r"NoSuchBucket|RequestTimeTooSkewed|InvalidAccessKeyId|SignatureDoesNotMatch|space left", str(error))


_REMEDIES = (
    (r"NoSuchBucket|ContainerNotFound|bucket does not exist", "make the bucket or container, or mend the url"),
    (r"RequestTimeTooSkewed|RequestExpired|AuthenticationFailed.*time", "this host's clock is wrong: let it be set by NTP"),
    (r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|ExpiredToken|AuthorizationHeaderMalformed|credential",
     "see the credentials in the environment of `rewake` (AWS_ACCESS_KEY_ID, …) and the region"),
    (r"AccessDenied|Forbidden|PermissionDenied|Permission denied|Unauth",
     "give these credentials the right to do that there"),
    (r"space left|QuotaExceeded|quota", "make room there"),
    (r"dns|resolve|Name or service|connect|tcp|timed out|sending request", "see whether the endpoint is right and reachable"),
    (r"Read-only file system", "mount it writable"),
)  # fmt: skip


def _remedy(error: Exception, settings: Settings) -> str:
    kind = type(error).__name__
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, f"{kind} {error}", re.IGNORECASE):
            return remedy
    return f"see that {settings.url} works"
