"""Where a gateway is, and what follows: replicas that it cannot reach get nothing from it, and it says why, once."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually
from fake_replica import ADMIN, FakeReplica, Fleet, replica_server, serving

from gateway import whereabouts
from gateway.__main__ import _find_itself as find_itself
from gateway.settings import SettingsError
from policies import reach
from policies.reach import Way

ELSEWHERE = reach.place("another-boot", 1)
BEHIND = {"address": "192.0.2.1", "place": ELSEWHERE}
"""Where a box of another host is: nothing leads there from here."""


def door_of(fake: FakeReplica) -> str:
    return reach.door(fake.address, fake.port)


async def moved(fleet: Fleet, fake: FakeReplica, **changes: Any) -> None:
    """Admit a replica whose record says so."""
    record = await fleet.admit(fake)
    await fleet.write(record.model_copy(update=changes))


def test_here_is_this_kernel_and_network_namespace():
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert whereabouts.here() == f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}"


async def test_a_replica_elsewhere_is_asked_through_its_door(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        await moved(Fleet(store), fake, **BEHIND, door=door_of(fake), incarnation="far")
        answer = await served.chat()
        assert (answer.status_code, answer.headers["x-rewake-incarnation"]) == (200, "far")


async def test_one_without_a_door_gets_nothing_and_the_reason_is_said(store, store_server, caplog):
    async with replica_server() as fake, serving(store_server) as served:
        await moved(Fleet(store), fake, **BEHIND, host="b", incarnation="far")
        registry = served.gateway.registry
        await eventually(lambda: any(one.incarnation == "far" for one in registry.replicas()))
        assert registry.available("m") == ()
        (listed,) = (await served.client.get("/admin/v1/replicas", headers=ADMIN)).json()["replicas"]
        assert listed["barred"].startswith("it is on b, and has no door there")
        told = (await served.client.get("/admin/v1/why?of=m", headers=ADMIN)).json()
        assert told["brief"] == f"m#0: {listed['barred']}"
        assert [record.getMessage() for record in caplog.records].count("replica cannot be reached from here") == 1


@pytest.mark.parametrize("far", [False, True])
def test_only_far_connections_give_up_on_silent_hosts(far):
    with whereabouts.socket_for(Way("127.0.0.1", 1, far)) as made:
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == (whereabouts.LOST_S * 1000 if far else 0)
        assert bool(made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) is far
        assert not made.getblocking()


def test_an_address_of_either_family_has_its_socket():
    for address, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        with whereabouts.socket_for(Way(address, 1, far=True)) as made:
            assert made.family == family


def test_a_gateway_that_cannot_tell_where_it_is_says_so_at_its_start(monkeypatch):
    def hidden() -> str:
        raise FileNotFoundError(2, "No such file or directory", "/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(whereabouts, "here", hidden)
    with pytest.raises(SettingsError, match=r"boot_id: No such file or directory; it must be readable for gateways"):
        find_itself()
