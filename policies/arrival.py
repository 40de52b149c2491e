"""May a restore begin while the weights of its snapshot are still on their way, and how long does it wait for the rest of them.

A restore that waits for weights keeps a GPU from everybody else. So it begins only when what is left comes, at the rate seen so
far, within the time that the restore takes before it wants the weights. Knows bytes and seconds; nothing of how either is had.
"""

from __future__ import annotations

from policies.reading import Choice

_PATIENCE_S = 60.0
_SLOWEST = 50e6
"""Bytes a second that are waited for, of the network's and of a disk's, beside the minute that a remote gets for one request."""


def begin(left: int, *, rate: float, lead_s: float | None) -> Choice:
    """Whether to restore all else now, while the rest of the weights still comes.

    Args:
        left: bytes of weights that are not here yet.
        rate: bytes a second at which they came so far; 0: nothing has come.
        lead_s: what a restore takes at the least before it wants weights; None: this host has not been measured.
    """
    if lead_s is None:
        return Choice(False, "this host has not been measured yet")
    if rate <= 0.0:
        return Choice(False, "nothing has come yet")
    why = f"{left / 1e6:.1f} MB are left, {left / rate:.2f} s at {rate / 1e6:.0f} MB/s; weights are wanted after {lead_s:.2f} s"
    return Choice(left / rate <= lead_s, why)


def patience_s(behind: int) -> float:
    """How long an engine on a GPU waits for so many bytes that are not here and verified, before it is ended."""
    return _PATIENCE_S + behind / _SLOWEST
