"""This host as a command sees it that needs no restorer: its snapshots, its facts, its GPUs. It speaks to no store."""

from __future__ import annotations

import asyncio

from policies.config import Config
from restorer.cli.operator import Failed
from restorer.machine.host import Host, build

_NOWHERE = "unix:///nonexistent"


def this_host(config: Config) -> Host:
    """Blocks: the driver is asked for the GPUs, in a helper that ends here.

    Raises:
        Failed: the snapshots are somebody else's.
    """
    try:
        host = build(config, _NOWHERE, stamps_file="stamps.cli.json")
    except OSError as error:
        raise Failed(f"{error.filename}: {error.strerror}; snapshots belong to the user that runs the restorer") from None
    asyncio.run(_find_gpus(host))
    return host


async def _find_gpus(host: Host) -> None:
    try:
        await host.find_gpus()
    finally:
        await host.cuda.close()
        await host.jobs.close()
