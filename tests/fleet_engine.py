"""A small engine that streams: one process, answers that are a hash of the prompt, streams that last as long as a test wants.

``python fleet_engine.py PORT HOLD``: serves ``/health`` and ``/v1/completions`` on PORT. While HOLD-answer exists it does not
answer; while HOLD-stream exists a stream does not end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path

_PAUSE_S = 0.05


def words(prompt: str, tokens: int) -> list[str]:
    """What it answers, whenever and wherever it is asked."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return [digest[4 * n % 60 : 4 * n % 60 + 4] for n in range(tokens)]


class Engine:
    """All of its connections."""

    def __init__(self, hold: str) -> None:
        self._answer, self._stream = Path(f"{hold}-answer"), Path(f"{hold}-stream")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) is not None:
                sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(sizes[0].partition(b":")[2])) if sizes else b""
                await self._reply(json.loads(body) if body else None, writer)
                if b"connection: close" in head.lower():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _reply(self, asked: dict[str, object] | None, writer: asyncio.StreamWriter) -> None:
        if asked is None:
            return await _send(writer, {"status": "ok"})
        while self._answer.exists():  # noqa: ASYNC110 - another process makes and removes it
            await asyncio.sleep(_PAUSE_S)
        said = words(str(asked["prompt"]), int(str(asked["max_tokens"])))
        if not asked.get("stream"):
            usage = {"completion_tokens": len(said)}
            return await _send(
                writer, {"choices": [{"index": 0, "text": " ".join(said), "finish_reason": "length"}], "usage": usage}
            )
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for word in said:
            await _event(writer, {"choices": [{"index": 0, "text": word, "finish_reason": None}]})
        while self._stream.exists():
            await _event(writer, {"choices": [{"index": 0, "text": ".", "finish_reason": None}]})
            await asyncio.sleep(_PAUSE_S)
        await _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()


async def _event(writer: asyncio.StreamWriter, document: object) -> None:
    data = f"data: {json.dumps(document)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def _send(writer: asyncio.StreamWriter, document: object) -> None:
    data = json.dumps(document).encode()
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


async def main() -> None:
    port, hold = sys.argv[1:]
    server = await asyncio.start_server(Engine(hold).serve, "0.0.0.0", int(port))
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
