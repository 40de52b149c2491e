"""Bytes of one request on disk instead of in memory: a file without a name, gone when it is closed, however that comes.

Every access runs in a thread. Closing never waits: the last thread that still uses the file closes it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import IO, TypeVar

from gateway.errors import SpoolFailed

T = TypeVar("T")
PIECE_BYTES = 256 << 10


class Spool:
    """Written once from front to back, then read any number of times, also at once."""

    def __init__(self) -> None:
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        except OSError as error:
            raise _failed(error) from error
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self.size = 0

    async def append(self, data: bytes | bytearray) -> None:
        """Write ``data`` at the end.

        Raises:
            SpoolFailed: the disk is full or broken.
        """
        await asyncio.to_thread(self._use, self._write, data)
        self.size += len(data)

    async def look(self, call: Callable[[mmap.mmap], T]) -> T:
        """What ``call`` makes of the whole content, in a thread. The content must not be empty."""
        return await asyncio.to_thread(self._use, lambda: call(mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)))

    async def pieces(self, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from ``start`` to ``end``, in pieces of at most PIECE_BYTES."""
        while start < end:
            piece = await asyncio.to_thread(self._use, self._read, min(PIECE_BYTES, end - start), start)
            start += len(piece)
            yield piece

    async def edited(self, edits: Sequence[tuple[int, int, bytes]]) -> AsyncIterator[bytes]:
        """All of it, in pieces, but for each edit's bytes from start to end, in order, its text."""
        at = 0
        for start, end, text in (*edits, (self.size, self.size, b"")):
            async for piece in self.pieces(at, start):
                yield piece
            if text:
                yield text
            at = end

    def close(self) -> None:
        """Give the disk's space back. Idempotent."""
        with self._lock:
            self._closed = True
            if not self._users:
                self._file.close()

    def _use(self, call: Callable[..., T], *arguments: object) -> T:
        """In a thread: the file stays open until ``call`` returns, so that its number cannot come to mean another one."""
        with self._lock:
            if self._closed:
                raise SpoolFailed("The request was closed while its body was being kept.")
            self._users += 1
        try:
            return call(*arguments)
        except OSError as error:
            raise _failed(error) from error
        finally:
            with self._lock:
                self._users -= 1
                if self._closed and not self._users:
                    self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _read(self, count: int, offset: int) -> bytes:
        piece = os.pread(self._file.fileno(), count, offset)
        if not piece:
            raise SpoolFailed("A request body that was kept on disk is shorter than it was.")
        return piece


async def once(data: bytes) -> AsyncIterator[bytes]:
    """What is in memory, as pieces come."""
    yield data


def _failed(error: OSError) -> SpoolFailed:
    where = tempfile.gettempdir()
    return SpoolFailed(f"The request body cannot be kept in {where}: {error.strerror or error}.", retry_after_s=5.0)
