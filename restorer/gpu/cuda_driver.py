"""The NVIDIA driver as :mod:`restorer.gpu.cuda_helper` asks for it: CUDA through ``cuda-bindings``, facts through NVML.

Without ``cuda-bindings`` the command ``cuda-checkpoint`` does the checkpoints, slower: each call of it initialises CUDA
anew; weights are then read by the engine itself. Every fault of a library comes out as a DriverError.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from restorer.gpu.cuda_helper import CHECKPOINTED, FAILED, LOCKED, RUNNING, Driver, DriverError
from restorer.system import buffers

_STATES = {0: RUNNING, 1: LOCKED, 2: CHECKPOINTED, 3: FAILED}
_TOOL_S = 600.0
_INSTALL = "install Rewake with its GPU parts: pip install 'rewake[gpu]'"


def choose() -> Driver:
    """The best way to the driver that this host has. It says at the first call if there is none."""
    # The order of NVML and of the bus, whoever started the restorer; and every GPU.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - optional, and for this process alone
    except ImportError:
        return Tool()
    return Bindings(driver)


class _Nvml:
    """Facts about GPUs."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._started: Any = None

    def facts(self) -> dict[str, Any]:
        with self._nvml() as nvml:
            handles = self._handles(nvml)
            return {
                "driver": _text(nvml.nvmlSystemGetDriverVersion()),
                "mps": _mps(),
                "gpus": [self._gpu(nvml, handle) for handle in handles],
                "topology": _topology(nvml, handles),
                "open_module": _open_module(),
            }

    def memory(self) -> dict[str, dict[str, Any]]:
        with self._nvml() as nvml:
            found = {}
            for handle in self._handles(nvml):
                facts = nvml.nvmlDeviceGetMemoryInfo(handle)
                pids: list[int] = []
                with contextlib.suppress(nvml.NVMLError):
                    pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
                found[_text(nvml.nvmlDeviceGetUUID(handle))] = {"free": facts.free, "total": facts.total, "pids": pids}
            return found

    def _gpu(self, nvml: Any, handle: Any) -> dict[str, Any]:
        def ask(read: Callable[[], Any], unsupported: Any = None) -> Any:
            try:
                return read()
            except nvml.NVMLError as error:
                return unsupported if error.value == nvml.NVML_ERROR_NOT_SUPPORTED else None

        compute = ask(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
        return {
            "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
            "name": ask(lambda: _text(nvml.nvmlDeviceGetName(handle))),
            "memory_bytes": ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
            "compute": None if compute is None else ".".join(map(str, compute)),
            "mig": ask(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]), False),
            "persistence": ask(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle))),
            "ecc": ask(lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]), False),
        }

    def _handles(self, nvml: Any) -> list[Any]:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    @contextlib.contextmanager
    def _nvml(self) -> Iterator[Any]:
        with self._starting:
            if self._started is None:
                try:
                    import pynvml  # noqa: PLC0415 - optional, and for this process alone
                except ImportError:
                    raise DriverError("NO_NVML", f"nvidia-ml-py is missing; {_INSTALL}") from None
                try:
                    pynvml.nvmlInit()
                except pynvml.NVMLError as error:
                    raise DriverError("NO_DRIVER", f"NVML does not start: {error}; see nvidia-smi") from None
                self._started = pynvml
        try:
            yield self._started
        except self._started.NVMLError as error:
            raise DriverError("NVML", f"NVML: {error}") from None


class Bindings(_Nvml):
    """CUDA's driver API."""

    def __init__(self, cuda: Any) -> None:
        super().__init__()
        self._cuda = cuda
        self._initialised = False

    def is_cuda(self, pid: int) -> bool:
        self._begin()
        # The state is told of launchers too that hold nothing; only a process with CUDA state has a restore thread.
        return int(self._cuda.cuCheckpointProcessGetRestoreThreadId(pid)[0]) == 0

    def state(self, pid: int) -> str:
        return _STATES.get(int(self._do("cuCheckpointProcessGetState", pid)), FAILED)

    def lock(self, pid: int, timeout_ms: int) -> None:
        asked = self._cuda.CUcheckpointLockArgs()
        asked.timeoutMs = timeout_ms
        self._do("cuCheckpointProcessLock", pid, asked)

    def checkpoint(self, pid: int) -> None:
        self._do("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> None:
        asked = None
        if pairs:
            if not hasattr(self._cuda, "CUcheckpointGpuPair"):
                raise DriverError("NO_GPU_MAP", "this cuda-bindings cannot move a process to another GPU; install 13.0 or later")
            asked = self._cuda.CUcheckpointRestoreArgs()
            asked.gpuPairs = [self._pair(old, new) for old, new in pairs]
            asked.gpuPairsCount = len(pairs)
        self._do("cuCheckpointProcessRestore", pid, asked)

    def unlock(self, pid: int) -> None:
        self._do("cuCheckpointProcessUnlock", pid, None)

    def open(self, uuid: str) -> _Device:
        self._begin()
        for ordinal in range(self._do("cuDeviceGetCount")):
            device = self._do("cuDeviceGet", ordinal)
            if self._do("cuDeviceGetUuid", device).bytes == _bytes_of(uuid):
                return _Device(self._cuda, self._do, device, ordinal)
        raise DriverError("NO_SUCH_GPU", f"CUDA knows no GPU {uuid}")

    def _pair(self, old: str, new: str) -> Any:
        pair = self._cuda.CUcheckpointGpuPair()
        for name, text in (("oldUuid", old), ("newUuid", new)):
            uuid = self._cuda.CUuuid()
            # The struct's bytes cannot be set through its attribute.
            ctypes.memmove(int(uuid.getPtr()), _bytes_of(text), 16)
            setattr(pair, name, uuid)
        return pair

    def _begin(self) -> None:
        with self._starting:
            if not self._initialised:
                self._check(self._cuda.cuInit(0))
                self._initialised = True

    def _do(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver; what it returns, without the status."""
        self._begin()
        if not hasattr(self._cuda, name):
            raise DriverError("TOO_OLD", f"this cuda-bindings has no {name}; install 12.8 or later")
        return self._check(getattr(self._cuda, name)(*arguments))

    def _check(self, answer: Any) -> Any:
        status, *values = answer
        if int(status) != 0:
            raise DriverError(status.name, _explained(self._cuda, status))
        return values[0] if values else None


class _Block:
    """Device memory that can be handed on."""

    def __init__(self, handle: Any, address: Any, count: int, fd: int) -> None:
        self.handle, self.address, self.count, self.fd = handle, address, count, fd


class _Pinned:
    """Pinned memory of the host, with a stream. Ours and not the driver's, which no disk can read into."""

    def __init__(self, call: Callable[..., Any], count: int) -> None:
        self._do = call
        self._kept = contextlib.ExitStack()
        self.view = self._kept.enter_context(buffers.whole(count))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        try:
            call("cuMemHostRegister", self._address, count, 0)
            self._kept.callback(call, "cuMemHostUnregister", self._address)
            self._stream = call("cuStreamCreate", 1)
            self._kept.callback(call, "cuStreamDestroy", self._stream)
        except DriverError:
            self._kept.close()
            raise

    def begin(self, block: _Block, offset: int, count: int) -> None:
        self._do("cuMemcpyHtoDAsync", int(block.address) + offset, self._address, count, self._stream)

    def wait(self) -> None:
        self._do("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        self._kept.close()


class _Device:
    """A GPU with a context of this process, which ends with :meth:`close`: nothing stays on the GPU between two starts."""

    def __init__(self, cuda: Any, call: Callable[..., Any], device: Any, ordinal: int) -> None:
        self._cuda, self._do, self._device, self._ordinal = cuda, call, device, ordinal
        self._context = call("cuDevicePrimaryCtxRetain", device)
        self._blocks: list[_Block] = []
        self._pinned: list[_Pinned] = []

    def allocate(self, count: int) -> _Block:
        cuda = self._cuda
        self._do("cuCtxSetCurrent", self._context)
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self._ordinal
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        grain = int(self._do("cuMemGetAllocationGranularity", wanted, least))
        size = -(-count // grain) * grain
        handle = self._do("cuMemCreate", size, wanted, 0)
        address = self._do("cuMemAddressReserve", size, 0, 0, 0)
        self._do("cuMemMap", address, size, 0, handle, 0)
        access = cuda.CUmemAccessDesc()
        access.location = wanted.location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._do("cuMemSetAccess", address, size, [access], 1)
        fd = int(self._do("cuMemExportToShareableHandle", handle, wanted.requestedHandleTypes, 0))
        self._blocks.append(block := _Block(handle, address, size, fd))
        return block

    def staging(self, count: int) -> _Pinned:
        self._do("cuCtxSetCurrent", self._context)
        self._pinned.append(pinned := _Pinned(self._do, count))
        return pinned

    def close(self) -> None:
        self._do("cuCtxSetCurrent", self._context)
        for pinned in self._pinned:
            pinned.close()
        for block in self._blocks:
            os.close(block.fd)
            self._do("cuMemUnmap", block.address, block.count)
            self._do("cuMemAddressFree", block.address, block.count)
            self._do("cuMemRelease", block.handle)
        self._blocks, self._pinned = [], []
        self._do("cuDevicePrimaryCtxRelease", self._device)


class Tool(_Nvml):
    """The command ``cuda-checkpoint``."""

    def is_cuda(self, pid: int) -> bool:
        try:
            self._run("--get-restore-tid", "--pid", str(pid))
        except DriverError as error:
            if error.code == "NO_TOOL":
                raise
            return False
        return True

    def state(self, pid: int) -> str:
        said = self._run("--get-state", "--pid", str(pid)).strip().lower()
        return said if said in _STATES.values() else FAILED

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._run("--action", "lock", "--timeout", str(timeout_ms), "--pid", str(pid))

    def checkpoint(self, pid: int) -> None:
        self._run("--action", "checkpoint", "--pid", str(pid))

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> None:
        mapping = ("--device-map", ",".join(f"{old}={new}" for old, new in pairs)) if pairs else ()
        self._run("--action", "restore", "--pid", str(pid), *mapping)

    def unlock(self, pid: int) -> None:
        self._run("--action", "unlock", "--pid", str(pid))

    def open(self, uuid: str) -> _Device:
        raise DriverError("NO_BINDINGS", f"cuda-bindings is missing, so that the engine itself must read its weights; {_INSTALL}")

    def _run(self, *arguments: str) -> str:
        found = shutil.which("cuda-checkpoint")
        if found is None:
            raise DriverError("NO_TOOL", f"neither cuda-bindings nor the command cuda-checkpoint is here; {_INSTALL}")
        try:
            done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=_TOOL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DriverError("TOOL", f"cuda-checkpoint {arguments[1]}: {error}") from None
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            code = "CUDA_ERROR_OUT_OF_MEMORY" if "out of memory" in said.lower() else "TOOL"
            raise DriverError(code, f"cuda-checkpoint {' '.join(arguments)}: {said}")
        return done.stdout


def _explained(cuda: Any, status: Any) -> str:
    _, text = cuda.cuGetErrorString(status)
    return _text(text) if text else "no explanation"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _bytes_of(uuid: str) -> bytes:
    return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))


def _open_module(version: Path = Path("/proc/driver/nvidia/version")) -> bool | None:
    try:
        return "Open Kernel Module" in version.read_text()
    except OSError:
        return None


def _mps() -> bool:
    """A multi-process service runs on this host. comm holds fifteen characters."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{entry}/comm").read_text().startswith("nvidia-cuda-mps"):
                    return True
    return False


def _topology(nvml: Any, handles: Sequence[Any]) -> str | None:
    """How GPUs are linked, as a class: the same number of NVLinks each, and the same nearness on the bus of each two.

    None: the driver does not say.
    """
    nvlinks, levels = [], []
    try:
        for at, handle in enumerate(handles):
            nvlinks.append(_nvlinks(nvml, handle))
            levels += [int(nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other)) for other in handles[at + 1 :]]
    except nvml.NVMLError as error:
        return "" if error.value == nvml.NVML_ERROR_NOT_SUPPORTED else None
    return f"NVLinks {' '.join(map(str, sorted(nvlinks)))}; bus {' '.join(map(str, sorted(levels)))}" if levels else ""


def _nvlinks(nvml: Any, handle: Any) -> int:
    """Links of a GPU that are up."""
    up = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
            break
    return up
