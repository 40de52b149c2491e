"""Runs `rewake` commands in forks of one process that has imported everything: starting Python is most of what a command costs,
and the documents have many.

    python docs_forks.py serve SOCKET        in the background; makes SOCKET when it is ready
    python docs_forks.py SOCKET ARGUMENT...  runs one there: our folder, environment, streams and exit status

What a command does is the same; that it also starts by itself is for other tests to show.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

_STREAMS = 3
_MESSAGE = 1 << 20


def serve(path: str) -> None:
    """Until killed."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import rewake  # noqa: PLC0415 -- only where it is served: the other half must start at once

    with contextlib.redirect_stdout(None):
        for group in ([], ["snapshot"]):
            rewake.main([*group, "--help"])  # which imports every command
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(16)
    os.rename(f"{path}.new", path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(_wait_for(asked, rewake))
        asked.close()


def _wait_for(asked: socket.socket, rewake: object) -> int:
    """Run a command in a child of its own, and say how it ended."""
    data, fds, _, _ = socket.recv_fds(asked, _MESSAGE, _STREAMS)
    child = os.fork()
    if child == 0:
        asked.close()
        code = 1
        try:
            code = _run(json.loads(data), fds, rewake)
        finally:
            os._exit(code)
    for fd in fds:
        os.close(fd)
    _, status = os.waitpid(child, 0)
    asked.send(str(os.waitstatus_to_exitcode(status)).encode())
    return 0


def _run(told: dict[str, object], fds: list[int], rewake: object) -> int:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(str(told["folder"]))
    os.environ.clear()
    os.environ.update(told["environment"])  # type: ignore[arg-type]
    code = rewake.main(told["arguments"])  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)


def ask(path: str, arguments: list[str]) -> int:
    told = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(told).encode()], range(_STREAMS))
        answer = server.recv(16)
    return int(answer) if answer else 1


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
