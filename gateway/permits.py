"""How much this gateway may use of what all gateways share: slots on replicas, and what a tenant may have at once.

Permits are leased from the store, pool by pool (permits.lua decides who gets how many), and used without asking anybody: a
round trip happens when more are wanted than held, when another gateway waits for its share, and to renew. Without the
store this gateway goes on with what it holds. Decides nothing about requests.

What is used never exceeds what the store has noted: before a call this gateway binds itself to what it will keep at least
(``keep``), and believes in more only when the answer says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from gateway import logs
from gateway.current import Current
from gateway.errors import StoreUnavailable
from gateway.ledger import Ledger
from policies.replica import Replica, State

PERIOD_S = 1.0
"""Leases of pools in use are renewed this often."""
TTL_S = 10.0
"""A gateway that has not renewed for this long is gone, and its permits are others'."""
SETTLE_S = 3.0
"""After a store has forgotten everything: how long nobody's part grows, so that all can say what they use."""
TENURE_S = 0.25
"""What cannot be split stays with its holder this long before it goes to the next one."""
_CALM_S = 0.005
"""Wishes within this time share one call."""
_LOOK_SHARE = 10.0
"""Where many tenants make a look at all pools long, there are this many times as long between two."""
_ROUNDS = 4
_CHUNK = 64
"""Pools in one call, so that the store is never busy with us for long."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What this gateway says of one pool."""

    name: str
    total: int
    keep: int
    want: int
    held: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What the store says of it. ``needed``: another gateway waits for what is held over ``target``."""

    held: int
    target: int
    needed: bool


class Lender(Protocol):
    """The store, as far as permits go."""

    async def lend(
        self, gateway: str, number: int, wishes: Sequence[Wish], *, spare: bool, leave: bool, dead: str
    ) -> Sequence[Grant | None]:
        """One grant for each wish, None for a call that a later one has overtaken. Raises StoreUnavailable."""


class Fleet(Protocol):
    """The replicas as this gateway sees them."""

    def replicas(self) -> Sequence[Replica]: ...


@dataclass(slots=True)
class _Pool:
    """One pool as this gateway last knew it."""

    total: int
    held: int = 0
    """So many are this gateway's for sure."""
    target: int = 0
    needed: bool = False
    hinted: bool = False
    asked: int = -1
    """The want that was last told."""
    granted_at: float | None = None
    asked_at: float = float("-inf")

    @property
    def limit(self) -> int:
        """What may be in use: over its share nothing new begins while another gateway waits."""
        return min(self.held, self.target) if self.needed else self.held


class Permits:
    """The leases of one gateway process; :meth:`run` keeps them.

    Args:
        id: this gateway's, as in its reports.
        dead: that of a gateway of which it is certain that it is no more; its permits are free at once.
    """

    def __init__(self, id: str, current: Current, *, lender: Lender, fleet: Fleet, ledger: Ledger, dead: str = "") -> None:
        self.id = id
        self.dead = dead
        self.draining = False
        """Take no part of what nobody wants."""
        self.on_more: Callable[[], None] = lambda: None
        """Called when more may be used than before."""
        self._current = current
        self._lender = lender
        self._fleet = fleet
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._pools: dict[str, _Pool] = {}
        self._slots: dict[str, _Pool] = {}
        """Those of replicas, by incarnation: asked at every request."""
        self._shares: dict[str, _Pool] = {}
        """Those of tenants' requests on replicas, by tenant: likewise."""
        self._owing = False
        """Some pool is needed elsewhere."""
        self._wake = asyncio.Event()
        self._number = 0
        self._calm_s = _CALM_S

    # ------------------------------------------------------------------ what the waiting room asks

    def limit(self, replica: Replica) -> int:
        """Requests that this gateway may have on the replica at once."""
        pool = self._slots.get(replica.incarnation)
        return 0 if pool is None else pool.limit

    def tenant_limit(self, tenant: str) -> int | None:
        """Requests of this tenant that this gateway may have on replicas at once; None: any number."""
        spec = self._current.tenants.get(tenant)
        if spec is None or spec.limits.concurrency is None:
            return None
        pool = self._shares.get(tenant)
        return 0 if pool is None else pool.limit

    def places(self, tenant: str) -> int | None:
        """Requests of this tenant that may wait here at once; None: any number."""
        spec = self._current.tenants.get(tenant)
        if spec is None or spec.limits.max_held is None:
            return None
        pool = self._pools.get(_held(tenant))
        # A refusal is final, so before the store was ever asked the benefit of the doubt is the client's.
        return spec.limits.max_held if pool is None or pool.granted_at is None else pool.limit

    def wanted(self) -> None:
        """Somebody waits."""
        self._wake.set()

    def released(self, incarnation: str, tenant: str) -> None:
        """A request has ended; whoever waits for a permit at another gateway may have its."""
        if not self._owing:
            return
        for name in (_replica(incarnation), _tenant(tenant)):
            pool = self._pools.get(name)
            if pool is not None and pool.needed:
                self._wake.set()

    # ------------------------------------------------------------------ the leases

    def look(self) -> None:
        """Replicas or settings have changed."""
        self._wake.set()

    def hint(self, name: str) -> None:
        """Somebody waits for permits of this pool, or gave some back."""
        pool = self._pools.get(name)
        if pool is not None:
            pool.hinted = True
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled. A lost store is tried again each period."""
        while True:
            try:
                await self._settle()
            except StoreUnavailable as error:
                logs.warning("permits not renewed; going on with those held", reason=str(error))
                await asyncio.sleep(PERIOD_S)
            await asyncio.sleep(self._calm_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()

    async def leave(self) -> None:
        """Give everything back: this gateway has no request left."""
        names = list(self._pools)
        self._pools.clear()
        self._slots.clear()
        with contextlib.suppress(StoreUnavailable):
            for chunk in _chunks(names):
                await self._call([Wish(name, 0, 0, 0, 0) for name in chunk], leave=True)

    async def _settle(self) -> None:
        """Ask for all that is due, and again if an answer makes something due: a share to be given back, for example."""
        for _ in range(_ROUNDS):
            self._wake.clear()
            since = self._loop.time()
            needs = self._needs()
            self._calm_s = max(_CALM_S, _LOOK_SHARE * (self._loop.time() - since))
            for name in [name for name in self._pools if name not in needs]:
                del self._pools[name]
                self._slots.pop(name.removeprefix(_REPLICA), None)
                self._shares.pop(name.removeprefix(_TENANT), None)
            due = [name for name, need in needs.items() if self._due(name, need)]
            if not due:
                return
            more = False
            for chunk in _chunks(due):
                more = await self._ask({name: needs[name] for name in chunk}) or more
            if more:
                self.on_more()
        self._wake.set()

    async def _ask(self, needs: Mapping[str, _Need]) -> bool:
        """Settle these pools; True when one of them allows more than before."""
        now, before = self._loop.time(), {name: self._pools[name].limit for name in needs if name in self._pools}
        wishes = [self._wish(name, need, now) for name, need in needs.items()]
        for wish, grant in zip(wishes, await self._call(wishes), strict=True):
            pool = self._pools.get(wish.name)
            if grant is not None and pool is not None:
                pool.held, pool.target, pool.needed, pool.granted_at = grant.held, grant.target, grant.needed, now
        self._owing = any(pool.needed for pool in self._pools.values())
        return any(self._pools[name].limit > before.get(name, 0) for name in needs if name in self._pools)

    async def _call(self, wishes: Sequence[Wish], *, leave: bool = False) -> Sequence[Grant | None]:
        self._number += 1
        return await self._lender.lend(self.id, self._number, wishes, spare=not self.draining, leave=leave, dead=self.dead)

    def _wish(self, name: str, need: _Need, now: float) -> Wish:
        """Binds this gateway to what it says it will keep."""
        pool = self._pools.setdefault(name, _Pool(need.total))
        if name.startswith(_REPLICA):
            self._slots[name.removeprefix(_REPLICA)] = pool
        elif name.startswith(_TENANT):
            self._shares[name.removeprefix(_TENANT)] = pool
        known = pool.granted_at is not None
        held = pool.held
        # After so long others may have what was ours; only what is in use is claimed.
        expired = pool.granted_at is not None and now - pool.granted_at >= TTL_S
        pool.held = max(need.used, 0 if expired or not known else min(held, pool.target))
        pool.total, pool.asked, pool.asked_at, pool.hinted = need.total, need.want, now, False
        return Wish(name, need.total, pool.held, need.want, held)

    def _due(self, name: str, need: _Need) -> bool:
        """Whether a call about this pool can change anything now."""
        pool = self._pools.get(name)
        if pool is None or pool.hinted or pool.total != need.total:
            return True
        if pool.needed and pool.held > max(need.used, pool.target):
            return True
        age_s = self._loop.time() - pool.asked_at
        want = min(need.want, need.total)
        if want > pool.held and (need.want != pool.asked or age_s >= TENURE_S):
            return True
        resting = not need.want and pool.held == pool.target and not pool.needed
        return age_s >= (TTL_S / 3 if resting else PERIOD_S)

    def _pause_s(self) -> float:
        """Until something is due even if nothing happens."""
        short = any(pool.held < min(pool.asked, pool.total) for pool in self._pools.values())
        return TENURE_S if short else PERIOD_S

    def _needs(self) -> dict[str, _Need]:
        """Every pool that this gateway has a part in, and what it uses and wants of it."""
        ledger, config, needs = self._ledger, self._current.config, {}
        for replica in self._fleet.replicas():
            if replica.state is State.ADMITTED and replica.model in config.models:
                used = ledger.inflight(replica.incarnation)
                needs[_replica(replica.incarnation)] = _Need(replica.concurrency, used, used + ledger.held(replica.model))
        for name, tenant in config.tenants.items():
            used, held = ledger.tenant_inflight(name), ledger.tenant_held(name)
            if tenant.limits.concurrency is not None:
                needs[_tenant(name)] = _Need(tenant.limits.concurrency, used, used + held)
            if tenant.limits.max_held is not None:
                needs[_held(name)] = _Need(tenant.limits.max_held, held, held + 1 if held else 0)
        return needs


@dataclass(frozen=True, slots=True)
class _Need:
    total: int
    used: int
    want: int


_REPLICA = "replica:"
_TENANT = "tenant:"


def _replica(incarnation: str) -> str:
    return _REPLICA + incarnation


def _tenant(name: str) -> str:
    return _TENANT + name


def _held(name: str) -> str:
    return f"held:{name}"


def _chunks(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK))


def payload(wishes: Sequence[Wish]) -> list[dict[str, object]]:
    """The wishes as permits.lua reads them."""
    return [asdict(wish) for wish in wishes]
