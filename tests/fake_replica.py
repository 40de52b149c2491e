"""A scriptable upstream, and a stand-in for the restorer's writes, for faults and timings that real parts cannot show.

:class:`FakeReplica` is a TCP server whose answers are scripts: coroutines that write raw bytes. :class:`Fleet` writes
replica records as a restorer would: record, sequence number and hint. :func:`serving` runs the gateway as
``python -m gateway`` does, through its own runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import redis.asyncio
from aiohttp import web

from gateway import app as application
from gateway import server
from gateway.metrics import Metrics
from gateway.settings import Settings
from policies.config import Config, parse
from policies.replica import Replica, Stage, State
from policies.wire import Failure, Hint, Keys

TOKEN = "let-me-in"
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
CHAT = "/v1/chat/completions"
Script = Callable[["Exchange"], Awaitable[None]]
PATH: ContextVar[Literal["fast", "ordinary"]] = ContextVar("path", default="fast")
"""Which way :func:`serving` lets requests take; conftest.py runs the tests of the data path through both."""


@dataclass
class Exchange:
    """One request that the fake got, and the connection to answer on."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, document: object, status: str = "200 OK", head: str = "") -> None:
        body = json.dumps(document).encode()
        await self.send(
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body
        )

    async def begin_events(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def event(self, document: object) -> None:
        await self.chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """Close with a TCP reset."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def client_left(self) -> None:
        """Return once the gateway has closed this connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


def completion(text: str = "hello") -> dict[str, Any]:
    """A chat completion as the SDK parses it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def delta(text: str) -> dict[str, Any]:
    """One chunk of a streamed chat completion."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    return {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


async def answer(exchange: Exchange) -> None:
    """The default script."""
    await exchange.json(completion())


@dataclass
class FakeReplica:
    """Answers each request by the next script, or by :attr:`default`."""

    default: Script = answer
    scripts: list[Script] = field(default_factory=list)
    requests: list[Exchange] = field(default_factory=list)
    connections: int = 0
    inflight: int = 0
    most_inflight: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> FakeReplica:
        self._server = await asyncio.start_server(self._accept, self.address, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while not writer.is_closing():
                    await self._serve(await _read(reader, writer))
        finally:
            writer.close()

    async def _serve(self, exchange: Exchange) -> None:
        self.requests.append(exchange)
        self.inflight += 1
        self.most_inflight = max(self.most_inflight, self.inflight)
        script = self.scripts.pop(0) if self.scripts else self.default
        try:
            await script(exchange)
        finally:
            self.inflight -= 1


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")[:-2]
    method, path, _ = first.split(" ", 2)
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Exchange(method, path, headers, await reader.readexactly(length), reader, writer)


@contextlib.asynccontextmanager
async def replica_server(default: Script = answer, *scripts: Script) -> AsyncIterator[FakeReplica]:
    fake = await FakeReplica(default, list(scripts)).start()
    try:
        yield fake
    finally:
        await fake.stop()


class Fleet:
    """Writes records as the restorer does. One per test."""

    def __init__(self, store: redis.asyncio.Redis, namespace: str = "rewake") -> None:
        self.store = store
        self.keys = Keys(namespace)
        self._starts = 0

    async def write(self, replica: Replica, *, hint: bool = True) -> Replica:
        record = replica.model_copy(update={"seq": await self.store.incr(self.keys.seq)})
        await self.store.hset(self.keys.replicas, record.id, record.model_dump_json())
        if hint:
            await self.store.publish(self.keys.events, Hint(replica=record).model_dump_json())
        return record

    async def admit(self, fake: FakeReplica, model: str = "m", slot: int = 0, *, hint: bool = True, **more: Any) -> Replica:
        """Open traffic to a fake under a new incarnation."""
        self._starts += 1
        record = Replica(
            id=f"{model}#{slot}",
            model=model,
            state=State.ADMITTED,
            fence=1,
            host="h1",
            incarnation=more.pop("incarnation", f"inc-{slot}-{self._starts}"),
            address=fake.address,
            port=fake.port,
            start="restored",
            stages=(Stage(name="restore", seconds=0.4),),
            concurrency=more.pop("concurrency", 8),
        )
        return await self.write(record.model_copy(update=more), hint=hint)

    async def change(self, replica: Replica, state: State, **more: Any) -> Replica:
        return await self.write(replica.model_copy(update={"state": state, **more}))

    async def fail(self, model: str, detail: str, ttl_ms: int = 30_000) -> None:
        """What the restorer does when a start has failed for good."""
        failure = Failure(code="restore_failed", detail=detail, operation="op")
        await self.store.set(self.keys.failure(model), failure.model_dump_json(), px=ttl_ms)
        await self.store.publish(self.keys.events, Hint(model=model).model_dump_json())

    async def jobs(self) -> list[dict[str, Any]]:
        """Records of all unsettled jobs that any host may claim."""
        ids = await self.store.zrange(self.keys.jobs, 0, -1)
        return [json.loads(await self.store.hget(self.keys.job(id), "record")) for id in ids]


def configuration(**changes: Any) -> Config:
    """A configuration with one model ``m``; ``model__x`` changes the model, ``gateway__x`` the gateway."""
    model: dict[str, Any] = {"engine": {"kind": "http", "command": ["/bin/true"]}, "aliases": ["alias/of-m"]}
    gateway: dict[str, Any] = {}
    models: dict[str, Any] = {"m": model, **changes.pop("models", {})}
    for name, value in changes.items():
        part, _, key = name.partition("__")
        {"model": model, "gateway": gateway}[part][key] = value
    return parse({"models": models, "gateway": gateway})


@dataclass
class Served:
    """A gateway that serves, and a client of it."""

    gateway: application.Gateway
    client: httpx.AsyncClient
    url: str
    port: int
    runner: web.AppRunner

    async def chat(self, model: str = "m", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.client.post(CHAT, json={"model": model, "messages": [], **fields}, headers=headers)

    def held(self, model: str = "m") -> int:
        return self.gateway.ledger.held(model)

    def inflight(self) -> int:
        return sum(self.gateway.ledger.replicas().values())

    def counts(self) -> tuple[int, int, int]:
        ledger = self.gateway.ledger
        return ledger.total_held, ledger.total_bytes, self.inflight()


@contextlib.asynccontextmanager
async def serving(store_url: str, config: Config | None = None, id: str = "gw") -> AsyncIterator[Served]:
    """A gateway on a free port, connected to the store."""
    config = config or configuration()
    settings = Settings(config, store_url, TOKEN, id)
    app = application.build(settings, Metrics(config.models, version="test"))
    runner = server.Runner(app, app[application.GATEWAY].serving.fast if PATH.get() == "fast" else None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site.port
        gateway = app[application.GATEWAY]
        async with asyncio.timeout(30):
            await gateway.link.connected.wait()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits) as client:
            yield Served(gateway, client, f"http://127.0.0.1:{port}", port, runner)
    finally:
        await runner.cleanup()
