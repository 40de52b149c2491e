"""``python -m restorer --config FILE --store URL``: the restorer of this host. Runs as root; opens no port."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import sys
from pathlib import Path

from policies.config import Config
from restorer.boxes import network
from restorer.errors import RestorerError
from restorer.machine.host import build
from restorer.operations.reload import Line, read, reload
from restorer.operations.worker import Worker
from restorer.records.journal import Hook, program_hook

log = logging.getLogger("rewake.restorer")
USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; SIGHUP reads the configuration again.

    Exit status: 0 stopped, 1 failed, 2 unusable settings or no right to run.
    """
    parser = argparse.ArgumentParser(prog="restorer", description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--control-fd", type=int, help="the line to a supervisor, which has the configuration")
    parser.add_argument("--store", required=True, help="redis://, rediss:// or unix:// URL of the shared store")
    # For tests alone: a program that is run before and after each step, and may let it fail.
    parser.add_argument("--step-hook", default=os.environ.get("REWAKE_STEP_HOOK"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if os.geteuid() != 0:
        return _refuse("the restorer makes namespaces and runs CRIU: start it as root")
    try:
        line = None if options.control_fd is None else Line(options.control_fd)
        config = read(options.config) if line is None else line.first()
    except RestorerError as error:
        return _refuse(str(error))
    lock = _only_one(config)
    if lock is None:
        return _refuse(f"another restorer works in {config.run_dir}; stop it first, or give this one a run_dir of its own")
    try:
        # Not uvloop: its children inherit descriptors that are not theirs, and an engine that holds one cannot be dumped.
        hook = None if options.step_hook is None else program_hook(options.step_hook)
        return asyncio.run(_serve(config, options.store, options.config, line, hook))
    except RestorerError as error:
        print(f"restorer: {error}", file=sys.stderr)
        return 1


async def _serve(config: Config, store: str, file: Path, line: Line | None, hook: Hook | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await network.free(config.restorer.network)
    host = await asyncio.to_thread(build, config, store, hook=hook)
    log.info("restorer on %s: %s", host.name, host.capability)
    if line is None:
        loop.add_signal_handler(signal.SIGHUP, reload, host, file)
        await Worker(host).run(stop)
        return 0
    hearing = asyncio.create_task(line.run(host))
    try:
        await Worker(host).run(stop)
    finally:
        hearing.cancel()
        await asyncio.wait({hearing})
    return 0


def _only_one(config: Config) -> int | None:
    """A lock that ends with this process; None when another has it. Two restorers would remove each other's boxes."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    fd = os.open(run_dir / "restorer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _refuse(message: str) -> int:
    print(f"restorer: {message}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
