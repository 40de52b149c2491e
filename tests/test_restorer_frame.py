"""`rewake top`: one picture that fits where it is shown, and a terminal that is left as it was."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from restorer.cli.frame import ago, brief, frame, seconds

ROOT = Path(__file__).parents[1]
NOW = 1_700_000_100_000
REPLICA = {
    "id": "org/model#0",
    "model": "org/model",
    "state": "restoring",
    "start": "restored",
    "inflight": 3,
    "updated_ms": NOW - 65_000,
    "host": "h1",
    "incarnation": "abcdef012345",
    "reason": "a cause\nand more",
}
MODEL = {
    "name": "org/model",
    "state": "restoring",
    "admitted": 0,
    "max_replicas": 2,
    "inflight": 3,
    "held": 7,
    "eta_s": 2.25,
    "engine": "vllm",
    "failure": None,
}
PROGRESS = {
    "id": "op/0",
    "what": "start",
    "replica": "org/model#0",
    "model": "org/model",
    "snapshot": "",
    "begun_ms": NOW - 4_000,
    "now_ms": NOW,
    "stages": [{"name": "verify bytes", "seconds": 1.0, "begun_ms": NOW - 4_000, "bytes": 5 << 20, "tier": "disk"}],
    "doing": [{"name": "restore processes", "seconds": 3.0, "begun_ms": NOW - 3_000, "bytes": None, "tier": None}],
    "bytes_done": None,
    "bytes_total": None,
}
DOCUMENT: dict[str, Any] = {
    "version": "1-1",
    "now_ms": NOW,
    "store": True,
    "gateways": 2,
    "models": [MODEL, {**MODEL, "name": "broken", "state": "failed", "held": 0, "failure": "criu restore failed", "eta_s": None}],
    "held": [
        {"model": "org/model", "tenant": "research", "position": 1, "of": 4, "gateway": "host-7", "waited_s": 4.25, "eta_s": 2.0}
    ],
    "replicas": [REPLICA],
    "progress": [PROGRESS, {**PROGRESS, "what": "log"}],
    "operations": [{"kind": "scale_up", "model": "org/model", "state": "running", "created_ms": NOW - 4_000, "detail": ""}],
    "tasks": [],
    "hosts": [
        {"host": "h1", "running": 1, "snapshots": [{"fits": True, "bytes": 1 << 30}], "capable": True, "capability": ""},
    ],
}


def drawn(width: int, document: dict[str, Any] = DOCUMENT) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False, emoji=False).print(frame(document, width, NOW, ""))
    return out.getvalue().splitlines()


def test_all_that_matters_is_in_the_picture() -> None:
    text = "\n".join(drawn(120))
    for part in ("0 of 2 models ready", "7 held", "2 gateways", "1 host", "1 of 4", "host-7"):
        assert part in text
    assert "▲ broken (rewake why broken): criu restore failed" in text
    for row in ("◐ restoring", "verify bytes", "5.0 MiB disk", "restore processes", "research", "1 min", "1 of 1 fit", "a cause"):
        assert row in text
    assert "and more" not in text
    assert text.count("restore processes") == 1


def test_a_bar_lies_where_its_stage_lay() -> None:
    first, second = (next(line for line in drawn(120) if name in line) for name in ("verify bytes", "restore processes"))
    assert first.count("━") == 7
    assert second.count("━") == 21
    assert first.index("━") < second.index("━")


@pytest.mark.parametrize("width", [20, 40, 60, 72, 110, 200])
def test_no_line_is_wider_than_the_terminal_and_what_matters_least_goes_first(width: int) -> None:
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert ("INCARNATION" in text) is (width >= 110)
    assert "MODEL" in text


def test_a_lost_store_and_no_host_are_said_first() -> None:
    lines = drawn(100, {**DOCUMENT, "store": False, "hosts": [], "replicas": [], "held": [], "progress": [], "operations": []})
    assert lines[1].startswith("▲ the store is not reached")
    assert lines[2].startswith("▲ no restorer reports")


def test_durations_and_causes_are_short() -> None:
    assert [seconds(value) for value in (0.0123, 1.26, 59.9, 125)] == ["12 ms", "1.3 s", "59.9 s", "2 min 5 s"]
    assert [ago(NOW - ms, NOW) for ms in (500, 61_000, 7_200_000, 90_000_000)] == ["0 s", "1 min", "2 h", "1 d"]
    assert brief("x" * 100, 10) == "xxxxxxxxx…"
    assert brief("it ended; its log ends: a prompt") == "it ended"


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = open(sys.argv[1], "rb").read()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """A configuration whose gateway answers everything with the overview."""
    (tmp_path / "overview.json").write_text(json.dumps(DOCUMENT))
    argv = [sys.executable, "-c", SERVER, str(tmp_path / "overview.json")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            (tmp_path / "admin-token").write_text("t")
            path = tmp_path / "rewake.yaml"
            engine = "{engine: {kind: http, command: [/bin/true]}}"
            path.write_text(f"models: {{m: {engine}}}\ngateway: {{port: {port}}}\nrun_dir: {tmp_path}\nstate_dir: {tmp_path}\n")
            yield path
        finally:
            server.kill()


def test_without_a_terminal_it_prints_one_picture_and_ends(config: Path) -> None:
    argv = [sys.executable, str(ROOT / "rewake.py"), "top", "-c", str(config)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "org/model" in done.stdout
    assert "\x1b" not in done.stdout
    told = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert json.loads(told.stdout) == DOCUMENT


@pytest.mark.parametrize(
    ("end", "handler"),
    [("q", signal.SIG_DFL), ("\x03", signal.SIG_DFL), ("\x03", signal.SIG_IGN)],
    ids=["q", "ctrl-c", "ctrl-c that was ignored by whoever started it"],
)
def test_on_a_terminal_it_lives_until_it_is_told_to_end_and_leaves_it_as_it_was(
    config: Path, end: str, handler: signal.Handlers
) -> None:
    pid, fd = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, handler)
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, str(ROOT / "rewake.py"), "top", "-n", "0.2", "-c", str(config)])
    try:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        seen = read_until(fd, b"restore processes")
        assert b"\x1b[?1049h" in seen
        os.kill(pid, signal.SIGWINCH)
        read_until(fd, b"restore processes")
        os.write(fd, end.encode())
        assert b"\x1b[?1049l" in read_until(fd, b"\x1b[?1049l")
        _, status = os.waitpid(pid, 0)
        pid = 0
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(fd)


def read_until(fd: int, wanted: bytes, within_s: float = 60.0) -> bytes:
    """What came up to and including ``wanted``."""
    seen, deadline = b"", time.monotonic() + within_s
    while wanted not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([fd], [], [], 0.5)[0]:
            with contextlib.suppress(OSError):
                seen += os.read(fd, 65536)
    return seen


_SAID = "criu restore failed with status 1: 1000: Error (criu/files-reg.c:2175): File usr/lib/lib.so has bad size 19 (expect 9)"


def test_what_criu_said_is_brief_without_where_in_its_sources() -> None:
    assert brief(_SAID) == "criu restore failed: File usr/lib/lib.so has bad size 19 (expect 9)"


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_long_reason_costs_no_other_column_a_letter(width: int) -> None:
    broken = REPLICA | {"id": "a-model-with-a-name#0", "state": "failed", "reason": _SAID}
    cold = REPLICA | {"state": "admitted", "start": "cold", "reason": f"restore of snapshot 0123456789abcdef failed: {_SAID}"}
    lines = drawn(width, {**DOCUMENT, "replicas": [broken, cold], "operations": []})
    table = lines[lines.index("REPLICAS") + 1 :]
    assert table[0].split()[:5] == ["REPLICA", "STATE", "START", "INFLIGHT", "SINCE"]
    for row, name in zip(table[1:], ("a-model-with-a-name#0", "org/model#0"), strict=False):
        assert row.startswith(name)
    # And what is wrong stands above everything, with the way to its cause.
    wrong = [line for line in lines if line.startswith("▲")]
    assert any("a-model-with-a-name#0 failed (rewake why a-model-with-a-name#0): " in line for line in wrong)
    assert any("org/model#0 was started cold (rewake why org/model#0): rest" in line for line in wrong)
