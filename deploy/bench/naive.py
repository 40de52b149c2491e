"""The yardstick: a proxy as one writes it with aiohttp in ten minutes. Not for use: see what `make bench-gateway` says of it.

Usage: naive.py PORT UPSTREAM_PORT
"""

from __future__ import annotations

import sys

import aiohttp
import uvloop
from aiohttp import web

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade", "te", "trailer"}


async def session(app: web.Application):
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        app["client"] = client
        yield


async def handle(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
    target = f"http://127.0.0.1:{request.app['upstream']}{request.path_qs}"
    async with request.app["client"].request(request.method, target, data=body, headers=headers) as answer:
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


def main() -> None:
    port, upstream = int(sys.argv[1]), int(sys.argv[2])
    app = web.Application()
    app["upstream"] = upstream
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{tail:.*}", handle)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
