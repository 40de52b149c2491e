"""The fair order: arrival within a tenant, shares between tenants, priorities before all, positions that come true."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.fair import FairQueue, Place, Share


def queue(**shares: Share) -> FairQueue[str]:
    return FairQueue(lambda tenant: shares.get(tenant, Share()))


def drain(waiting: FairQueue[str]) -> list[str]:
    order = []
    while waiting.ready:
        order.append(waiting.pop())
    return order


def test_one_tenant_goes_in_order_of_arrival() -> None:
    waiting = queue()
    for n in range(100):
        waiting.push(str(n), "")
    assert drain(waiting) == [str(n) for n in range(100)]
    assert (len(waiting), waiting.ready) == (0, False)


def test_gateway_case_66_a_flood_leaves_the_next_tenant_the_first_round() -> None:
    waiting = queue()
    for n in range(1000):
        waiting.push(f"a{n}", "a")
    place = waiting.push("b", "b")
    assert waiting.position(place) <= 2
    assert "b" in [waiting.pop(), waiting.pop()]


def test_a_late_tenant_is_due_now_and_has_saved_up_nothing() -> None:
    waiting = queue()
    for n in range(100):
        waiting.push(f"a{n}", "a")
    for _ in range(50):
        waiting.pop()
    for n in range(50):
        waiting.push(f"b{n}", "b")
    served = Counter(waiting.pop()[0] for _ in range(20))
    assert abs(served["a"] - served["b"]) <= 1


def test_grants_are_shared_by_weight() -> None:
    waiting = queue(big=Share(weight=3), small=Share(weight=1))
    for n in range(100):
        waiting.push(f"b{n}", "big")
        waiting.push(f"s{n}", "small")
    served = Counter(waiting.pop()[0] for _ in range(40))
    assert served == {"b": 30, "s": 10}


def test_a_higher_priority_goes_first_whatever_the_weights() -> None:
    waiting = queue(low=Share(weight=1000), high=Share(weight=0.001, priority=1))
    waiting.push("l1", "low")
    for n in range(3):
        waiting.push(f"h{n}", "high")
    last = waiting.push("l2", "low")
    assert waiting.position(last) == 5
    assert drain(waiting) == ["h0", "h1", "h2", "l1", "l2"]


def test_who_had_a_turn_goes_before_everybody_and_is_not_charged_twice() -> None:
    waiting = queue()
    for n in range(3):
        waiting.push(f"a{n}", "a")
        waiting.push(f"b{n}", "b")
    assert [waiting.pop() for _ in range(3)] == ["a0", "b0", "a1"]
    place = waiting.push("a1", "a", returned=True)
    assert waiting.position(place) == 1
    assert drain(waiting) == ["a1", "b1", "a2", "b2"]


def test_a_blocked_tenant_is_passed_over_and_keeps_its_places() -> None:
    waiting = queue()
    for n in range(2):
        waiting.push(f"a{n}", "a")
    behind = waiting.push("b", "b")
    waiting.block("a")
    assert (waiting.next_tenant(), waiting.position(behind)) == ("b", 1)
    assert waiting.pop() == "b"
    assert not waiting.ready
    waiting.unblock("a")
    waiting.unblock("nobody")
    assert drain(waiting) == ["a0", "a1"]


def test_new_priorities_count_for_those_who_wait() -> None:
    shares = {"a": Share(), "b": Share()}
    waiting: FairQueue[str] = FairQueue(shares.__getitem__)
    for n in range(2):
        waiting.push(f"a{n}", "a")
        waiting.push(f"b{n}", "b")
    shares["b"] = Share(priority=5)
    waiting.reshare()
    assert drain(waiting) == ["b0", "b1", "a0", "a1"]


def test_ten_thousand_waiters_cost_no_more_each_than_a_hundred() -> None:
    """No operation looks at the whole queue. Generous, for busy machines: a scan would be a hundred times slower."""

    def seconds(count: int) -> float:
        waiting = queue()
        since = time.thread_time()
        places = [waiting.push(str(n), f"t{n % 7}") for n in range(count)]
        for place in places[::3]:
            waiting.position(place)
            waiting.remove(place)
        drain(waiting)
        return (time.thread_time() - since) / count

    few = min(seconds(100) for _ in range(20))
    assert seconds(10_000) < 10 * few


tenants = st.sampled_from("abc")


class Model(RuleBasedStateMachine):
    """The queue beside a list of what it must hold; every position is checked by serving a copy of the order."""

    @initialize(weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 3.0])] * 3), priorities=st.tuples(*[st.integers(0, 1)] * 3))
    def begin(self, weights: tuple[float, ...], priorities: tuple[int, ...]) -> None:
        self.shares = {name: Share(weights[n], priorities[n]) for n, name in enumerate("abc")}
        self.queue: FairQueue[int] = FairQueue(self.shares.__getitem__)
        self.places: dict[int, Place[int]] = {}
        self.owner: dict[int, str] = {}
        self.expected: list[int] = []
        self.blocked: set[str] = set()
        self.made = 0

    @rule(tenant=tenants, returned=st.booleans())
    def push(self, tenant: str, returned: bool) -> None:
        self.made += 1
        self.places[self.made] = self.queue.push(self.made, tenant, returned=returned)
        self.owner[self.made] = tenant
        self.expected.clear()

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.places)))
        self.queue.remove(self.places.pop(item))
        self.expected.clear()

    @precondition(lambda self: self.queue.ready)
    @rule()
    def pop(self) -> None:
        """Positions are a promise: with nobody coming or leaving, they are the order."""
        if not self.expected:
            free = [item for item in self.places if self.owner[item] not in self.blocked]
            self.expected = sorted(free, key=lambda item: self.queue.position(self.places[item]))
            positions = [self.queue.position(self.places[item]) for item in self.expected]
            assert positions == list(range(1, len(free) + 1))
        highest = max(self.shares[self.owner[i]].priority for i in self.places if self.owner[i] not in self.blocked)
        item = self.queue.pop()
        assert item == self.expected.pop(0)
        assert self.shares[self.owner[item]].priority == highest
        del self.places[item]

    @rule(tenant=tenants)
    def block(self, tenant: str) -> None:
        if any(self.owner[item] == tenant for item in self.places):
            self.queue.block(tenant)
            self.blocked.add(tenant)
            self.expected.clear()

    @rule(tenant=tenants)
    def unblock(self, tenant: str) -> None:
        self.queue.unblock(tenant)
        self.blocked.discard(tenant)
        self.expected.clear()

    @invariant()
    def it_holds_what_was_put_in(self) -> None:
        if hasattr(self, "queue"):
            assert sorted(self.queue) == sorted(self.places)
            assert len(self.queue) == len(self.places)
            if not self.places:
                self.blocked.clear()  # an empty queue remembers nothing


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(st.lists(tenants, min_size=60, max_size=60))
def test_backlogged_tenants_never_drift_apart(order: list[str]) -> None:
    """Whatever order they came in: while two of equal weight wait, their grants differ by one at most."""
    waiting = queue()
    left = Counter(order)
    for n, tenant in enumerate(order):
        waiting.push(f"{tenant}{n}", tenant)
    served: Counter[str] = Counter()
    while len([tenant for tenant in left if left[tenant] > served[tenant]]) == len(left):
        served[waiting.pop()[0]] += 1
        assert max(served[t] for t in left) - min(served[t] for t in left) <= 1
