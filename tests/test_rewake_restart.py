"""Restart and reload of a whole installation under load: `rewake up` with real gateways, clients on raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
import redis.asyncio
from certificates import make
from conftest import eventually
from fake_installation import ROOT, Place, Running, a_place, free_port, running
from fake_replica import CHAT, Exchange, Fleet, delta, replica_server
from processes import alive
from test_gateway_tls import seen

STREAMS, HELD = 200, 50
_UNKNOWN = "unknown setting; remove it or mend its spelling"


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as found:
        yield found


@dataclass
class Client:
    """One request on a connection of its own, and exactly what came back."""

    model: str
    port: int
    stream: bool = True
    head: bytes = b""
    body: bytes = b""
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        request = json.dumps({"model": self.model, "messages": [], "stream": self.stream}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(request)}\r\n\r\n"
        writer.write(head.encode() + request)
        try:
            self.head = await reader.readuntil(b"\r\n\r\n")
            self.begun.set()
            while not self.whole and (data := await reader.read(1 << 16)):
                self.body += data
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        return self

    @property
    def status(self) -> int:
        """0: the connection ended without an answer."""
        return int(self.head.split(b" ", 2)[1]) if self.head else 0

    @property
    def whole(self) -> bool:
        """The answer has ended as its framing says."""
        if b"chunked" in self.head.lower():
            return self.body.endswith(b"0\r\n\r\n")
        return bool(self.header("content-length")) and len(self.body) >= int(self.header("content-length"))

    def header(self, name: str) -> str:
        found = [line for line in self.head.decode().splitlines() if line.lower().startswith(f"{name}:")]
        return found[0].partition(":")[2].strip() if found else ""


class Steady:
    """New requests one after the other, each on a connection of its own, and what became of them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: Counter[int] = Counter()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            client = await Client("quick", self.port, stream=False).run()
            self.statuses[client.status if client.whole else -1] += 1
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class System:
    """A running installation, its store, and a client of its admin API."""

    def __init__(self, place: Place, up: Running, http: httpx.AsyncClient, store: redis.asyncio.Redis) -> None:
        self.place, self.up, self.http, self.fleet = place, up, http, Fleet(store)

    @property
    def workers(self) -> dict[str, int]:
        return {name: pid for name, pid in self.place.children().items() if name.startswith("gateway")}

    async def call(self, verb: str) -> httpx.Response:
        return await self.http.post(f"/admin/v1/{verb}", timeout=60)

    async def cli(self, *words: str) -> tuple[int, str]:
        """Exit code and output of a command of the operator."""
        argv = [sys.executable, str(ROOT / "rewake.py"), *words, "-c", str(self.place.config)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        said, _ = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode or 0, said.decode()

    async def held(self) -> int:
        """Over all gateways, as their reports have it."""
        store = self.fleet.store
        reports = [await store.get(f"rewake:gateway:{id}") for id in await store.smembers("rewake:gateways")]
        return sum(load["held"] for report in reports if report for load in json.loads(report)["models"].values())


@contextlib.asynccontextmanager
async def system(place: Place) -> AsyncIterator[System]:
    with running(place, gateway=None) as up:
        found = re.search(r"https?://[^/]+", up.says("serving", within=60))
        assert found is not None
        url = found[0]
        token = (place.run_dir / "admin-token").read_text().strip()
        certificate = place.folder / "used.pem"
        verify = ssl.create_default_context(cafile=certificate) if certificate.exists() else True
        store = redis.asyncio.from_url(f"unix://{place.socket}", decode_responses=True)
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, verify=verify) as http:
            try:
                yield System(place, up, http, store)
            except BaseException:
                print("\n".join(up.said[-40:]))
                with contextlib.suppress(Exception):
                    while (line := up._lines.get_nowait()) is not None:
                        print(line)
                raise
            finally:
                await store.aclose()
        up.process.send_signal(signal.SIGTERM)
        assert up.ends(within=60) == 0


def ticking(gate: asyncio.Event) -> object:
    """A stream that goes on until the gate opens."""

    async def script(exchange: Exchange) -> None:
        await exchange.begin_events()
        while not gate.is_set():
            await exchange.event(delta("tick"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await gate.wait()
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    return script


async def _begin(port: int, count: int, model: str = "m") -> list[asyncio.Task[Client]]:
    return [asyncio.create_task(Client(model, port).run()) for _ in range(count)]


@pytest.mark.parametrize("workers", [1, 2])
async def test_gateway_case_32_rolling_restart_with_200_streams_and_50_held_fails_nothing(place: Place, workers: int) -> None:
    place.write(workers=workers, access_log=False, models={"m": {}, "quick": {}})
    gate = asyncio.Event()
    async with replica_server(ticking(gate)) as fake, replica_server() as quick, system(place) as it:  # type: ignore[arg-type]
        await it.fleet.admit(fake, "m", concurrency=STREAMS)
        await it.fleet.admit(quick, "quick", concurrency=50)
        streams = await _begin(place.port, STREAMS)
        await eventually(lambda: len(fake.requests) == STREAMS, within=30)
        held = await _begin(place.port, HELD)

        async def all_held() -> bool:
            return await it.held() == HELD

        await eventually(all_held, within=10)
        before = it.workers
        steady = Steady(place.port)
        answer = await it.call("restart")
        assert (answer.status_code, answer.json()) == (200, {"restarted": [f"gateway-{n}" for n in range(workers)]})
        after = it.workers
        # The old ones live on beside the new ones, with what they have open; the held ones are held.
        assert set(before.values()) < set(after.values())
        assert len(after) == 2 * workers
        assert not any(task.done() for task in (*streams, *held))
        # A second restart right behind the first is as harmless.
        if workers == 1:
            assert (await it.call("restart")).status_code == 200
        gate.set()
        answers = await asyncio.wait_for(asyncio.gather(*streams, *held), 60)
        assert Counter(client.status for client in answers) == {200: STREAMS + HELD}
        assert all(client.whole and b"data: [DONE]" in client.body for client in answers)
        await eventually(lambda: not any(map(alive, before.values())))
        await steady.stop()
        assert set(steady.statuses) == {200}
        assert steady.statuses[200] > 5
        # Everything is counted down to nothing, in the store as well.
        await eventually(lambda: fake.inflight == 0)


async def test_metrics_at_their_own_address_are_there_all_through_a_restart(place: Place) -> None:
    port = free_port()
    place.write(workers=2, access_log=False, top={"metrics": {"address": f"127.0.0.1:{port}"}})
    async with system(place) as it:
        assert (await it.http.get("/metrics")).status_code == 404

        async def scrape() -> int:
            async with httpx.AsyncClient(trust_env=False) as once:
                answer = await once.get(f"http://127.0.0.1:{port}/metrics", timeout=30)
                return answer.status_code if "rewake_build_info" in answer.text else 0

        assert await scrape() == 200
        before, restarting = it.workers, asyncio.create_task(it.call("restart"))
        seen: Counter[int] = Counter()
        while not restarting.done():
            seen[await scrape()] += 1
        assert (await restarting).status_code == 200
        await eventually(lambda: not any(map(alive, before.values())), within=60)
        seen[await scrape()] += 1
        assert set(seen) == {200}


async def test_gateway_case_32_what_does_not_end_within_the_drain_is_503_with_retry_after_1_or_cut(place: Place) -> None:
    place.write(workers=1, access_log=False, drain_s=2, models={"m": {"hold": {"silent_s": 0.2, "keepalive_s": 0.2}}})
    gate = asyncio.Event()
    async with replica_server(ticking(gate)) as fake, system(place) as it:  # type: ignore[arg-type]
        await it.fleet.admit(fake, "m", concurrency=10)
        streams = await _begin(place.port, 10)
        await eventually(lambda: len(fake.requests) == 10, within=10)
        held = [asyncio.create_task(Client("m", place.port, stream=False).run()) for _ in range(5)]
        committed = await _begin(place.port, 5)

        async def all_held() -> bool:
            return await it.held() == 10

        await eventually(all_held)
        began = time.monotonic()
        assert (await it.call("restart")).status_code == 200
        refused = await asyncio.wait_for(asyncio.gather(*held), 30)
        assert time.monotonic() - began > 1.5, "held requests are refused at the end of the drain, not before"
        assert {(client.status, client.header("retry-after"), client.header("x-should-retry")) for client in refused} == {
            (503, "1", "true")
        }
        assert {client.header("connection") for client in refused} == {"close"}
        assert all(b"shutting_down" in client.body for client in refused)
        # Those that had signs of life already get an error in the stream's own words, and no proper end.
        late = await asyncio.wait_for(asyncio.gather(*committed), 30)
        assert {(client.status, client.whole) for client in late} == {(200, False)}
        assert all(client.body.count(b"\n: ") + client.body.startswith(b":") for client in late)
        assert all(b"shutting_down" in client.body and b"[DONE]" not in client.body for client in late)
        cut = await asyncio.wait_for(asyncio.gather(*streams), 30)
        assert {client.status for client in cut} == {200}
        # No answer that was cut off looks whole.
        assert not any(client.whole or b"[DONE]" in client.body for client in cut)
        gate.set()
        assert (await Client("m", place.port).run()).whole


async def test_a_successor_that_cannot_serve_leaves_the_old_one_in_its_place(place: Place) -> None:
    async with system(place) as it:
        before = it.workers
        # Something that every start reads, and no reload does.
        token = place.run_dir / "admin-token"
        kept = token.read_text()
        token.write_text("\n")
        answer = await it.call("restart")
        assert answer.status_code == 409
        assert "ended with status 2; the old one goes on" in answer.json()["error"]["message"]
        assert it.workers == before
        token.write_text(kept)
        assert await it.cli("restart") == (0, "restarted gateway-0; what the old processes have open may finish\n")
        await eventually(lambda: not any(map(alive, before.values())))


async def test_a_killed_worker_refuses_nobody_while_it_comes_back(place: Place) -> None:
    place.write(models={"m": {}, "quick": {}})
    async with replica_server() as quick, system(place) as it:
        await it.fleet.admit(quick, "quick", concurrency=50)
        assert (await Client("quick", place.port).run()).status == 200
        (pid,) = it.workers.values()
        os.kill(pid, signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*(Client("quick", place.port).run() for _ in range(20))), 30)
        # Those that the dead one had accepted are lost with it; nobody is refused a connection.
        assert Counter(client.status for client in answers)[200] >= 19


async def test_reload_reaches_every_process_or_none(place: Place) -> None:
    place.write(workers=2)
    async with replica_server() as fake, system(place) as it:
        place.write(workers=2, models={"m": {}, "new": {"idle_park_s": 7}}, drain_s=5)
        answer = await it.call("reload")
        assert (answer.status_code, answer.json()) == (
            200,
            {"applied": ["gateway.drain_s", "models.new"], "next_start": [], "restart": []},
        )
        it.up.says("rewake: reloaded; in force: gateway.drain_s, models.new")
        await it.fleet.admit(fake, "new", concurrency=50)
        # Both workers know it: connections of their own reach either.
        answers = await asyncio.gather(*(Client("new", place.port).run() for _ in range(20)))
        assert Counter(client.status for client in answers) == {200: 20}
        good = place.config.read_text()
        place.config.write_text(good.replace("drain_s", "drian_s"))
        answer = await it.call("reload")
        assert answer.status_code == 400
        assert "gateway.drian_s: unknown setting" in answer.json()["error"]["message"]
        it.up.says("reload rejected, the old configuration stays in force")
        assert "rewake_config_last_reload_successful 0.0" in (await it.http.get("/metrics")).text
        # A worker that dies now comes back with the last good configuration, not with the broken file.
        before = it.workers
        assert (await it.call("restart")).status_code == 200
        await eventually(lambda: not any(map(alive, before.values())))
        assert (await Client("new", place.port).run()).status == 200
        assert await it.cli("reload") == (2, f"rewake: {place.config} has faults:\ngateway.drian_s: {_UNKNOWN}\n")
        place.config.write_text(good.replace("idle_park_s: 7", "concurrency: 3").replace(f"port: {place.port}", "port: 1"))
        port_moved = place.config.read_text()
        place.config.write_text(good.replace("idle_park_s: 7", "concurrency: 3"))
        assert await it.cli("reload") == (
            0,
            "models.new.idle_park_s: in force\nmodels.new.concurrency: in force for replicas that start from now on\n",
        )
        place.config.write_text(port_moved)
        answer = await it.call("reload")
        assert answer.json() == {"applied": [], "next_start": [], "restart": ["gateway.port"]}
        place.config.write_text(good)
        assert (await it.cli("reload"))[0] == 0
        assert await it.cli("reload") == (0, "no setting has changed\n")
        # SIGHUP does the same.
        place.config.write_text(good.replace("drain_s: 5", "drain_s: 6"))
        it.up.process.send_signal(signal.SIGHUP)
        it.up.says("rewake: reloaded; in force: gateway.drain_s")
        assert "rewake_config_last_reload_successful 1.0" in (await it.http.get("/metrics")).text


async def test_certificates_that_only_root_can_read_are_renewed_while_serving(place: Place) -> None:
    pair, other = make(place.folder, "used"), make(place.folder, "other")
    pair.key.chmod(0o600)
    place.write(tls={"certificate": str(pair.certificate), "key": str(pair.key)})
    async with system(place) as it:
        assert str(it.http.base_url).startswith("https://")
        assert (await it.http.get("/health")).status_code == 200
        first = pair.der
        pair.key.write_bytes(other.key.read_bytes())
        answer = await it.call("reload")
        assert (answer.status_code, "does not belong" in answer.json()["error"]["message"]) == (400, True)
        assert await seen(place.port) == first
        pair.certificate.write_bytes(other.certificate.read_bytes())
        # By itself: nobody asks for it.
        it.up.says("another certificate is in force")
        assert await seen(place.port) == other.der
        # The command line trusts the gateway's own certificate, whatever it is for.
        assert await it.cli("ps", "--json") == (0, "[]\n")
        assert await it.cli("reload") == (0, "no setting has changed\n")
        await it.http.aclose()
