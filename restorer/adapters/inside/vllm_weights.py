"""Runs inside vLLM's workers (``--worker-extension-cls vllm_weights.RewakeWeights``): takes the weights out, and puts them back.

vLLM's allocator for its sleep mode knows every run of device memory that holds weights. Asleep, the runs have addresses but no
memory; awake again, the same addresses have memory without content. Here the content is exported into files, once, and copied
back to the same addresses after a restore, either from device memory that another process has filled meanwhile, or from the
files. A fingerprint of each run, computed where it lies, proves that it is what it was.

Methods are called through ``POST /collective_rpc`` with one string, a JSON object whose ``ranks`` says to each worker what is
asked of it, and answer with one. A fault is an answer with ``error``: an exception would end the engine. The standard library
and torch only; nothing of the restorer can be imported.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import queue
import socket
import time
from typing import Any

PROTOCOL = 1
CHUNK = 64 << 20
"""Bytes of one step of a fingerprint, a read or a copy; part of what a fingerprint means."""
THREADS = 8
TAG = "weights"
_MASK = (1 << 64) - 1
_STEP, _START, _FOLD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x100000001B3
_PAGE = 2 << 20
"""Device memory is mapped in multiples of this."""
_SOCKET_S = 120.0


def multiplier(index: int) -> int:
    """What the word at ``index`` of a chunk is multiplied with: odd, so that no change of one word is lost."""
    return ((index * _STEP + _START) & _MASK) | 1


def fold(sums: list[int]) -> str:
    """The fingerprint of a run, from the sums of its chunks. Hex."""
    found = 0
    for one in sums:
        found = (found * _FOLD + one) & _MASK
    return f"{found:016x}"


class RewakeWeights:
    """Mixed into vLLM's worker class."""

    def rewake_describe(self, asked: str = "{}") -> dict[str, Any]:
        """Every run of weights: bytes and fingerprint, in an order that a restore repeats."""
        return self._rewake_answer(self._rewake_describe, asked)

    def rewake_export(self, asked: str) -> dict[str, Any]:
        """Write the runs, one after another, into files of ``part_bytes`` in ``folder``."""
        return self._rewake_answer(self._rewake_export, asked)

    def rewake_tidy(self, asked: str = "{}") -> dict[str, Any]:
        """Let go of memory that nobody uses: it would be in the dump."""
        return self._rewake_answer(lambda _: self._rewake_memory().tidy(), asked)

    def rewake_part(self, asked: str = "{}") -> dict[str, Any]:
        """Have communicators let go of what no checkpoint can hold, by vLLM's own hooks, where it has them."""
        return self._rewake_answer(lambda _: self._rewake_hook("checkpoint_prepare", parted=True), asked)

    def rewake_join(self, asked: str = "{}") -> dict[str, Any]:
        """Undo :meth:`rewake_part`, if it was done."""
        wanted = getattr(self, "_rewake_parted", False)
        return self._rewake_answer(lambda _: self._rewake_hook("checkpoint_restore", parted=False) if wanted else {}, asked)

    def rewake_import(self, asked: str) -> dict[str, Any]:
        """Fill the runs, from ``socket`` or from ``files`` ([path, bytes] each); answers with their fingerprints."""
        return self._rewake_answer(self._rewake_import, asked)

    def _rewake_hook(self, name: str, parted: bool) -> dict[str, Any]:
        hook = getattr(self, name, None)
        if hook is not None:
            hook()
        self._rewake_parted = parted
        return {"hook": hook is not None}

    def _rewake_memory(self) -> Any:
        return TorchMemory()

    def _rewake_answer(self, work: Any, asked: str) -> dict[str, Any]:
        try:
            rank = int(getattr(self, "rank", 0))
            ranks = json.loads(asked).get("ranks") or [{}] * (rank + 1)
            answer: dict[str, Any] = work(ranks[rank]) or {}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"rank": rank, **answer}

    def _rewake_describe(self, _: dict[str, Any]) -> dict[str, Any]:
        memory = self._rewake_memory()
        memory.clear_unused()
        runs = memory.runs()
        prints = memory.fingerprints(runs)
        allocations = [[count, found] for (_, count), found in zip(runs, prints, strict=True)]
        return {"protocol": PROTOCOL, "allocations": allocations}

    def _rewake_export(self, asked: dict[str, Any]) -> dict[str, Any]:
        memory, runs = self._rewake_memory(), self._rewake_memory().runs()
        total, part_bytes = sum(count for _, count in runs), int(asked["part_bytes"])
        starts = range(0, total, part_bytes)

        def write(number: int) -> dict[str, Any]:
            begin = starts[number]
            end = min(begin + part_bytes, total)
            name = f"part-{number:05d}"
            digest = hashlib.sha256()
            fd = os.open(os.path.join(asked["folder"], name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for at in range(begin, end, CHUNK):
                    for address, count in pieces(runs, at, min(at + CHUNK, end)):
                        data = memory.read(address, count)
                        digest.update(data)
                        _write(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            return {"name": name, "bytes": end - begin, "sha256": digest.hexdigest()}

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            return {"parts": list(pool.map(write, range(len(starts))))}

    def _rewake_import(self, asked: dict[str, Any]) -> dict[str, Any]:
        memory, begun = self._rewake_memory(), time.monotonic()
        runs = memory.runs()
        if "socket" in asked:
            sizes, fds = receive(asked["socket"])
            _fits(runs, sizes)
            received = time.monotonic()
            memory.copy_from(fds, sizes, runs)
        else:
            received = begun
            _fits(runs, [count for _, count in asked["files"]])
            memory.read_from(asked["files"], runs)
        copied = time.monotonic()
        prints = memory.fingerprints(runs)
        seconds = {"wait": received - begun, "copy": copied - received, "fingerprints": time.monotonic() - copied}
        return {"fingerprints": prints, "seconds": seconds}


def pieces(runs: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """(address, bytes) of what lies from ``begin`` to ``end`` of the runs laid one after another."""
    found, at = [], 0
    for address, count in runs:
        low, high = max(begin, at), min(end, at + count)
        if low < high:
            found.append((address + low - at, high - low))
        at += count
    return found


def receive(path: str) -> tuple[list[int], list[int]]:
    """(sizes, file descriptors) of the parts that the helper offers at a unix socket; waits until they are filled."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_SOCKET_S)
        peer.connect(path)
        head = b""
        while not head.endswith(b"\n"):
            byte = peer.recv(1)
            if not byte:
                raise OSError("the helper closed the connection: its load failed or was dropped")
            head += byte
        sizes = [int(count) for count in json.loads(head)["parts"]]
        fds: list[int] = []
        while len(fds) < len(sizes):
            data, more, _, _ = socket.recv_fds(peer, 1, 64)
            if not data:
                raise OSError("the helper closed the connection half-way")
            fds += more
            peer.sendall(b"+")
    return sizes, fds


def _fits(runs: list[tuple[int, int]], sizes: list[int]) -> None:
    have, need = sum(sizes), sum(count for _, count in runs)
    if have != need:
        raise ValueError(f"there are {have} bytes of weights for {need} bytes of allocations")


def _write(fd: int, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class TorchMemory:
    """Device memory of this process, through torch and vLLM's allocator; mapping others' memory through libcuda."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        # Threads begin on the first device, whatever their worker's is.
        self._device = torch.device("cuda", torch.cuda.current_device())

    def runs(self) -> list[tuple[int, int]]:
        """(address, bytes) of every allocation that holds weights."""
        return [(int(address), int(data.handle[1])) for address, data in self._allocations().items() if data.tag == TAG]

    def fingerprints(self, runs: list[tuple[int, int]]) -> list[str]:
        """One for each run; computed on the GPU, read back once."""
        torch = self._torch
        if not runs:
            return []
        words = min(CHUNK, max(count for _, count in runs)) // 8
        factors = torch.arange(words, dtype=torch.int64, device=self._device)
        factors = factors.mul_(_signed(_STEP)).add_(_signed(_START)).bitwise_or_(1)
        product, sums, counts = torch.empty_like(factors), [], []
        for address, count in runs:
            steps = [(address + at, min(CHUNK, count - at) // 8) for at in range(0, count, CHUNK)]
            for start, length in steps:
                torch.mul(self._words(start, length), factors[:length], out=product[:length])
                sums.append(product[:length].sum())
            counts.append(len(steps))
        flat = [int(one) & _MASK for one in torch.stack(sums).tolist()]
        found, at = [], 0
        for count in counts:
            found.append(fold(flat[at : at + count]))
            at += count
        return found

    def read(self, address: int, count: int) -> Any:
        """The bytes of device memory, in ours; not pinned, since pinned memory stays and would be in the dump."""
        return memoryview(self._bytes(address, count).cpu().numpy())

    def clear_unused(self) -> None:
        """Zero what no tensor holds: left-overs of loading differ from one start to the next."""
        torch = self._torch
        torch.cuda.synchronize()
        mine = {address for address, _ in self.runs()}
        for segment in torch.cuda.memory_snapshot():
            if segment["address"] not in mine:
                continue
            at = segment["address"]
            for block in segment["blocks"]:
                held = block["state"] in ("active_allocated", "active_awaiting_free", "active_pending_free")
                used = block.get("requested_size", block["size"]) if held else 0
                if used < block["size"]:
                    self._bytes(at + used, block["size"] - used).zero_()
                at += block["size"]
        torch.cuda.synchronize()

    def tidy(self) -> None:
        gc.collect()
        self._torch.cuda.empty_cache()
        # Pinned buffers that torch keeps for later; not every version can be asked to let go.
        getattr(self._torch._C, "_host_emptyCache", lambda: None)()
        ctypes.CDLL(None).malloc_trim(0)

    def copy_from(self, fds: list[int], sizes: list[int], runs: list[tuple[int, int]]) -> None:
        """Copy from others' device memory, which is mapped meanwhile; the descriptors are closed."""
        with _Mapped(fds, sizes, self._device.index) as base:
            at = 0
            for address, count in runs:
                self._bytes(address, count).copy_(self._bytes(base + at, count), non_blocking=True)
                at += count
            self._torch.cuda.synchronize()

    def read_from(self, files: list[tuple[str, int]], runs: list[tuple[int, int]]) -> None:
        """Read files by many threads, each with a pinned buffer and a stream of its own."""
        torch = self._torch
        work: queue.SimpleQueue[tuple[int, int, int, int]] = queue.SimpleQueue()

        def reader() -> None:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream()
            pinned = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
            view = memoryview(pinned.numpy())
            with contextlib.suppress(queue.Empty), torch.cuda.stream(stream):
                while True:
                    fd, offset, place, count = work.get_nowait()
                    _read_exactly(fd, view[:count], offset)
                    done = 0
                    for address, length in pieces(runs, place, place + count):
                        self._bytes(address, length).copy_(pinned[done : done + length], non_blocking=True)
                        done += length
                    stream.synchronize()

        with contextlib.ExitStack() as opened:
            place = 0
            for path, count in files:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                for offset in range(0, count, CHUNK):
                    work.put((fd, offset, place + offset, min(CHUNK, count - offset)))
                place += count
            with concurrent.futures.ThreadPoolExecutor(2 * THREADS) as pool:
                for job in [pool.submit(reader) for _ in range(2 * THREADS)]:
                    job.result()
        self.tidy()

    def _allocations(self) -> dict[int, Any]:
        from vllm.device_allocator.cumem import CuMemAllocator

        allocations: dict[int, Any] = CuMemAllocator.get_instance().pointer_to_data
        return allocations

    def _bytes(self, address: int, count: int) -> Any:
        return self._torch.as_tensor(_Raw(address, count, "|u1"), device=self._device)

    def _words(self, address: int, count: int) -> Any:
        return self._torch.as_tensor(_Raw(address, count, "<i8"), device=self._device)


class _Raw:
    """Device memory by its address, as other libraries' arrays are described to torch."""

    def __init__(self, address: int, count: int, kind: str) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": kind, "data": (address, False), "version": 3}


class _Mapped:
    """Others' device memory, mapped one after another at an address of this process. A context manager that yields it."""

    def __init__(self, fds: list[int], sizes: list[int], device: int) -> None:
        self._fds, self._device = fds, device
        self._sizes = [-(-count // _PAGE) * _PAGE for count in sizes]
        if any(size != count for size, count in zip(self._sizes[:-1], sizes[:-1], strict=True)):
            raise ValueError("the parts of the weights do not lie one after another")
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._handles: list[ctypes.c_uint64] = []
        self._mapped = 0
        self._base = ctypes.c_uint64()

    def __enter__(self) -> int:
        try:
            self._do("cuMemAddressReserve", ctypes.byref(self._base), _size(sum(self._sizes)), _size(0), _size(0), _size(0))
            for fd, size in zip(self._fds, self._sizes, strict=True):
                handle = ctypes.c_uint64()
                self._do("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
                self._handles.append(handle)
                self._do("cuMemMap", _size(self._base.value + self._mapped), _size(size), _size(0), handle, _size(0))
                self._mapped += size
            # CUmemAccessDesc: a device, by its ordinal, may read and write.
            access = (ctypes.c_int * 3)(1, self._device, 3)
            self._do("cuMemSetAccess", self._base, _size(self._mapped), ctypes.byref(access), _size(1))
        except BaseException:
            self.__exit__()
            raise
        return int(self._base.value)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            at = self._base.value
            for size in self._sizes:
                if at < self._base.value + self._mapped:
                    self._do("cuMemUnmap", _size(at), _size(size))
                at += size
            for handle in self._handles:
                self._do("cuMemRelease", handle)
            if self._base.value:
                self._do("cuMemAddressFree", self._base, _size(sum(self._sizes)))
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'unknown error').decode()}")


def _size(count: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(count)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _read_exactly(fd: int, view: memoryview, at: int) -> None:
    while view:
        count = os.preadv(fd, [view], at)
        if count == 0:
            raise OSError("a weights file is shorter than its manifest says")
        view, at = view[count:], at + count
