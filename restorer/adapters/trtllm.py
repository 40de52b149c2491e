"""TensorRT-LLM's server, ``trtllm-serve``: the OpenAI API and a health route. It has no route by which it could be put to sleep
or its weights be taken apart, so that its GPU state goes into the dump whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import httpx

from restorer.adapters.abilities import Abilities, probe
from restorer.adapters.engine import Body, HttpEngine

_NEEDED = {
    "TLLM_NCCL_SYMMETRIC_ZERO_COPY": "0",
    "UCX_TLS": "tcp,self",
}
"""Windows registered with NCCL, and RDMA, are beyond what a checkpoint can hold."""


class TensorRtLlm(HttpEngine):
    """One GPU; more are refused, as for every engine that was not seen to survive it."""

    _abilities: Abilities | None = None

    def settings(self) -> dict[str, str]:
        return {**_NEEDED, **super().settings()} if self.captured else super().settings()

    def needed(self) -> Mapping[str, str]:
        return {**_NEEDED, **super().needed()}

    async def ask(self, client: httpx.AsyncClient, path: str, body: Body | None = None) -> httpx.Response:
        if self._abilities is None:
            self._abilities = await probe(client)
        return await super().ask(client, path, body)

    def as_sent(self, body: Body) -> Body:
        """With a salt, where it takes one, so that no cached prefix is used; it refuses members that it does not know."""
        known = self._abilities is not None and "cache_salt" in self._abilities.fields
        return {**body, "cache_salt": secrets.token_hex(16)} if known else body

    def prompt(self, length: int, serial: int) -> str | list[int]:
        return self.tokens(length, serial)
