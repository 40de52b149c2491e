"""The configuration file: its defaults, its bounds, and what it says of a fault."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from policies.config import Bytes, ConfigError, parse

ENGINE = {"kind": "http", "command": ["/bin/engine"]}


def document(model: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return {"models": {"m": {"engine": ENGINE, **(model or {})}}, **sections}


def test_the_shortest_file_is_safe_by_default() -> None:
    config = parse(document())
    assert config.gateway.host == "127.0.0.1"
    assert config.gateway.user == "nobody"
    assert config.store.url is None
    assert config.models["m"].snapshot.rehearse
    assert config.models["m"].canary.max_tokens >= 16
    assert len(config.models["m"].canary.prompts) == 2


@pytest.mark.parametrize(
    ("faulty", "complaint"),
    [
        (None, "the file must be a mapping of settings, but it holds nothing"),
        ([], "the file must be a mapping of settings, but it holds a list"),
        ({}, "models: Field required"),
        ({"models": {}}, "models: Dictionary should have at least 1 item after validation, not 0"),
        ({"models": {"m": {}}}, "models.m.engine: Field required"),
        (document(gateway={"prot": 1}), "gateway.prot: unknown setting; remove it or mend its spelling"),
        (document(gateway={"port": 70000}), "gateway.port: Input should be less than or equal to 65535"),
        (document({"keep": 2}), "models.m: keep is 2 but max_replicas is 1; raise max_replicas"),
        (
            document({"schedule": [{"start": "09:00", "end": "18:00", "replicas": 2}]}),
            "models.m: schedule wants 2 replicas but max_replicas is 1; raise max_replicas",
        ),
        (document({"group": "gpu"}), "models.m.group: there is no group 'gpu'; add it under groups"),
        (document({"pinned": True}), "models.m.pinned: it is in no group that could displace it; name its group"),
        (
            {
                "models": {
                    "m": {"engine": ENGINE, "group": "gpu", "pinned": True, "keep": 1},
                    "n": {"engine": ENGINE, "group": "gpu"},
                },
                "groups": {"gpu": {}},
            },
            "groups.gpu: its pinned and kept models fill it for ever; raise members, or unpin one",
        ),
        (
            document({"engine": {"kind": "http", "command": ["engine"]}}),
            "models.m.engine.command: 'engine' must be an absolute path",
        ),
        (document({"engine": {"kind": "http", "command": []}}), "models.m.engine.command: Tuple should have at least 1 item"),
        (
            document({"engine": {"kind": "x", "command": ["/x"]}}),
            "models.m.engine.kind: Input should be 'llama-server', 'vllm', 'sglang', 'tensorrt-llm' or 'http'",
        ),
        (
            document({"hold": {"max_bytes": "64 MB/s"}}),
            "models.m.hold.max_bytes: '64 MB/s' is not a size; write bytes, or a number with",
        ),
        (document({"hold": {"max_bytes": "5 parsec"}}), "models.m.hold.max_bytes: '5 parsec' is not a size"),
        (document({"hold": {"max_wait_s": 0}}), "models.m.hold.max_wait_s: Input should be greater than 0"),
        (document({"drain_s": float("inf")}), "models.m.drain_s: Input should be a finite number"),
        (document({"aliases": ["m"]}), "models.m: the name 'm' already belongs to 'm'"),
        (document({"aliases": ["a b"]}), "models.m: 'a b' is not a usable model name"),
        (document({"aliases": ["a#1"]}), "models.m: 'a#1' is not a usable model name"),
        (document(restorer={"network": "10.0.0.0/29"}), "restorer.network: 10.0.0.0/29 holds fewer than four replicas"),
        (document(restorer={"network": "10.0.0.1/16"}), "restorer.network: 10.0.0.1/16 has host bits set"),
        (document(store={"namespace": "a b"}), "store.namespace: String should match pattern"),
        (document(state_dir="relative"), "state_dir: String should match pattern"),
    ],
)
def test_a_fault_is_named_by_its_path_with_its_reason(faulty: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(faulty)
    assert str(caught.value).startswith(complaint), str(caught.value)


def test_every_fault_is_listed_one_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(document({"keep": "x", "typo": 1}, gateway={"port": -1}))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "models.m.keep",
        "models.m.typo",
        "gateway.port",
    ]


def test_two_models_cannot_share_a_name() -> None:
    models = {"a": {"engine": ENGINE, "aliases": ["gpt"]}, "b": {"engine": ENGINE, "aliases": ["gpt"]}}
    with pytest.raises(ConfigError, match=r"models\.b: the name 'gpt' already belongs to 'a'"):
        parse({"models": models})


def test_names_and_aliases_resolve_to_their_model() -> None:
    config = parse({"models": {"a": {"engine": ENGINE, "aliases": ["gpt", "x/y"]}, "b": {"engine": ENGINE}}})
    assert {name: config.resolve(name) for name in ("a", "gpt", "x/y", "b", "c", "")} == {
        "a": "a",
        "gpt": "a",
        "x/y": "a",
        "b": "b",
        "c": None,
        "": None,
    }


def test_the_configuration_cannot_be_changed() -> None:
    config = parse(document())
    with pytest.raises(ValidationError, match="frozen"):
        config.gateway.port = 1


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("7B", 7), ("2 KiB", 2048), ("1.5MiB", 3 << 19), ("1 gb", 10**9), (" 64  MB ", 64 * 10**6), ("0", 0)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert TypeAdapter(Bytes).validate_python(text) == size


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_a_size_with_a_unit_is_exact(number: int, unit: str) -> None:
    shift = {"KiB": 10, "MiB": 20, "GiB": 30}[unit]
    assert TypeAdapter(Bytes).validate_python(f"{number} {unit}") == number << shift


@pytest.mark.parametrize("text", ["-1", "1e3", "MiB", "", "1 2", -1])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Bytes).validate_python(text)


def test_off_may_be_written_without_quotes() -> None:
    """YAML reads a bare ``off`` as false."""
    hold = {"keepalive": False, "user_agents": [{"pattern": "x", "keepalive": False}]}
    parsed = parse(document({"hold": hold})).models["m"].hold
    assert (parsed.keepalive, parsed.keepalive_for("x")) == ("off", "off")
    with pytest.raises(ConfigError, match=r"models\.m\.hold\.keepalive: "):
        parse(document({"hold": {"keepalive": True}}))


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_words_that_yaml_takes_for_booleans_are_words(word):
    document = yaml.safe_load(f"models: {{m: {{engine: {{kind: http, command: [/e]}}, restore: {{prefetch: {word}}}}}}}")
    assert parse(document).models["m"].restore.prefetch == word
