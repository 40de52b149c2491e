"""The configuration in force: one object that every part holds, so that a reload reaches all of them in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies.config import Config, Model
from policies.tenancy import Tenant


class Current:
    """Holds the configuration; parts read :attr:`config` whenever they decide, and never keep it across a wait."""

    def __init__(self, config: Config) -> None:
        self._put(config)
        self.on_change: list[Callable[[Config, Config], None]] = []
        """Called with the configuration before and after a reload, when the new one is already in force."""

    def replace(self, config: Config) -> None:
        """Put a validated configuration in force. Synchronous: no request sees a part of each."""
        before = self.config
        self._put(config)
        for listener in self.on_change:
            listener(before, config)

    def _put(self, config: Config) -> None:
        self.config = config
        # Every request asks for these two, and a look into the configuration takes ten times as long as one at this object.
        self.models: Mapping[str, Model] = config.models
        self.tenants: Mapping[str, Tenant] = config.tenants
