#!/usr/bin/env python3
"""Writes docs/reference out of the code, or says what of it is stale.

Usage: python -m deploy.site.reference [--check]      (from the root of the checkout; `make reference`)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.site import commands, diagram, gateway, settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
_NOTE = "<!-- Made from the code by `make reference`: mend it there. -->\n\n"


def pages() -> Mapping[str, str]:
    """Name of each file, and what it must hold."""
    return {
        "settings.md": _NOTE + settings.page(),
        "commands.md": _NOTE + commands.page(),
        "routes.md": _NOTE + gateway.routes(),
        "errors.md": _NOTE + gateway.error_page(),
        "metrics.md": _NOTE + gateway.metrics(),
        "openapi.json": gateway.description(),
        "lifecycle.svg": diagram.picture(),
    }


def stale() -> list[str]:
    """Names of files that are not what the code says."""
    return [name for name, text in pages().items() if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != text]


def main() -> int:
    """Write, or check."""
    changed = stale()
    if "--check" in sys.argv:
        print("\n".join(f"docs/reference/{name} is stale: run `make reference`" for name in changed))
        return bool(changed)
    FOLDER.mkdir(exist_ok=True)
    for name in changed:
        (FOLDER / name).write_text(pages()[name])
        print(f"docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
