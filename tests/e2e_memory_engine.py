"""A small engine with much memory: anonymous, in 200 memory files, and a big file mapped; its answers depend on every byte.

``python e2e_memory_engine.py PORT FILE``: serves ``/health`` and ``/v1/completions`` on PORT, with FILE mapped.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import mmap
import os
import sys
import zlib

FILES, FILE_BYTES, MEMORY_BYTES = 200, 128 << 10, 96 << 20


def content(number: int, size: int) -> bytes:
    return hashlib.shake_128(number.to_bytes(4, "big")).digest(4096) * (size // 4096)


class Engine:
    def __init__(self, path: str) -> None:
        self.memory = mmap.mmap(-1, MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Every other MiB stays zero.
        for at in range(0, MEMORY_BYTES, 2 << 20):
            self.memory[at : at + (1 << 20)] = content(1000 + at, 1 << 20)
        self.files = []
        for number in range(FILES):
            fd = os.memfd_create(f"part-{number}")
            os.ftruncate(fd, FILE_BYTES)
            view = mmap.mmap(fd, FILE_BYTES)
            view[:] = content(number, FILE_BYTES)
            # Half of them stay mapped, as pinned buffers are; of the others only the descriptor is left.
            self.files.append((fd, view if number % 2 else None))
            if number % 2 == 0:
                view.close()
        file = os.open(path, os.O_RDONLY)
        self.mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        os.close(file)

    def answer(self, prompt: str) -> str:
        digest = hashlib.sha256(prompt.encode())
        for fd, view in self.files:
            digest.update(os.pread(fd, FILE_BYTES, 0) if view is None else view[:])
        digest.update(b"%d %d" % (zlib.crc32(self.memory), zlib.crc32(self.mapped)))
        return digest.hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        self._reply({"status": "ok"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = self.engine.answer(asked["prompt"])
        usage = {"completion_tokens": asked["max_tokens"]}
        self._reply({"choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage})

    def _reply(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    Handler.engine = Engine(sys.argv[2])
    http.server.HTTPServer(("0.0.0.0", int(sys.argv[1])), Handler).serve_forever()
