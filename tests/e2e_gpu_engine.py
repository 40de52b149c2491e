"""A small engine with vLLM's routes, whose "GPUs" are those of :mod:`fake_cuda`: a process for each and one before them, all with
CUDA state; weights that its sleep throws away, and answers that depend on every byte of them.

``python e2e_gpu_engine.py PORT HOLD [--seed N] [--claims BYTES] [--no-cuda] [--deaf] [vLLM's options for sleep and for GPUs]``.
While HOLD-garble exists, what it takes in as weights is wrong by one bit, while HOLD-stale exists, the last run of it is left
out; while HOLD-misaligned exists, it says what broken GPU state makes engines say; while HOLD-full exists, it finds the disk
full; while HOLD-unmappable exists, it cannot map others' device memory; while HOLD-oversleep exists, it does not wake; while
HOLD-unset exists, what it keeps beside its weights is zeros when it wakes.
With --deaf it has no routes for sleep.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import http.server
import importlib
import json
import mmap
import multiprocessing
import os
import signal
import threading
import urllib.parse
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIZES = (96 << 10, 32 << 10, 64 << 10)
STATE_BYTES, KV_BYTES = 1 << 20, 4 << 20


def cuda_state(bytes_used: int, rank: int = 0) -> None:
    """What the fake driver knows of this process."""
    path = Path(os.environ["HOME"]) / f"cuda-{os.getpid()}"
    state = json.loads(path.read_text()) if path.exists() else {"state": "running"}
    index = int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[rank])
    path.write_text(json.dumps({"index": index, **state, "bytes": bytes_used}))


class HostMemory:
    """The memory interface of the extension over ordinary memory."""

    def __init__(self, extension: Any, blocks: list[mmap.mmap], hold: str) -> None:
        self._extension, self._blocks, self._hold = extension, blocks, hold

    def runs(self) -> list[tuple[int, int]]:
        return [(ctypes.addressof(ctypes.c_char.from_buffer(block)), len(block)) for block in self._blocks]

    def fingerprints(self, runs: list[tuple[int, int]]) -> list[str]:
        return [self._fingerprint(ctypes.string_at(address, count)) for address, count in runs]

    def _fingerprint(self, data: bytes) -> str:
        words = memoryview(data).cast("Q")
        found = sum(word * self._extension.multiplier(n) for n, word in enumerate(words)) & ((1 << 64) - 1)
        return str(self._extension.fold([found]))

    def read(self, address: int, count: int) -> bytes:
        if Path(self._hold + "-full").exists():
            raise OSError(28, "No space left on device")
        return ctypes.string_at(address, count)

    def clear_unused(self) -> None:
        pass

    def tidy(self) -> None:
        pass

    def copy_from(self, fds: list[int], sizes: list[int], runs: list[tuple[int, int]]) -> None:
        if Path(self._hold + "-unmappable").exists():
            raise OSError("cuMemImportFromShareableHandle: CUDA_ERROR_NOT_INITIALIZED")
        data = b"".join(os.pread(fd, size, 0) for fd, size in zip(fds, sizes, strict=True))
        for fd in fds:
            os.close(fd)
        self.fill(data, runs)

    def read_from(self, files: list[tuple[str, int]], runs: list[tuple[int, int]]) -> None:
        self.fill(b"".join(Path(path).read_bytes()[:count] for path, count in files), runs)

    def fill(self, data: bytes, runs: list[tuple[int, int]]) -> None:
        if Path(self._hold + "-garble").exists():
            data = bytes([data[0] ^ 1]) + data[1:]
        for number, block in enumerate(self._blocks):
            if number == len(SIZES) - 1 and Path(self._hold + "-stale").exists():
                continue
            at = sum(SIZES[:number])
            block[:] = data[at : at + len(block)]


def work(pipe: Connection, rank: int, options: argparse.Namespace) -> None:
    """A process that has weights."""
    hold, extension_name, cuda = options.hold, options.worker_extension_cls, not options.no_cuda
    blocks = [mmap.mmap(-1, size) for size in SIZES]
    names = [f"{options.seed} {rank} {number}" for number in range(len(SIZES))]
    original = [hashlib.shake_256(name.encode()).digest(size) for name, size in zip(names, SIZES, strict=True)]
    for block, data in zip(blocks, original, strict=True):
        block[:] = data
    buffer = bytearray(b"what is computed once, such as the positions of an image's parts")
    worker: Any = None
    if extension_name:
        module, _, name = extension_name.rpartition(".")
        extension = importlib.import_module(module)
        kind = type("Worker", (getattr(extension, name),), {"_rewake_memory": lambda _: HostMemory(extension, blocks, hold)})
        worker = kind()
        worker.rank = rank
    awake = STATE_BYTES + KV_BYTES + options.claims + sum(SIZES)
    if cuda:
        cuda_state(awake, rank)
    while True:
        method, arguments = pipe.recv()
        if method == "complete":
            content = hashlib.sha256(b"".join(bytes(block) for block in (*blocks, buffer))).hexdigest()
            pipe.send(hashlib.sha256(f"{arguments} {content}".encode()).hexdigest())
        elif method == "sleep":
            for block in blocks if arguments != "1" else ():
                block[:] = bytes(len(block))
            if cuda:
                cuda_state(STATE_BYTES, rank)
            pipe.send(None)
        elif method == "wake":
            if Path(hold + "-unset").exists():
                buffer[:] = bytes(len(buffer))
            if cuda:
                cuda_state(awake if arguments != ["weights"] else STATE_BYTES + sum(SIZES), rank)
            pipe.send(None)
        elif method == "reload_weights":
            HostMemory(None, blocks, hold).fill(b"".join(original), [])
            pipe.send(None)
        else:
            pipe.send(getattr(worker, method)(*arguments))


class Handler(http.server.BaseHTTPRequestHandler):
    pipes: list[Connection]
    """One to each worker, by rank."""
    lock = threading.Lock()
    asleep: set[str] = set()  # noqa: RUF012 - the server's state
    hold: str
    deaf = False

    def ask(self, method: str, arguments: Any) -> list[Any]:
        with self.lock:
            for pipe in self.pipes:
                pipe.send((method, arguments))
            return [pipe.recv() for pipe in self.pipes]

    def do_GET(self) -> None:
        if self.path == "/is_sleeping" and self.deaf:
            self._reply({"detail": "Not Found"}, 404)
            return
        self._reply({"is_sleeping": bool(self.asleep)} if self.path == "/is_sleeping" else {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        if url.path == "/sleep":
            self.ask("sleep", query.get("level", ["1"])[0])
            self.asleep.update({"weights", "kv_cache"})
            self._reply({})
        elif url.path == "/wake_up":
            if Path(self.hold + "-oversleep").exists():
                self._reply({"error": "out of memory"}, 500)
                return
            self.ask("wake", query.get("tags"))
            self.asleep.difference_update(query.get("tags", ["weights", "kv_cache"]))
            self._reply({})
        elif url.path == "/collective_rpc":
            self._reply({"results": self.ask(body["method"], body.get("args", []))})
        elif url.path == "/reset_prefix_cache":
            self._reply({"success": True})
        elif self.asleep:
            self._reply({"error": "asleep"}, 500)
        elif Path(self.hold + "-misaligned").exists():
            print("RuntimeError: CUDA error: misaligned address", flush=True)
            os.killpg(0, signal.SIGKILL)
        else:
            digest = hashlib.sha256("".join(self.ask("complete", body["prompt"])).encode()).hexdigest() * 9
            text = " ".join(digest[4 * n : 4 * n + 4] for n in range(body["max_tokens"]))
            if body.get("stream"):
                self._stream({"choices": [{"index": 0, "text": text}]})
                return
            usage = {"completion_tokens": body["max_tokens"]}
            self._reply({"choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage})

    def _stream(self, event: object) -> None:
        data = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _reply(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("hold")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--claims", type=int, default=0, help="more bytes that it says to have on each GPU")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--disable-custom-all-reduce", action="store_true")
    parser.add_argument("--worker-extension-cls", default="")
    options = parser.parse_args()
    forks = multiprocessing.get_context("fork")
    Handler.pipes, Handler.hold, Handler.deaf = [], options.hold, options.deaf
    for rank in range(options.tensor_parallel_size):
        ours, theirs = multiprocessing.Pipe()
        Handler.pipes.append(ours)
        forks.Process(target=work, args=(theirs, rank, options), daemon=True).start()
    if not options.no_cuda:
        cuda_state(0)
    http.server.ThreadingHTTPServer(("0.0.0.0", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
