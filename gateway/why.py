"""``GET /admin/v1/why``: the story of a model or a replica that is not what it should be. Reads; decides nothing."""

from __future__ import annotations

from gateway import whereabouts
from gateway.current import Current
from gateway.errors import InvalidRequest, NotFound
from gateway.exchange import Call, Reply, reply
from gateway.registry import Registry
from gateway.routes import shown
from gateway.store import Store
from policies import placement, story


class Why:
    """One per gateway process."""

    def __init__(self, current: Current, *, registry: Registry, store: Store) -> None:
        self._current = current
        self._registry = registry
        self._store = store

    async def answer(self, call: Call) -> Reply:
        """``?of=NAME``: a model, an alias, a replica's slot or an incarnation.

        Raises:
            NotFound: there is no such thing. StoreUnavailable.
        """
        name = call.query.get("of", "")
        if not name:
            raise InvalidRequest("Name a model or a replica: ?of=NAME.", "invalid_request")
        replicas = self._registry.replicas()
        record = next((one for one in replicas if name in (one.id, one.incarnation)), None)
        model = record.model if record is not None else self._current.config.resolve(name)
        if model is None:
            raise NotFound(f"There is no model and no replica {shown(name)!r}.")
        hosts = await self._store.hosts()
        settings = self._current.config.models.get(model)
        told = story.tell(
            model,
            self._registry.state(model),
            replicas,
            self._registry.standing(model),
            await self._store.trails(),
            hosts,
            replica="" if record is None else record.id,
            barred={one.id: why for one in replicas if (why := whereabouts.barred(one))},
            lacking={} if settings is None else placement.lacking(model, settings, hosts),
        )
        return reply(told)
