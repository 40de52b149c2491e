"""What runs inside vLLM, over ordinary memory: how runs are cut, told apart, exported and filled again."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import socket
import threading
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from restorer.adapters.vllm import INSIDE, Vllm

SPEC = importlib.util.spec_from_file_location("vllm_weights", INSIDE / "vllm_weights.py")
assert SPEC is not None
assert SPEC.loader is not None
inside: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(inside)


class Memory:
    """Runs of "device memory" at made-up addresses."""

    def __init__(self, *runs: bytes) -> None:
        self.blocks = {4096 * (n + 1): bytearray(run) for n, run in enumerate(runs)}
        self.cleared = 0

    def runs(self) -> list[tuple[int, int]]:
        return [(address, len(block)) for address, block in self.blocks.items()]

    def fingerprints(self, runs: list[tuple[int, int]]) -> list[str]:
        return [hashlib.sha256(self.blocks[address]).hexdigest()[:8] for address, _ in runs]

    def read(self, address: int, count: int) -> bytes:
        base = max(known for known in self.blocks if known <= address)
        return bytes(self.blocks[base][address - base : address - base + count])

    def clear_unused(self) -> None:
        self.cleared += 1

    def tidy(self) -> None:
        raise RuntimeError("CUDA error: out of memory")

    def read_from(self, files: list[tuple[str, int]], runs: list[tuple[int, int]]) -> None:
        data = b"".join(Path(path).read_bytes() for path, _ in files)
        at = 0
        for address, count in runs:
            self.blocks[address][:] = data[at : at + count]
            at += count


class Worker(inside.RewakeWeights):  # type: ignore[misc]
    rank = 1

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def _rewake_memory(self) -> Memory:
        return self.memory


def asked(**what: Any) -> str:
    """For the second of two workers."""
    return json.dumps({"ranks": [{"wrong": True}, what]})


def test_both_ends_speak_the_same_protocol() -> None:
    assert inside.PROTOCOL == Vllm.PROTOCOL
    module, _, name = Vllm.EXTENSION.rpartition(".")
    assert (INSIDE / f"{module}.py").is_file()
    assert hasattr(inside, name)
    # vLLM mixes the class into its worker and refuses one whose names the worker has already.
    assert all(attribute.lstrip("_").startswith("rewake_") for attribute in vars(inside.RewakeWeights) if attribute[:2] != "__")


def test_runs_are_described_in_order_with_unused_memory_cleared() -> None:
    memory = Memory(b"abcdefgh", b"ijkl")
    found = Worker(memory).rewake_describe("{}")
    assert found["rank"] == 1
    assert [count for count, _ in found["allocations"]] == [8, 4]
    assert memory.cleared == 1


def test_what_is_exported_comes_back(tmp_path: Path) -> None:
    worker = Worker(Memory(b"abcdefgh", b"", b"ijklm"))
    before = worker.rewake_describe()["allocations"]
    parts = worker.rewake_export(asked(folder=str(tmp_path), part_bytes=6))["parts"]
    assert [(one["name"], one["bytes"]) for one in parts] == [("part-00000", 6), ("part-00001", 6), ("part-00002", 1)]
    data = [(tmp_path / one["name"]).read_bytes() for one in parts]
    assert b"".join(data) == b"abcdefghijklm"
    assert [one["sha256"] for one in parts] == [hashlib.sha256(one).hexdigest() for one in data]
    other = Worker(Memory(bytes(8), b"", bytes(5)))
    files = [[str(tmp_path / one["name"]), one["bytes"]] for one in parts]
    assert other.rewake_import(asked(files=files))["fingerprints"] == [print for _, print in before]
    assert b"".join(other.memory.blocks.values()) == b"abcdefghijklm"


def test_vllms_hooks_for_checkpoints_are_called_where_it_has_them_and_undone_once() -> None:
    called: list[str] = []

    class Plain(inside.RewakeWeights):
        pass

    class Hooked(inside.RewakeWeights):
        def checkpoint_prepare(self) -> None:
            called.append("prepare")

        def checkpoint_restore(self) -> None:
            called.append("restore")

    assert Plain().rewake_part() == {"rank": 0, "hook": False}
    worker = Hooked()
    assert worker.rewake_join() == {"rank": 0}, "it never parted"
    assert worker.rewake_part() == {"rank": 0, "hook": True}
    assert worker.rewake_join() == {"rank": 0, "hook": True}
    assert worker.rewake_join() == {"rank": 0}
    assert called == ["prepare", "restore"]


def test_a_fault_is_an_answer_since_an_exception_would_end_the_engine(tmp_path: Path) -> None:
    worker = Worker(Memory(b"abcdefgh"))
    assert worker.rewake_tidy("{}") == {"error": "RuntimeError: CUDA error: out of memory"}
    assert worker.rewake_import(asked(files=[["/x", 7]])) == {
        "error": "ValueError: there are 7 bytes of weights for 8 bytes of allocations"
    }
    assert "FileNotFoundError" in worker.rewake_export(asked(folder=str(tmp_path / "no"), part_bytes=6))["error"]
    assert "JSONDecodeError" in worker.rewake_describe("?")["error"]
    assert "closed the connection" in worker.rewake_import(asked(socket=str(closed(tmp_path / "s"))))["error"]


def closed(path: Path) -> Path:
    """A socket whose helper closes every connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener:
            listener.accept()[0].close()

    threading.Thread(target=serve, daemon=True).start()
    return path


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 200), st.integers(0, 200))
def test_pieces_are_the_bytes_asked_for(counts: list[int], begin: int, end: int) -> None:
    runs, flat, address = [], [], 1000
    for count in counts:
        runs.append((address, count))
        flat += range(address, address + count)
        address += count + 7
    found = [byte for start, count in inside.pieces(runs, begin, end) for byte in range(start, start + count)]
    assert found == flat[begin:end]


@given(st.integers(0, 1 << 23), st.integers(1, (1 << 64) - 1))
def test_restore_case_72_no_change_of_one_word_is_lost(index: int, change: int) -> None:
    assert inside.multiplier(index) % 2 == 1
    assert change * inside.multiplier(index) % (1 << 64) != 0


def test_the_order_of_chunks_counts() -> None:
    assert inside.fold([1, 2]) != inside.fold([2, 1])
    assert inside.fold([]) == "0" * 16
    assert inside.fold([(1 << 64) - 1]) == "f" * 16
