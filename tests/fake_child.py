"""A child process with scripted faults, for the supervisor: it writes down what happens to it.

Usage: fake_child.py JOURNAL NAME [crash | deaf | slow SECONDS | unprivileged | listen | watch SOCKET]
``watch`` notes at its end whether somebody still listens on a unix socket.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType


def obey(fd: int) -> None:
    """Take every configuration that a supervisor sends after the first."""
    with open(fd, "rb", closefd=False) as lines:
        next(lines, None)
        for line in lines:
            told = json.loads(line)
            if told["kind"] == "told":
                os.write(fd, json.dumps({"kind": "taken", "number": told["number"]}).encode() + b"\n")


def main() -> None:
    journal, name, how, more = Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or [""])[0], sys.argv[4:]

    def note(event: str) -> None:
        with journal.open("a") as file:
            file.write(f"{name} {event} {os.getpid()}\n")

    def end(number: int, _: FrameType | None) -> None:
        note(f"got-{signal.Signals(number).name}")
        if how == "slow":
            time.sleep(float(more[0]))
        if how == "watch":
            with socket.socket(socket.AF_UNIX) as client:
                note("store-there" if client.connect_ex(more[0]) == 0 else "store-gone")
        if how != "deaf":
            note("ends")
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    if how == "unprivileged":
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    options = dict(zip(sys.argv, sys.argv[1:], strict=False))
    listeners = []
    if "--control-fd" in options:
        threading.Thread(target=obey, args=(int(options["--control-fd"]),), daemon=True).start()
    if how == "listen":
        listeners.append(socket.socket(fileno=int(options["--listen-fd"])))
        listeners[0].listen()
        os.write(int(options["--control-fd"]), b'{"kind": "ready", "connected": true}\n')
    note("begins")
    print(f"{name} says hello", flush=True)
    if how == "crash":
        sys.exit(7)
    while True:
        signal.pause()
        print(f"{name} goes on, with {len(listeners)} ports open", flush=True)


main()
