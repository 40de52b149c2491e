"""May a restore begin while the weights of its snapshot are still on their way, and how long does it wait for the rest of them.

A restore that waits for weights keeps a GPU from everybody else. So it begins only when the rest is here and verified, at the
rates seen so far, within the time that the restore takes before it wants the weights. Knows bytes and seconds; nothing of how
either is had.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.reading import Choice

_PATIENCE_S = 60.0
_SLOWEST = 50e6
"""Bytes a second that are waited for, of the network's and of a disk's, beside the minute that a remote gets for one request."""


_OF_FLOOR = 2.0
"""How many times its floor that part of a restore takes: from 1.8 to 2.6 on the GPU hosts that were measured."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What is still to be done for some weights, and how fast it went so far."""

    left: int
    """Bytes that are to come over the network: of what is there several times, once."""
    came: float
    """Bytes a second at which they came; 0: none has."""
    behind: int
    """Bytes that are not on the disk and verified, among them all that are to come."""
    part: int
    """Of these, what is verified in one piece after the last byte has come."""
    checked: float
    """Bytes a second that are made durable and verified while that is done; 0: nothing was yet."""
    spent_s: float = 0.0
    """Seconds that were spent on what is being verified now."""

    @property
    def network_s(self) -> float:
        """Until the last byte has come and its part is verified."""
        return self.left / self.came + min(self.part, self.behind) / self.checked if self.left else 0.0

    @property
    def disk_s(self) -> float:
        """Until all is verified, as if it were here."""
        return max(0.0, self.behind / self.checked - self.spent_s)


def begin(rest: Rest, *, lead_s: float | None) -> Choice:
    """Whether to restore all else now, while the rest of the weights still comes.

    Args:
        lead_s: the floor of what a restore does before it wants weights; None: this host has not been measured.
    """
    if lead_s is None:
        return Choice(False, "this host has not been measured yet")
    lead_s *= _OF_FLOOR
    if rest.checked <= 0.0 or (rest.left and rest.came <= 0.0):
        return Choice(False, "nothing has come yet")
    rest_s = max(rest.network_s, rest.disk_s)
    why = (
        f"{_mb(rest.left)} MB were left, at {_mb(rest.came)} MB/s, and {_mb(rest.behind)} MB not verified, at "
        f"{_mb(rest.checked)} MB/s: {rest_s:.2f} s; weights are wanted after about {lead_s:.2f} s"
    )
    return Choice(rest_s <= lead_s, why)


def patience_s(count: int) -> float:
    """How long so many bytes of weights are waited for, of a remote or a disk: what hangs with few is not given half an hour."""
    return _PATIENCE_S + count / _SLOWEST


def _mb(count: float) -> str:
    return f"{count / 1e6:.0f}"
