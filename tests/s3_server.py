"""A real S3 server, moto's, behind a front that counts requests and breaks those that a test wants broken.

For obstore's client of Google's store the front says "only if there is none", and who asks, in S3's words; all else is the same.
Of the emulators of that store that are packages none takes all that this client asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from moto.server import ThreadedMotoServer

from policies.storage import Remote


@dataclass
class Request:
    """One request that came through."""

    method: str
    path: str
    status: int
    bytes: int
    """Of its body and its answer's together."""


SIGNED = "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""Whom moto takes somebody for who says this; it checks no signatures."""
Fault = Callable[[str, str], str | None]
"""Method and path -> how it is to go wrong (``503``, ``reset``, ``cut``, ``stall``, ``flip``; ``hold``: until it says otherwise),
or None."""


@dataclass
class S3:
    """Where it listens, what it was asked, how it fails."""

    endpoint: str
    bucket: str = "copies"
    requests: list[Request] = field(default_factory=list)
    fault: Fault = lambda _method, _path: None

    def remote(self, prefix: str, **settings: Any) -> Remote:
        """Settings of a remote in the bucket."""
        config = {"endpoint": self.endpoint, "region": "us-east-1"}
        secrets = {"access_key_id": "REWAKE_TEST_S3_ID", "secret_access_key": "REWAKE_TEST_S3_SECRET"}
        url = f"s3://{self.bucket}/{prefix}"
        return Remote(url=url, settings=config, env=secrets, **{"timeout_s": 20, **settings})

    def gcs(self, prefix: str, **settings: Any) -> Remote:
        """The same bucket through obstore's client of Google's store, which speaks this protocol but for conditions and keys."""
        config, secrets = {"base_url": self.endpoint}, {"bearer_token": "REWAKE_TEST_GCS_TOKEN"}
        return Remote(url=f"gs://{self.bucket}/{prefix}", settings=config, env=secrets, **{"timeout_s": 20, **settings})

    def count(self, method: str, part: str = "/chunks/") -> int:
        """Requests that succeeded."""
        return sum(one.method == method and part in one.path and one.status < 300 for one in self.requests)


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """One that has a bucket, on a port of its own, for as long as the block lasts."""
    os.environ |= {"REWAKE_TEST_S3_ID": "id", "REWAKE_TEST_S3_SECRET": "secret", "REWAKE_TEST_GCS_TOKEN": "token"}
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    server = S3("")
    loop, started = asyncio.new_event_loop(), threading.Event()
    ended: asyncio.Future[None] = loop.create_future()
    thread = threading.Thread(target=lambda: loop.run_until_complete(_front(server, moto, started, ended)))
    thread.start()
    try:
        assert started.wait(20)
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set_result, None)
        thread.join()
        loop.close()
        moto.stop()


async def _front(server: S3, moto: ThreadedMotoServer, started: threading.Event, ended: asyncio.Future[None]) -> None:
    host, port = moto.get_host_and_port()
    async with aiohttp.ClientSession(f"http://{host}:{port}", auto_decompress=False) as client:

        async def handle(request: web.Request) -> web.StreamResponse:
            body, fault = await request.read(), server.fault(request.method, request.path)
            while fault == "hold" and not ended.done():
                await asyncio.sleep(0.02)
                fault = server.fault(request.method, request.path)
            if fault == "503":
                return web.Response(status=503)
            if fault == "stall":
                await asyncio.shield(ended)
                return web.Response(status=503)
            if fault == "reset":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "accept-encoding")}
            if headers.get("Authorization") == "Bearer token":
                headers["Authorization"] = SIGNED
                if headers.pop("x-goog-if-generation-match", None) == "0":
                    headers["If-None-Match"] = "*"
            async with client.request(request.method, request.raw_path, data=io.BytesIO(body), headers=headers) as answer:
                data = await answer.read()
                server.requests.append(Request(request.method, request.path, answer.status, len(body) + len(data)))
                kept = {n: v for n, v in answer.headers.items() if n.lower() not in ("transfer-encoding", "connection", "date")}
                if fault == "cut":
                    reply = web.StreamResponse(status=answer.status, headers=kept)
                    await reply.prepare(request)
                    await reply.write(data[: len(data) // 2])
                    assert request.transport is not None
                    request.transport.abort()
                    return reply
                if fault == "flip":
                    data = data[:-1] + bytes([data[-1] ^ 1])
                if request.method == "HEAD":
                    kept.pop("Content-Type", None)
                    return web.Response(status=answer.status, headers=kept)
                kept.pop("Content-Length", None)
                return web.Response(status=answer.status, headers=kept, body=io.BytesIO(data))

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{rest:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with client.put(f"/{server.bucket}") as made:
            assert made.status == 200
        started.set()
        await ended
        await runner.cleanup()
