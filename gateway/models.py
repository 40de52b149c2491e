"""The model list: every configured model, running or cold, with its state. Looking never wakes anything."""

from __future__ import annotations

from collections.abc import Callable

from gateway import routes
from gateway.current import Current
from gateway.errors import ModelNotFound
from gateway.exchange import Call, Reply, reply
from gateway.registry import Registry
from policies.config import Config
from policies.replica import State


def named(config: Config, name: str) -> str:
    """The model that a client means.

    Raises:
        ModelNotFound: the configuration has no such model.
    """
    model = config.resolve(name)
    if model is None:
        raise ModelNotFound(f"The model {routes.shown(name)!r} does not exist.")
    return model


class Models:
    """``GET /v1/models`` and ``GET /v1/models/{name}``, shaped as OpenAI's.

    Args:
        eta_s: model -> seconds until it can answer; None: nobody knows.
        allows: tenant and model -> whether it may use it. Others are not listed, and not found.
    """

    def __init__(
        self,
        current: Current,
        registry: Registry,
        *,
        eta_s: Callable[[str], float | None],
        allows: Callable[[str, str], bool],
    ) -> None:
        self._current = current
        self._registry = registry
        self._eta_s = eta_s
        self._allows = allows

    async def list(self, call: Call) -> Reply:
        models = [model for model in self._current.config.models if self._allows(call.tenant, model)]
        return reply({"object": "list", "data": [self._card(model) for model in models]})

    async def get(self, call: Call) -> Reply:
        """One model by its name or an alias; names may contain slashes.

        Raises:
            ModelNotFound: the configuration has no such model, or not for this tenant.
        """
        name = call.params["name"]
        model = named(self._current.config, name)
        if not self._allows(call.tenant, model):
            raise ModelNotFound(f"The model {routes.shown(name)!r} does not exist.")
        return reply(self._card(model))

    def _card(self, model: str) -> dict[str, object]:
        eta_s = self._eta_s(model)
        return {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": "rewake",
            "rewake": {
                "state": self._registry.state(model),
                "replicas": self._registry.count(model, {State.ADMITTED}),
                "aliases": list(self._current.config.models[model].aliases),
                "eta_seconds": None if eta_s is None else round(eta_s, 1),
            },
        }
