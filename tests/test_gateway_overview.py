"""What who watches is told: everything at a glance, news as it comes, tasks for one host, the story of a failure, the page."""

from __future__ import annotations

import asyncio
import json

from conftest import eventually
from fake_replica import ADMIN, Exchange, FakeReplica, Fleet, answer, configuration, replica_server, serving

from gateway import console
from policies.failures import Verdict
from policies.journal import Step, Trail
from policies.replica import Stage, State
from policies.tasks import MAX_TASKS, Progress, Task, TaskState
from policies.wire import MAX_WAITING, Hint, HostReport, SnapshotSummary

OVERVIEW = "/admin/v1/overview"
PROGRESS = Progress(id="op-1/0", what="start", host="h1", model="m", replica="m#0", begun_ms=1)


async def host(store, *snapshots: SnapshotSummary, name: str = "h1") -> Fleet:
    """A restorer that reports."""
    fleet = Fleet(store)
    report = HostReport(host=name, capable=True, capability="", snapshots=snapshots, running=0, parallel_starts=3)
    await store.sadd(fleet.keys.hosts, name)
    await store.set(fleet.keys.host(name), report.model_dump_json(), px=60_000)
    return fleet


def summary(id: str, **more: object) -> SnapshotSummary:
    return SnapshotSummary(id=id, model="m", created_ms=1, bytes=2, fits=True, cold_start_s=9.0).model_copy(update=more)


async def overview(served, **query: str) -> dict:
    found = await served.client.get(OVERVIEW, params=query, headers=ADMIN)
    assert found.status_code == 200, found.text
    return found.json()


async def test_everything_is_in_one_document(store, store_server):
    async with serving(store_server) as served:
        fleet = await host(store, summary("a"))
        replica = await fleet.admit(FakeReplica(), state=State.RESTORING)
        await store.hset(fleet.keys.progress("h1"), PROGRESS.id, PROGRESS.model_dump_json())
        await served.client.post("/admin/v1/snapshots", json={"model": "m"}, headers=ADMIN)
        await eventually(served.gateway.registry.replicas)
        found = await overview(served)
        model = found["models"][0]
        assert (model["name"], model["state"], model["coming"], model["cold_start_s"]) == ("m", "restoring", 1, 9.0)
        assert [(one["id"], one["inflight"]) for one in found["replicas"]] == [(replica.id, 0)]
        assert [(one["kind"], one["state"]) for one in found["operations"]] == [("snapshot", "running")]
        assert found["progress"] == [PROGRESS.model_dump(mode="json")]
        assert found["hosts"][0]["snapshots"][0]["id"] == "a"
        assert (found["store"], found["gateways"], found["held"]) == (True, 1, [])


async def test_who_has_seen_it_is_answered_when_there_is_news(store, store_server):
    async with serving(store_server) as served:
        fleet = await host(store)
        seen = await overview(served)
        waiting = asyncio.create_task(overview(served, after=seen["version"], wait="20"))
        await asyncio.sleep(0)
        await eventually(lambda: served.gateway.life.open == 1)
        doing = PROGRESS.model_copy(update={"doing": (Stage(name="restore processes", seconds=0.5),)})
        await store.hset(fleet.keys.progress("h1"), doing.id, doing.model_dump_json())
        await store.publish(fleet.keys.events, Hint(progress="h1").model_dump_json())
        news = await waiting
        assert news["version"] != seen["version"]
        assert news["progress"][0]["doing"][0]["name"] == "restore processes"
        # Another worker's version is none of this one's: answered at once.
        assert (await overview(served, after="elsewhere-7", wait="20"))["version"] == news["version"]
        assert (await served.client.get(OVERVIEW, params={"wait": "31"}, headers=ADMIN)).status_code == 400
        assert (await served.client.get(OVERVIEW)).status_code == 401


async def test_a_drain_does_not_wait_for_who_only_watches(store, store_server):
    async with serving(store_server) as served:
        seen = await overview(served)
        waiting = asyncio.create_task(overview(served, after=seen["version"], wait="30"))
        await eventually(lambda: served.gateway.life.open == 1)
        served.gateway.life.drain()
        await asyncio.wait_for(waiting, 30)


async def test_a_lost_store_is_said_and_what_is_known_is_shown(tmp_path):
    from conftest import running_store  # noqa: PLC0415
    from redis import asyncio as redis_asyncio  # noqa: PLC0415

    with running_store(tmp_path) as url:
        async with serving(url) as served:
            client = redis_asyncio.from_url(url)
            await client.shutdown(nosave=True)
            await client.aclose()
            found = await overview(served)
            assert (found["store"], found["hosts"], found["models"][0]["name"]) == (False, [], "m")


async def test_held_requests_are_named_in_their_order_and_bounded(store, store_server):
    gate = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await gate.wait()
        await answer(exchange)

    async with replica_server(slow) as fake, serving(store_server, configuration(model__concurrency=1)) as served:
        count = MAX_WAITING + 3
        requests = [asyncio.create_task(served.chat()) for _ in range(count)]
        await eventually(lambda: served.gateway.ledger.held("m") == count)
        found = await overview(served)
        assert found["models"][0]["held"] == count
        assert [one["position"] for one in found["held"]] == list(range(1, MAX_WAITING + 1))
        assert {(one["model"], one["of"], one["gateway"]) for one in found["held"]} == {("m", count, served.gateway.reporter.id)}
        gate.set()
        await Fleet(store).admit(fake)
        await asyncio.gather(*requests)
        assert (await overview(served))["held"] == []


async def test_a_position_is_one_at_a_gateway_and_says_at_which(store, store_server):
    """Each has a queue of its own: two requests may both be the first, and nobody is told that one is behind the other."""
    async with serving(store_server, id="gw1") as one, serving(store_server, id="gw2") as other:
        requests = [asyncio.create_task(served.chat()) for served in (one, one, other)]

        async def told() -> bool:
            held = (await overview(one))["held"]
            places = sorted((place["gateway"], place["position"], place["of"]) for place in held)
            return places == [("gw1", 1, 2), ("gw1", 2, 2), ("gw2", 1, 1)]

        await eventually(told)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def test_a_task_goes_to_the_host_that_can_do_it_and_is_followed_to_its_end(store, store_server):
    async with serving(store_server) as served:
        fleet = await host(store, summary("a"))
        asked = {"kind": "verify", "snapshot": "a"}
        made = await served.client.post("/admin/v1/tasks", json=asked, headers=ADMIN)
        assert made.status_code == 202
        task = Task.model_validate(made.json())
        assert (task.host, task.state) == ("h1", TaskState.RUNNING)
        assert await store.lrange(fleet.keys.host_tasks("h1"), 0, -1) == [task.id]
        waiting = asyncio.create_task(served.client.get(f"/admin/v1/tasks/{task.id}", params={"wait": "30"}, headers=ADMIN))
        await eventually(lambda: served.gateway.link._followers)
        ended = task.model_copy(update={"state": TaskState.SUCCEEDED, "detail": "whole", "result": {"faults": []}})
        await store.set(fleet.keys.task(task.id), ended.model_dump_json())
        await store.publish(fleet.keys.events, Hint(task=task.id).model_dump_json())
        assert (await waiting).json() == ended.model_dump(mode="json")
        assert [(one["kind"], one["state"], one["result"]) for one in (await overview(served))["tasks"]] == [
            ("verify", "succeeded", {})
        ]


async def test_tasks_that_nobody_can_do_are_refused_and_their_number_is_bounded(store, store_server):
    async with serving(store_server) as served:
        fleet = await host(store, summary("a"))

        async def ask(**body: object) -> tuple[int, str]:
            found = await served.client.post("/admin/v1/tasks", json=body, headers=ADMIN)
            return found.status_code, found.json().get("error", {}).get("message", "")

        assert await ask(kind="verify", snapshot="b") == (404, "No restorer that is there has snapshot 'b'.")
        assert await ask(kind="explain", snapshot="a", host="h2") == (404, "No restorer that is there has snapshot 'a' on h2.")
        assert (await ask(kind="log", replica="m#0", lines=5_000))[0] == 400
        assert (await ask(kind="rm", snapshot="a"))[0] == 400
        await store.lpush(fleet.keys.host_tasks("h1"), *("x" for _ in range(MAX_TASKS)))
        status, message = await ask(kind="verify", snapshot="a")
        assert (status, message) == (409, "Too many tasks wait for the restorer on h1; ask again when it has got on.")
        assert (await served.client.get("/admin/v1/tasks/none", headers=ADMIN)).status_code == 404


async def test_the_story_of_a_failure_quotes_the_line_and_names_the_remedy(store, store_server):
    line = "(00.1) Error (criu/files-reg.c:2175): File a.so has bad size 19 (expect 9)"
    verdict = Verdict(cls="host", evidence=line, remedy="bring that version back")
    common = {"operation": "op-1", "job": "op-1/0", "kind": "start", "replica": "m#0", "attempt": 1, "host": "h1", "pid": 1}
    steps = (Step(n=0, name="restore processes", at_ms=1, ms=2.0, error=f"criu restore failed with status 1: {line}"),)
    ended = {"at_ms": 1, "outcome": "failed", "ended_ms": 2}
    wrong = Trail(id="j1", model="m", steps=steps, verdict=verdict, detail="criu restore failed", **common, **ended)
    other = Trail(id="j2", model="other", **common, **ended)
    async with serving(store_server) as served:
        fleet = await host(store, summary("a", fits=False, mismatches=("host.kernel: expected 5, found 6; boot it",)))
        await store.rpush(fleet.keys.journal, *(one.model_dump_json() for one in (other, wrong)))
        await fleet.admit(FakeReplica(), state=State.FAILED, reason="criu restore failed")
        await fleet.fail("m", "criu restore failed with status 1", ttl_ms=30_000)
        await eventually(lambda: served.gateway.registry.failure("m") and served.gateway.registry.replicas())
        for name in ("m", "m#0", "alias/of-m"):
            found = (await served.client.get("/admin/v1/why", params={"of": name}, headers=ADMIN)).json()
            assert found["brief"] == line
            assert 0 < found["next_try_s"] <= 30
            (tried,) = found["tries"]
            assert (tried["id"], tried["quote"], tried["remedy"]) == ("j1", line, "bring that version back")
            assert (tried["step"], tried["fault"]) == ("in 'restore processes'", "host")
            assert found["unfit"] == [{"id": "a", "host": "h1", "reason": "host.kernel: expected 5, found 6; boot it"}]
            assert (found["hosts"], found["lacking"], tried["logged"]) == (["h1"], {}, True)
        missing = await served.client.get("/admin/v1/why", params={"of": "nobody"}, headers=ADMIN)
        assert (missing.status_code, "nobody" in missing.json()["error"]["message"]) == (404, True)
        assert (await served.client.get("/admin/v1/why", headers=ADMIN)).status_code == 400


async def test_the_story_says_when_no_host_can_start_a_model_before_anybody_tries(store, store_server):
    config = configuration(model__engine={"kind": "http", "command": ["/bin/true"], "hosts": ["elsewhere"]})
    async with serving(store_server, config) as served:

        async def why() -> dict:
            return (await served.client.get("/admin/v1/why", params={"of": "m"}, headers=ADMIN)).json()

        assert ((await why())["hosts"], (await why())["lacking"]) == ([], {})
        await host(store)
        found = await why()
        assert (found["hosts"], found["lacking"]) == (["h1"], {"h1": "engine.hosts names elsewhere"})
        assert (found["tries"], found["brief"]) == ([], "")


async def test_the_page_and_all_it_is_made_of_may_be_loaded_by_itself_alone(store, store_server):
    async with serving(store_server) as served:
        for path in ["/console", *(f"/console/{file.name}" for file in console.FOLDER.iterdir())]:
            found = await served.client.get(path)
            assert found.status_code == 200, path
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert found.headers["x-content-type-options"] == "nosniff"
            again = await served.client.get(path, headers={"If-None-Match": f'"other", W/{found.headers["etag"]}'})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", found.headers["etag"])
        assert (await served.client.get("/console/app.py")).status_code == 404
        assert (await served.client.get("/console/../app.py")).status_code == 404
        assert (await served.client.head("/console")).content == b""


async def test_the_page_can_be_switched_off(store, store_server):
    config = configuration(gateway__console=False)
    async with serving(store_server, config) as served:
        found = await served.client.get("/console")
        assert (found.status_code, json.loads(found.content)["error"]["message"]) == (
            404,
            "The console is switched off (gateway.console).",
        )
