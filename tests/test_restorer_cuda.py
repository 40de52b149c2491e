"""The GPU helper as a real process over a fake driver with scripted faults, and the client that speaks to it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from conftest import eventually
from processes import alive

from restorer.errors import Environment, RestorerError, ToolFailed, ToolHung
from restorer.gpu.cuda import Cuda, command
from restorer.gpu.cuda_driver import Bindings, Tool
from restorer.gpu.cuda_helper import DriverError, Helper
from restorer.system import pagecache


class Host:
    """A helper, and processes that the fake driver takes for CUDA processes."""

    def __init__(self, folder: Path, gpus: int = 1) -> None:
        self.folder, self.home = folder / "cuda", folder / "home"
        self.home.mkdir()
        self.cuda = Cuda(fake_cuda.written(self.folder, gpus=gpus))
        self.running: list[subprocess.Popen[bytes]] = []

    def process(self, bytes_used: int = 1 << 20, index: int = 0) -> int:
        environ = {"FAKE_CUDA": str(self.folder), "HOME": str(self.home), "PATH": os.environ["PATH"]}
        self.running.append(one := subprocess.Popen(["sleep", "60"], env=environ))
        state = {"state": "running", "index": index, "bytes": bytes_used}
        (self.home / f"cuda-{one.pid}").write_text(json.dumps(state))
        return one.pid

    def state(self, pid: int) -> str:
        return str(json.loads((self.home / f"cuda-{pid}").read_text())["state"])

    def fault(self, op: str, **what: Any) -> Path:
        path = self.folder / f"fault-{op}"
        path.write_text(json.dumps(what))
        return path

    def calls(self, *verbs: str) -> list[list[str]]:
        path = self.folder / "calls"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if not verbs or line[0] in verbs]

    async def freeze(self, pids: list[int], lock_s: float = 5) -> dict[str, Any]:
        return await self.cuda.freeze(pids, lock_s=lock_s, within_s=10)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    host = Host(tmp_path, gpus=8)
    yield host
    for fault in host.folder.glob("fault-*"):
        fault.unlink()
    await host.cuda.close()
    for one in host.running:
        one.kill()
        one.wait()


async def test_all_are_locked_before_any_is_checkpointed_and_thawed_the_same_way(host: Host) -> None:
    pids = [host.process() for _ in range(3)]
    timings = await host.freeze(pids)
    assert {host.state(pid) for pid in pids} == {"checkpointed"}
    assert timings.keys() == {"lock_s", "checkpoint_s"}
    await host.cuda.thaw(pids, [], within_s=10)
    assert {host.state(pid) for pid in pids} == {"running"}
    assert [line[0] for line in host.calls()] == [verb for verb in ("lock", "checkpoint", "restore", "unlock") for _ in pids]


async def test_restore_case_70_one_helper_opens_the_driver_once_however_many_processes_and_calls(host: Host) -> None:
    """A process for each of them would wait for the driver's context each time, for seconds."""
    started = host.folder / "started"
    counting = host.folder / "helper"
    argv = shlex.join(fake_cuda.written(host.folder, gpus=8))
    counting.write_text(f"#!/bin/sh\necho $$ >> {started}\nexec {argv}\n")
    counting.chmod(0o755)
    host.cuda = Cuda([str(counting)])
    pids = [host.process() for _ in range(6)]
    for _ in range(3):
        assert await host.cuda.find(pids) == pids
        await host.freeze(pids)
        await host.cuda.thaw(pids, [], within_s=10)
    assert len(started.read_text().split()) == 1


async def test_cuda_processes_are_found_by_asking_the_driver(host: Host) -> None:
    pids = [host.process() for _ in range(2)]
    assert await host.cuda.find([os.getpid(), *pids, 1]) == pids
    assert await host.cuda.states([pids[0], os.getpid()]) == {pids[0]: "running", os.getpid(): "failed"}


async def test_restore_case_56_one_of_four_hangs_and_the_others_are_unlocked(host: Host) -> None:
    pids = [host.process() for _ in range(4)]
    fault = host.fault("lock", do="hang", pid=pids[1])
    with pytest.raises(ToolHung, match=rf"lock of pid {pids[1]} \(2 of 4\) did not end within 2\.2 s; undone on all others"):
        await host.freeze(pids, lock_s=0.2)
    assert {host.state(pid) for pid in pids} == {"running"}
    # It wakes up when everybody has given up, and must not stay locked then.
    fault.unlink()
    await eventually(lambda: host.calls("unlock")[-1][1] == str(pids[1]), what="the late one is unlocked")
    await eventually(lambda: {host.state(pid) for pid in pids} == {"running"})
    await host.freeze(pids)
    assert {host.state(pid) for pid in pids} == {"checkpointed"}


async def test_restore_case_56_one_that_cannot_be_checkpointed_undoes_all(host: Host) -> None:
    pids = [host.process() for _ in range(3)]
    host.fault("checkpoint", do="CUDA_ERROR_UNKNOWN", pid=pids[2])
    with pytest.raises(ToolFailed, match=rf"checkpoint of pid {pids[2]} \(3 of 3\): CUDA_ERROR_UNKNOWN: scripted; undone"):
        await host.freeze(pids)
    assert {host.state(pid) for pid in pids} == {"running"}


async def test_a_success_that_left_the_wrong_state_is_none(host: Host) -> None:
    pids = [host.process() for _ in range(2)]
    host.fault("checkpoint", state="locked", pid=pids[0])
    with pytest.raises(ToolFailed, match="WRONG_STATE: is locked after checkpoint, not checkpointed"):
        await host.freeze(pids)
    assert {host.state(pid) for pid in pids} == {"running"}


async def test_what_could_not_be_undone_is_named(host: Host) -> None:
    pids = [host.process() for _ in range(2)]
    host.fault("checkpoint", do="CUDA_ERROR_UNKNOWN", pid=pids[0])
    host.fault("unlock", state="failed", pid=pids[0])
    with pytest.raises(ToolFailed, match=f"not undone on pid {pids[0]}"):
        await host.freeze(pids)


async def test_restore_case_62_the_driver_gets_our_deadline_not_its_own(host: Host) -> None:
    pid = host.process()
    await host.freeze([pid], lock_s=31.5)
    assert host.calls("lock") == [["lock", str(pid), "timeout=31500"]]


async def test_restore_case_54_a_gpu_that_is_full_is_said_so(host: Host) -> None:
    pids = [host.process() for _ in range(2)]
    await host.freeze(pids)
    (host.folder / "stranger-bytes").write_text(str(8 << 30))
    with pytest.raises(Environment, match=r"GPU thaw: .*CUDA_ERROR_OUT_OF_MEMORY.* too little free memory"):
        await host.cuda.thaw(pids, [], within_s=10)
    # Not running, so that nobody takes it for an engine: its caller kills it.
    assert {host.state(pid) for pid in pids} == {"checkpointed"}


async def test_restore_case_57_a_map_names_every_gpu_or_the_driver_refuses(host: Host) -> None:
    pid = host.process(index=3)
    await host.freeze([pid])
    with pytest.raises(ToolFailed, match="CUDA_ERROR_INVALID_VALUE"):
        await host.cuda.thaw([pid], [("GPU-3", "GPU-5")], within_s=10)
    pairs = [(f"GPU-{n}", f"GPU-{ {3: 5, 5: 3}.get(n, n) }") for n in range(8)]
    await host.cuda.thaw([pid], pairs, within_s=10)
    assert json.loads((host.home / f"cuda-{pid}").read_text())["uuid"] == "GPU-5"
    assert len(host.calls("restore")[-1]) == 2 + 8


async def test_restore_case_55_quiet_brings_off_what_it_can_and_never_fails(host: Host) -> None:
    pids = [host.process() for _ in range(3)]
    await host.freeze([pids[2]])
    host.fault("lock", do="CUDA_ERROR_UNKNOWN", pid=pids[0])
    states = await host.cuda.quiet([*pids, os.getpid()], lock_s=1, within_s=5)
    assert states == {pids[0]: "running", pids[1]: "checkpointed", pids[2]: "checkpointed", os.getpid(): "failed"}


async def test_the_helpers_death_fails_what_was_in_flight_and_the_next_call_starts_another(host: Host) -> None:
    pids = [host.process() for _ in range(2)]
    fault = host.fault("checkpoint", do="die", pid=pids[1])
    with pytest.raises(ToolFailed, match="GPU helper failed with status 7: it ended in the midst of its work"):
        await host.freeze(pids)
    fault.unlink()
    assert "locked" in {host.state(pid) for pid in pids}
    # Thawing works from whatever state each was left in.
    await host.cuda.thaw(pids, [], within_s=10)
    assert {host.state(pid) for pid in pids} == {"running"}


async def test_a_helper_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("restorer.gpu.cuda._SLACK_S", -29.8)
    path = tmp_path / "silent"
    path.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    path.chmod(0o755)
    cuda = Cuda([str(path)])
    silent, other = await asyncio.gather(cuda.memory(), cuda._call("open", 60.0), return_exceptions=True)
    assert isinstance(silent, ToolHung)
    assert str(silent) == "the GPU helper did not answer to memory within 0.2 s, and was killed"
    assert isinstance(other, ToolHung)
    assert str(other) == "the GPU helper did not answer to another call, and was killed"
    assert not alive(int((tmp_path / "pid").read_text()))
    await cuda.close()


async def test_a_helper_that_cannot_be_started_says_so() -> None:
    cuda = Cuda(["/no/helper"])
    with pytest.raises(Environment, match="the GPU helper /no/helper does not start: No such file or directory"):
        await cuda.memory()
    await cuda.close()


async def test_the_helper_ends_with_the_restorer(tmp_path: Path) -> None:
    argv = fake_cuda.written(tmp_path)
    script = f"import subprocess, time; print(subprocess.Popen({argv!r}, stdin=subprocess.PIPE).pid, flush=True); time.sleep(60)"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    await parent.wait()
    await eventually(lambda: not alive(pid), what="the helper is gone")


async def test_facts_and_memory(host: Host) -> None:
    facts = await host.cuda.facts()
    assert (facts.driver, facts.mps, len(facts.gpus or ())) == ("580.1", False, 8)
    pid = host.process(bytes_used=1 << 30, index=2)
    memory = await host.cuda.memory()
    assert memory["GPU-2"] == {"free": 7 << 30, "total": 8 << 30, "pids": [pid]}
    (host.folder / "facts.json").write_text(json.dumps({"total_bytes": 1, "facts": {"driver": "1", "surprise": 1}}))
    with pytest.raises(ToolFailed, match="its facts are none"):
        await host.cuda.facts()


# ---------------------------------------------------------------- weights on their way


def received(path: Path) -> bytes:
    """What an engine would get, by the code that runs in it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "restorer/adapters/inside"))
    try:
        import vllm_weights  # noqa: PLC0415 - found as engines find it
    finally:
        sys.path.pop(0)
    sizes, fds = vllm_weights.receive(str(path))
    data = b"".join(os.pread(fd, size, 0) for fd, size in zip(fds, sizes, strict=True))
    for fd in fds:
        os.close(fd)
    return data


async def test_weights_are_loaded_and_handed_on_by_descriptors(host: Host, tmp_path: Path) -> None:
    # More than fit into one message, so that messages must not run together.
    files = [(tmp_path / f"part-{n}", 1000 + n) for n in range(70)]
    for n, (path, size) in enumerate(files):
        path.write_bytes(bytes([n]) * size)
    gate = host.fault("open", do="hang")
    await host.cuda.load("x", "GPU-0", files, tmp_path / "w.sock", threads=4)
    load = asyncio.create_task(host.cuda.loaded("x", within_s=90))
    # Whoever asks early waits until all is there.
    early = asyncio.create_task(asyncio.to_thread(received, tmp_path / "w.sock"))
    await asyncio.sleep(0)
    gate.unlink()
    assert (await load)["bytes"] == sum(size for _, size in files)
    assert await early == b"".join(path.read_bytes() for path, _ in files)
    assert (await host.cuda.memory())["GPU-0"]["free"] == (8 << 30) - sum(size for _, size in files)
    await host.cuda.drop("x")
    assert (await host.cuda.memory())["GPU-0"]["free"] == 8 << 30
    assert not (tmp_path / "w.sock").exists()
    await host.cuda.drop("x")


async def test_what_memory_cannot_keep_is_read_past_the_page_cache(host: Host) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        path, content = Path(folder) / "part", os.urandom((8 << 20) + 12345)
        path.write_bytes(content)
        pagecache.evict([path])
        before, _ = pagecache.share([path])
        await host.cuda.load("x", "GPU-0", [(path, len(content))], Path(folder) / "w", threads=2, direct=True)
        load = await host.cuda.loaded("x", within_s=90)
        after, _ = pagecache.share([path])
        assert load["bytes"] == len(content)
        assert await asyncio.to_thread(received, Path(folder) / "w") == content
        if before == 0:  # a file system in memory keeps it whatever one says
            assert after < len(content) // 2
        await host.cuda.drop("x")


async def test_a_load_that_fails_says_why_and_holds_nothing(host: Host, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"abc")
    with pytest.raises(Environment, match="No such file"):
        await host.cuda.load("no", "GPU-0", [(short, 3), (tmp_path / "no", 4)], tmp_path / "w.sock", threads=2)
    await host.cuda.load("short", "GPU-0", [(short, 4)], tmp_path / "w.sock", threads=2)
    with pytest.raises(Environment, match="shorter than its manifest says"):
        await host.cuda.loaded("short", within_s=90)
    host.fault("allocate", do=fake_cuda.OUT_OF_MEMORY)
    await host.cuda.load("x", "GPU-0", [(short, 3)], tmp_path / "w.sock", threads=2)
    with pytest.raises(Environment, match="too little free memory"):
        await host.cuda.loaded("x", within_s=90)
    assert (await host.cuda.memory())["GPU-0"]["free"] == 8 << 30
    assert not (tmp_path / "w.sock").exists()


async def test_who_waits_for_a_load_that_is_dropped_is_told(host: Host, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"abc")
    gate = host.fault("open", do="hang")
    await host.cuda.load("x", "GPU-0", [(short, 4)], tmp_path / "w.sock", threads=1)
    load = asyncio.create_task(host.cuda.loaded("x", within_s=90))
    waiting = asyncio.create_task(asyncio.to_thread(received, tmp_path / "w.sock"))
    gate.unlink()
    with pytest.raises(OSError, match=r"closed the connection|reset|refused|No such file"):
        await waiting
    with pytest.raises(Environment):
        await load


async def test_a_load_that_is_dropped_before_it_begins_never_begins(host: Host, tmp_path: Path) -> None:
    await host.cuda.drop("x")
    with pytest.raises(Environment, match="load x was dropped before it began"):
        await host.cuda.load("x", "GPU-0", [(tmp_path / "no", 4)], tmp_path / "w.sock", threads=1)
    assert not (tmp_path / "w.sock").exists()
    with pytest.raises(Environment, match="load x was dropped"):
        await host.cuda.loaded("x", within_s=90)


async def late(host: Host, folder: Path, sizes: list[int]) -> list[Path]:
    """A load whose files are still holes, and where they lie."""
    paths = [folder / f"part-{n}" for n in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.touch()
        os.truncate(path, size)
    files = list(zip(paths, sizes, strict=True))
    await host.cuda.load("x", "GPU-0", files, folder / "w.sock", threads=3, late=True)
    return paths


async def test_parts_that_come_late_and_in_any_order_are_read_when_they_are_here(host: Host, tmp_path: Path) -> None:
    sizes = [(9 << 20) + 1, 5, 1 << 20, 4096]
    paths = await late(host, tmp_path, sizes)
    # Where they lie by then is no matter.
    moved = tmp_path / "moved"
    moved.mkdir()
    load = asyncio.create_task(host.cuda.loaded("x", within_s=90))
    content = [os.urandom(size) for size in sizes]
    for number in (2, 0, 3, 1):
        assert not load.done()
        paths[number].write_bytes(content[number])
        paths[number].rename(moved / paths[number].name)
        await host.cuda.arrived("x", number)
    assert (await load)["bytes"] == sum(sizes)
    # A part that was read before it was here would be a hole.
    assert await asyncio.to_thread(received, tmp_path / "w.sock") == b"".join(content)
    await host.cuda.drop("x")


@pytest.mark.parametrize("some", [0, 2])
async def test_a_load_whose_last_part_never_comes_can_be_dropped(host: Host, tmp_path: Path, some: int) -> None:
    paths = await late(host, tmp_path, [1 << 20] * 3)
    load = asyncio.create_task(host.cuda.loaded("x", within_s=90))
    for number in range(some):
        paths[number].write_bytes(os.urandom(1 << 20))
        await host.cuda.arrived("x", number)
    await eventually_free(host, (8 << 30) - (3 << 20))
    await host.cuda.drop("x")
    with pytest.raises(RestorerError):
        await load
    assert (await host.cuda.memory())["GPU-0"]["free"] == 8 << 30
    await host.cuda.arrived("x", 2)


async def test_a_late_part_that_is_too_short_ends_the_load_while_others_are_missing(host: Host, tmp_path: Path) -> None:
    paths = await late(host, tmp_path, [1 << 20] * 3)
    load = asyncio.create_task(host.cuda.loaded("x", within_s=90))
    os.truncate(paths[1], 5)
    await host.cuda.arrived("x", 1)
    with pytest.raises(Environment, match="shorter than its manifest says"):
        await load
    assert (await host.cuda.memory())["GPU-0"]["free"] == 8 << 30


async def eventually_free(host: Host, free: int) -> None:
    while (await host.cuda.memory())["GPU-0"]["free"] != free:  # noqa: ASYNC110 - a driver can only be asked
        await asyncio.sleep(0.02)


async def test_bandwidth_is_measured(host: Host) -> None:
    assert await host.cuda.bandwidth("GPU-1") > 1e6


def test_the_helper_is_ours_unless_told_otherwise() -> None:
    assert command(())[-1] == "restorer.gpu.cuda_helper"
    assert command(("/x", "y")) == ("/x", "y")


# ---------------------------------------------------------------- the driver's own interfaces


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `cuda-checkpoint` that notes how it is called."""
    path = tmp_path / "cuda-checkpoint"
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n. {tmp_path}/does\n')
    path.chmod(0o755)
    (tmp_path / "does").write_text("echo running")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_without_bindings_the_command_does_it(tool: Path) -> None:
    driver = Tool()
    assert driver.is_cuda(7)
    assert driver.state(7) == "running"
    driver.lock(7, 5000)
    driver.checkpoint(7)
    driver.restore(7, [("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")])
    driver.unlock(7)
    assert (tool / "asked").read_text().splitlines() == [
        "--get-restore-tid --pid 7",
        "--get-state --pid 7",
        "--action lock --timeout 5000 --pid 7",
        "--action checkpoint --pid 7",
        "--action restore --pid 7 --device-map GPU-a=GPU-b,GPU-b=GPU-a",
        "--action unlock --pid 7",
    ]
    with pytest.raises(DriverError, match="cuda-bindings is missing"):
        driver.open("GPU-a")


def test_faults_of_the_command_are_typed(tool: Path) -> None:
    (tool / "does").write_text("echo 'OS call failed: out of memory' >&2; exit 1")
    assert not Tool().is_cuda(7)
    with pytest.raises(DriverError, match="out of memory") as caught:
        Tool().restore(7, [])
    assert caught.value.code == fake_cuda.OUT_OF_MEMORY
    (tool / "does").write_text("echo melting")
    assert Tool().state(7) == "failed"


def test_neither_bindings_nor_command_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for ask in (lambda: Tool().is_cuda(1), lambda: Tool().lock(1, 1)):
        with pytest.raises(DriverError, match=r"neither cuda-bindings nor the command cuda-checkpoint is here; install .*gpu"):
            ask()


async def test_faults_of_the_driver_are_typed_in_the_process_that_is_run(tool: Path) -> None:
    """Not with the fake driver, which is another program: what is raised there must be what is caught there."""
    (tool / "does").write_text("echo 'OS call failed: out of memory' >&2; exit 1")
    # Without the bindings, whatever this machine has.
    (tool / "cuda").mkdir()
    (tool / "cuda/__init__.py").write_text("")
    prelude = f"import sys; sys.path.insert(0, {str(tool)!r}); "
    run = "import runpy; runpy.run_module('restorer.gpu.cuda_helper', run_name='__main__', alter_sys=True)"
    cuda = Cuda([sys.executable, "-c", prelude + run])
    try:
        with pytest.raises(Environment, match="too little free memory"):
            await cuda.freeze([1], lock_s=1, within_s=1)
        assert await cuda.states([1]) == {1: "failed"}
    finally:
        await cuda.close()


def test_a_step_that_breaks_by_a_fault_of_ours_was_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.written(tmp_path)
    driver = fake_cuda.FakeDriver(tmp_path)
    monkeypatch.setattr(driver, "lock", lambda *_: 1 // 0)
    monkeypatch.setattr(driver, "state", lambda _: "running")
    with pytest.raises(DriverError, match="BUG: ZeroDivisionError"):
        Helper(driver).perform("freeze", {"pids": [1], "lock_s": 1, "within_s": 1})


class Library:
    """The part of cuda-bindings that is used, as it answers: a status first."""

    class Status(int):
        name = "CUDA_ERROR_OUT_OF_MEMORY"

    def __init__(self, status: int = 0) -> None:
        self.status, self.asked = self.Status(status), []  # type: ignore[var-annotated]

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        self.asked.append(("cuInit", flags))
        return (self.Status(0),)

    def cuGetErrorString(self, status: int) -> tuple[Any, ...]:
        return self.Status(0), b"out of memory"

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[Any, ...]:
        return self.status, 2

    def cuCheckpointProcessGetRestoreThreadId(self, pid: int) -> tuple[Any, ...]:
        return self.status, 5

    def cuCheckpointProcessRestore(self, pid: int, asked: Any) -> tuple[Any, ...]:
        self.asked.append((pid, asked and [(bytes(p.oldUuid.data), bytes(p.newUuid.data)) for p in asked.gpuPairs]))
        return (self.status,)

    class CUcheckpointRestoreArgs:
        gpuPairs: list[Any]
        gpuPairsCount = 0

    class CUcheckpointGpuPair:
        oldUuid: Any = None
        newUuid: Any = None

    class CUuuid:
        def __init__(self) -> None:
            self.data = ctypes.create_string_buffer(16)

        def getPtr(self) -> int:
            return ctypes.addressof(self.data)


def test_bindings_are_called_as_they_want_to_be() -> None:
    library = Library()
    driver = Bindings(library)
    assert driver.state(7) == "checkpointed"
    assert driver.is_cuda(7)
    driver.restore(7, [])
    old, new = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-ff010203-0405-0607-0809-0a0b0c0d0e0f"
    driver.restore(7, [(old, new)])
    assert library.asked == [("cuInit", 0), (7, None), (7, [(bytes(range(16)), b"\xff" + bytes(range(1, 16)))])]
    with pytest.raises(DriverError, match="has no cuCheckpointProcessUnlock"):
        driver.unlock(7)


def test_faults_of_bindings_are_typed() -> None:
    driver = Bindings(Library(2))
    assert not driver.is_cuda(7)
    with pytest.raises(DriverError, match="out of memory") as caught:
        driver.restore(7, [])
    assert caught.value.code == fake_cuda.OUT_OF_MEMORY


def test_an_operation_that_is_none_is_refused(tmp_path: Path) -> None:
    fake_cuda.written(tmp_path)
    with pytest.raises(DriverError, match="no operation 'reset'"):
        Helper(fake_cuda.FakeDriver(tmp_path)).perform("reset", {})


def test_a_socket_that_cannot_be_made_is_no_bug(tmp_path: Path) -> None:
    fake_cuda.written(tmp_path)
    asked = {"name": "x", "gpu": "GPU-0", "files": [], "socket": str(tmp_path / ("x" * 120)), "threads": 1}
    with pytest.raises(OSError, match="too long"):
        Helper(fake_cuda.FakeDriver(tmp_path)).perform("load", asked)
