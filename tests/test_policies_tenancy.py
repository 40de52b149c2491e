"""Tenants as the configuration has them: their keys are hashes, and every fault says where it is."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from policies.config import Config, ConfigError, parse
from policies.tenancy import Tenant, key_hash

MODELS = {"m": {"engine": {"kind": "http", "command": ["/bin/true"]}}}
HASH = key_hash("a key")


def config(**tenants: Any) -> Config:
    return parse({"models": MODELS, "tenants": tenants})


def test_a_hash_is_sha256_of_the_keys_bytes() -> None:
    assert key_hash("abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert key_hash("\udcff") != key_hash("?")


def test_the_least_tenant_may_everything_without_limit() -> None:
    tenant = config(alice={"keys": [HASH]}).tenants["alice"]
    assert tenant == Tenant(keys=(HASH,))
    assert tenant.models is None
    assert set(tenant.limits.model_dump().values()) == {None}


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ({"a": {"keys": ["rwk-the-key-itself"]}}, "tenants.a.keys.0"),
        ({"a": {"keys": [HASH.upper()]}}, "tenants.a.keys.0"),
        ({"a": {"keys": [HASH]}, "b": {"keys": [HASH]}}, "tenants.b.keys: the same key already belongs to 'a'"),
        ({"a": {"models": ["x"]}}, "tenants.a.models: there is no model 'x'"),
        ({"a": {"weight": 0}}, "tenants.a.weight"),
        ({"a": {"priority": 101}}, "tenants.a.priority"),
        ({"a": {"limits": {"requests_per_minute": 0}}}, "tenants.a.limits.requests_per_minute"),
        ({"a": {"limits": {"tokens_per_minute": -1}}}, "tenants.a.limits.tokens_per_minute"),
        ({"a": {"limits": {"requests_per_hour": 1}}}, "tenants.a.limits.requests_per_hour: unknown setting"),
    ],
)
def test_faults_say_where_they_are(tenants: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**tenants)
    assert says in str(caught.value)


def test_a_key_in_place_of_its_hash_is_not_repeated_by_the_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(yaml.safe_load(f"models: {MODELS}\ntenants: {{a: {{keys: [rwk-secret]}}}}"))
    assert "rwk-secret" not in str(caught.value)
