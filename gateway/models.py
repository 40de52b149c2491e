"""The model list: every configured model, running or cold, with its state. Looking never wakes anything."""

from __future__ import annotations

from gateway.current import Current
from gateway.errors import ModelNotFound
from gateway.exchange import Call, Reply, reply
from gateway.registry import Registry
from policies.replica import State


class Models:
    """``GET /v1/models`` and ``GET /v1/models/{name}``, shaped as OpenAI's."""

    def __init__(self, current: Current, registry: Registry) -> None:
        self._current = current
        self._registry = registry

    async def list(self, call: Call) -> Reply:
        return reply({"object": "list", "data": [self._card(model) for model in self._current.config.models]})

    async def get(self, call: Call) -> Reply:
        """One model by its name or an alias; names may contain slashes.

        Raises:
            ModelNotFound: the configuration has no such model.
        """
        name = call.params["name"]
        model = self._current.config.resolve(name)
        if model is None:
            raise ModelNotFound(f"The model {name!r} does not exist.")
        return reply(self._card(model))

    def _card(self, model: str) -> dict[str, object]:
        return {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": "rewake",
            "rewake": {
                "state": self._registry.state(model),
                "replicas": self._registry.count(model, {State.ADMITTED}),
                "aliases": list(self._current.config.models[model].aliases),
            },
        }
