"""How a gateway reaches a replica: never by an address that leads elsewhere from where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import reach
from policies.config import ConfigError, parse
from policies.expose import Expose
from policies.reach import Way
from policies.replica import Replica, State

HERE, ELSEWHERE = reach.place("boot-1\n", 4026531840), reach.place("boot-2", 4026531840)


def admitted(**more: str) -> Replica:
    return Replica(id="m#0", model="m", state=State.ADMITTED, fence=1, host="b", address="198.18.0.2", port=8000, **more)


def test_in_its_place_a_box_is_reached_itself():
    assert reach.way(admitted(place=HERE, door="10.0.0.5:20003"), HERE) == Way("198.18.0.2", 8000, far=False)
    assert reach.barred(admitted(place=HERE), HERE) == ""


def test_a_record_of_an_older_restorer_is_of_this_host():
    assert reach.way(admitted(), HERE) == Way("198.18.0.2", 8000, far=False)


@pytest.mark.parametrize(
    ("door", "way"),
    [("10.0.0.5:20003", Way("10.0.0.5", 20003, far=True)), ("[fd00::5]:20003", Way("fd00::5", 20003, far=True)), ("", None)],
)
def test_whoever_is_elsewhere_goes_through_the_door_or_not_at_all(door: str, way: Way | None):
    record = admitted(place=ELSEWHERE, door=door)
    assert reach.way(record, HERE) == way
    assert bool(reach.barred(record, HERE)) is (way is None)
    # Another network namespace of the same kernel is another place.
    assert reach.way(admitted(place=reach.place("boot-1", 1), door=door), HERE) == way


@given(address=st.ip_addresses().map(str), port=st.integers(1, 65535))
def test_a_door_is_found_again_in_its_text(address: str, port: int):
    assert reach.way(admitted(place=ELSEWHERE, door=reach.door(address, port)), HERE) == Way(address, port, far=True)


def test_the_reason_names_the_host_and_what_mends_it():
    why = reach.barred(admitted(place=ELSEWHERE), HERE)
    assert why == "it is on b, and has no door there: set restorer.expose on that host, or use a gateway on it"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"address": "host.example.org"}, "is no IP address"),
        ({"address": "0.0.0.0"}, "leads to no host"),
        ({"address": "10.0.0.5", "ports": "2000-1000"}, "is no range of ports"),
        ({"address": "10.0.0.5", "ports": "http"}, "is no range of ports"),
        ({"address": "10.0.0.5", "ports": "1-70000"}, "is no range of ports"),
        ({"address": "10.0.0.5", "allow": []}, "at least 1 item"),
        ({"address": "10.0.0.5", "allow": ["everybody"]}, "does not appear to be an IPv4 or IPv6 network"),
    ],
)
def test_what_cannot_be_exposed_is_refused_in_words(wrong: dict[str, object], said: str):
    engine = {"kind": "http", "command": ["/bin/engine"]}
    document = {"models": {"m": {"engine": engine}}, "restorer": {"expose": {"allow": ["10.0.0.0/8"], **wrong}}}
    with pytest.raises(ConfigError, match=said):
        parse(document)


def test_ports_are_a_range_or_one():
    assert Expose(address="10.0.0.5", allow=("10.0.0.0/8",)).range == range(20000, 21000)
    assert Expose(address="10.0.0.5", ports=7000, allow=("10.0.0.0/8",)).range == range(7000, 7001)
    assert Expose(address="fd00::5", ports="7000-7001", allow=("fd00::/8",)).range == range(7000, 7002)
