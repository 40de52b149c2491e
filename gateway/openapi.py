"""The gateway's description of itself as OpenAPI 3.1, made from the table of routes, so that it cannot lag behind.

Bodies for replicas are described as far as the gateway reads them: the rest is the engines' business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from gateway import admin, overview
from gateway.exchange import Call, Reply, reply
from gateway.routes import TABLE, Route
from gateway.version import version

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "rewake"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "rewake": {
            "type": "object",
            "required": ["state", "replicas", "aliases", "eta_seconds"],
            "properties": {
                "state": {"type": "string"},
                "replicas": {"type": "integer", "minimum": 0},
                "aliases": {"type": "array", "items": {"type": "string"}},
                "eta_seconds": {"type": ["number", "null"], "minimum": 0},
            },
        },
    },
}
_MODELS = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}},
}
_ANSWERS: Mapping[str, str] = {"models.list": "Models", "models.get": "Model"}
_ACCEPTED = frozenset(f"admin.{name}" for name in ("create_snapshot", "scale_up", "scale_down", "drain", "move", "create_task"))
_WAITS = {"admin.operation": admin.MAX_WAIT_S, "admin.task": admin.MAX_WAIT_S, "admin.overview": overview.MAX_WAIT_S}
_FIELDS = {"model": {"type": "string", "minLength": 1}, "stream": {"type": ["boolean", "null"]}}
_HINT = {
    "name": "x-rewake-model",
    "in": "header",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
    "description": "The model. The parameter `model` may name it instead.",
}


async def answer(call: Call) -> Reply:
    """``GET /openapi.json``."""
    return reply(document())


@cache
def document() -> dict[str, object]:
    """The whole description."""
    paths: dict[str, dict[str, object]] = {}
    for route in TABLE:
        paths.setdefault(route.name, {})[route.method.lower()] = _operation(route)
    schemas = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, "Model": _MODEL, "Models": _MODELS}
    schemes = {"key": {"type": "http", "scheme": "bearer"}, "admin": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rewake", "version": version()},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
    }


def _operation(route: Route) -> dict[str, object]:
    described: dict[str, object] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.name}").strip("_"),
        "summary": route.summary,
        "responses": _responses(route),
        "security": {"tenant": [{}, {"key": []}], "admin": [{"admin": []}], "none": []}[route.auth],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", route.name)
    ]
    if route.model == "hint":
        parameters.append(_HINT)
    if route.serves in _WAITS:
        wait = {"type": "number", "minimum": 0, "maximum": _WAITS[route.serves]}
        parameters.append({"name": "wait", "in": "query", "required": False, "schema": wait})
    if route.serves == "admin.why":
        parameters.append({"name": "of", "in": "query", "required": True, "schema": {"type": "string", "minLength": 1}})
    if route.serves == "admin.overview":
        parameters.append({"name": "after", "in": "query", "required": False, "schema": {"type": "string"}})
    if parameters:
        described["parameters"] = parameters
    body = _body(route)
    if body is not None:
        described["requestBody"] = {"required": True, "content": body}
    return described


def _body(route: Route) -> dict[str, object] | None:
    if route.serves in admin.BODIES:
        return {"application/json": {"schema": admin.BODIES[route.serves].model_json_schema()}}
    if route.serves != "replica" or route.model == "hint":
        return None
    schema: dict[str, object] = {"type": "object", "properties": _FIELDS, "required": ["model"]}
    if route.model == "either":
        schema["description"] = "The header x-rewake-model or the parameter `model` may name the model instead."
    content: dict[str, object] = {"application/json": {"schema": schema}}
    if route.multipart:
        form = {"type": "object", "properties": {"model": _FIELDS["model"]}, "required": ["model"]}
        content["multipart/form-data"] = {"schema": form}
    return content


def _responses(route: Route) -> dict[str, object]:
    error = "AnthropicError" if route.dialect == "anthropic" else "Error"
    shaped = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    answers: dict[str, object] = {"default": {"description": "An error, of the gateway or the replica", "content": shaped}}
    status = "101" if route.serves == "socket" else "202" if route.serves in _ACCEPTED else "200"
    good: dict[str, object] = {"description": "As the engine answers" if route.serves == "replica" else "Done"}
    if route.serves in _ANSWERS:
        good["content"] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{_ANSWERS[route.serves]}"}}}
    return {status: good, **answers}
