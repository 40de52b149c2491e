"""What tenants may still use this minute, over all gateways: spent here without asking, leased from the store beforehand.

Each tenant that was here lately has an account: leased requests, and the tokens left as the store last said. Spending is
synchronous. Accounts are settled with the store all together, a few times a second, in the background; sooner when a lease runs
low, and at once when somebody waits. What is leased follows the pace, so that at a steady one nobody ever waits. While the
store does not answer, each gateway goes on with its share of every budget, and owns up afterwards. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway import logs
from gateway.current import Current
from gateway.errors import RateLimited, StoreUnavailable
from policies import tenancy
from policies.config import Config
from policies.limits import Claim, Settled, keep, refilled, wait_s

_PERIOD_S = 0.25
_CALM_S = 0.02
"""Tokens of a tenant that is near its end are told to the others this soon, all that came together in one call."""
_NEAR = 1 / 8
"""Near its end: less than this part of a minute's tokens is left. Before that the next period is soon enough."""
_LOW = 1 / 4
"""A lease with less than this part of what should be at hand is renewed before the period ends."""
_FRESH_S = 1.0
"""What the store said holds for so long; accounts in use are settled more often than that."""
_IDLE_S = 10.0
"""An account not used for this long is closed: what it had leased goes back."""
_ANSWER_S = 0.5
"""The store has this long to answer; after that this gateway goes on alone."""
_RETRY_S = 1.0
_MEMO_S = 1.0
"""An empty budget is believed to be empty for at most this long: another gateway may give back what it has leased."""


class Budgets(Protocol):
    """The tenants' budgets as all gateways share them."""

    async def settle(self, claims: Sequence[Claim]) -> Sequence[Settled]:
        """One answer for each claim.

        Raises:
            StoreUnavailable: nothing is known about any of them.
        """


@dataclass(slots=True)
class _Account:
    """One tenant at this gateway."""

    tenant: str
    used_at: float
    ready: bool = False
    """What is leased may be spent without a further look: the store was asked lately, and there is no debt."""
    leased: float = 0.0
    low: float = 0.0
    """With less than this leased, more should be on its way."""
    spent: int = 0
    """Requests in this period."""
    period_at: float = -math.inf
    """When it began."""
    pace: float = 0.0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    left: float | None = None
    """Requests left for all, as the store said; None: it never did."""
    tokens: float | None = None
    """Tokens left for all: as the store said, less what was used here since."""
    plenty: float = math.inf
    """With more tokens left than this the others need not hear soon of what is used here; as the store was last asked."""
    owed: int = 0
    """Tokens used here that the store does not know of."""
    settled_at: float = -math.inf
    stale: bool = False
    """Something has happened since that the store has to be asked about."""
    empty_until: float = -math.inf
    """No requests are left before this moment."""
    made: float = 0.0
    """Requests that this gateway gave itself while the store was lost."""
    alone_at: float | None = None
    """Since when (and up to when it has refilled itself) it goes on alone."""


class Limits:
    """The budgets of one gateway process. Needs a running event loop.

    Args:
        gateways: how many gateways are alive, this one included.
        clock: seconds, monotonic.
    """

    def __init__(self, current: Current, *, store: Budgets, gateways: Callable[[], int], clock: Callable[[], float]) -> None:
        self._current = current
        self._store = store
        self._gateways = gateways
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._due = asyncio.Event()
        self._telling: asyncio.TimerHandle | None = None
        self._lost = self._leaving = False
        current.on_change.append(self._reloaded)
        self.on_limited: Callable[[str, str], None] = lambda tenant, limit: None
        """Called with the tenant and ``requests`` or ``tokens`` whenever a request is turned away."""

    def charge_request(self, tenant: str) -> bool:
        """Pay for one request. False: nothing is leased here at the moment, so :meth:`obtain` has to be awaited.

        Raises:
            RateLimited: the tenant has used up what it may use for now.
        """
        account = self._accounts.get(tenant)
        if account is None or not account.ready or account.leased < 1:
            return self._charge(tenant)
        account.leased -= 1
        account.spent += 1
        if account.leased < account.low:
            account.low = 0.0
            self._due.set()
        return True

    def _charge(self, tenant: str) -> bool:
        """Pay for one request when it is not clear that it can be paid."""
        limits = self._limits(tenant)
        if limits is None:
            return True
        now = self._clock()
        account = self._account(tenant, now)
        if self._lost:
            self._refill_alone(account, limits, now)
        elif account.stale or now >= account.settled_at + _FRESH_S:
            return False
        if account.tokens is not None and account.tokens <= 0:
            self._refuse_debt(account, account.tokens, limits, now)
        if limits.requests_per_minute is None:
            return True
        if account.leased >= 1:
            account.leased -= 1
            account.spent += 1
            return True
        if self._lost or now < account.empty_until:
            raise self._used_up(account, limits.requests_per_minute, now)
        return False

    async def obtain(self, tenant: str) -> None:
        """Pay for one request after :meth:`charge_request` could not tell. All that wait share one call to the store.

        Raises:
            RateLimited: the tenant has used up what it may use for now.
        """
        loop = asyncio.get_running_loop()
        while not self.charge_request(tenant):
            account = self._accounts[tenant]
            paid: asyncio.Future[None] = loop.create_future()
            account.waiting.append(paid)
            self._due.set()
            try:
                async with asyncio.timeout(2 * _ANSWER_S):
                    return await paid
            except TimeoutError:
                self._lose("no answer in time")
            except asyncio.CancelledError:
                if paid.done() and not paid.cancelled() and paid.exception() is None:
                    account.leased += 1
                    account.spent -= 1
                raise

    def charge_tokens(self, tenant: str, tokens: int) -> None:
        """Tokens that an answer took, told after it. May put the tenant in debt."""
        account = self._accounts.get(tenant)
        if account is not None and account.ready and account.tokens is not None and 0 < tokens < account.tokens - account.plenty:
            account.owed += tokens
            account.tokens -= tokens
            return
        limits = self._limits(tenant)
        if limits is None or limits.tokens_per_minute is None or tokens <= 0:
            return
        if account is None:
            account = self._account(tenant, self._clock())
        account.owed += tokens
        if account.tokens is not None:
            account.tokens -= tokens
            if account.tokens > limits.tokens_per_minute * _NEAR:
                return
            account.ready = account.ready and account.tokens > 0
        if self._telling is None and not self._lost:
            self._telling = asyncio.get_running_loop().call_later(_CALM_S, self._due.set)

    def indebted(self, tenant: str) -> None:
        """Some gateway has just put the tenant in debt: ask before it goes on here."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.stale, account.ready = True, False

    async def run(self) -> None:
        """Settle accounts until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S if self._lost else _PERIOD_S):
                    await self._due.wait()
            await self._settle()

    async def leave(self) -> None:
        """Give back what is leased, and tell what is owed: this gateway has no request left."""
        self._leaving = True
        await self._settle()
        self._leaving = False

    # ------------------------------------------------------------ with the store

    async def _settle(self) -> None:
        self._due.clear()
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        accounts = [account for account in list(self._accounts.values()) if self._open(account)]
        if not accounts:
            return
        claims = [self._claim(account) for account in accounts]
        try:
            async with asyncio.timeout(_ANSWER_S):
                answers = await self._store.settle(claims)
        except (StoreUnavailable, TimeoutError) as error:
            for account, claim in zip(accounts, claims, strict=True):
                # Told twice is better than not at all; leased requests that were on their way back are lost to this minute.
                account.owed += claim.owed
                account.made -= min(claim.back, 0.0)
            self._lose(str(error) or "no answer in time")
            return
        if self._lost:
            self._lost = False
            logs.info("tenants' budgets are shared again")
        now = self._clock()
        for account, claim, answer in zip(accounts, claims, answers, strict=True):
            self._settled(account, claim, answer, now)

    def _open(self, account: _Account) -> bool:
        """Whether there is anything to settle; forgets the accounts of tenants that are no more, or that have no limits."""
        if self._limits(account.tenant) is not None:
            return True
        del self._accounts[account.tenant]
        self._release(account)
        return False

    def _claim(self, account: _Account) -> Claim:
        """What to ask for and tell; takes it out of the account, so that nothing is told twice."""
        limits, now = self._limits(account.tenant) or tenancy.Limits(), self._clock()
        if account.spent or account.owed:
            account.used_at = now
        at_hand = self._at_hand(account, now)
        account.low = _LOW * at_hand
        surplus = max(0, math.floor(account.leased) - 2 * at_hand)
        account.leased -= surplus
        claim = Claim(
            tenant=account.tenant,
            requests=limits.requests_per_minute,
            tokens=limits.tokens_per_minute,
            need=len(account.waiting),
            more=max(0, at_hand - math.floor(account.leased)),
            back=surplus - account.made,
            owed=account.owed,
        )
        account.owed, account.made = 0, 0.0
        return claim

    def _at_hand(self, account: _Account, now: float) -> int:
        """Requests to have leased from now on."""
        if self._leaving or now >= account.used_at + _IDLE_S:
            account.pace, account.spent = 0.0, 0
            return 0
        if now < account.period_at + _PERIOD_S:
            # In the middle of a period the pace is not known to have fallen, but may have grown already.
            return keep(account.spent, 2 * account.pace)[0]
        at_hand, account.pace = keep(account.spent, account.pace)
        account.spent, account.period_at = 0, now
        return at_hand

    def _settled(self, account: _Account, claim: Claim, answer: Settled, now: float) -> None:
        """Take an answer in, and serve those who waited for it in their order."""
        account.leased += answer.granted
        account.left = answer.requests
        account.tokens = answer.tokens - account.owed
        account.settled_at, account.alone_at, account.stale = now, None, False
        # Tokens that are not limited are always said to be 0.
        account.ready = claim.tokens is None or account.tokens > 0
        account.plenty = math.inf if claim.tokens is None else claim.tokens * _NEAR
        if answer.granted < claim.need + claim.more:
            account.low = 0.0  # there is not so much, and asking again soon would change nothing
        short = claim.requests is not None and answer.requests < 1
        account.empty_until = now + min(_MEMO_S, wait_s(answer.requests, limit=claim.requests or 1, needed=1)) if short else now
        self._release(account)
        if (self._leaving or now >= account.used_at + _IDLE_S) and not account.owed and account.leased < 1:
            self._accounts.pop(account.tenant, None)

    def _release(self, account: _Account) -> None:
        """Everyone who waits is paid for, or told why not."""
        waiting, account.waiting = account.waiting, deque()
        for paid in waiting:
            if paid.done():
                continue
            try:
                if self.charge_request(account.tenant):
                    paid.set_result(None)
                else:
                    account.waiting.append(paid)
            except RateLimited as refused:
                paid.set_exception(refused)
        if account.waiting:
            self._due.set()

    # ------------------------------------------------------------ without it

    def _lose(self, reason: str) -> None:
        """Go on alone; whoever waits is served at once."""
        if not self._lost:
            self._lost = True
            logs.warning("tenants' budgets are not shared; this gateway keeps to its part of each", reason=reason)
        for account in list(self._accounts.values()):
            account.ready = False
            self._release(account)

    def _refill_alone(self, account: _Account, limits: tenancy.Limits, now: float) -> None:
        """This gateway's share of what would have come since; at first its share of what was left."""
        others = max(1, self._gateways())
        if account.alone_at is None:
            requests, tokens = limits.requests_per_minute or 0, limits.tokens_per_minute or 0
            first = math.floor(max(0.0, requests if account.left is None else account.left) / others)
            account.leased += first
            account.made += first
            left = tokens if account.tokens is None else account.tokens
            account.tokens = left / others if left > 0 else left
            account.alone_at = now
        seconds, account.alone_at = now - account.alone_at, now
        if limits.requests_per_minute is not None:
            share = limits.requests_per_minute / others
            made = max(0.0, refilled(account.leased, limit=share, seconds=seconds) - account.leased)
            account.leased += made
            account.made += made
        if limits.tokens_per_minute is not None and account.tokens is not None:
            share = limits.tokens_per_minute / others
            account.tokens = max(account.tokens, refilled(account.tokens, limit=share, seconds=seconds))

    # ------------------------------------------------------------ one tenant

    def _reloaded(self, before: Config, after: Config) -> None:
        """Limits may have changed: look at them again."""
        for account in self._accounts.values():
            account.ready = False

    def _limits(self, tenant: str) -> tenancy.Limits | None:
        """None: nothing that this module would have to count."""
        found = self._current.tenants.get(tenant)
        if found is None or (found.limits.requests_per_minute is None and found.limits.tokens_per_minute is None):
            return None
        return found.limits

    def _account(self, tenant: str, now: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(tenant, now)
        account.used_at = now
        return account

    def _refuse_debt(self, account: _Account, tokens: float, limits: tenancy.Limits, now: float) -> None:
        """Unless the debt has been paid off since the store told of it."""
        limit = limits.tokens_per_minute
        if limit is None:
            return
        since = now if account.alone_at is not None else account.settled_at
        left = refilled(tokens, limit=limit, seconds=now - since)
        if left <= 0:
            self.on_limited(account.tenant, "tokens")
            raise _refusal(account.tenant, "tokens", limit, wait_s(left, limit=limit, needed=1))

    def _used_up(self, account: _Account, limit: int, now: float) -> RateLimited:
        self.on_limited(account.tenant, "requests")
        if account.alone_at is not None:
            seconds = wait_s(account.leased, limit=limit / max(1, self._gateways()), needed=1)
        else:
            left = refilled(account.left or 0.0, limit=limit, seconds=now - account.settled_at)
            seconds = wait_s(left, limit=limit, needed=1)
        return _refusal(account.tenant, "requests", limit, seconds)


def _refusal(tenant: str, what: str, limit: int, seconds: float) -> RateLimited:
    return RateLimited(
        f"Tenant {tenant!r} has used its {limit} {what} a minute; there is more in {math.ceil(seconds)} s.",
        retry_after_s=seconds,
        headers={
            f"x-ratelimit-limit-{what}": str(limit),
            f"x-ratelimit-remaining-{what}": "0",
            f"x-ratelimit-reset-{what}": f"{seconds:.3f}s",
        },
    )
