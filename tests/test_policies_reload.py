"""What a reload changes, and when."""

from __future__ import annotations

from typing import Any

import pytest

from policies.config import Config, parse
from policies.reload import Changes, merge


def config(**changes: Any) -> Config:
    """Two models, with settings changed by their paths (``__`` for a dot)."""
    engine = {"kind": "http", "command": ["/bin/true"]}
    document: dict[str, Any] = {"models": {"a": {"engine": engine}, "org/b": {"engine": dict(engine)}}}
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = document
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return parse(document)


def test_nothing_changed() -> None:
    assert merge(config(), config()) == (config(), Changes())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("gateway__host", "0.0.0.0"),
        ("gateway__port", 9000),
        ("gateway__workers", 3),
        ("gateway__user", "daemon"),
        ("gateway__tls", {"certificate": "/c.pem", "key": "/k.pem"}),
        ("store__url", "redis://elsewhere"),
        ("store__namespace", "other"),
        ("metrics__address", "127.0.0.1:9464"),
        ("state_dir", "/elsewhere"),
        ("run_dir", "/elsewhere"),
        ("restorer__criu", "/elsewhere"),
        ("restorer__network", "10.0.0.0/16"),
    ],
)
def test_what_cannot_change_live_is_named_and_keeps_its_value_and_the_rest_is_applied(path: str, value: Any) -> None:
    wished = config(**{path: value, "gateway__drain_s": 7})
    merged, changes = merge(config(), wished)
    assert merged == config(gateway__drain_s=7)
    assert changes == Changes(applied=("gateway.drain_s",), restart=(path.replace("__", "."),))
    # Asked again, it is named again: it is still not in force.
    assert merge(merged, wished)[1].restart == changes.restart


def test_certificates_may_move_while_tls_stays_on() -> None:
    before = config(gateway__tls={"certificate": "/c.pem", "key": "/k.pem"})
    after = config(gateway__tls={"certificate": "/d.pem", "key": "/k.pem"})
    assert merge(before, after) == (after, Changes(applied=("gateway.tls.certificate",)))


def test_models_that_come_and_go_are_one_change_each() -> None:
    engine = {"kind": "http", "command": ["/bin/true"]}
    before, after = config(), parse({"models": {"a": {"engine": engine}, "c.d": {"engine": engine}}})
    assert merge(before, after) == (after, Changes(applied=("models.c.d", "models.org/b")))


def test_settings_of_running_engines_wait_for_the_next_start() -> None:
    after = config(models__a__concurrency=3, models__a__hold={"max_wait_s": 5}, models__a__aliases=["x"])
    merged, changes = merge(config(), after)
    assert merged == after
    assert changes.next_start == ("models.a.concurrency",)
    assert changes.applied == ("models.a.aliases", "models.a.hold.max_wait_s")
    engine = {"kind": "http", "command": ["/bin/false"], "env": {"A": "1"}}
    changes = merge(config(), config(**{"models__org/b__engine": engine}))[1]
    assert changes == Changes(next_start=("models.org/b.engine.command", "models.org/b.engine.env.A"))


def test_a_configuration_survives_its_way_to_another_process() -> None:
    """A supervisor sends it as JSON."""
    whole = config(
        gateway__tls={"certificate": "/c.pem", "key": "/k.pem"},
        gateway__max_body_bytes="3 MiB",
        gateway__trusted_proxies=["10.0.0.0/8"],
        models__a__schedule=[{"start": "22:00", "end": "06:00"}],
        models__a__defaults={"temperature": 0, "stop": ["x"]},
        tenants__t={"keys": ["sha256:" + "0" * 64]},
    )
    assert parse(whole.model_dump(mode="json")) == whole
