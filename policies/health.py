"""What the answers of a replica say of its health, and whether it gets more requests: passive health, with hysteresis.

A replica is trusted until it is ejected; after a pause that grows from ejection to ejection one request at a time tries
it, and the first that is answered brings it back. Refusing work is no failure: whoever says 422, 429 or 503 is alive.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

FAILURES = 3
"""So many in a row, and the replica is ejected."""
PAUSE_S = 5.0
"""How long the first ejection lasts; each next one twice as long."""
MAX_PAUSE_S = 60.0
RECOVERED = 10
"""After so many good answers in a row the next pause is short again."""


class Outcome(enum.Enum):
    """What became of one request, as far as it says something of the replica."""

    OK = "ok"
    """It answered; also with a client's error."""
    BUSY = "busy"
    """It refused because it has enough to do: neither good nor bad."""
    FAILED = "failed"
    """It answered with an error of its own, or broke off."""
    DEAD = "dead"
    """No connection, or no answer within the time that any request may take."""


def outcome_of(status: int) -> Outcome:
    """What an answer's status says."""
    if status in (429, 503):
        return Outcome.BUSY
    # 501 is how engines say that they have no such route, or not for this model: nothing is wrong with them.
    return Outcome.OK if status < 500 or status == 501 else Outcome.FAILED


@dataclass(frozen=True, slots=True)
class Health:
    """What is remembered of one incarnation."""

    failures: int = 0
    """In a row, since the last good answer or ejection."""
    successes: int = 0
    """In a row, since the last failure."""
    ejections: int = 0
    """Without having recovered in between."""
    until: float | None = None
    """It is ejected until then, and on trial after that; None: trusted."""

    def ejected(self, now: float) -> bool:
        return self.until is not None and now < self.until

    def on_trial(self, now: float) -> bool:
        return self.until is not None and now >= self.until


TRUSTED = Health()


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from one outcome."""

    health: Health
    suspect: bool = False
    """Somebody who can look closer should."""


def judge(health: Health, outcome: Outcome, now: float, *, alone: bool) -> Judgement:
    """The numbered decision, first match wins.

    1. Busy: nothing changes.
    2. It was ejected and the pause is not over: nothing changes; this request began before.
    3. Good: trusted. Enough of them, and past ejections are forgotten.
    4. Dead: ejected.
    5. It failed, but no other replica could serve (``alone``): it stays, since errors that some requests provoke must not
       take the model from all; every third failure is passed on.
    6. It failed on trial, or for the third time in a row: ejected.
    7. It failed: counted.
    """
    if outcome is Outcome.BUSY or health.ejected(now):
        return Judgement(health)
    if outcome is Outcome.OK:
        if health is TRUSTED:
            return Judgement(health)
        successes = health.successes + 1
        return Judgement(TRUSTED if successes >= RECOVERED or not health.ejections else Health(0, successes, health.ejections))
    failures = health.failures + 1
    if outcome is Outcome.DEAD:
        return _eject(health, now)
    if alone:
        return Judgement(Health(failures, 0, health.ejections), suspect=failures % FAILURES == 0)
    if health.on_trial(now) or failures >= FAILURES:
        return _eject(health, now)
    return Judgement(replace(health, failures=failures, successes=0))


def _eject(health: Health, now: float) -> Judgement:
    pause_s = min(PAUSE_S * 2.0**health.ejections, MAX_PAUSE_S)
    return Judgement(Health(ejections=min(health.ejections + 1, 32), until=now + pause_s), suspect=True)
