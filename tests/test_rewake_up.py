"""`rewake up` as a process: what it starts, in which order it ends, what it leaves behind when it is killed."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
from collections.abc import Iterator

import httpx
import pytest
import redis
import yaml
from conftest import eventually, require_root, running_store
from fake_installation import Place, a_place, free_port, running
from processes import alive, owned, uid_of

NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as found:
        yield found


async def test_begins_all_and_ends_gateways_then_restorer_then_store(place: Place) -> None:
    place.write(workers=2)
    with running(place, restorer=("watch", str(place.socket))) as up:
        await eventually(lambda: len(place.events()) == 3)
        assert sorted(place.events()) == ["gateway0 begins", "gateway1 begins", "restorer begins"]
        children = place.children()
        assert sorted(children) == ["gateway-0", "gateway-1", "restorer", "store"]
        # As a terminal does it: to the whole foreground group.
        os.killpg(up.process.pid, signal.SIGINT)
        assert up.ends() == 0
    events = place.events()[3:]
    assert sorted(events[:4]) == ["gateway0 ends", "gateway0 got-SIGTERM", "gateway1 ends", "gateway1 got-SIGTERM"]
    assert events[4:] == ["restorer got-SIGTERM", "restorer store-there", "restorer ends"]
    assert not any(map(alive, children.values()))
    assert up.said[-1] == "rewake: stopped"


async def test_says_where_it_serves_what_does_not_work_and_passes_lines_on(place: Place) -> None:
    with running(place, gateway=("listen",)) as up:
        assert up.says("serving") == (
            f"rewake: serving m at http://127.0.0.1:{place.port}/v1; admin token in {place.run_dir}/admin-token; "
            "Ctrl-C stops everything"
        )
        assert up.says("cold starts only").startswith(
            "rewake: cold starts only, because CRIU is not usable: /no/such/criu not found; install CRIU 4.2 or later"
        )
        await eventually(lambda: {"restorer begins", "gateway0 begins"} <= set(place.events()))
        up.process.send_signal(signal.SIGTERM)
        assert up.ends() == 0
    assert "restorer | restorer says hello" in up.said
    assert "gateway-0 | gateway0 says hello" in up.said


async def test_makes_its_folders_and_the_token_for_the_right_accounts(place: Place) -> None:
    with running(place, gateway=("listen",)) as up:
        up.says("serving")
        me = os.geteuid()
        assert owned(place.state_dir) == (0o700, me)
        assert owned(place.run_dir) == (0o755, me)
        assert owned(place.run_dir / "admin-token") == (0o600, me)
        owner = NOBODY.pw_uid if me == 0 else me
        assert owned(place.socket) == (0o600, owner)
        assert owned(place.socket.parent) == (0o700, owner)
        assert uid_of(place.children()["store"]) == owner


async def test_a_second_one_on_the_same_run_dir_is_refused(place: Place) -> None:
    with running(place, gateway=("listen",)) as first:
        first.says("serving")
        token = (place.run_dir / "admin-token").read_text()
        with running(place) as second:
            assert second.ends() == 1
        assert second.said == [
            f"rewake: `rewake up` already runs on {place.run_dir} (pid {first.process.pid}); stop it, or set another run_dir"
        ]
        assert (place.run_dir / "admin-token").read_text() == token
        assert place.events() == ["restorer begins", "gateway0 begins"] or place.events() == [
            "gateway0 begins",
            "restorer begins",
        ]


@pytest.mark.parametrize("how", [(), ("unprivileged",)])
async def test_kill_9_leaves_no_child_and_the_next_one_starts(place: Place, how: tuple[str, ...]) -> None:
    if how:
        require_root()
    with running(place, gateway=how) as up:
        await eventually(lambda: len(place.events()) == 2)
        children = place.children()
        up.process.kill()
        await eventually(lambda: not any(map(alive, children.values())))
    assert {"gateway0 got-SIGTERM", "restorer got-SIGTERM"} <= set(place.events())
    with running(place, gateway=("listen",)) as up:
        up.says("serving")


async def test_the_next_one_waits_for_a_restorer_that_still_stops(place: Place) -> None:
    with running(place, restorer=("slow", "4")) as first:
        await eventually(lambda: len(place.events()) == 2)
        first.process.kill()
        first.process.wait()
        with running(place, gateway=("listen",)) as second:
            second.says("an earlier `rewake up` was killed; waiting for what it left to end: restorer (pid ")
            second.says("serving")
            await eventually(lambda: place.events().count("restorer begins") == 2)
    events = [event for event in place.events() if event.startswith("restorer")]
    # The orphan hears of it twice: from the kernel, and from the successor.
    assert events[0] == "restorer begins"
    assert events.index("restorer ends") < events.index("restorer begins", 1)


async def test_a_second_signal_cuts_the_gateways_off_and_still_lets_the_restorer_clean_up(place: Place) -> None:
    with running(place, gateway=("slow", "60"), restorer=("slow", "0.5")) as up:
        await eventually(lambda: len(place.events()) == 2)
        up.process.send_signal(signal.SIGINT)
        await eventually(lambda: "gateway0 got-SIGTERM" in place.events())
        assert "restorer got-SIGTERM" not in place.events()
        up.process.send_signal(signal.SIGINT)
        assert up.ends() == 0
    assert "gateway0 ends" not in place.events()
    assert place.events()[-2:] == ["restorer got-SIGTERM", "restorer ends"]


async def test_the_store_comes_back_after_it_died_and_the_others_go_on(place: Place) -> None:
    with running(place) as up:
        await eventually(lambda: len(place.events()) == 2)
        before = place.children()
        os.kill(before["store"], signal.SIGKILL)
        up.says("store was killed by SIGKILL")
        after = await eventually(lambda: (found := place.children()).get("store", before["store"]) != before["store"] and found)
        assert {name: pid for name, pid in after.items() if name != "store"} == {
            name: pid for name, pid in before.items() if name != "store"
        }
        with contextlib.closing(redis.Redis.from_url(f"unix://{place.socket}")) as client:
            await eventually(lambda: _pings(client))


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


async def test_a_store_of_ones_own_is_used_and_none_embedded(place: Place) -> None:
    (place.folder / "own").mkdir()
    with running_store(place.folder / "own") as url:
        place.write(store=url)
        with running(place, gateway=("listen",)) as up:
            up.says("serving")
            assert sorted(place.children()) == ["gateway-0", "restorer"]
            assert not place.socket.exists()


async def test_sighup_is_a_reload_unless_the_terminal_was_closed(place: Place) -> None:
    terminal, theirs = os.openpty()
    with running(place, gateway=("listen",), stdin=theirs) as up:
        os.close(theirs)
        up.says("serving")
        up.process.send_signal(signal.SIGHUP)
        up.says("rewake: reloaded; no setting has changed")
        os.close(terminal)
        up.process.send_signal(signal.SIGHUP)
        up.says("stopping: open responses may finish")
        assert up.ends() == 0


async def test_a_store_that_does_not_answer_ends_it_with_the_reason(place: Place) -> None:
    place.write(store=f"redis://127.0.0.1:{free_port()}")
    with running(place, store_s=0.3) as up:
        assert up.ends() == 1
    assert "does not answer within 0.3 s" in up.said[-1]
    assert place.events() == []


async def test_an_address_that_is_taken_ends_it_with_what_to_change(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.port)), running(place) as up:
        assert up.ends() == 1
    assert up.said[-1] == (
        f"rewake: cannot listen on 127.0.0.1:{place.port}: Address already in use; change gateway.host or gateway.port, "
        "or stop what has it"
    )
    assert place.events() == []


async def test_an_address_that_another_installation_shares_out_is_taken_too(place: Place) -> None:
    """Its workers' sockets share the port, and the kernel would let ours join them."""
    with socket.create_server(("127.0.0.1", place.port), reuse_port=True), running(place) as up:
        assert up.ends() == 1
    assert "Address already in use" in up.said[-1]
    assert place.events() == []


async def test_a_network_that_this_host_is_attached_to_is_refused(place: Place) -> None:
    document = yaml.safe_load(place.config.read_text())
    document["restorer"]["network"] = "127.0.0.0/16"
    place.config.write_text(yaml.safe_dump(document))
    with running(place) as up:
        assert up.ends() == 1
    assert up.said[-1].startswith("rewake: restorer.network is 127.0.0.0/16, but this host is attached to 127.0.0.0/8 (dev lo)")
    assert place.events() == []


async def test_a_run_dir_closed_to_the_gateways_account_is_refused(place: Place) -> None:
    require_root()
    (place.folder / "closed").mkdir(mode=0o700)
    place.run_dir = place.folder / "closed" / "run"
    place.write()
    with running(place) as up:
        assert up.ends() == 1
    assert up.said == [
        f"rewake: {place.folder}/closed is closed to nobody, the gateway's account: chmod o+x {place.folder}/closed, "
        "or set run_dir to another place"
    ]


async def test_the_real_gateway_runs_without_root_and_ends_with_a_killed_up(place: Place) -> None:
    with running(place, gateway=None) as up:
        up.says("serving", within=30)
        pid = place.children()["gateway-0"]
        assert uid_of(pid) == (NOBODY.pw_uid if os.geteuid() == 0 else os.geteuid())
        token = (place.run_dir / "admin-token").read_text().strip()
        url = f"http://127.0.0.1:{place.port}/admin/v1/replicas"
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(url, headers={"Authorization": f"Bearer {token}"})
        assert answer.json() == {"replicas": []}
        up.process.kill()
        await eventually(lambda: not alive(pid), within=10)
