"""Which requests are traced by chance: every so many, the number drawn anew each time.

To count down costs a request nothing, where a draw for each would cost as much as all its counting. The gaps are as wide as they
would be if each had been drawn for. Knows nothing of traces.
"""

from __future__ import annotations

import math
import random


class Sampler:
    """Chooses a part of all that it is asked about.

    Args:
        part: from 0, none, to 1, all.
    """

    def __init__(self, part: float, seed: int | None = None) -> None:
        self._part = part
        self._random = random.Random(seed)
        self._passed_over = self._gap()

    def chosen(self) -> bool:
        """Whether this one is."""
        if self._passed_over > 0:
            self._passed_over -= 1
            return False
        if self._part <= 0:
            return False
        self._passed_over = self._gap()
        return True

    def _gap(self) -> int:
        """How many are passed over before the next one."""
        if not 0 < self._part < 1:
            return 0
        return int(math.log(1 - self._random.random()) / math.log1p(-self._part))
