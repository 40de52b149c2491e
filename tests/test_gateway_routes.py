"""Finding a route: the whole table, its spellings, what is no path, and what browsers are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import cors, routes
from gateway.errors import MethodNotAllowed, NotFound
from policies.config import Cors


def concrete(template: str) -> str:
    return template.replace("{name}", "org/model").replace("{id}", "resp_1").replace("{asset}", "app.js")


CONCRETE = {concrete(route.name) for route in routes.TABLE}


@pytest.mark.parametrize("route", routes.TABLE, ids=lambda route: f"{route.method} {route.name}")
def test_every_route_is_found_with_and_without_a_slash_and_a_query(route):
    path = concrete(route.name)
    for target in (path, path + "/", f"{path}?a=1", f"http://host:1/{path[1:]}"):
        found = routes.find(route.method, target)
        assert found.route is route
        assert found.upstream == (f"{path}?a=1" if "?" in target else path)
        assert {route.method, "OPTIONS"} <= set(found.allow.split(", "))


def test_the_table_names_no_method_twice():
    assert len({(route.method, route.name) for route in routes.TABLE}) == len(routes.TABLE)


def test_gateway_case_56_model_names_with_a_slash_plain_and_encoded():
    for target in ("/v1/models/org/name", "/v1/models/org%2Fname", "/v1/models/org%2fname/"):
        assert routes.find("GET", target).params == {"name": "org/name"}
    assert routes.find("GET", "/v1/models/%E6%A8%A1%E5%9E%8B").params == {"name": "模型"}


def test_gateway_case_58_options_is_found_everywhere_and_asks_for_no_key():
    for route in routes.TABLE:
        assert routes.find("OPTIONS", concrete(route.name)).preflight
    assert routes.find("OPTIONS", "*").preflight
    with pytest.raises(NotFound):
        routes.find("OPTIONS", "/nothing")


def test_gateway_case_59_head_is_for_what_the_gateway_answers_itself():
    assert routes.find("HEAD", "/v1/models").route.serves == "models.list"
    for target, allow in (("/v1/chat/completions", "POST, OPTIONS"), ("/v1/responses/r", "GET, DELETE, OPTIONS")):
        with pytest.raises(MethodNotAllowed) as refused:
            routes.find("HEAD", target)
        assert refused.value.headers == {"Allow": allow}


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("/v1/v1/chat/completions", "/v1 twice. Did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "Did you mean /v1/models?"),
        ("/chat/completions", "Did you mean /v1/chat/completions?"),
        ("//v1/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/v1//chat/completions/", "Did you mean /v1/chat/completions/?"),
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/V1/Embeddings", "Did you mean /v1/embeddings?"),
        ("/nothing", "There is no path /nothing.$"),
    ],
)
def test_a_wrong_path_says_what_was_meant(target, meant):
    with pytest.raises(NotFound, match=meant.replace("?", r"\?")):
        routes.find("POST", target)


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/v1/load_lora_adapter", "/flush_cache", "/slots"),
        *("/sleep/", "/props", "/update_weights_from_disk", "/server_info"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_routes_that_control_an_engine_do_not_exist(method, path):
    with pytest.raises(NotFound, match="not forwarded"):
        routes.find(method, path)


@pytest.mark.parametrize(
    "target",
    [
        *("/v1/responses/a/../../sleep", "/v1/responses/..%2fsleep", "/v1/responses/%2e%2e/sleep", "/v1/chat%2fcompletions"),
        *(
            "/v1/chat/completions;x",
            "/v1/chat/completions//",
            "",
            "*",
            "/",
            "sleep",
            "/tokenize/../sleep",
            "/v1/responses/a%0d%0ab",
        ),
    ],
)
def test_no_spelling_leads_beside_the_table(target):
    with pytest.raises((NotFound, MethodNotAllowed)):
        routes.find("POST", target)


@given(method=st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "x y"]), target=st.text(max_size=60))
def test_whatever_the_target_what_goes_upstream_is_spelt_as_in_the_table(method, target):
    try:
        found = routes.find(method, target)
    except (NotFound, MethodNotAllowed) as error:
        said = str(error)
    else:
        said = ""
        assert found.route.serves not in ("replica", "socket") or found.path in CONCRETE
    assert said.isprintable()


ASK = {
    "Origin": "https://a.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, x-y",
}


def test_gateway_case_58_preflight_grants_what_the_configuration_grants():
    found = routes.find("OPTIONS", "/v1/chat/completions")
    for origins, granted in (
        ((), None),
        (("https://a.example",), "https://a.example"),
        (("*",), "*"),
        (("https://b.example",), None),
    ):
        settings = Cors(origins=origins)
        answer = cors.options(settings, found, ASK)
        added = dict(cors.granted(settings, ASK["Origin"]))
        assert (answer.status, answer.body, answer.headers["Allow"]) == (204, b"", "POST, OPTIONS")
        assert added.get("Access-Control-Allow-Origin") == granted
        assert answer.headers.get("Access-Control-Allow-Headers") == ("authorization, x-y" if granted else None)
        assert answer.headers.get("Access-Control-Allow-Methods") == ("POST, OPTIONS" if granted else None)
        assert answer.headers.get("Access-Control-Max-Age") == ("600" if granted else None)
        assert ("Vary" in added) is (origins not in ((), ("*",)))
    assert "Access-Control-Allow-Credentials" not in added


def test_cors_repeats_no_header_names_that_are_none():
    odd = {**ASK, "Access-Control-Request-Headers": "x\r\ny: z"}
    answer = cors.options(Cors(origins=("*",)), routes.find("OPTIONS", "/v1/completions"), odd)
    assert "Access-Control-Allow-Headers" not in answer.headers
