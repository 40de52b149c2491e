"""Stands between the restorer and its GPU helper: notes what each request took, and may change facts in what is answered.

Usage: helper.py [--log FILE] [--fact NAME=VALUE …] -- HELPER [ARGUMENT …]      (as ``restorer.gpu_helper``)

For the bench, which wants to know what the driver itself took, and must be refused by another driver or topology. Each line of
the log is one request that was answered: ``op``, the number of ``pids`` it was about, ``seconds``, and numbers of the answer; a
line with ``op: start`` is the helper's own start.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


class Between:
    """One helper, and the requests that are on their way to it."""

    def __init__(self, argv: list[str], log: Path | None, facts: dict[str, str]) -> None:
        self._log, self._facts = log, facts
        self._asked: dict[int, tuple[dict[str, Any], float]] = {}
        self._helper = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._note({"op": "start"})

    def run(self) -> int:
        """Pass everything on, both ways, until either end is gone; the helper's exit status."""
        threading.Thread(target=self._requests, daemon=True).start()
        assert self._helper.stdout is not None
        for line in self._helper.stdout:
            answer = json.loads(line)
            asked, begun = self._asked.pop(answer["id"])
            if "result" in answer:
                answer["result"] |= self._facts if asked["op"] == "facts" else {}
            numbers = {key: value for key, value in answer.get("result", {}).items() if isinstance(value, int | float)}
            took = time.monotonic() - begun
            self._note({"op": asked["op"], "pids": len(asked.get("pids", ())), "seconds": took, "numbers": numbers})
            print(json.dumps(answer), flush=True)
        return self._helper.wait()

    def _requests(self) -> None:
        assert self._helper.stdin is not None
        for line in sys.stdin:
            request = json.loads(line)
            self._asked[request["id"]] = request, time.monotonic()
            self._helper.stdin.write(json.dumps(request) + "\n")
            self._helper.stdin.flush()
        self._helper.stdin.close()

    def _note(self, line: dict[str, Any]) -> None:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--fact", action="append", default=[], metavar="NAME=VALUE", help="of the driver's facts, changed")
    parser.add_argument("helper", nargs="+")
    options = parser.parse_args()
    # Its own helper ends with its stdin, which is ours.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    facts = dict(pair.split("=", 1) for pair in options.fact)
    return Between(options.helper, options.log, facts).run()


if __name__ == "__main__":
    sys.exit(main())
