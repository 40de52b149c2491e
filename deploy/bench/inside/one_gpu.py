"""Runs inside vLLM (``--worker-cls one_gpu.Worker``): every worker of a host uses its first GPU.

For the bench, on a host with one GPU: NCCL 2.30 and later let several workers have the same GPU
(``NCCL_MULTI_RANK_GPU_ENABLE``), so that what a checkpoint makes of them and their communicators can be seen there.
"""

from __future__ import annotations

from vllm.v1.worker import gpu_worker


class Worker(gpu_worker.Worker):
    def init_device(self) -> None:
        self.local_rank = 0
        super().init_device()
