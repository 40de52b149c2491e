"""What CRIU cannot carry, and what it can, tried: each process is dumped and restored by the real CRIU.

The inventory must have said before what came of it: a fatal finding that CRIU would not have minded is as wrong as a missing one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dumping import some_boxes, started, survives

from restorer.boxes.box import Box, BoxFactory
from restorer.checkpoint.criu import GHOST_LIMIT
from restorer.procfs.inventory import examine
from restorer.procfs.obstacles import sockets
from restorer.procfs.scene import Descriptor, Scene, Tree

pytestmark = pytest.mark.criu

FINE = {
    "descriptors": """
        memory = os.memfd_create("m", 2); os.ftruncate(memory, 1 << 20); fcntl.fcntl(memory, 1033, 15)
        import select; event = os.eventfd(0); poll = select.epoll(); poll.register(event)
        signals = ok(libc.signalfd(-1, bytes(128), 0)); place = os.open("/etc", os.O_PATH)
        timer = ok(libc.timerfd_create(1, 0)); ok(libc.timerfd_settime(timer, 0, struct.pack("qqqq", 0, 5, 0, 5), None))
        os.mkfifo(private + "/fifo"); fifo = os.open(private + "/fifo", os.O_RDWR); pipe = os.pipe(); os.write(pipe[1], b"x")
        devices = [os.open("/dev/" + name, os.O_RDONLY) for name in ("null", "zero", "urandom", "full")]
        status, net = os.open("/proc/self/status", os.O_RDONLY), os.open("/proc/self/ns/net", os.O_RDONLY)
        rings = ctypes.c_ulong(0); ok(libc.syscall(206, 8, ctypes.byref(rings)))
        """,
    "locks": """
        files = [open(private + f"/lock{n}", "w+") for n in range(4)]
        fcntl.flock(files[0], 2); fcntl.lockf(files[1], 2); fcntl.fcntl(files[3], 1024, 1)
        fcntl.fcntl(files[2], 37, struct.pack("hhqqi4x", 1, 0, 0, 0, 0))
        """,
    "sockets": """
        kept = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)), socket.socket(16, socket.SOCK_RAW, 0),
                socket.socket(socket.AF_INET, socket.SOCK_RAW, 1), socket.create_server(("::", 9000), family=socket.AF_INET6)]
        kept[1].bind((0, 0))
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); one.bind(("0.0.0.0", 5353))
        two = socket.socket(socket.AF_UNIX); two.bind("\\0abstract"); two.listen()
        four = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); four.bind(private + "/datagrams")
        five, six = socket.socketpair(); socket.send_fds(five, [b"x"], [os.memfd_create("sent")])
        idle = socket.socket(); idle6 = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        """,
    "processes": """
        if os.fork() == 0: os._exit(0)
        stopped = os.fork()
        if stopped == 0: time.sleep(3600)
        os.kill(stopped, signal.SIGSTOP)
        signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 1000)
        timer = ctypes.c_void_p(0); ok(libc.timer_create(1, None, ctypes.byref(timer))); ok(libc.mlockall(3))
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start(); ok(libc.semget(0, 1, 0o1600))
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)); os.makedirs(private + "/d"); os.chdir(private + "/d")
        os.rmdir(private + "/d")
        """,
    "a filter of system calls": """
        line = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000), 8)
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(line)), 16)
        ok(libc.prctl(38, 1, 0, 0, 0)); ok(libc.prctl(22, 2, program))
        """,
    "namespaces of its own that CRIU makes anew": "ok(libc.unshare(0x04000000 | 0x08000000 | 0x40000000))",
    "a watched folder": 'watch = ok(libc.inotify_init1(0)); ok(libc.inotify_add_watch(watch, private.encode(), 0x100))',
}  # fmt: skip
FATAL = {
    "userfaultfd": ("userfaultfd", "ok(libc.syscall(323, 0o2000000))"),
    "perf event": ("perf_event", 'ok(libc.syscall(298, struct.pack("IIQQQQ", 1, 128, 0, 0, 0, 0) + bytes(88), 0, -1, -1, 0))'),
    "bpf map": ("bpf", 'what = struct.pack("IIII", 2, 4, 8, 1) + bytes(100); ok(libc.syscall(321, 0, what, len(what)))'),
    "landlock": ("landlock-ruleset", 'ok(libc.syscall(444, struct.pack("Q", 1), 8, 0))'),
    "inotify on overlayfs": ("inotify", """
        for name in "luwm": os.makedirs("/dev/shm/" + name)
        data = b"lowerdir=/dev/shm/l,upperdir=/dev/shm/u,workdir=/dev/shm/w"
        ok(libc.mount(b"overlay", b"/dev/shm/m", b"overlay", 0, data))
        watch = ok(libc.inotify_init1(0)); ok(libc.inotify_add_watch(watch, b"/dev/shm/m", 0x100))
        """),
    "vsock": ("socket", "kept = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"),
    "mptcp": ("socket", 'kept = socket.socket(2, socket.SOCK_STREAM, 262); kept.bind(("0.0.0.0", 9001)); kept.listen()'),
    "mount namespace": ("namespace", "ok(libc.unshare(0x00020000))"),
    "user namespace": ("namespace", "ok(libc.unshare(0x10000000))"),
    "time namespace": ("namespace", "ok(libc.unshare(0x00000080))"),
    "pid namespace of a child": ("namespace", "ok(libc.unshare(0x20000000)); child(lambda: None)"),
    "mount namespace of a child": ("namespace", "child(lambda: ok(libc.unshare(0x00020000)))"),
    "network of a child": ("namespace", "child(lambda: ok(libc.unshare(0x40000000)))"),
    "uts namespace of a child": ("namespace", "child(lambda: ok(libc.unshare(0x04000000)))"),
    "System V shared memory": ("sysv_shm", "segment = ok(libc.shmget(0, 65536, 0o1600)); libc.shmat(segment, None, 0)"),
    "message queue": ("mount", 'ok(ctypes.CDLL("librt.so.1", use_errno=True).mq_open(b"/q", 0o102, 0o600, None))'),
    "fuse": ("device", 'kept = os.open("/dev/fuse", os.O_RDWR)'),
    "tun": ("device", 'kept = os.open("/dev/net/tun", os.O_RDWR)'),
    "kvm": ("device", 'kept = os.open("/dev/kvm", os.O_RDWR)'),
    "a device under another name": ("device", """
        os.mknod(private + "/name", 0o20600, os.makedev(10, 229)); kept = os.open(private + "/name", os.O_RDWR)
        """),
    "pty": ("tty", "kept = os.openpty()"),
    "traced": ("traced", "child(lambda: ok(libc.ptrace(0, 0, None, None)))"),
    "alarm": ("timer", "kept = ok(libc.timerfd_create(9, 0))"),
    "secret memory": ("secretmem", "kept = ok(libc.syscall(447, 0)); os.ftruncate(kept, 4096); memory = mmap.mmap(kept, 4096)"),
    "io_uring": ("io_uring", "kept = ok(libc.syscall(425, 4, ctypes.create_string_buffer(120)))"),
}  # fmt: skip


@pytest.fixture
async def boxes() -> AsyncIterator[BoxFactory]:
    async with some_boxes(51) as factory:
        yield factory


def fatal(box: Box, pid: int) -> set[str]:
    found = examine(pid, private=("/dev/shm", str(box.mountpoint)), ghost_limit=GHOST_LIMIT)
    return {finding.code for finding in found if finding.severity == "fatal"}


@pytest.mark.parametrize("name", FINE)
async def test_what_criu_carries_is_no_obstacle(boxes: BoxFactory, tmp_path: Path, name: str) -> None:
    box = await boxes.take()
    pid = await started(box, FINE[name])
    assert fatal(box, pid) == set()
    assert await survives(boxes, box, tmp_path)


@pytest.mark.parametrize("name", FATAL)
async def test_restore_cases_22_51_52_what_criu_cannot_carry_is_refused_before(
    boxes: BoxFactory, tmp_path: Path, name: str
) -> None:
    code, script = FATAL[name]
    box = await boxes.take()
    pid = await started(box, script)
    assert fatal(box, pid) == {code}
    assert not await survives(boxes, box, tmp_path)


def test_a_socket_that_was_closed_while_all_was_looked_at_is_no_obstacle(tmp_path: Path) -> None:
    """Of two that no table knows, the one that is open still."""
    folder = tmp_path / "7/fd"
    folder.mkdir(parents=True)
    held = [Descriptor(7, fd, f"socket:[{fd}000]", 0, folder / str(fd)) for fd in (3, 4)]
    (folder / "4").symlink_to("socket:[4000]")
    scene = Scene(
        tree=Tree(pids=(7,), inner=()),
        proc=tmp_path,
        descriptors=held,
        mappings=[],
        sockets={},
        private=(),
        ghost_limit=0,
        outside_tcp_ok=False,
    )
    assert [finding.fd for finding in sockets(scene)] == [4]
