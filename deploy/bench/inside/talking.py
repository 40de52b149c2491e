"""One of the processes of nccl.py: talking.py WORK RANK PROCESSES PORT. Needs torch, and a GPU for each.

Does its work once, says so, and does it again after each word on stdin: ``part`` before it is checkpointed, ``join`` afterwards.
An answer is one line of JSON, with ``error`` where the work failed or its result was wrong.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

_NUMBERS = 1 << 20


class Raw:
    """Memory by its address, as torch takes it."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<f4", "data": (address, False), "version": 3}


class Talker:
    def __init__(self, work: str, rank: int, processes: int, port: int) -> None:
        self._work, self._rank, self._processes, self._port = work, rank, processes, port
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(self._device)
        self._given = torch.full((_NUMBERS,), float(rank + 1), device=self._device)
        self._summed = torch.empty_like(self._given)
        self._pinned = torch.ones(_NUMBERS, pin_memory=True)
        self._graph: Any = None
        self._round = 0
        self._join()

    def part(self) -> None:
        if self._work.startswith("anew"):
            self._graph = None
            dist.destroy_process_group()

    def join(self) -> None:
        if self._work.startswith("anew"):
            self._join()

    def do(self) -> None:
        """Raises whatever went wrong."""
        if self._work == "pinned":
            # A kernel that reads the host's memory, as NCCL's do.
            self._pinned.fill_(2.0)
            found = torch.as_tensor(Raw(self._pinned.data_ptr(), _NUMBERS), device=self._device).sum().item()
            if found != 2.0 * _NUMBERS:
                raise ValueError(f"the sum is {found}")
            return
        if self._graph is not None:
            self._graph.replay()
        else:
            self._sum()
        torch.cuda.synchronize()
        wanted = sum(range(1, self._processes + 1))
        if not bool((self._summed == wanted).all()):
            raise ValueError(f"the sum is {self._summed[:4].tolist()}, not {wanted}")

    def _sum(self) -> None:
        self._summed.copy_(self._given)
        dist.all_reduce(self._summed)

    def _join(self) -> None:
        if self._work == "pinned":
            return
        self._round += 1
        where = f"tcp://127.0.0.1:{self._port + self._round - 1}"
        dist.init_process_group("nccl", init_method=where, rank=self._rank, world_size=self._processes)
        if self._work.endswith("graph"):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(2):
                    self._sum()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._sum()


def main() -> None:
    work, *numbers = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    talker: Talker | None = None
    word = "begin"
    while word:
        try:
            if talker is None:
                talker = Talker(work, *map(int, numbers))
            elif word == "part":
                talker.part()
            else:
                talker.join()
            if word != "part":
                talker.do()
            answer = {}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        word = sys.stdin.readline().strip()
    os._exit(0)


main()
