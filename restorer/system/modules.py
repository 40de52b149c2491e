"""Modules of ours that are run as processes of their own: with which command, and in which environment they find the others.

Knows no module by name, and starts nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
"""The folder in which our packages are."""


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """argv of one. The current folder is no place to import from (-P): root runs this."""
    return (sys.executable, "-P", "-m", module, *arguments)


def environment() -> dict[str, str]:
    """This process's own, in which our packages come first, and whatever else it found is still found."""
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}
