"""The configuration in force: one object that every part holds, so that a reload reaches all of them in one step."""

from __future__ import annotations

from collections.abc import Callable

from policies.config import Config


class Current:
    """Holds the configuration; parts read :attr:`config` whenever they decide, and never keep it across a wait."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.on_change: list[Callable[[Config, Config], None]] = []
        """Called with the configuration before and after a reload, when the new one is already in force."""

    def replace(self, config: Config) -> None:
        """Put a validated configuration in force. Synchronous: no request sees a part of each."""
        before, self.config = self.config, config
        for listener in self.on_change:
            listener(before, config)
