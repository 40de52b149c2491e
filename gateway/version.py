"""Which version of the project this is, and in which of its two forms. Knows nothing else."""

from __future__ import annotations

from importlib import metadata

from policies import fair


def version() -> str:
    """As it is installed; a checkout that was not has none."""
    try:
        return metadata.version("rewake")
    except metadata.PackageNotFoundError:
        return "unpackaged"


def data_path() -> str:
    """``compiled`` or ``interpreted``: how the modules run that a plain request goes through."""
    return "interpreted" if fair.__file__.endswith(".py") else "compiled"
