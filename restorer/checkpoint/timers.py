"""Timers of a snapshot that CRIU would restore dead: a repeating timerfd whose time had come when the donor was stopped.

The kernel says of such a timer that no time is left until it fires, CRIU writes that down, and at the restore it means
*disarmed*: an event loop that waits for it waits for ever. So it is put down as due after one period. Knows CRIU's image of open
files.
"""

from __future__ import annotations

from pathlib import Path

from restorer.checkpoint import images

_TYPE, _TIMERFD = 1, 17
_SECONDS, _NANOSECONDS, _PERIOD_S, _PERIOD_NS = 7, 8, 9, 10


def rearm(folder: Path) -> int:
    """Mend the images in ``folder``, which nobody else has seen yet. Blocks; returns how many timers were mended.

    Raises:
        SnapshotError: the images are not as they are known here.
    """
    path = folder / "files.img"
    if not path.exists():
        return 0
    image, mended = images.read(path), 0
    for number, message in enumerate(image.messages):
        if images.numbers(message).get(_TYPE) == _TIMERFD:
            content = [_rearmed(field) for field in images.fields(message)]
            changed = images.encoded(content)
            mended += changed != message
            image.messages[number] = changed
    if mended:
        path.unlink()
        image.write(path)
    return mended


def _rearmed(field: images.Field) -> images.Field:
    """The part of an entry that describes the timer, due after one period if it repeats and was due already."""
    if not isinstance(field.value, bytes):
        return field
    known = images.numbers(field.value)
    repeats = known.get(_PERIOD_S, 0) or known.get(_PERIOD_NS, 0)
    if not repeats or known.get(_SECONDS, 0) or known.get(_NANOSECONDS, 0):
        return field
    due = {_SECONDS: known[_PERIOD_S], _NANOSECONDS: known[_PERIOD_NS]}
    content = [images.integer(one.number, due[one.number]) if one.number in due else one for one in images.fields(field.value)]
    return field._replace(value=images.encoded(content))
