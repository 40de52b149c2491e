"""What requests that belong on the same replica have in common: a session that the client names, or how the prompt begins.

Reads a header and the first bytes of a body, and parses neither; what the key is worth against load is
:mod:`policies.balance`'s to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

from policies.balance import Balance

SESSION_HEADERS = ("x-rewake-session", "x-session-id")
"""The first that is there names the session; nobody else's: it counts within the tenant."""
KEYED = frozenset(("session", "prefix"))
"""The ways to balance that heed a key."""
_PROMPT = re.compile(rb'"(?:messages|prompt|input|query)"\s*:')
_LOOK = 64 << 10
"""A prompt that begins later than this is not looked for."""
_PREFIX = 1 << 10
"""Bytes of the prompt that count: enough to tell conversations apart, and still there when they have grown."""


def key(balance: Balance, *, tenant: str, headers: Mapping[str, str], body: bytes | None) -> str:
    """The key of a request; empty when nothing says where it belongs.

    Args:
        headers: case-insensitive.
        body: None when it is not in memory.
    """
    if balance == "session":
        session = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")
        if session:
            return f"{tenant}\0{session[:256]}"
    # A session that nobody names is known by its beginning, too.
    return _prefix(body) if balance in ("session", "prefix") and body else ""


def _prefix(body: bytes) -> str:
    found = _PROMPT.search(body, 0, _LOOK)
    if found is None:
        return ""
    return blake2b(body[found.start() : found.start() + _PREFIX], digest_size=16).hexdigest()
