"""Boxes: the namespaces one engine lives in, from birth to ``kill -9``.

A box is a set of fresh pid, mount, ipc, uts and net namespaces with a small pid 1 (:mod:`restorer.boxes.boxinit`), a private
/dev/shm, a private folder at the same path in every box, and a veth pair whose inner address gateways of this host can reach;
those of others reach it through its door (:mod:`restorer.boxes.doors`). An engine is started, dumped and restored *inside* a
box, by tools that enter it, so pids, ports, sockets and files of clones never meet, and the end of pid 1 is the end of all of
it: processes, mounts, network.

A box outlives the restorer that made it. What is needed to find it again is in /proc (the mark in pid 1's argv) and in
one small state file; :meth:`BoxFactory.survivors` brings back the handles. Nothing here knows of replicas or snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policies.expose import Expose
from restorer.boxes import boxinit, cgroups, network
from restorer.boxes.doors import Doors
from restorer.errors import EngineDied, Environment, ToolFailed, ToolHung
from restorer.procfs import inventory
from restorer.procfs.processes import children, proceed, readable, start_time, status

log = logging.getLogger("rewake.restorer")

FIRST_PID = 1000
"""Engines start here, so that the few tools that enter a box to restore one (from pid 2 upwards) are never in its way."""
_UNSHARE = ("unshare", "--pid", "--mount", "--ipc", "--uts", "--net", "--fork", "--kill-child", "--mount-proc", "--")
_SHOW = """mkdir -p "$2" && [ -z "$(ls -A "$2")" ] || { echo "it is no empty folder"; exit 1; }
mount --bind "$1" "$2"
"""
_SPAWN = """echo {last} > /proc/sys/kernel/ns_last_pid && cd "$1" && shift || exit 1
setsid "$@" </dev/null >>engine.log 2>&1 &
echo $!"""
_SETUP_S = 20.0
_KILL_S = 20.0


@dataclass(slots=True)
class Output:
    """What a tool left behind."""

    rc: int
    text: str
    """The end of its stdout and stderr."""


@dataclass(slots=True)
class Box:
    """A handle on one box. Single-owner: its methods are called by one task at a time, :meth:`kill` by anyone."""

    id: str
    init_pid: int
    """Host pid of its pid 1."""
    index: int
    """Number of its /30 within the factory's network."""
    host_address: str
    address: str
    """Where what listens on 0.0.0.0 inside is reached from the host."""
    folder: Path
    """On the host: ``private/`` (bound at ``mountpoint`` inside), ``box.log``, ``work/`` for the tools' logs."""
    mountpoint: Path
    state_file: Path
    facts: dict[str, Any] = field(default_factory=dict)
    """What the owner wants to find again after a crash; saved by :meth:`remember`."""

    @property
    def private(self) -> Path:
        return self.folder / "private"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def log(self) -> Path:
        """The engine's stdout and stderr."""
        return self.private / "engine.log"

    @property
    def root(self) -> Path:
        """The box's file system as seen from the host."""
        return Path(f"/proc/{self.init_pid}/root")

    @property
    def alive(self) -> bool:
        started = start_time(self.init_pid)
        return started is not None and started == self.facts.get("init_start_time")

    def remember(self, **facts: Any) -> None:
        """Save facts for :meth:`BoxFactory.survivors`; atomic, and gone after a reboot, like the box itself."""
        self.facts.update(facts)
        record = {"id": self.id, "init_pid": self.init_pid, "index": self.index, "facts": self.facts}
        temporary = self.state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(record))
        temporary.replace(self.state_file)

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, name: str | None = None
    ) -> Output:
        """Run a tool inside the box and wait for it.

        Args:
            name: what to call it if it hangs; default: the command's first word.

        Raises:
            ToolHung: it did not end within ``timeout_s`` seconds and was killed. A hung CRIU leaves half-made processes
                behind: the caller kills the box.
        """
        tool = await asyncio.create_subprocess_exec(
            *("nsenter", "-t", str(self.init_pid), "-p", "-m", "-i", "-u", "-n", "--"),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(os.environ if env is None else env),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, _ = await tool.communicate()
        except TimeoutError:
            raise ToolHung(f"{name or argv[0]} did not end within {timeout_s:g} s inside box {self.id}; it was killed") from None
        finally:
            if tool.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(tool.pid, signal.SIGKILL)
                await tool.wait()
        assert tool.returncode is not None
        return Output(tool.returncode, out[-4000:].decode(errors="replace"))

    async def spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> int:
        """Start an engine: own session, stdin from /dev/null, output appended to :attr:`log`. Returns its pid *inside*."""
        script = _SPAWN.format(last=FIRST_PID - 1)
        started = await self.run(["/bin/sh", "-c", script, "sh", str(self.mountpoint), *argv], timeout_s=_SETUP_S, env=env)
        if started.rc != 0:
            raise ToolFailed("sh", started.rc, started.text)
        return int(started.text.split()[-1])

    async def appear_at(self, mountpoint: Path) -> None:
        """Show the private folder where a donor in another installation had its own: the images name what is in it by that path.

        Raises:
            Environment: something else is there.
        """
        if mountpoint == self.mountpoint:
            return
        argv = ["/bin/sh", "-c", _SHOW, "sh", str(self.mountpoint), str(mountpoint)]
        shown = await self.run(argv, timeout_s=_SETUP_S)
        if shown.rc != 0:
            raise Environment(
                f"{mountpoint}, where the donor had its private folder, cannot be used here: {shown.text.strip()}; "
                "set run_dir as it is on the donor's host, or make a snapshot here"
            )
        self.mountpoint = mountpoint
        self.remember(mountpoint=str(mountpoint))

    def host_pid(self, inner_pid: int) -> int | None:
        """The host's number of a process that pid 1 of the box is parent of; None when there is none."""
        for pid in children(self.init_pid):
            with contextlib.suppress(OSError):
                if status(pid, "NSpid").split()[-1] == str(inner_pid):
                    return pid
        return None

    def let_run(self) -> None:
        """Let all that is stopped or frozen in it run on: from outside, so that no tool could fail or hang. Blocks."""
        if (group := self.facts.get("cgroup")) is not None:
            cgroups.thaw(group)
        with contextlib.suppress(EngineDied):
            proceed(pid for pid in inventory.tree(self.init_pid).pids if pid != self.init_pid)

    async def kill(self) -> None:
        """End everything in the box and wait until it is gone. Idempotent; shielded from cancellation by its callers."""
        group = self.facts.get("cgroup")
        if self.alive:
            if group is not None:
                cgroups.thaw(group)
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(self.init_pid)
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    await readable(pidfd, _KILL_S, f"pid 1 of box {self.id} did not die within {_KILL_S:g} s of SIGKILL")
                finally:
                    os.close(pidfd)
        if group is not None:
            await cgroups.remove(group)
        # A link of this name that we did not make is another installation's.
        if self.facts.get("linked"):
            await network.leave(self.host_address)
        self.state_file.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self.folder, True)


class BoxFactory:
    """Makes boxes, keeps a few ready, and finds those that a dead restorer left behind.

    Args:
        run_dir: state files and the common mountpoint; lost at reboot.
        state_dir: the boxes' folders (logs, private files).
        network: IPv4 network split into one /30 per box.
        spare: ready boxes to keep, so that a restore does not wait for namespaces (about 50 ms).
        expose: where boxes get doors to other hosts; None: nowhere.
    """

    def __init__(self, *, run_dir: Path, state_dir: Path, network: str, spare: int, expose: Expose | None = None) -> None:
        self.doors = Doors(expose, log.warning)
        self._addresses = ipaddress.IPv4Network(network)
        self._states = run_dir / "boxes"
        self._folders = state_dir / "boxes"
        self.mountpoint = run_dir / "box"
        self._mark = f"rewake-box={self._states}"
        self._taken: set[int] = set()
        self._spare = spare
        self._ready: list[Box] = []
        self._known: dict[str, Box] = {}
        """Every box there is, by id: those taken, the spares, and what another process left behind."""
        self._unshares: set[asyncio.subprocess.Process] = set()
        self._filling = asyncio.Lock()
        for folder in (self._states, self._folders, self.mountpoint):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def reserve(self) -> str:
        """The id of the box that :meth:`take` will hand out for it, so that it can be noted first. A spare is kept for it."""
        if not self._ready:
            return secrets.token_hex(6)
        return self._ready.pop().id

    async def take(self, id: str | None = None) -> Box:
        """A fresh box, by an id from :meth:`reserve`. The caller owns it and kills it."""
        id = self.reserve() if id is None else id
        box = self._known.get(id)
        if box is not None and box.alive:
            return box
        if box is not None:
            await self.discard(box)
        return await self._make(id)

    def known(self, id: str) -> Box | None:
        """The handle of a box that there is; None: it is gone."""
        return self._known.get(id)

    async def fill(self) -> None:
        """Top the spares up; called when nothing is urgent."""
        async with self._filling:
            while len(self._ready) < self._spare:
                self._ready.append(await self._make(secrets.token_hex(6)))

    async def discard(self, box: Box) -> None:
        """Kill a box and free its network."""
        await box.kill()
        await self.doors.shut(box)
        # Once: its number may be another box's by the second time.
        if self._known.pop(box.id, None) is not None:
            self._taken.discard(box.index)

    async def close(self) -> None:
        """Kill the spares."""
        async with self._filling:
            while self._ready:
                await self.discard(self._ready.pop())

    async def survivors(self) -> list[Box]:
        """Handles of every live box of this factory that another process made; state files of dead ones are removed.

        Boxes whose state file was never written (the maker died in between) come back without facts.
        """
        found = {}
        for pid, id in self._marked():
            state_file = self._states / f"{id}.json"
            record: dict[str, Any] = {}
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(state_file.read_text())
            # Without a record it has no address yet, so it must not be taken for the one that has the first.
            index = int(record.get("index", -1))
            box = self._handle(id, pid, index)
            box.facts = {**record.get("facts", {}), "init_start_time": start_time(pid)}
            box.mountpoint = Path(box.facts.get("mountpoint", box.mountpoint))
            self._taken.add(index)
            found[id] = self._known[id] = box
        for stale in (path for path in self._states.iterdir() if path.stem not in found):
            await cgroups.remove(cgroups.name(stale.stem))
            stale.unlink(missing_ok=True)
        for folder in (path for path in self._folders.iterdir() if path.name not in found):
            await asyncio.to_thread(shutil.rmtree, folder, True)
        return list(found.values())

    def _marked(self) -> list[tuple[int, str]]:
        """(host pid of pid 1, box id) of every box with this factory's mark."""
        boxes = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    argv = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                    mark = next((arg.decode() for arg in argv if arg.startswith(self._mark.encode() + b"/")), None)
                    if mark is not None and status(int(entry), "NSpid").split()[-1] == "1":
                        boxes.append((int(entry), mark.rpartition("/")[2]))
        return boxes

    def _handle(self, id: str, init_pid: int, index: int) -> Box:
        base = self._addresses.network_address + 4 * index
        return Box(
            id=id,
            init_pid=init_pid,
            index=index,
            host_address=str(base + 1),
            address=str(base + 2),
            folder=self._folders / id,
            mountpoint=self.mountpoint,
            state_file=self._states / f"{id}.json",
        )

    def _take_index(self) -> int:
        count = self._addresses.num_addresses // 4
        index = next((n for n in range(count) if n not in self._taken), None)
        if index is None:
            raise Environment(f"all {count} addresses of {self._addresses} are in use; give restorer.network a larger network")
        self._taken.add(index)
        return index

    async def _make(self, id: str) -> Box:
        while True:
            try:
                return await self._make_at(id, self._take_index())
            except network.AddressTaken as error:
                # By another installation on this host; its number stays taken here, so this ends with the network.
                log.warning("%s; taking the next", error)

    async def _make_at(self, id: str, index: int) -> Box:
        box = self._known[id] = self._handle(id, 0, index)
        try:
            for folder in (box.private / "tmp", box.private / "home", box.work):
                folder.mkdir(parents=True, mode=0o700)
            box.init_pid = await self._unshare(box)
            box.remember(init_start_time=start_time(box.init_pid))
            await network.join(box.init_pid, box.host_address, box.address)
            box.remember(linked=True)
            await self.doors.make(box)
        except network.AddressTaken:
            await asyncio.shield(box.kill())
            raise
        except BaseException:
            await asyncio.shield(self.discard(box))
            raise
        return box

    async def _unshare(self, box: Box) -> int:
        """Start pid 1 and wait until it is ready; returns its host pid."""
        argv = (sys.executable, "-I", "-S", boxinit.__file__, f"{self._mark}/{box.id}", str(box.private), str(self.mountpoint))
        with (box.folder / "box.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *_UNSHARE,
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        self._unshares.add(process)
        reaper = asyncio.create_task(process.wait())
        reaper.add_done_callback(lambda _: self._unshares.discard(process))
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETUP_S):
                line = await process.stdout.readline()
        if line != b"ready\n":
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            said = (box.folder / "box.log").read_text(errors="replace").strip()
            raise Environment(f"this host cannot make a box: {said or 'unshare said nothing'}; run `rewake doctor`")
        return children(process.pid)[0]
