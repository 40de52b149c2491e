#!/usr/bin/env python3
"""What held requests cost, and whether they slow down models that serve: ``make bench-held``.

Usage: held.py [--requests N] [--body BYTES] [--rounds N]

One gateway process; an upstream and the clients are processes of their own. The latency of a warm model is measured in
rounds that alternate, first with nothing held and then with all requests held, so that what else runs on the machine
counts in both. Then the held model is admitted, and every request must be answered. Writes build/bench-held.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

import httpx
import uvloop
from rich.console import Console
from rich.table import Table
from rig import BUILD, BenchError, Gateway, gateway, raise_open_files, until

ANSWER = json.dumps({"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": {"content": "hello"}}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
PROBES = 1500
CONNECT_AT_ONCE = 200

console = Console(highlight=False)


class Upstream(asyncio.Protocol):
    """Answers each request at once with the same words."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclass of asyncio's.
        self._transport, self._buffer = cast(asyncio.Transport, transport), bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            if len(self._buffer) < end + 4 + length:
                return
            del self._buffer[: end + 4 + length]
            self._transport.write(HEAD % len(ANSWER) + ANSWER)


class Client(asyncio.Protocol):
    """Sends one request at its start and keeps the whole of one answer."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self._buffer = cast(asyncio.Transport, transport), b""
        self.transport.write(self._request)

    def again(self) -> asyncio.Future[int]:
        """Send the request once more on the same connection."""
        self.answered, self._buffer = asyncio.get_running_loop().create_future(), b""
        self.transport.write(self._request)
        return self.answered

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if found and len(body) >= length and not self.answered.done():
            self.answered.set_result(int(head.split(b" ", 2)[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_result(0)


def request(model: str, size: int) -> bytes:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "x" * size}]}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )


async def upstream(pipe: Connection) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=4096)
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


async def holder(pipe: Connection, port: int, count: int, size: int) -> None:
    """Opens ``count`` requests, says so, and at the end says how they were answered: status -> number."""
    loop, limit, clients = asyncio.get_running_loop(), asyncio.Semaphore(CONNECT_AT_ONCE), []
    sent = request("cold", size)

    async def connect() -> None:
        async with limit:
            _, client = await loop.create_connection(lambda: Client(sent), "127.0.0.1", port)
            clients.append(client)

    await asyncio.gather(*(connect() for _ in range(count)))
    pipe.send(len(clients))
    await loop.run_in_executor(None, pipe.recv)
    begun = time.perf_counter()
    statuses = await asyncio.gather(*(client.answered for client in clients))
    pipe.send(({str(status): statuses.count(status) for status in set(statuses)}, time.perf_counter() - begun))
    for client in clients:
        client.transport.close()


async def prober(pipe: Connection, port: int) -> None:
    """Latencies of the warm model over one connection, a round whenever it is asked for one."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(request("warm", 200)), "127.0.0.1", port)
    await client.answered
    while await loop.run_in_executor(None, pipe.recv):
        taken = []
        for _ in range(PROBES):
            begun = time.perf_counter()
            status = await client.again()
            taken.append(time.perf_counter() - begun)
            if status != 200:
                raise BenchError(f"the warm model answered {status}")
        pipe.send(sorted(taken))


@contextlib.contextmanager
def aside(job: Any, *arguments: Any) -> Iterator[Connection]:
    """A coroutine function in a process of its own, and the pipe to it."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(job, theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.terminate()
        process.join(10)


def _run(job: Any, pipe: Connection, *arguments: Any) -> None:
    uvloop.run(job(pipe, *arguments))


def receive(pipe: Connection, what: str, within: float = 120.0) -> Any:
    if not pipe.poll(within):
        raise BenchError(f"waited {within:g} s for {what}")
    return pipe.recv()


def held(pipe_of: Gateway, model: str) -> int:
    """What the gateway itself counts."""
    text = httpx.get(f"http://127.0.0.1:{pipe_of.port}/metrics", timeout=30, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("rewake_queue_depth") and f'"{model}"' in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    engine = {"engine": {"kind": "http", "command": ["/bin/true"]}}
    bounds = {"max_requests": options.requests * 2, "max_bytes": "4 GiB"}
    models = {
        "warm": {**engine, "concurrency": 64},
        "cold": {**engine, "concurrency": 64, "hold": {**bounds, "max_wait_s": 600, "silent_s": 500}},
    }
    empty: list[list[float]] = []
    loaded: list[list[float]] = []
    with gateway(models, hold=bounds, access_log=False) as made, aside(upstream) as source:
        port = receive(source, "the upstream")
        made.admit("warm", port, concurrency=64)
        time.sleep(0.5)
        memory, answers, drained_s = [], {}, 0.0
        with aside(prober, made.port) as probe:
            for number in range(options.rounds):
                probe.send(True)
                empty.append(receive(probe, "latencies with nothing held"))
                before = made.memory()
                with aside(holder, made.port, options.requests, options.body) as clients:
                    receive(clients, "the requests to be sent")
                    until(lambda: held(made, "cold") == options.requests, "every request to be held", 60)
                    memory.append(made.memory() - before)
                    probe.send(True)
                    loaded.append(receive(probe, "latencies with everything held"))
                    if number == options.rounds - 1:
                        clients.send(True)
                        record = made.admit("cold", port, concurrency=64)
                        answers, drained_s = receive(clients, "every request to be answered")
                        made.remove(record)
                until(lambda: held(made, "cold") == 0, "the waiting room to be empty", 60)
    return summary(options, memory, empty, loaded, answers, drained_s)


def summary(
    options: argparse.Namespace,
    memory: list[int],
    empty: list[list[float]],
    loaded: list[list[float]],
    answers: dict[str, int],
    drained_s: float,
) -> dict[str, Any]:
    def quantile(sample: list[float], q: float) -> float:
        return sample[int(q * (len(sample) - 1))]

    ratios = [quantile(with_, 0.99) / quantile(without, 0.99) for without, with_ in zip(empty, loaded, strict=True)]
    return {
        "requests": options.requests,
        "body_bytes": options.body,
        # The first round alone: afterwards the allocator already has the memory.
        "bytes_per_held_request": round(memory[0] / options.requests),
        "bytes_per_held_request_beyond_body": round(memory[0] / options.requests - options.body),
        "warm_p50_s": {"nothing held": _median(empty, 0.5, quantile), "all held": _median(loaded, 0.5, quantile)},
        "warm_p99_s": {"nothing held": _median(empty, 0.99, quantile), "all held": _median(loaded, 0.99, quantile)},
        "ratios": {"warm_p99_held_vs_unloaded": round(statistics.median(ratios), 3)},
        "answers": answers,
        "drained_s": round(drained_s, 3),
    }


def _median(rounds: list[list[float]], q: float, quantile: Any) -> float:
    return round(statistics.median(quantile(sample, q) for sample in rounds), 6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--body", type=int, default=2000, help="bytes of each held body, about")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        raise_open_files(options.requests + 500)
        found = measure(options)
    except BenchError as error:
        print(f"bench-held: {error}", file=sys.stderr)
        return 1
    table = Table("", "nothing held", f"{options.requests:,} held", title="Held requests")
    for name in ("warm_p50_s", "warm_p99_s"):
        table.add_row(name.replace("_s", ", ms"), *(f"{1000 * value:.2f}" for value in found[name].values()))
    console.print(table)
    console.print(f"p99 with all held: {found['ratios']['warm_p99_held_vs_unloaded']} times that with nothing held")
    console.print(
        f"memory for each held request: {found['bytes_per_held_request']:,} bytes, its body of {options.body:,} included"
    )
    console.print(f"then admitted: answered {found['answers']} in {found['drained_s']} s")
    (BUILD / "bench-held.json").write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["answers"] == {"200": options.requests} else 1


if __name__ == "__main__":
    sys.exit(main())
