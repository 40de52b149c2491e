"""Runs inside vLLM (``--worker-cls one_gpu.Worker``): every worker of a host uses its first GPU.

For the bench, so that what a checkpoint makes of several workers and their communicators can be seen on a host with one GPU.
NCCL takes each worker to be on a host of its own, as it has to if two are to have one GPU; so all that they say to each other
goes over sockets, as it does between GPUs when nothing may be shared.
"""

from __future__ import annotations

import os

from vllm.v1.worker import gpu_worker


class Worker(gpu_worker.Worker):
    def init_device(self) -> None:
        os.environ["NCCL_HOSTID"] = f"worker-{self.rank}"
        self.local_rank = 0
        super().init_device()
