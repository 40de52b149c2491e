"""Reload while streams run and requests wait: what changes, what stays, and what a bad file leaves as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from certificates import make
from conftest import eventually
from fake_replica import ADMIN, CHAT, Exchange, Fleet, Served, configuration, delta, replica_server, serving

from gateway.current import Current
from gateway.exchange import Call
from gateway.reload import Rejected, Reloader
from gateway.tls import Certificates, Pem
from policies.config import Config, parse
from policies.control import Told
from policies.replica import State
from policies.tenancy import key_hash

ENGINE = {"kind": "http", "command": ["/bin/true"]}


def put(served: Served, config: Config) -> dict[str, Any]:
    changes = served.gateway.reloader.put(config, None)
    return {"applied": changes.applied, "next_start": changes.next_start, "restart": changes.restart}


async def test_models_come_go_and_change_while_a_stream_runs_and_requests_wait(store, store_server):
    gate = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.event(delta("first"))
        await gate.wait()
        await exchange.event(delta("last"))
        await exchange.end()

    before = configuration(models={"gone": {"engine": ENGINE}, "cold": {"engine": ENGINE}})
    after = configuration(models={"new": {"engine": ENGINE}, "cold": {"engine": ENGINE, "aliases": ["alias/of-cold"]}})
    async with replica_server(stream) as fake, replica_server() as other, serving(store_server, before) as served:
        fleet = Fleet(store)
        await fleet.admit(fake, "gone", concurrency=1)
        async with served.client.stream("POST", CHAT, json={"model": "gone", "stream": True}) as response:
            pieces = response.aiter_bytes()
            assert b"first" in await anext(pieces)
            queued = asyncio.create_task(served.chat("gone"))
            held = asyncio.create_task(served.chat("cold"))
            await eventually(lambda: served.held("gone") == served.held("cold") == 1)
            assert put(served, after)["applied"] == ("models.cold.aliases", "models.gone", "models.new")
            # Whoever waits for a model that is gone hears so at once, and not to come back.
            refused = await asyncio.wait_for(queued, 30)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            assert refused.headers["x-should-retry"] == "false"
            assert (await served.chat("gone")).status_code == 404
            assert not held.done()
            # What was open goes on to its end.
            gate.set()
            assert b"last" in b"".join([piece async for piece in pieces])
        # The new model is known in every part: asked for, shown, served.
        waiting = asyncio.create_task(served.chat("new"))
        await eventually(lambda: served.held("new") == 1)

        async def asked_for() -> bool:
            return "new" in [job["model"] for job in await fleet.jobs()]

        await eventually(asked_for)
        listed = {model["id"] for model in (await served.client.get("/v1/models")).json()["data"]}
        assert {"m", "new", "cold"} <= listed
        assert "gone" not in listed
        await fleet.admit(other, "new")
        await fleet.admit(other, "cold")
        assert (await waiting).status_code == (await held).status_code == 200
        assert (await served.chat("alias/of-cold")).status_code == 200
        assert 'model="new"' in (await served.client.get("/metrics")).text
        await eventually(lambda: served.counts() == (0, 0, 0))
        assert not served.gateway.life.crashed.is_set()


async def test_a_model_that_comes_back_is_served_again(store, store_server):
    with_it, without = configuration(models={"x": {"engine": ENGINE}}), configuration()
    async with replica_server() as fake, serving(store_server, with_it) as served:
        await Fleet(store).admit(fake, "x")
        assert (await served.chat("x")).status_code == 200
        for _ in range(3):
            put(served, without)
            assert (await served.chat("x")).status_code == 404
            put(served, with_it)
            assert (await served.chat("x")).status_code == 200
        assert served.counts() == (0, 0, 0)


async def test_a_smaller_queue_keeps_who_waits_and_refuses_the_next(store, store_server):
    async with replica_server() as fake, serving(store_server, configuration()) as served:
        waiting = [asyncio.create_task(served.chat()) for _ in range(3)]
        await eventually(lambda: served.held() == 3)
        assert put(served, configuration(model__hold={"max_requests": 1}))["applied"] == ("models.m.hold.max_requests",)
        assert (await served.chat()).json()["error"]["code"] == "queue_full"
        await Fleet(store).admit(fake)
        assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}


async def test_a_cold_model_that_no_longer_holds_lets_its_waiters_go(store, store_server):
    async with serving(store_server, configuration()) as served:
        waiting = asyncio.create_task(served.chat())
        await eventually(lambda: served.held() == 1)
        put(served, configuration(model__hold={"max_wait_s": 0.5}))
        # The deadline that it came with is its own; the next one has the new one.
        assert (await served.chat()).json()["error"]["code"] == "cold_start_timeout"
        assert not waiting.done()
        waiting.cancel()


async def test_every_kind_of_setting_is_looked_up_afresh(store, store_server):
    key, other = "k" * 32, "o" * 32

    def tenants(*keys: str, **more: Any) -> Config:
        config = configuration(gateway__max_body_bytes=2000, gateway__cors={"origins": ["https://a.example"]}, **more)
        parsed = {"t": {"keys": [key_hash(each) for each in keys]}} if keys else {}
        return parse(config.model_dump(mode="json") | {"tenants": parsed})

    def bearer(value: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {value}", "Origin": "https://a.example", "X-Forwarded-For": "203.0.113.9"}

    async with replica_server() as fake, serving(store_server, configuration()) as served:
        await Fleet(store).admit(fake)
        # A client that keeps its connection must not keep what was decided on it.
        async with httpx.AsyncClient(base_url=served.url) as kept:

            async def ask(value: str, size: int = 0) -> httpx.Response:
                return await kept.post(CHAT, json={"model": "m", "x": "x" * size}, headers=bearer(value))

            answer = await ask(key, 5000)
            assert answer.status_code == 200
            assert "access-control-allow-origin" not in answer.headers
            put(served, tenants(key))
            assert [(await ask(each)).status_code for each in (key, other)] == [200, 401]
            assert (await ask(key)).headers["access-control-allow-origin"] == "https://a.example"
            assert (await ask(key, 5000)).status_code == 413
            put(served, tenants(other))
            assert [(await ask(each)).status_code for each in (key, other)] == [401, 200]
            seen = fake.requests[-1].header("X-Forwarded-For")
            assert seen is not None
            assert "203.0.113.9" not in seen
            put(served, tenants(other, gateway__trusted_proxies=["127.0.0.1/32"]))
            assert (await ask(other)).status_code == 200
            assert fake.requests[-1].header("X-Forwarded-For") == "203.0.113.9, 127.0.0.1"
            put(served, configuration())
            assert (await ask("anything", 5000)).status_code == 200


async def test_what_needs_a_restart_is_named_and_the_rest_is_in_force(store, store_server):
    async with serving(store_server, configuration()) as served:
        changes = put(served, configuration(gateway__port=1, gateway__workers=9, model__concurrency=2, gateway__drain_s=3))
        assert changes == {
            "applied": ("gateway.drain_s",),
            "next_start": ("models.m.concurrency",),
            "restart": ("gateway.port", "gateway.workers"),
        }
        assert served.gateway.current.config == configuration(model__concurrency=2, gateway__drain_s=3)


@pytest.mark.parametrize("seed", range(3))
async def test_no_interleaving_of_reloads_and_requests_leaves_anything_counted(store, store_server, seed):
    """Requests for three models, two of which come and go, while replicas come, go and fail."""
    configs = [
        configuration(
            models={name: {"engine": ENGINE, "hold": {"max_wait_s": 0.3}} for name in names}, model__hold={"max_wait_s": 0.3}
        )
        for names in ((), ("a",), ("a", "b"), ("b",))
    ]

    async def reset(exchange: Exchange) -> None:
        exchange.reset()

    async with replica_server() as fake, serving(store_server, configs[2]) as served:
        fake.scripts = [reset] * 5
        fleet, clients = Fleet(store), []
        for turn in range(24):
            model = ("m", "a", "b")[(turn + seed) % 3]
            clients += [asyncio.create_task(served.chat(model)) for _ in range(2)]
            if turn % 5 == seed:
                clients[-1].cancel()
            await asyncio.sleep(0)
            put(served, configs[(turn * (seed + 1)) % 4])
            record = await fleet.admit(fake, model, concurrency=1)
            if turn % 4 == 3:
                await fleet.change(record, State.STOPPED)
        answers = await asyncio.gather(*clients, return_exceptions=True)
        statuses = {answer.status_code for answer in answers if not isinstance(answer, BaseException)}
        assert statuses <= {200, 404, 429, 502, 503}
        await eventually(lambda: served.counts() == (0, 0, 0))
        assert not served.gateway.life.crashed.is_set()


# ---------------------------------------------------------------- alone, with a file of its own


class Alone:
    """A reloader without a gateway around it."""

    def __init__(self, folder: Path, document: dict[str, Any], certificates: Certificates | None = None) -> None:
        self.file = folder / "rewake.yaml"
        self.write(document)
        self.reported: list[bool] = []
        self.current = Current(configuration())
        self.reloader = Reloader(
            self.current,
            certificates=certificates,
            file=self.file,
            line=None,
            authorize=lambda call: None,
            report=self.reported.append,
        )

    def write(self, document: object) -> None:
        self.file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))


def documented(**gateway: Any) -> dict[str, Any]:
    return {"models": {"m": {"engine": ENGINE, "aliases": ["alias/of-m"]}}, "gateway": gateway}


async def test_a_bad_file_is_rejected_with_every_fault_and_the_old_one_kept(tmp_path):
    alone = Alone(tmp_path, documented())
    kept = alone.current.config
    for bad, says in (
        (
            {"models": {"m": {"engine": ENGINE, "concurrency": 0}}, "gateway": {"prot": 1}},
            ["models.m.concurrency", "gateway.prot"],
        ),
        ("models: [", ["not YAML"]),
        ("", ["nothing"]),
    ):
        alone.write(bad)
        with pytest.raises(Rejected) as rejected:
            await alone.reloader.reload()
        assert all(part in str(rejected.value) for part in (*says, str(alone.file)))
        assert alone.current.config is kept
    alone.file.unlink()
    with pytest.raises(Rejected, match="cannot be read"):
        await alone.reloader.reload()
    alone.write(documented(drain_s=3))
    assert (await alone.reloader.reload()).applied == ("gateway.drain_s",)
    assert alone.reported == [False] * 4 + [True]


async def test_nobody_hears_of_a_reload_that_changes_nothing(tmp_path):
    alone = Alone(tmp_path, documented())
    alone.current.on_change.append(lambda before, after: pytest.fail("told"))
    await alone.reloader.reload()
    assert alone.reported == [True]


async def test_a_bad_pair_leaves_certificate_and_configuration_as_they_were(tmp_path):
    pair, other = make(tmp_path, "used"), make(tmp_path, "other")
    tls = {"certificate": str(pair.certificate), "key": str(pair.key)}
    certificates = Certificates(Pem(pair.certificate.read_text(), pair.key.read_text()))
    alone = Alone(tmp_path, documented(tls=tls), certificates)
    alone.current.replace(configuration(gateway__tls=tls))
    first = certificates.pem
    pair.key.write_bytes(other.key.read_bytes())
    alone.write(documented(tls=tls, drain_s=3))
    with pytest.raises(Rejected, match="does not belong"):
        await alone.reloader.reload()
    assert (certificates.pem, alone.current.config.gateway.drain_s) == (first, 30.0)
    pair.certificate.write_bytes(other.certificate.read_bytes())
    await alone.reloader.reload()
    assert certificates.pem.certificate == other.certificate.read_text()
    assert alone.current.config.gateway.drain_s == 3


async def test_a_renewed_certificate_is_taken_up_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.reload.WATCH_S", 0.02)
    pair, other = make(tmp_path, "used"), make(tmp_path, "other")
    tls = {"certificate": str(pair.certificate), "key": str(pair.key)}
    certificates = Certificates(Pem(pair.certificate.read_text(), pair.key.read_text()))
    alone = Alone(tmp_path, documented(tls=tls), certificates)
    alone.current.replace(configuration(gateway__tls=tls))
    watching = asyncio.create_task(alone.reloader.watch())
    try:
        await asyncio.sleep(0.1)  # the first look is what later ones are compared with
        pair.install(other)
        await eventually(lambda: certificates.pem.key == other.key.read_text())
    finally:
        watching.cancel()


# ---------------------------------------------------------------- over HTTP


async def test_reload_over_http_answers_with_the_changes_or_with_every_fault(store, store_server, tmp_path):
    async with serving(store_server, configuration()) as served:
        url = "/admin/v1/reload"
        assert (await served.client.post(url)).status_code == 401
        file = tmp_path / "rewake.yaml"
        served.gateway.reloader._file = file
        file.write_text(yaml.safe_dump({"models": {"m": {"engine": ENGINE}}, "gateway": {"drain_s": 4, "port": 1}}))
        answer = await served.client.post(url, headers=ADMIN)
        assert (answer.status_code, answer.json()) == (
            200,
            {"applied": ["gateway.drain_s", "models.m.aliases"], "next_start": [], "restart": ["gateway.port"]},
        )
        assert "rewake_config_last_reload_successful 1.0" in (await served.client.get("/metrics")).text
        file.write_text("models: {}\ngateway: {drain: 4}\n")
        answer = await served.client.post(url, headers=ADMIN)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], answer.headers["x-should-retry"]) == (400, "invalid_config", "false")
        assert "models" in error["message"]
        assert "gateway.drain" in error["message"]
        assert "rewake_config_last_reload_successful 0.0" in (await served.client.get("/metrics")).text
        assert served.gateway.current.config.gateway.drain_s == 4


async def test_restart_over_http_needs_somebody_who_can_start_a_successor(store, store_server):
    async with serving(store_server, configuration()) as served:
        assert (await served.client.post("/admin/v1/restart")).status_code == 401
        answer = await served.client.post("/admin/v1/restart", headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "busy")


async def test_a_supervisors_configuration_that_does_not_fit_is_answered_with_why(tmp_path):
    alone = Alone(tmp_path, documented())
    good, bad = configuration(gateway__drain_s=9).model_dump(mode="json"), {"models": {}}
    assert alone.reloader._told(Told(number=1, config=good)) == ""
    assert "models" in alone.reloader._told(Told(number=2, config=bad))
    assert alone.current.config.gateway.drain_s == 9
    assert alone.reported == [True, False]
    await alone.reloader.handle_reload(Call())
