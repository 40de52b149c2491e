"""What msgspec reads and writes on the data path, as it declares it: by annotations that it looks at while the program runs.

Apart from the modules that use them, since those may be compiled, and what is compiled keeps no annotation but a plain class's
name: ``bool | None`` becomes ``type``, ``list[str]`` becomes ``list``. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import msgspec


class Peek(msgspec.Struct):
    """The two fields of a request body that routing needs."""

    model: str = ""
    stream: bool | None = False


class Counted(msgspec.Struct):
    """An engine's usage object with nothing in it but numbers."""

    prompt_tokens: int
    completion_tokens: int


class Line(msgspec.Struct, gc=False):
    """One line of the access log; its fields are written in this order."""

    time: str
    request_id: str
    client: str
    tenant: str
    method: str
    route: str
    model: str | None
    stream: bool
    status: int
    code: str
    phase: str
    start: str
    replica: str
    incarnation: str
    retries: int
    waited_s: float
    ttft_s: float | None
    duration_s: float
    bytes_in: int
    bytes_out: int
    prompt_tokens: int | None
    completion_tokens: int | None
    trace_id: str
