"""The operator's console: the files of one page, and the headers that keep it to itself.

The page loads nothing from anywhere else, runs no script but its own, and learns everything from the admin API with the token
that its reader types in. What it shows is decided in :mod:`gateway.overview` and in ``static/``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.current import Current
from gateway.errors import NotFound
from gateway.exchange import Call, Reply

FOLDER = Path(__file__).with_name("static")
PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked again each time, and answered with 304: a new version is there at the next load.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    type: str
    tag: str


class Console:
    """The handlers. The files are read once."""

    def __init__(self, current: Current) -> None:
        self._current = current
        self._files = _FILES

    async def page(self, call: Call) -> Reply:
        return self._answer(PAGE, call)

    async def asset(self, call: Call) -> Reply:
        return self._answer(call.params["asset"], call)

    def _answer(self, name: str, call: Call) -> Reply:
        found = self._files.get(name) if self._current.config.gateway.console else None
        if found is None:
            raise NotFound("The console is switched off (gateway.console)." if name in self._files else "There is no such file.")
        headers = {**HEADERS, "ETag": found.tag}
        known = [tag.strip().removeprefix("W/") for tag in call.if_none_match.split(",")]
        if found.tag in known:
            return Reply(304, b"", headers, found.type)
        return Reply(200, found.data, headers, found.type)


def _file(path: Path) -> _File:
    data = path.read_bytes()
    return _File(data, _TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:24]}"')


# Read with the code: later this process may have given up the right to read where it lies.
_FILES = {path.name: _file(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES}
