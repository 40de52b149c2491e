"""The admin API and the model list over HTTP."""

from __future__ import annotations

import asyncio

import pytest
from conftest import eventually
from fake_replica import ADMIN, Exchange, FakeReplica, Fleet, answer, configuration, replica_server, serving
from test_policies_compat import HOST

from policies.manifest import HostFacts
from policies.replica import State
from policies.wire import REPORT_TTL_MS, HostReport, Operation, OperationState, SnapshotSummary
from restorer.coordination.jobs import JobStore


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "let-me-in"}, {"Authorization": "Bearer é"}]
)
async def test_every_route_needs_the_token(store, store_server, headers):
    async with serving(store_server) as served:
        for method, path in (
            ("GET", "models"),
            ("GET", "replicas"),
            ("GET", "hosts"),
            ("GET", "snapshots"),
            ("POST", "snapshots"),
            ("POST", "scale-up"),
            ("POST", "scale-down"),
            ("POST", "drain"),
            ("POST", "move"),
            ("GET", "operations/x"),
        ):
            raw = {name: value.encode() for name, value in headers.items()}
            response = await served.client.request(method, f"/admin/v1/{path}", headers=raw)
            error = response.json()["error"]
            assert (response.status_code, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert await Fleet(store).jobs() == []


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("scale-up", b"{", 400, "JSON"),
        ("scale-up", b"", 400, "model"),
        ("scale-up", b'{"model":"m","replicas":0}', 400, "replicas"),
        ("scale-up", b'{"model":"m","replicas":2}', 400, "max_replicas is 1"),
        ("scale-up", b'{"model":"m","wings":2}', 400, "wings"),
        ("scale-up", b'{"model":"nobody"}', 404, "nobody"),
        ("scale-down", b'{"model":"m","replicas":-1}', 400, "replicas"),
        ("drain", b'{"replica":"m#0"}', 404, "m#0"),
        ("move", b'{"replica":"m#0"}', 404, "m#0"),
        ("move", b'{"replica":"m#0","where":"b"}', 400, "where"),
        ("snapshots", b'{"model":7}', 400, "model"),
        ("scale-up", b"x" * 100_000, 413, "larger"),
    ],
)
async def test_unusable_bodies_say_what_is_wrong(store, store_server, path, body, status, says):
    async with serving(store_server) as served:
        response = await served.client.post(f"/admin/v1/{path}", content=body, headers=ADMIN)
        assert response.status_code == status
        assert says in response.json()["error"]["message"]


async def test_scale_up_is_followed_to_its_end(store, store_server):
    async with serving(store_server) as served:
        response = await served.client.post("/admin/v1/scale-up", json={"model": "alias/of-m"}, headers=ADMIN)
        assert response.status_code == 202
        operation = Operation.model_validate(response.json())
        assert (operation.model, operation.state, operation.reason) == ("m", OperationState.RUNNING, "admin")
        again = await served.client.post("/admin/v1/scale-up", json={"model": "m"}, headers=ADMIN)
        assert again.json()["id"] == operation.id
        path = f"/admin/v1/operations/{operation.id}"
        assert (await served.client.get(path, headers=ADMIN)).json()["state"] == "running"
        assert (await served.client.get(path, params={"wait": "61"}, headers=ADMIN)).status_code == 400
        assert (await served.client.get("/admin/v1/operations/none", headers=ADMIN)).status_code == 404
        waiting = asyncio.create_task(served.client.get(path, params={"wait": "30"}, headers=ADMIN))
        await eventually(lambda: served.gateway.link._followers)
        fleet = Fleet(store)
        ended = operation.model_copy(update={"jobs": (), "state": OperationState.FAILED, "detail": "why", "code": 3})
        await store.set(fleet.keys.operation(operation.id), ended.model_dump_json())
        await store.publish(fleet.keys.events, f'{{"operation":"{operation.id}"}}')
        assert (await waiting).json() == ended.model_dump(mode="json")


async def test_scale_down_if_idle_is_409_while_somebody_uses_it(store, store_server):
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await gate.wait()
        await answer(exchange)

    async with replica_server(slow) as fake, serving(store_server) as served:
        await Fleet(store).admit(fake)
        request = asyncio.create_task(served.chat())
        await eventually(lambda: served.inflight() == 1)
        busy = await served.client.post("/admin/v1/scale-down", json={"model": "m", "if_idle": True}, headers=ADMIN)
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "busy")
        gate.set()
        await request
        accepted = await served.client.post("/admin/v1/scale-down", json={"model": "m", "if_idle": True}, headers=ADMIN)
        assert (accepted.status_code, accepted.json()["kind"], accepted.json()["state"]) == (202, "scale_down", "running")
        again = await served.client.post("/admin/v1/scale-down", json={"model": "m"}, headers=ADMIN)
        assert again.json()["id"] == accepted.json()["id"]


async def test_drain_stops_one_replica(store, store_server):
    async with serving(store_server) as served:
        replica = await Fleet(store).admit(FakeReplica(), slot=1)
        await eventually(lambda: served.gateway.registry.available("m"))
        response = await served.client.post("/admin/v1/drain", json={"replica": replica.id}, headers=ADMIN)
        assert response.status_code == 202
        assert response.json()["jobs"] == [f"{response.json()['id']}/1"]


async def test_a_move_goes_to_the_best_of_the_others_or_says_what_each_lacks(store, store_server):
    config = configuration(model__engine={"kind": "http", "command": ["/bin/true"], "hosts": ["h1", "h3", "h4"]})
    async with replica_server() as fake, serving(store_server, config) as served:
        replica = await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        usual = {"capable": True, "capability": "", "snapshots": (), "parallel_starts": 1}

        async def report(host, **more):
            await store.set(f"rewake:host:{host}", HostReport(host=host, **{**usual, "running": 0, **more}).model_dump_json())
            await store.sadd("rewake:hosts", host)

        async def move(**body):
            answer = await served.client.post("/admin/v1/move", json={"replica": replica.id, **body}, headers=ADMIN)
            return answer.status_code, answer.json()

        await report("h1")
        status, said = await move()
        assert (status, said["error"]["message"]) == (404, "No restorer reports from another host.")
        await report("h2")
        await report("h5", models=("other",))
        status, said = await move()
        assert status == 409
        assert "h2: engine.hosts names h1, h3, h4" in said["error"]["message"]
        assert "its configuration has no such model" in said["error"]["message"]
        await report("h4", running=1)
        await report("h3", starting=1)
        assert (await move(to="h1"))[0] == 400
        assert (await move(to="h9"))[0] == 404
        assert (await move(to="h2"))[0] == 409
        status, operation = await move()
        assert (status, operation["kind"], operation["state"]) == (202, "move", "running")
        assert await store.zrange("rewake:jobs:h4", 0, -1) == [f"{operation['id']}/1"]
        assert (await move(to="h3"))[1]["id"] == operation["id"], "asked for again, it is the same one"


async def test_replicas_and_models_say_what_there_is(store, store_server):
    async with serving(store_server) as served:
        fleet = Fleet(store)
        replica = await fleet.admit(FakeReplica(), state=State.RESTORING)
        await eventually(served.gateway.registry.replicas)
        listed = (await served.client.get("/admin/v1/replicas", headers=ADMIN)).json()["replicas"]
        assert [(item["id"], item["state"], item["inflight"], item["incarnation"]) for item in listed] == [
            ("m#0", "restoring", 0, replica.incarnation)
        ]
        model = (await served.client.get("/admin/v1/models", headers=ADMIN)).json()["models"][0]
        assert (model["name"], model["state"], model["admitted"], model["coming"], model["demand"]) == ("m", "restoring", 0, 1, 0)


async def test_snapshots_are_what_the_hosts_report(store, store_server):
    async with serving(store_server) as served:
        fleet = Fleet(store)
        summary = SnapshotSummary(id="abc", model="m", created_ms=1, bytes=2, fits=False, mismatches=("host.arch: ...",))
        report = HostReport(host="h1", capable=True, capability="CRIU 4.2", snapshots=(summary,), running=0, parallel_starts=3)
        await store.sadd(fleet.keys.hosts, "h1", "dead")
        await store.set(fleet.keys.host("h1"), report.model_dump_json(), px=6000)
        response = await served.client.get("/admin/v1/snapshots", headers=ADMIN)
        assert response.json() == {"hosts": [report.model_dump(mode="json")]}
        made = await served.client.post("/admin/v1/snapshots", json={"model": "m"}, headers=ADMIN)
        assert (made.status_code, made.json()["kind"]) == (202, "snapshot")
        again = await served.client.post("/admin/v1/snapshots", json={"model": "m"}, headers=ADMIN)
        assert again.json()["id"] == made.json()["id"]


async def test_hosts_say_what_they_are_as_long_as_they_live(store, store_server):
    async with serving(store_server) as served:
        jobs = JobStore(store_server, "rewake", "h1")
        report = HostReport(host="h1", capable=True, capability="", snapshots=(), running=0, parallel_starts=3)
        await jobs.report(report, {}, HOST)
        await store.sadd(Fleet(store).keys.hosts, "dead")
        listed = await served.client.get("/admin/v1/hosts", headers=ADMIN)
        assert listed.json() == {"hosts": [{"host": "h1", "facts": HOST.model_dump(mode="json")}]}
        assert HostFacts.model_validate(listed.json()["hosts"][0]["facts"]) == HOST
        assert 0 < await store.pttl(Fleet(store).keys.facts("h1")) <= REPORT_TTL_MS
        assert (await served.client.get("/admin/v1/hosts")).status_code == 401
        await jobs.close()


async def test_a_lost_store_is_503_for_operations(tmp_path):
    from conftest import running_store  # noqa: PLC0415
    from redis import asyncio as redis_asyncio  # noqa: PLC0415

    with running_store(tmp_path) as url:
        async with serving(url) as served:
            client = redis_asyncio.from_url(url)
            await client.shutdown(nosave=True)
            await client.aclose()
            response = await served.client.post("/admin/v1/scale-up", json={"model": "m"}, headers=ADMIN)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "store_unavailable")


async def test_cases_56_71_cold_models_are_listed_and_found_by_any_spelling(store, store_server):
    engine = {"engine": {"kind": "http", "command": ["/bin/true"]}}
    async with serving(store_server, configuration(models={"org/name": engine})) as served:
        listed = (await served.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [(card["id"], card["object"], card["rewake"]["state"]) for card in listed["data"]] == [
            ("m", "model", "cold"),
            ("org/name", "model", "cold"),
        ]
        for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
            assert (await served.client.get(path)).json()["id"] == "org/name"
        assert (await served.client.get("/v1/models/alias/of-m")).json()["id"] == "m"
        missing = await served.client.get("/v1/models/nobody")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        await Fleet(store).admit(FakeReplica())
        await eventually(lambda: served.gateway.registry.available("m"))
        assert (await served.client.get("/v1/models/m")).json()["rewake"] == {
            "state": "ready",
            "replicas": 1,
            "aliases": ["alias/of-m"],
            "eta_seconds": 0.0,
        }


async def test_case_59_head_has_no_body_and_a_post_route_says_what_it_allows(store, store_server):
    async with serving(store_server) as served:
        head = await served.client.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        refused = await served.client.head("/v1/completions")
        assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST, OPTIONS", b"")
