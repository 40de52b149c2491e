"""The steps of a start or a capture: each is journaled before it is taken, and timed: seconds, bytes, tier."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.journal import Undo
from policies.replica import Stage
from restorer.journal import Journal


@dataclass(slots=True)
class Timed:
    """A stage under way; its owner may say what it moved."""

    name: str
    bytes: int | None = None
    tier: str | None = None


@dataclass(slots=True)
class Stages:
    """Finished stages, in order.

    Args:
        journal: where each is written ahead; None: what is done leaves nothing that a crash could leave behind.
        within: the stage that these are a part of.
    """

    journal: Journal | None = None
    within: str = ""
    done: list[Stage] = field(default_factory=list)

    @contextlib.contextmanager
    def timed(self, name: str, undo: Undo | None = None) -> Iterator[Timed]:
        """Journal and time a step; its time is recorded even if it fails, since that is when it is asked for.

        Raises:
            Environment: it cannot be journaled, and must not be taken.
        """
        stage, begun = Timed(name), time.perf_counter()
        number = None if self.journal is None else self.journal.step(self.within + name, undo)
        try:
            yield stage
        except BaseException as error:
            self._ended(stage, begun, number, error)
            raise
        self._ended(stage, begun, number, None)

    def parts(self, name: str) -> Stages:
        """For the steps within one step: journaled like all others, but no stages of their own."""
        return Stages(self.journal, f"{self.within}{name}: ")

    async def durable(self) -> None:
        """Wait until all that was journaled is on the disk: before a step whose effect outlives the machine's death."""
        if self.journal is not None:
            await self.journal.durable()

    def _ended(self, stage: Timed, begun: float, number: int | None, error: BaseException | None) -> None:
        seconds = time.perf_counter() - begun
        self.done.append(Stage(name=stage.name, seconds=round(seconds, 6), bytes=stage.bytes, tier=stage.tier))
        if self.journal is None or number is None:
            return
        if error is None:
            self.journal.done(number, seconds, bytes=stage.bytes, tier=stage.tier)
        else:
            self.journal.failed(number, seconds, error)
