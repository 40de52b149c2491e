"""Who could have changed a file: owner, mode, and the folders that lead to it.

A file is private to us when it belongs to root or to the running user, nobody else may write it, and nobody else may put
another in its place, or in the place of a folder above it. What is opened is what is judged: by its descriptor, never through
a link.

A second hard link gives nobody a right, since owner and mode belong to the file and not to the name, so links are not counted:
the store shares equal files by them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from restorer.errors import Environment


class Exposure(NamedTuple):
    """One way in which somebody else could have changed something."""

    path: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.found}; {self.remedy}"


def exposed(path: str | Path, facts: os.stat_result) -> Exposure | None:
    """How somebody else can change what ``facts`` were read of; None: nobody can."""
    us = os.geteuid()
    if facts.st_uid not in (0, us):
        return Exposure(str(path), f"it belongs to uid {facts.st_uid}", f"if you trust what is in it: chown {us} {path}")
    if facts.st_mode & 0o022 and not stat.S_ISLNK(facts.st_mode):
        mode = stat.S_IMODE(facts.st_mode)
        others = "others" if mode & 0o002 else "its group"
        return Exposure(str(path), f"{others} may write it (mode {mode:04o})", f"if you trust what is in it: chmod go-w {path}")
    return None


def way_to(path: Path) -> Iterator[Exposure]:
    """Every folder on the way to and including ``path`` that somebody else can change; links are followed, and judged too.

    A folder that anybody may write but only owners may take from (sticky, such as /tmp) is sound for what is in it.
    """
    for place in (*reversed(path.absolute().parents), path.absolute()):
        try:
            named, facts = place.lstat(), place.stat()
        except FileNotFoundError:
            return
        for found in (named, facts) if stat.S_ISLNK(named.st_mode) else (facts,):
            sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX and place != path
            if not (sticky and found.st_uid == 0) and (exposure := exposed(place, found)) is not None:
                yield exposure


def read_private(path: Path, *, most: int, secret: bool) -> bytes:
    """A small file that only we can have written.

    Args:
        most: bytes; a longer file is refused.
        secret: nobody else may read it either.

    Raises:
        Environment: it cannot be read, or somebody else could have written (or read) it. Says how to mend it.
    """
    for exposure in way_to(path.parent):
        raise Environment(str(exposure))
    try:
        # Non-blocking, so that a FIFO in its place is refused rather than waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise Environment(f"{path} is not a regular file; put the file itself there")
            if (open_to := exposed(path, facts)) is not None:
                raise Environment(str(open_to))
            if secret and facts.st_mode & 0o077:
                raise Environment(f"{path}: others may read it (mode {stat.S_IMODE(facts.st_mode):04o}); chmod 600 {path}")
            data = file.read(most + 1)
    except OSError as error:
        why = "is a link; name the file itself" if error.errno == errno.ELOOP else error.strerror
        raise Environment(f"{path}: {why}") from None
    if len(data) > most:
        raise Environment(f"{path} has more than {most} bytes; it is another file than was meant")
    return data
