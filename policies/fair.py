"""The order among requests that wait for one model: priorities, then fair shares among tenants, then arrival.

Start-time fair queueing with one flow for each tenant: a tenant's next request is due at a virtual time, each grant moves
that time on by ``1 / weight``, and the earliest goes first. A tenant that comes late is due now, not at the end of
somebody else's flood, and saves up nothing while it asks for nothing. A higher priority goes before all of it.

Owns the order alone: it does not know what waits, nor why a tenant is blocked. Every operation takes a time that grows
with the logarithm of the waiters and of the tenants; :meth:`FairQueue.position` also looks at each tenant that waits.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_UNIT = 1 << 30
"""What a grant costs a tenant of weight 1. Whole numbers, so that positions and order never disagree by a rounding."""


class Share(NamedTuple):
    """What a tenant may expect."""

    weight: float = 1.0
    """Its part of the grants while others of its priority wait too; more than 0."""
    priority: int = 0

    @property
    def stride(self) -> int:
        """What a grant costs, in virtual time."""
        return max(1, round(_UNIT / self.weight))


class Place(Generic[T]):
    """One item's place in the queue; valid until it is popped or removed."""

    __slots__ = ("flow", "item", "line", "number")

    def __init__(self, item: T, flow: _Flow[T]) -> None:
        self.item = item
        self.flow = flow
        self.line = flow.line
        self.number = 0


class FairQueue(Generic[T]):
    """The waiters of one model.

    Args:
        share: tenant -> its share; asked when the tenant begins to wait, and by :meth:`reshare`.
    """

    def __init__(self, share: Callable[[str], Share]) -> None:
        self._share = share
        self._flows: dict[str, _Flow[T]] = {}
        self._classes: dict[int, _Class[T]] = {}
        self._order: list[int] = []
        self._size = 0
        self._made = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        """All items, each tenant's in order."""
        for flow in self._flows.values():
            for line in (flow.returned, flow.line):
                for place in line:
                    yield place.item

    @property
    def ready(self) -> bool:
        """Somebody waits who is not blocked."""
        return self.next_tenant() is not None

    def push(self, item: T, tenant: str, *, returned: bool = False) -> Place[T]:
        """Take a place behind the tenant's others; ``returned``: it had its turn and could not use it, so it goes before
        them, and the turn is not charged."""
        flow = self._flows.get(tenant)
        if flow is None:
            self._made += 1
            flow = self._flows[tenant] = _Flow(tenant, self._made, self._share(tenant))
        place, idle = Place(item, flow), not len(flow)
        if idle:
            self._rank(flow)
            flow.due = max(flow.due, flow.rank.now)
        if returned:
            place.line = flow.returned
            flow.due -= flow.stride
        place.line.append(place)
        self._size += 1
        if idle or returned:
            self._enlist(flow)
        return place

    def remove(self, place: Place[T]) -> None:
        """The item leaves without a grant."""
        place.line.remove(place)
        self._left(place.flow)

    def next_tenant(self) -> str | None:
        """Whose turn it is; None when nobody waits who is not blocked."""
        flow = self._next()
        return None if flow is None else flow.tenant

    def head(self) -> T:
        """The item whose turn it is.

        Raises:
            IndexError: nobody waits who is not blocked.
        """
        return self._head().item

    def pop(self) -> T:
        """The item whose turn it is, charged to its tenant.

        Raises:
            IndexError: nobody waits who is not blocked.
        """
        place = self._head()
        flow = place.flow
        place.line.remove(place)
        flow.rank.now = max(flow.rank.now, flow.due)
        flow.due += flow.stride
        self._left(flow)
        if len(flow):
            self._enlist(flow)
        return place.item

    def block(self, tenant: str) -> None:
        """Pass over this tenant until it is unblocked; its items keep their places."""
        flow = self._flows[tenant]
        flow.blocked, flow.entry = True, None

    def unblock(self, tenant: str) -> None:
        """Let it take part again. Nothing for a tenant that is not blocked."""
        flow = self._flows.get(tenant)
        if flow is not None and flow.blocked:
            flow.blocked = False
            if len(flow):
                # What it could not use meanwhile is not saved up.
                flow.due = max(flow.due, flow.rank.now)
                self._enlist(flow)

    def position(self, place: Place[T]) -> int:
        """How many grants until this item has its turn, 1 = next, if nobody comes or leaves and all are granted."""
        flow = place.flow
        before = place.line.rank(place) + (len(flow.returned) if place.line is flow.line else 0)
        at = flow.due + before * flow.stride
        for other in self._flows.values():
            if other is flow or other.blocked or not len(other):
                continue
            if other.rank is flow.rank:
                before += _due_before(other, at + (other.number < flow.number))
            elif other.rank.priority > flow.rank.priority:
                before += len(other)
        return before + 1

    def reshare(self) -> None:
        """Shares may have changed: sort all tenants in again."""
        for flow in self._flows.values():
            before = flow.priority
            flow.priority, flow.stride = (share := self._share(flow.tenant)).priority, share.stride
            if len(flow) and flow.priority != before:
                self._rank(flow)
                flow.due = flow.rank.now
                self._enlist(flow)

    def _head(self) -> Place[T]:
        flow = self._next()
        if flow is None:
            raise IndexError("nobody may go")
        return (flow.returned if len(flow.returned) else flow.line).head()

    def _next(self) -> _Flow[T] | None:
        for priority in self._order:
            flow = self._classes[-priority].first()
            if flow is not None:
                return flow
        return None

    def _rank(self, flow: _Flow[T]) -> None:
        """Into the class of its priority."""
        found = self._classes.get(flow.priority)
        if found is None:
            found = self._classes[flow.priority] = _Class(flow.priority)
            insort(self._order, -flow.priority)
        flow.rank = found

    def _enlist(self, flow: _Flow[T]) -> None:
        """Due at its new time; the entry it had before is void."""
        if not flow.blocked:
            flow.entry = _Entry(flow)
            heapq.heappush(flow.rank.heap, flow.entry)

    def _left(self, flow: _Flow[T]) -> None:
        self._size -= 1
        if not len(flow):
            flow.entry = None
        if not self._size:
            # Nobody waits, nobody is owed anything; so the past does not grow.
            self._flows.clear()
            self._classes.clear()
            self._order.clear()


class _Entry(Generic[T]):
    """A flow's line in the heap of its class."""

    __slots__ = ("due", "flow")

    def __init__(self, flow: _Flow[T]) -> None:
        self.due = flow.due
        self.flow = flow

    def __lt__(self, other: _Entry[T]) -> bool:
        return (self.due, self.flow.number) < (other.due, other.flow.number)


class _Class(Generic[T]):
    """All flows of one priority."""

    __slots__ = ("heap", "now", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.heap: list[_Entry[T]] = []
        self.now = 0
        """Virtual time: when the latest grant was due."""

    def first(self) -> _Flow[T] | None:
        """The flow that is due first; void entries go on the way."""
        while self.heap:
            entry = self.heap[0]
            if entry.flow.entry is entry and entry.flow.rank is self:
                return entry.flow
            heapq.heappop(self.heap)
        return None


class _Flow(Generic[T]):
    """One tenant's waiters."""

    __slots__ = ("blocked", "due", "entry", "line", "number", "priority", "rank", "returned", "stride", "tenant")

    rank: _Class[T]

    def __init__(self, tenant: str, number: int, share: Share) -> None:
        self.tenant = tenant
        self.priority = share.priority
        self.stride = share.stride
        self.number = number
        """Settles ties."""
        self.returned: _Line[T] = _Line()
        self.line: _Line[T] = _Line()
        self.due = 0
        self.entry: _Entry[T] | None = None
        self.blocked = False

    def __len__(self) -> int:
        return len(self.returned) + len(self.line)


def _due_before(flow: _Flow[T], at: int) -> int:
    """How many of the flow's items are due before ``at``."""
    return min(len(flow), max(0, -((flow.due - at) // flow.stride)))


class _Line(Generic[T]):
    """First in, first out, with exits anywhere and exact ranks: a Fenwick tree counts who is left below each number."""

    __slots__ = ("_counts", "_next", "_places")

    def __init__(self) -> None:
        self._places: OrderedDict[int, Place[T]] = OrderedDict()
        self._counts: list[int] = [0] * 8
        self._next = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place[T]]:
        return iter(self._places.values())

    def head(self) -> Place[T]:
        return next(iter(self._places.values()))

    def append(self, place: Place[T]) -> None:
        if self._next + 1 >= len(self._counts):
            self._renumber()
        place.number = self._next
        self._places[place.number] = place
        self._next += 1
        self._add(place.number, 1)

    def remove(self, place: Place[T]) -> None:
        del self._places[place.number]
        self._add(place.number, -1)

    def rank(self, place: Place[T]) -> int:
        """How many are before it."""
        index, before = place.number, 0
        while index:
            before += self._counts[index]
            index &= index - 1
        return before

    def _add(self, number: int, change: int) -> None:
        index = number + 1
        while index < len(self._counts):
            self._counts[index] += change
            index += index & -index

    def _renumber(self) -> None:
        """Numbers from 0 again, with room for as many again: a cost that each of them shares."""
        places = list(self._places.values())
        self._places = OrderedDict(enumerate(places))
        self._next = len(places)
        size = max(8, 1 << (2 * len(places) + 1).bit_length())
        self._counts = [0] * size
        for number, place in enumerate(places):
            place.number = number
            self._counts[number + 1] = 1
        for index in range(1, size):
            parent = index + (index & -index)
            if parent < size:
                self._counts[parent] += self._counts[index]
