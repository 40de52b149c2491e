"""Which version of the project this is. Knows nothing else."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """As it is installed; a checkout that was not has none."""
    try:
        return metadata.version("rewake")
    except metadata.PackageNotFoundError:
        return "unpackaged"
