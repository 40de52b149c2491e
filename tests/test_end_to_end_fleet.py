"""One installation over several hosts: replicas are reached through their doors, what ends one's part ends no other's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import Fleet, fleet, streaming
from fleet_engine import words

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two hosts; engines start cold."""
    hold = tmp_path_factory.mktemp("hold")
    with fleet({"m": streaming(hold / "m")}) as made:
        made.start()
        yield made


def test_a_gateway_elsewhere_is_served_through_a_door(pair: Fleet) -> None:
    gateway = pair.gateways[0]
    answer = gateway.complete("m")
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == " ".join(words("The capital of France is", 4))
    (replica,) = gateway.replicas("m")
    host = pair.hosts[replica["host"]]
    assert replica["door"].startswith(f"{host.node.address}:20")
    assert replica["place"].endswith(f"/{host.node.inode}")
    assert replica["barred"] == ""
