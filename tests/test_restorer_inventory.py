"""The inventory, on real processes, and on a written-down /proc for what this machine has not."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually, require_root

import rewake
from restorer.errors import EngineDied
from restorer.procfs.inventory import Finding, examine, mapped_files, numbers, tree
from restorer.procfs.sockets import Socket, sockets_of

PRELUDE = "import os, socket, subprocess, sys, threading, time, ctypes, signal\nprivate = sys.argv[1]\n"
POSTLUDE = "\nopen(private + '/ready', 'w').close()\nwhile True: signal.pause()\n"

Start = Callable[..., Awaitable[int]]


def spawn(argv: list[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
    with (Path(argv[-1]) / "log").open("ab") as log:
        given = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True, **options}
        return subprocess.Popen(argv, **given)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an engine-like process: nothing inherited, output to a file in its private folder. Returns its pid."""
    started: list[subprocess.Popen[bytes]] = []
    private = tmp_path / "private"
    private.mkdir()

    async def start(script: str = "", prefix: tuple[str, ...] = (), **options: Any) -> int:
        started.append(
            spawn([*prefix, sys.executable, "-c", PRELUDE + textwrap.dedent(script) + POSTLUDE, str(private)], options)
        )
        ready = private / "ready"
        await eventually(lambda: ready.exists() or started[-1].poll() is not None, what="the process is ready")
        assert started[-1].poll() is None, (private / "log").read_text()
        ready.unlink()
        return started[-1].pid

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def codes(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in findings]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [str(finding) for finding in findings]
    return findings[0]


async def test_a_well_behaved_tree_has_no_findings(start: Start, tmp_path: Path) -> None:
    pid = await start(
        """
        # All of this survives a dump: a connection within the tree, both ends of a pair and a pipe, memory files, threads.
        listener = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname()); theirs = listener.accept()[0]
        dual = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        mapped = socket.create_connection(("127.0.0.1", dual.getsockname()[1])); other = dual.accept()[0]
        pair = socket.socketpair(); pipe = os.pipe(); memory = os.memfd_create("m"); os.ftruncate(memory, 64 << 20)
        inside = open(private + "/kept", "w"); epoll = __import__("select").epoll(); event = os.eventfd(0)
        dead = os.pipe(); os.close(dead[0])
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        """
    )
    assert examine(pid, private=[str(tmp_path / "private")]) == []


async def test_the_tree_is_every_descendant_with_every_thread(start: Start) -> None:
    pid = await start(
        """
        sleeper = ["import time; time.sleep(1000)"]
        child = subprocess.Popen([sys.executable, "-c", "import subprocess, sys, time; p = subprocess.Popen(['sleep', '1000']); "
            "open(sys.argv[1] + '/grandchild', 'w').write(str(p.pid)); time.sleep(1000)", private])
        while not (os.path.exists(private + '/grandchild') and os.path.getsize(private + '/grandchild')): time.sleep(0.01)
        for _ in range(2): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        """
    )
    family = tree(pid)
    assert family.pids[0] == pid
    assert len(family.pids) == 3
    threads = {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    assert len(threads) == 3
    assert set(family.inner) == threads | set(family.pids)
    assert numbers(pid) == {one: one for one in family.pids}


async def test_pids_are_those_of_the_trees_own_namespace(start: Start) -> None:
    require_root()
    outer = await start(prefix=("unshare", "--pid", "--fork", "--kill-child"))
    (child,) = children(outer)
    family = tree(child)
    assert family.pids == (child,)
    assert family.inner == (1,)
    assert numbers(child) == {1: child}


def test_a_process_that_has_ended_is_an_engine_that_died() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    for look in (tree, examine, mapped_files, numbers):
        with pytest.raises(EngineDied, match=f"there is no process {process.pid}"):
            look(process.pid)


async def test_restore_case_52_a_real_io_uring_is_found_open_and_mapped(start: Start, tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    if ring < 0:
        pytest.skip(f"no io_uring here: {os.strerror(ctypes.get_errno())}")
    os.close(ring)
    script = """
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))
        assert ring >= 0
        MAP_SHARED_POPULATE = 0x8001
        libc.mmap(None, ctypes.c_size_t(4096), 3, MAP_SHARED_POPULATE, ring, ctypes.c_long(0))
    """
    pid = await start(script)
    mapped, opened = examine(pid, private=[str(tmp_path)])
    assert (opened.code, opened.severity, opened.pid) == ("io_uring", "fatal", pid)
    assert os.readlink(f"/proc/{pid}/fd/{opened.fd}") == "anon_inode:[io_uring]"
    assert "seccomp" in opened.remedy
    assert (mapped.code, mapped.severity, mapped.fd) == ("io_uring", "fatal", None)
    pid = await start(textwrap.dedent(script) + "os.close(ring)")
    assert only(examine(pid, private=[str(tmp_path)])).what == "an io_uring is mapped"


async def test_restore_case_51_a_terminal_is_refused(start: Start) -> None:
    master, slave = pty.openpty()
    try:
        pid = await start(stdin=slave)
        finding = only(examine(pid, private=["/tmp"]))
        assert (finding.code, finding.severity, finding.fd) == ("tty", "fatal", 0)
        assert os.ttyname(slave) in finding.what
        assert "/dev/null" in finding.remedy
    finally:
        os.close(master)
        os.close(slave)


async def test_restore_case_22_a_file_watcher_is_noted(start: Start) -> None:
    pid = await start("watch = ctypes.CDLL(None).inotify_init1(0)")
    assert codes(examine(pid, private=["/tmp"])) == [("inotify", "note")]


async def test_restore_case_06_connections_to_others_are_refused_with_both_ends(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        pid = await start(f"ours = socket.create_connection(('127.0.0.1', {port}))")
        mine, _ = outside.accept()
        with mine:
            finding = only(examine(pid, private=["/tmp"]))
            local = mine.getpeername()[1]
            assert finding.what == f"tcp 127.0.0.1:{local} -> 127.0.0.1:{port} ESTABLISHED"
            assert (finding.code, finding.severity, finding.pid) == ("tcp_outside", "fatal", pid)
            assert codes(examine(pid, private=["/tmp"], outside_tcp_ok=True)) == [("tcp_outside", "note")]


async def test_a_client_is_found_before_and_after_it_is_accepted(start: Start, tmp_path: Path) -> None:
    pid = await start(
        """
        listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        accepted = []
        def accept(*_):
            accepted.append(listener.accept()[0])
            open(private + "/accepted", "w").close()
        signal.signal(signal.SIGUSR1, accept)
        open(private + "/port", "w").write(str(listener.getsockname()[1]))
        """
    )
    port = int((tmp_path / "private/port").read_text())
    with socket.create_connection(("127.0.0.1", port)) as ours:
        waiting = only(examine(pid, private=["/tmp"]))
        assert (waiting.code, waiting.severity) == ("tcp_waiting", "fatal")
        os.kill(pid, signal.SIGUSR1)
        await eventually((tmp_path / "private/accepted").exists)
        accepted = only(examine(pid, private=["/tmp"]))
        assert accepted.code == "tcp_outside"
        assert f"127.0.0.1:{port} -> 127.0.0.1:{ours.getsockname()[1]}" in accepted.what


async def test_pipes_that_lead_out_are_refused_but_dead_ones_are_not(start: Start) -> None:
    read, write = os.pipe()
    pid = await start(stdout=write)
    os.close(write)
    finding = only(examine(pid, private=["/tmp"]))
    assert (finding.code, finding.severity, finding.fd) == ("pipe_outside", "fatal", 1)
    os.close(read)
    assert examine(pid, private=["/tmp"]) == []


async def test_half_of_a_unix_pair_is_noted(start: Start) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid = await start(pass_fds=(theirs.fileno(),))
        assert codes(examine(pid, private=["/tmp"])) == [("unix_outside", "note")]


async def test_pidfds_within_the_tree_are_fine_and_others_are_not(start: Start) -> None:
    pid = await start(f"own = os.pidfd_open(os.getpid()); other = os.pidfd_open({os.getpid()})")
    found = {finding.severity: finding for finding in examine(pid, private=["/tmp"])}
    assert {finding.code for finding in found.values()} == {"pidfd"}
    assert str(os.getpid()) in found["fatal"].what
    assert str(pid) in found["note"].what


async def test_unlinked_files_are_fine_up_to_crius_limit(start: Start) -> None:
    pid = await start("import tempfile; f = tempfile.TemporaryFile(dir=private); f.truncate(2 << 20)")
    finding = only(examine(pid, private=["/tmp"]))
    assert (finding.code, finding.severity) == ("deleted", "fatal")
    assert f"{2 << 20} bytes" in finding.what
    assert examine(pid, private=["/tmp"], ghost_limit=2 << 20) == []


async def test_restore_case_15_what_the_tree_depends_on_is_listed_and_what_it_writes_is_noted(
    start: Start, tmp_path: Path
) -> None:
    outside, private = tmp_path / "outside", tmp_path / "private"
    outside.mkdir()
    for name in ("mapped weights", "read", "written", "new\nline"):
        (outside / name).write_bytes(bytes(8192))
    (private / "own").write_bytes(bytes(8192))
    pid = await start(
        f"""
        import mmap
        folder = {str(outside)!r}
        maps = []
        for name in (folder + "/mapped weights", folder + "/new\\nline", private + "/own"):
            with open(name, "rb") as file: maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        read, written = open(folder + "/read"), open(folder + "/written", "ab")
        listing = os.open(folder, os.O_RDONLY)
        """
    )
    files = mapped_files(pid, private=[str(private)])
    assert [path for path in files if path.startswith(str(tmp_path))] == [
        str(outside / "mapped weights"),
        str(outside / "new\nline"),
        str(outside / "read"),
    ]
    assert os.readlink(f"/proc/{pid}/exe") in files
    assert any("/libc" in path for path in files)
    finding = only(examine(pid, private=[str(private)]))
    assert (finding.code, finding.severity) == ("written", "note")
    assert str(outside / "written") in str(finding)


def test_a_gpu_and_other_devices_are_found_in_a_written_down_proc(tmp_path: Path) -> None:
    process = tmp_path / "42"
    for folder in ("fd", "fdinfo", "task/42", "task/43"):
        (process / folder).mkdir(parents=True)
    (process / "task/42/status").write_text("Name:\tx\nNSpid:\t42\t7\n")
    (process / "task/43/status").write_text("NSpid:\t43\t8\n")
    (process / "task/42/children").write_text("44 ")
    for fd, link in enumerate(
        ["/dev/null", "/dev/nvidia0", "/dev/nvidiactl", "/dev/dri/renderD128", "/dev/tty1", "anon_inode:[fanotify]"]
    ):
        (process / "fd" / str(fd)).symlink_to(link)
        (process / "fdinfo" / str(fd)).write_text("pos:\t0\nflags:\t0100002\n")
    family = tree(42, proc_root=tmp_path)
    assert (family.pids, family.inner) == ((42,), (7, 8)), "44 has ended meanwhile"
    found = examine(42, proc_root=tmp_path)
    assert codes(found) == [("gpu", "fatal")] * 3 + [("tty", "fatal"), ("inotify", "note")]
    assert str(found[0]).startswith("gpu (pid 42, fd 1): /dev/nvidia0 is open; ")


def test_restore_case_18_a_gpu_is_known_by_its_numbers_whatever_its_path_is(tmp_path: Path) -> None:
    """Container toolkits and drivers in folders of their own give devices other paths than /dev has."""
    require_root()
    process, elsewhere = tmp_path / "42", tmp_path / "run/nvidia/driver/dev"
    for folder in (process / "fd", process / "task/42", elsewhere):
        folder.mkdir(parents=True)
    (tmp_path / "devices").write_text("Character devices:\n195 nvidia\n226 drm\n511 nvidia-uvm\n\nBlock devices:\n 10 sd\n")
    numbers = {"nvidia0": (195, 0), "card": (226, 0), "uvm": (511, 0), "null": (1, 3), "fuse": (10, 229)}
    for fd, (name, (major, minor)) in enumerate(numbers.items()):
        os.mknod(elsewhere / name, 0o20600, os.makedev(major, minor))
        (process / "fd" / str(fd)).symlink_to(elsewhere / name)
    found = examine(42, proc_root=tmp_path)
    assert sorted((one.fd, one.code) for one in found) == [(0, "gpu"), (1, "gpu"), (2, "gpu"), (4, "device")]
    assert f"the device {elsewhere}/fuse (10:229) is open" in str(found[-1])


def test_socket_tables_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1\n"
        "   1: 0100007F:1F90 0200C612:C001 08 00000000:00000000 00:00000000 00000000     0        0 0 1\n"
        "   2: 0100007F:1F90 0200C612:C002 06 00000000:00000000 00:00000000 00000000     0        0 0 1\n"
    )
    (tmp_path / "net/tcp6").write_text(
        "header\n   0: 00000000000000000000000001000000:0050 0000000000000000FFFF00000200C612:C003 01 0:0 0:0 0 0 0 12 1\n"
    )
    (tmp_path / "net/unix").write_text(
        "Num RefCount Protocol Flags Type St Inode Path\n"
        "0: 00000002 00000000 00010000 0001 01 13 /run/x\n"
        "0: 00000003 00000000 00000000 0001 03 14\n"
        "0: 00000003 00000000 00000000 0002 03 15\n"
    )
    found = sockets_of(tmp_path)
    assert found[11] == Socket(11, "tcp", "LISTEN", ("127.0.0.1", 8080), ("0.0.0.0", 0))
    assert str(found[12]) == "tcp ::1:80 -> 18.198.0.2:49155 ESTABLISHED"
    assert sorted(one.state for inode, one in found.items() if inode < 0) == ["CLOSE_WAIT", "TIME_WAIT"]
    assert [found[inode].state for inode in (13, 14, 15)] == ["LISTEN", "ESTABLISHED", "OTHER"]


def test_huge_pages_are_noted_since_another_host_must_have_them(tmp_path: Path) -> None:
    process = tmp_path / "42"
    (process / "task/42").mkdir(parents=True)
    (process / "maps").write_text("7f0000000000-7f0000200000 rw-p 00000000 00:0f 9    /anon_hugepage (deleted)\n")
    assert codes(examine(42, proc_root=tmp_path)) == [("huge_pages", "note")]


def test_what_waits_for_a_device_is_noted_and_what_is_traced_is_fatal(tmp_path: Path) -> None:
    process = tmp_path / "42"
    for folder in ("fd", "task/42", "task/43"):
        (process / folder).mkdir(parents=True)
    (process / "task/42/status").write_text("State:\tD (disk sleep)\nTracerPid:\t0\n")
    (process / "task/43/status").write_text("State:\tt (tracing stop)\nTracerPid:\t7\n")
    traced, waiting = examine(42, proc_root=tmp_path)
    assert (traced.code, traced.severity, traced.what) == ("traced", "fatal", "thread 43 is traced by process 7")
    assert (waiting.code, waiting.severity) == ("uninterruptible", "note")
    assert waiting.what.startswith("thread 42 waits for a device")


async def test_inspecting_a_process_names_what_is_in_the_way_and_exits_with_1(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "rewake.yaml"
    config.write_text("models: {m: {engine: {kind: http, command: [/bin/true]}}}\n")
    fine = await start("kept = open(os.devnull)")
    assert await asyncio.to_thread(rewake.main, ["snapshot", "inspect", str(fine), "-c", str(config)]) == 0
    assert "fatal" not in capsys.readouterr().out
    pid = await start("timer = ctypes.CDLL(None).timerfd_create(9, 0); assert timer >= 0")
    assert await asyncio.to_thread(rewake.main, ["snapshot", "inspect", str(pid), "-c", str(config), "--json"]) == 1
    (finding,) = (one for one in json.loads(capsys.readouterr().out) if one["severity"] == "fatal")
    assert (finding["code"], finding["severity"], finding["pid"]) == ("timer", "fatal", pid)
    assert await asyncio.to_thread(rewake.main, ["snapshot", "inspect", "m", "-c", str(config)]) == 2
    assert "no replica of m runs on this host" in capsys.readouterr().err
