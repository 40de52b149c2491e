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
