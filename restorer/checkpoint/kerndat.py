"""What CRIU has found out about this kernel, kept where a host does not let it.

CRIU tries out some fifty abilities of the kernel before each dump and restore, 30 to 40 ms, unless it finds what it found
before in ``/run/criu.kdat``. It writes that only where /run lies in memory and so ends with the kernel; in a container it does
not. There it is asked once, when a restorer starts, and shown the answer in each box.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path

from restorer.boxes.probes import CHECK, file_system
from restorer.procfs.obstacles import KERNDAT
from restorer.system.files import write_durable

log = logging.getLogger("rewake.restorer")

PLACE = Path(KERNDAT)
_ASK = 'mount -t tmpfs -o mode=0700 tmpfs "$2" && "$1" check >&2 && exec cat "$3"'
_ASK_S = 30.0
# There has to be a file to show it at. An empty one is as good as none to whoever else finds it, and CRIU removes it: so
# it is made anew each time. Without any of it CRIU looks for itself.
_SHOW = 'true 2>/dev/null >>"$1" && mount --bind "$0" "$1" 2>/dev/null; shift; exec "$@"'


def kept(criu: Path, run_dir: Path) -> Path | None:
    """A file of this boot to be :func:`shown`; None: CRIU keeps one by itself, or said nothing, which costs only time. Blocks."""
    if file_system(PLACE.parent) == "tmpfs":
        return None
    argv = [*CHECK, "sh", "-c", _ASK, "sh", str(criu), str(PLACE.parent), str(PLACE)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S, check=True)
        found = run_dir / PLACE.name
        write_durable(found, done.stdout, 0o600)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("each call takes CRIU some 40 ms longer, since what it knows of this kernel cannot be kept: %s", error)
        return None
    return found


def shown(kerndat: Path | None, argv: Sequence[str]) -> list[str]:
    """A command that runs CRIU, in mounts of its own, as it is run with what is kept."""
    return list(argv) if kerndat is None else ["sh", "-c", _SHOW, str(kerndat), str(PLACE), *argv]
