"""Our own OpenAPI document: whole, true, and a source of requests that try to break what it describes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from conftest import eventually
from e2e_installation import needed
from fake_replica import ADMIN, Fleet, configuration, replica_server, serving

from gateway import openapi, routes

NOT_HTTP = "/v1/realtime"
OURS_ALONE = ("/admin/v1/reload", "/admin/v1/restart")
"""Their answers depend on how this process was started."""


def operations():
    for path, methods in openapi.document()["paths"].items():
        for method, operation in methods.items():
            yield path, method.upper(), operation


def test_the_document_has_every_route_and_no_other():
    assert {(path, method) for path, method, _ in operations()} == {(route.name, route.method) for route in routes.TABLE}
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(ids)) == len(ids)
    assert all(operation["summary"] for _, _, operation in operations())


def test_every_reference_leads_somewhere_and_every_parameter_is_described():
    document = openapi.document()
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
        found = document
        for part in reference.split("/"):
            found = found[part]
    for path, _, operation in operations():
        named = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path))


async def test_it_is_served_without_a_key(store, store_server):
    async with serving(store_server) as served:
        assert (await served.client.get("/openapi.json")).json() == json.loads(json.dumps(openapi.document()))


def smallest(path: str, operation: dict) -> dict[str, object]:
    """The least request that the document allows."""
    request: dict[str, object] = {
        "headers": dict(ADMIN),
        "url": path.replace("{name}", "m").replace("{id}", "x").replace("{asset}", "app.js"),
        "params": {one["name"]: "m" for one in operation.get("parameters", ()) if one["in"] == "query" and one["required"]},
    }
    if any(parameter["name"] == "x-rewake-model" for parameter in operation.get("parameters", ())):
        request["headers"] = ADMIN | {"x-rewake-model": "m"}
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        least = {"model": "m", "replica": "m#0", "kind": "log"}
        request["json"] = {name: least[name] for name in schema["required"]}
    return request


async def test_the_least_that_the_document_asks_for_is_enough(store, store_server):
    async with replica_server() as fake, serving(store_server) as served:
        replica = await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        wrong = []
        for path, method, operation in operations():
            if path == NOT_HTTP or path in OURS_ALONE:
                continue
            response = await served.client.request(method, **smallest(path, operation))
            # Of things that are not there.
            missing = path.startswith(("/admin/v1/operations", "/admin/v1/tasks", "/admin/v1/move"))
            expected = "404" if missing else next(iter(operation["responses"]))
            if str(response.status_code) != expected or not response.headers["x-request-id"]:
                wrong.append((method, path, response.status_code, response.text))
            assert served.gateway.registry.available("m"), replica
        assert wrong == []


async def test_requests_made_from_the_document_break_nothing(store, store_server, tmp_path):
    """Schemathesis: thousands of requests, proper and improper; statuses, types and shapes are what the document says."""
    st = Path(needed("REWAKE_CLIENTS")) / "new/bin/st"
    async with replica_server() as fake, serving(store_server, configuration(model__on_cold="reject")) as served:
        await Fleet(store).admit(fake)
        await eventually(lambda: served.gateway.registry.available("m"))
        excluded = [option for path in (NOT_HTTP, *OURS_ALONE) for option in ("--exclude-path", path)]
        process = await asyncio.create_subprocess_exec(
            *(str(st), "run", f"{served.url}/openapi.json", "--phases", "coverage,fuzzing", "--max-examples", "5"),
            *("--header", f"Authorization: {ADMIN['Authorization']}", "--request-timeout", "10", "--generation-deterministic"),
            *("--no-color", *excluded),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 180)
        assert process.returncode == 0, out.decode()
        await eventually(lambda: served.counts() == (0, 0, 0))
