"""A small engine with what makes real ones hard to snapshot: two processes, queues and locks on unlinked /dev/shm
semaphores, a shared-memory block, a mapped file of the host, a log that grows.

``python e2e_engine.py PORT MAPPED HOLD``: serves ``/health`` and ``/v1/completions`` on PORT, with MAPPED (a file) mapped.
While HOLD-start exists it does not listen, while HOLD-answer exists it does not answer.
"""

from __future__ import annotations

import ctypes
import hashlib
import http.server
import json
import mmap
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any


def worker(questions: Any, answers: Any, lock: Any, said: Any) -> None:
    """The second process: answers are a hash of the prompt, one word for each token."""
    while True:
        prompt, tokens = questions.get()
        with lock:
            said.value += 1
        digest = hashlib.sha256(prompt.encode()).hexdigest()
        answers.put(" ".join(digest[4 * n : 4 * n + 4] for n in range(tokens)))


class Handler(http.server.BaseHTTPRequestHandler):
    hold: str
    pipes: tuple[Any, Any]

    def do_GET(self) -> None:
        self._reply({"status": "ok"})

    def do_POST(self) -> None:
        while Path(self.hold + "-answer").exists():
            time.sleep(0.05)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        questions, answers = self.pipes
        questions.put((asked["prompt"], asked["max_tokens"]))
        text = answers.get(timeout=30)
        print(f"answered {asked['prompt']!r}" + "." * 2000, flush=True)
        usage = {"completion_tokens": asked["max_tokens"]}
        self._reply({"choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage})

    def _reply(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    port, mapped, hold = sys.argv[1:]
    file = os.open(mapped, os.O_RDONLY)
    library = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    os.close(file)
    while Path(hold + "-start").exists():
        time.sleep(0.05)
    forks = multiprocessing.get_context("fork")
    pipes = forks.Queue(), forks.Queue()
    said = forks.Value(ctypes.c_long, 0, lock=False)
    forks.Process(target=worker, args=(*pipes, forks.Lock(), said), daemon=True).start()
    Handler.hold, Handler.pipes = hold, pipes
    server = http.server.HTTPServer(("0.0.0.0", int(port)), Handler)
    print(f"listening, {len(library)} bytes mapped", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
