"""What browsers are told about calls from other origins. Decides by the configuration alone; knows no web framework.

Replicas have no say: what they answer about origins is dropped on the way (:mod:`gateway.envelope`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.envelope import Pairs
from gateway.exchange import Reply
from gateway.routes import Found
from policies.config import Cors

_EXPOSED = (
    "x-request-id, request-id, x-rewake-start, x-rewake-incarnation, x-rewake-error, x-should-retry, retry-after, retry-after-ms"
)
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")


def granted(cors: Cors, origin: str | None) -> Pairs:
    """Headers for any answer to a call from ``origin``, the value of its ``Origin`` header; none without permission."""
    if not cors.origins:
        return []
    if "*" in cors.origins:
        return [("Access-Control-Allow-Origin", "*"), ("Access-Control-Expose-Headers", _EXPOSED)]
    # The answer differs by origin even when it grants nothing: caches must know.
    varies = [("Vary", "Origin")]
    if origin not in cors.origins:
        return varies
    return [("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", _EXPOSED), *varies]


def options(cors: Cors, found: Found, headers: Mapping[str, str]) -> Reply:
    """204 with what is possible on a path, and for a preflight from a permitted origin what it may send.

    Needs no key and wakes nothing. The headers of :func:`granted` come on top, as on every answer.
    """
    answer = {"Allow": found.allow}
    origin = headers.get("Origin")
    permitted = any(name == "Access-Control-Allow-Origin" for name, _ in granted(cors, origin))
    if permitted and "Access-Control-Request-Method" in headers:
        answer["Access-Control-Allow-Methods"] = found.allow
        asked = headers.get("Access-Control-Request-Headers", "")
        if _NAMES.fullmatch(asked):
            answer["Access-Control-Allow-Headers"] = asked
        answer["Access-Control-Max-Age"] = str(cors.max_age_s)
    return Reply(204, b"", answer)
