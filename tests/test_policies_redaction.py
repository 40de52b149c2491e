"""What leaves a host in a support bundle: no secret, wherever it was put, and no prompt; but what explains a fault stays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies import redaction
from policies.redaction import HIDDEN

SECRETS = (
    "hf_abcdefghijklmnop",
    "sk-proj-abcdefgh12345678",
    "ghp_abcdefghijklmnop1234",
    "AKIAIOSFODNN7EXAMPLE",
    "xoxb-1234567890-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "Bearer abc.def-ghi",
    "redis://default:hunter2secret@store:6379/0",
    "https://bob:hunter2secret@proxy.example:3128",
    "password=hunter2secret",
    'api_key: "hunter2secret"',
    "--hf-token hunter2secret",
    "aws_secret_access_key=hunter2secret",
    "https://minio.example/bucket?X-Amz-Signature=hunter2secret&a=1",
)
DOCUMENT: dict[str, Any] = {
    "models": {
        "org/model": {
            "engine": {"kind": "vllm", "command": ["vllm", "serve", "m", "--port", "8000"], "env": {"A": "b"}, "cwd": "/srv"},
            "weights": ["/srv/weights"],
        }
    },
    "gateway": {"host": "127.0.0.1", "tls": {"certificate": "/etc/c.pem", "key": "/etc/k.pem"}},
    "store": {"url": "redis://store"},
    "tenants": {"team": {"keys": ["sha256:0123"], "models": ["org/model"]}},
}


def strings(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where each string of a document stands."""
    if isinstance(value, dict):
        return [found for key, one in value.items() for found in strings(one, (*path, key))]
    if isinstance(value, list):
        return [found for number, one in enumerate(value) for found in strings(one, (*path, number))]
    return [path]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("path", strings(DOCUMENT), ids=lambda path: ".".join(map(str, path)))
def test_a_secret_in_any_string_of_the_configuration_is_hidden(path: tuple[Any, ...], secret: str) -> None:
    planted = json.loads(json.dumps(DOCUMENT))
    place = planted
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = f"{place[path[-1]]} {secret}"
    shown = json.dumps(redaction.document(planted))
    for word in ("hunter2secret", "hf_abcdefgh", "sk-proj", "ghp_", "AKIAIOSF", "xoxb-1", "eyJhbGci", "abc.def-ghi"):
        assert word not in shown


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_in_the_middle_of_a_log_is_hidden_and_the_rest_stays(secret: str) -> None:
    shown = redaction.text(f"12:00 engine started with {secret} on port 8000\n12:01 out of memory")
    assert "hunter2" not in shown
    assert HIDDEN in shown
    assert shown.startswith("12:00 engine started with ")
    assert shown.endswith("12:01 out of memory")


def test_environments_keys_and_flags_are_hidden_by_their_names_and_the_rest_is_not() -> None:
    shown = redaction.document(
        {
            "env": {"HF_HOME": "/srv/hf", "HF_TOKEN": "x"},
            "command": ["vllm", "serve", "--api-key", "k1", "--port", "8000", "--token=k2", "--max-tokens", "5"],
            "tokens_per_minute": 5,
            "max_tokens": 7,
            "keys": ["sha256:ab"],
            "port": 8080,
            "preload": True,
        }
    )
    assert shown["env"] == {"HF_HOME": HIDDEN, "HF_TOKEN": HIDDEN}
    assert shown["command"] == ["vllm", "serve", "--api-key", HIDDEN, "--port", "8000", f"--token={HIDDEN}", "--max-tokens", "5"]
    assert (shown["tokens_per_minute"], shown["max_tokens"], shown["port"], shown["preload"]) == (5, 7, 8080, True)
    assert shown["keys"] == [HIDDEN]


def test_secrets_known_by_their_value_are_hidden_where_nothing_else_gives_them_away() -> None:
    document = {"store": {"url": "redis://u:open-sesame@h"}, "models": {"m": {"engine": {"env": {"MY_TOKEN": "opaque-value"}}}}}
    known = redaction.values(document)
    assert known == {"open-sesame", "opaque-value"}
    assert redaction.text("it said open-sesame and opaque-value", known) == f"it said {HIDDEN} and {HIDDEN}"


def test_a_private_key_is_hidden_also_when_its_end_was_cut_off() -> None:
    whole = "-----BEGIN PRIVATE KEY-----\nMIIabc\n-----END PRIVATE KEY-----\nafter"
    assert redaction.text(whole) == f"{HIDDEN}\nafter"
    assert redaction.text(whole[:40]) == HIDDEN


def test_what_a_criu_log_says_stays_as_it_is() -> None:
    line = "(00.123456)     42: Error (criu/files-reg.c:2139): File usr/lib/libfoo.so has bad size 123 (expect 124)"
    assert redaction.text(line) == line


def test_lines_that_repeat_requests_are_left_out_of_an_engines_log() -> None:
    log = "INFO started\nReceived request cmpl-1: prompt: 'my secret plan'\n{\"messages\": [1]}\nINFO slot 0 | n_tokens = 8\n"
    assert redaction.unasked(log) == ("INFO started\nINFO slot 0 | n_tokens = 8\n", 2)


@pytest.mark.parametrize(
    ("command", "tells"),
    [
        (["vllm", "serve", "m"], False),
        (["vllm", "serve", "--enable-log-requests"], True),
        (["llama-server", "-v"], True),
        (["llama-server", "--log-verbosity", "4"], True),
        (["llama-server", "--verbose-prompt-ish"], False),
    ],
)
def test_an_engine_that_is_told_to_log_requests_is_known(command: list[str], tells: bool) -> None:
    assert redaction.tells_requests(command) is tells
