"""WebSockets, as far as a gateway needs them: who asks for one properly, and raw bytes both ways once it is open.

Frames are never looked into. Knows how aiohttp's two protocols hand over what comes after an upgrade; nothing of models,
and nothing of waiting: by the time that a replica is asked, there is one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections import deque
from typing import Any

from aiohttp.base_protocol import BaseProtocol

from gateway.envelope import Pairs
from gateway.errors import InvalidRequest, UpgradeRequired
from gateway.exchange import Head

UPGRADE: Pairs = [("Connection", "Upgrade"), ("Upgrade", "websocket")]
"""What makes a head ask for, or agree to, a WebSocket. Hop by hop, so written anew on each side."""
SWITCHING = 101
_HIGH_BYTES = 256 << 10
_KEY_IN_PROTOCOL = re.compile(r"openai-insecure-api-key\.[^,\s]*\s*,?\s*|,?\s*openai-insecure-api-key\.[^,\s]*$")


def check(head: Head) -> None:
    """Refuse what is no proper opening handshake.

    Raises:
        UpgradeRequired: it asks for no WebSocket, or for another version.
        InvalidRequest: it has no usable key.
    """
    headers = head.headers
    tokens = [token.strip().lower() for token in headers.get("connection", "").split(",")]
    asks = "upgrade" in tokens and headers.get("upgrade", "").strip().lower() == "websocket"
    if not asks or head.version < (1, 1) or headers.get("sec-websocket-version", "").strip() != "13":
        needed = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        raise UpgradeRequired("This path speaks WebSocket, version 13, alone.", headers=needed)
    try:
        nonce = base64.b64decode(headers.get("sec-websocket-key", "").strip(), validate=True)
    except (binascii.Error, ValueError):
        nonce = b""
    if len(nonce) != 16:
        raise InvalidRequest("Sec-WebSocket-Key is missing or no 16 bytes in base64.", "invalid_http")


def asking(headers: Pairs) -> Pairs:
    """A forwarded head that asks the replica for a WebSocket; keys that browsers hide among the protocols stay here."""
    kept: Pairs = []
    for name, value in headers:
        if name.lower() == "sec-websocket-protocol":
            offered = _KEY_IN_PROTOCOL.sub("", value)
            kept += [(name, offered)] if offered.strip() else []
        else:
            kept.append((name, value))
    return kept + UPGRADE


class Wire:
    """One end of an upgraded connection. Takes over from the HTTP parser at once, what came early included."""

    def __init__(self, protocol: BaseProtocol | None, *more: Any) -> None:
        self._protocol = protocol
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._paused = False
        self._ended = protocol is None
        self._news = asyncio.Event()
        if protocol is not None:
            protocol.set_parser(self, *more)  # type: ignore[attr-defined]

    async def read(self) -> bytes:
        """The next bytes as they come; empty when the other side has ended, or is gone."""
        while not self._chunks and not self._ended:
            self._news.clear()
            await self._news.wait()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        if self._paused and self._protocol is not None:
            self._paused = False
            self._protocol.resume_reading()
        return data

    async def write(self, data: bytes) -> None:
        """Send; waits while the other side does not take it. Raises ConnectionError when it is gone."""
        protocol = self._protocol
        if protocol is None or protocol.transport is None or protocol.transport.is_closing():
            raise ConnectionResetError("the connection has ended")
        protocol.transport.write(data)
        await protocol._drain_helper()

    # What aiohttp calls, as it would call its own parser.

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        if data:
            self._chunks.append(bytes(data))
            self._size += len(data)
            self._news.set()
        if self._size > _HIGH_BYTES and not self._paused and self._protocol is not None:
            self._paused = True
            self._protocol.pause_reading()
        return False, b""

    def feed_eof(self) -> None:
        self._ended = True
        self._news.set()


async def join(client: Wire, replica: Wire, idle_s: float) -> tuple[int, int]:
    """Pass bytes both ways until one side ends, or nothing has moved for ``idle_s`` seconds.

    Returns:
        Bytes from the client, bytes to it.
    """
    loop, moved = asyncio.get_running_loop(), [0, 0]

    async def pump(n: int, source: Wire, sink: Wire) -> None:
        try:
            while data := await source.read():
                await sink.write(data)
                moved[n] += len(data)
                silence.reschedule(loop.time() + idle_s)
        except ConnectionError:
            pass

    pumps: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(idle_s) as silence:
            pumps += (asyncio.create_task(pump(0, client, replica)), asyncio.create_task(pump(1, replica, client)))
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        pass
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
    return moved[0], moved[1]
