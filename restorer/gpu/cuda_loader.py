"""Weights on their way to a GPU: files read by many threads through pinned buffers into device memory that can be handed on.

Runs in the GPU helper, while CRIU is still at work on the engine that will want them. Files that are still being written are
opened at once, whatever becomes of their names, and read when whoever asked says so. Each load has a listening unix socket;
whoever connects to it waits until all is there, and gets the file descriptors of the device memory. So the engine copies
from device to device, and no byte of the weights waits for a restore.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from restorer.system import pagecache

CHUNK = 4 << 20
"""Bytes of one read and one copy: few enough to be still in the processor's cache when they are copied on."""
_BUFFERS = 2
"""For each reader: one is read into while the other is copied from."""
_PAGE = 4096
_FDS_A_MESSAGE = 64
_SERVE_S = 900.0
"""Longer than any restore: it ends by being dropped."""
_PROBE_BYTES = 1 << 30


class Staging(Protocol):
    """A pinned buffer of the host with a queue of copies of its own."""

    view: memoryview

    def begin(self, block: Any, offset: int, count: int) -> None:
        """Begin to copy its first ``count`` bytes to ``offset`` of a block."""

    def wait(self) -> None:
        """Until what was begun is done."""


class Device(Protocol):
    """One GPU, opened."""

    def allocate(self, count: int) -> Any:
        """A block of device memory with ``fd``, its file descriptor."""

    def staging(self, count: int) -> Staging: ...

    def close(self) -> None:
        """Give everything back."""


class _Stopped(OSError):
    """Nobody wants this load any more."""


class _File(pagecache.Opened):
    """A file that is read through the page cache, or past it what is not there."""

    def read(self, view: memoryview, count: int, at: int) -> None:
        """Fill the first ``count`` bytes of a page-aligned buffer. Raises OSError when the file ends before."""
        done = 0
        if self.past(count, at):
            # Whole blocks alone, so that the file's last piece is asked for with some bytes that are not there; what comes short
            # or is refused (EINVAL: larger blocks) is read the other way.
            with contextlib.suppress(OSError):
                done = min(count, os.preadv(self.direct, [view[: -(-count // _PAGE) * _PAGE]], at))
        while done < count:
            more = os.preadv(self.fd, [view[done:count]], at + done)
            if more == 0:
                raise OSError(f"{Path(f'/proc/self/fd/{self.fd}').readlink()} is shorter than its manifest says")
            done += more


_Piece = tuple[_File, Any, int, int]
"""A file, the block that it goes to, offset and bytes of a piece of it."""


class _Load:
    """One set of weights for one GPU."""

    def __init__(
        self,
        device: Callable[[], Device],
        files: Sequence[tuple[str, int]],
        socket_path: str,
        *,
        threads: int,
        direct: bool,
        late: bool,
    ) -> None:
        self._open, self._sizes, self._threads = device, [count for _, count in files], threads
        self._path = socket_path
        self._here: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """Numbers of files that may be read; None: look whether to go on."""
        for number in () if late else range(len(files)):
            self._here.put(number)
        self._opened: list[_File] = []
        try:
            for path, _ in files:
                self._opened.append(_File(path, direct=direct))
            self._listener = self._listening()
        except OSError:
            self._close()
            raise
        self._stop = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self.loaded = threading.Event()
        self.fault: Exception | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _listening(self) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            listener.listen(1)
        except OSError:
            listener.close()
            raise
        return listener

    def _close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    @property
    def bytes(self) -> int:
        return sum(self._sizes)

    def arrived(self, number: int) -> None:
        """This file may be read; said once of each."""
        self._here.put(number)

    def drop(self) -> None:
        """Stop, and wait until the device memory is free."""
        self._stop.set()
        self._here.put(None)
        with contextlib.suppress(OSError):
            self._wake.send(b"+")
        self._thread.join()

    def _run(self) -> None:
        device: Device | None = None
        begun = time.monotonic()
        try:
            try:
                device = self._open()
                blocks = [device.allocate(count) for count in self._sizes]
                self._fill(device, blocks)
                self.seconds = time.monotonic() - begun
            except Exception as error:
                self.fault = error
            self._close()
            self.loaded.set()
            if self.fault is None:
                self._serve([block.fd for block in blocks])
        finally:
            for end in (self._listener, self._wake, self._woken):
                end.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            if device is not None:
                device.close()

    def _fill(self, device: Device, blocks: Sequence[Any]) -> None:
        work: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        faults: list[Exception] = []
        most = sum(-(-count // CHUNK) for count in self._sizes)
        readers = [
            threading.Thread(target=self._read, args=(device, work, faults), daemon=True) for _ in range(min(self._threads, most))
        ]
        for reader in readers:
            reader.start()
        waiting = len(blocks)
        while waiting and not self._stop.is_set() and not faults:
            number = self._here.get()
            if number is not None:
                waiting -= 1
                count = self._sizes[number]
                for at in range(0, count, CHUNK):
                    work.put((self._opened[number], blocks[number], at, min(CHUNK, count - at)))
        for _ in readers:
            work.put(None)
        for reader in readers:
            reader.join()
        if faults:
            raise faults[0]
        if waiting:
            raise _Stopped("the load was dropped")

    def _read(self, device: Device, work: queue.SimpleQueue[_Piece | None], faults: list[Exception]) -> None:
        try:
            buffers = [device.staging(CHUNK) for _ in range(_BUFFERS)]
            for staging in itertools.cycle(buffers):
                if (piece := work.get()) is None:
                    break
                file, block, at, count = piece
                if self._stop.is_set() or faults:
                    raise _Stopped("the load was dropped")
                staging.wait()
                file.read(staging.view, count, at)
                staging.begin(block, at, count)
            for staging in buffers:
                staging.wait()
        except Exception as error:
            faults.append(error)
            self._here.put(None)

    def _serve(self, fds: Sequence[int]) -> None:
        """Hand the descriptors to whoever asks, until dropped."""
        deadline = time.monotonic() + _SERVE_S
        while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self._listener, self._woken], [], [], left)
            if self._listener not in ready:
                break
            peer, _ = self._listener.accept()
            with peer, contextlib.suppress(OSError):
                peer.settimeout(10.0)
                peer.sendall(json.dumps({"parts": self._sizes}).encode() + b"\n")
                for at in range(0, len(fds), _FDS_A_MESSAGE):
                    rights = array.array("i", fds[at : at + _FDS_A_MESSAGE])
                    peer.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                    # Descriptors of two messages must not arrive as one.
                    peer.recv(1)


class Loads:
    """The loads of this process, by the name their callers gave them."""

    def __init__(self, device: Callable[[str], Device]) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}
        self._dropped: set[str] = set()
        """Names that were dropped before they were known: requests may overtake each other."""

    def load(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a load: its files are open, and descriptors may be asked for.

        A name is used once.
        """
        files = [(str(path), int(count)) for path, count in asked["files"]]
        name, uuid = str(asked["name"]), str(asked["gpu"])
        with self._lock:
            if name in self._dropped:
                raise OSError(f"load {name} was dropped before it began")
            self._loads[name] = _Load(
                lambda: self._device(uuid),
                files,
                str(asked["socket"]),
                threads=int(asked["threads"]),
                direct=bool(asked.get("direct")),
                late=bool(asked.get("late")),
            )
        return {}

    def arrived(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A file of a late load is whole; of one that was dropped nobody cares."""
        with self._lock:
            load = self._loads.get(str(asked["name"]))
        if load is not None:
            load.arrived(int(asked["number"]))
        return {}

    def loaded(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return when all of a load is in device memory."""
        with self._lock:
            load = self._loads.get(str(asked["name"]))
        if load is None:
            raise OSError(f"load {asked['name']} was dropped")
        load.loaded.wait()
        if load.fault is not None:
            self.drop(asked)
            raise load.fault
        return {"bytes": load.bytes, "seconds": load.seconds}

    def drop(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """End a load and free its memory; one that is not known is gone already, or will never begin."""
        with self._lock:
            load = self._loads.pop(str(asked["name"]), None)
            self._dropped.add(str(asked["name"]))
        if load is not None:
            load.drop()
        return {}

    def bandwidth(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Bytes a second from pinned memory to a GPU, by copying a gibibyte."""
        device = self._device(str(asked["gpu"]))
        try:
            block, staging = device.allocate(_PROBE_BYTES), device.staging(CHUNK)
            begun = time.monotonic()
            for at in range(0, _PROBE_BYTES, CHUNK):
                staging.begin(block, at, CHUNK)
            staging.wait()
            return {"bytes_per_s": _PROBE_BYTES / (time.monotonic() - begun)}
        finally:
            device.close()
