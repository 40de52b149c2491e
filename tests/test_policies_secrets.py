"""What is a secret by its name or its value; that no value ever comes out; what may leave a host."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policies_compat import HOST, PROFILE, manifest

from policies.compat import mismatches
from policies.secrets import found, hidden, hidden_argv, is_secret, publishable
from policies.trust import TRUST, Trust


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "VLLM_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        *("AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "PGPASSWORD", "DB_PASSWORD", "WANDB_API_KEY", "VAULT_TOKEN", "NETRC"),
        *("MY_PRIVATE_KEY", "SECRET_SAUCE", "SENTRY_DSN", "hf_token", "--api-key", "--hf-token", "--some.password"),
    ],
)
def test_restore_case_44_known_names_are_secrets(name: str) -> None:
    assert is_secret(name, "a value", TRUST)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PATH", "/bin"), ("TOKENIZERS_PARALLELISM", "false"), ("MAX_TOKENS", "4096"), ("AWS_REGION", "eu-west-1")),
        *(("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"), ("HF_TOKEN", ""), ("USE_AUTH_TOKEN", "1"), ("HF_TOKEN_PATH", "/run/token")),
        *(("API_KEY_FILE", "/run/key"), ("GOOGLE_APPLICATION_CREDENTIALS", "/run/gcp.json"), ("OLDPWD", "/root")),
        *(("EOS_TOKEN", "</s>"), ("URL", "http://example.test/x@y"), ("MODEL", "sk-small")),
    ],
)
def test_what_only_looks_like_one_is_none(name: str, value: str) -> None:
    assert not is_secret(name, value, TRUST)


@pytest.mark.parametrize(
    "value",
    [
        "hf_" + "a" * 34,
        "sk-" + "b" * 40,
        "AKIA" + "C" * 16,
        "postgres://me:hunter2@db/x",
        "-----BEGIN RSA PRIVATE KEY-----\nxx",
        "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4f",
    ],
)
def test_a_value_that_is_plainly_a_secret_is_one_whatever_its_name(value: str) -> None:
    assert is_secret("HARMLESS", value, TRUST)


def test_the_operator_adds_names_and_takes_some_away() -> None:
    own = Trust(secret_names=("corp_*", "license"), not_secret=("HF_*", "--my-token"))
    assert is_secret("CORP_THING", "value", own)
    assert is_secret("--license", "value", own)
    assert not is_secret("HF_TOKEN", "value", own)
    assert not is_secret("--my-token", "value", Trust(not_secret=("MY_TOKEN",)))


def test_names_of_variables_and_options_are_found() -> None:
    argv = ["/bin/engine", "--api-key", "one-value", "--hf-token=other-value", "--port", "8000", "sk-" + "x" * 20]
    assert list(found({"HF_TOKEN": "value", "A": "1"}, argv, TRUST)) == [
        "env HF_TOKEN",
        "option --api-key",
        "option --hf-token",
        "argument 6",
    ]


def test_secrets_are_hidden_but_still_compared() -> None:
    environ = {"HF_TOKEN": "first-token", "A": "1"}
    shown = hidden(environ, TRUST)
    assert shown["A"] == "1"
    assert shown["HF_TOKEN"].startswith("scrypt:")
    assert shown == hidden(environ, TRUST)
    assert shown != hidden({**environ, "HF_TOKEN": "second-token"}, TRUST)
    # The same value under another name says nothing of the first.
    assert hidden({"X_TOKEN": "first-token"}, TRUST)["X_TOKEN"] != shown["HF_TOKEN"]
    argv = hidden_argv(("/e", "--api-key", "key-one", "--hf-token=key-two", "--port", "1"), TRUST)
    assert argv[:2] == ("/e", "--api-key")
    assert argv[2].startswith("scrypt:")
    assert argv[3].startswith("--hf-token=scrypt:")
    assert argv[4:] == ("--port", "1")


WORDS = st.text("abcXYZ019-_=:/.@", min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["HF_TOKEN", "A_PASSWORD", "PATH", "X"]), st.text("abc019", min_size=5, max_size=9), max_size=4
    ),
    st.lists(WORDS, max_size=6),
)
def test_no_value_of_a_secret_comes_out(environ: dict[str, str], argv: list[str]) -> None:
    names = " ".join(found(environ, argv, TRUST))
    shown = hidden(environ, TRUST)
    for name, value in environ.items():
        if is_secret(name, value, TRUST):
            assert value not in names
            assert value not in shown[name].removeprefix("scrypt:") or len(value) < 8
            assert f"env {name}" in names
        else:
            assert shown[name] == value
    assert len(hidden_argv(argv, TRUST)) == len(argv)


def test_restore_case_44_a_snapshot_with_secrets_leaves_the_host_only_encrypted() -> None:
    clean, holding, unknown = (manifest().model_copy(update={"secrets": names}) for names in ((), ("env HF_TOKEN",), None))
    assert publishable(clean, encrypted=False) is None
    for snapshot in (holding, unknown):
        assert publishable(snapshot, encrypted=True) is None
        reason = publishable(snapshot, encrypted=False)
        assert reason is not None
        assert "encrypt its copies" in reason
    assert "env HF_TOKEN" in str(publishable(holding, encrypted=False))


def test_a_mismatch_shows_no_secret_that_an_older_snapshot_has_as_it_was() -> None:
    old = PROFILE.model_copy(update={"env": {"HF_TOKEN": "clear-token"}, "command": ("/vllm", "--api-key", "clear-key")})
    told = " ".join(map(str, mismatches(manifest(profile=old), PROFILE, HOST)))
    assert "profile.env.HF_TOKEN" in told
    assert "profile.command" in told
    assert "clear" not in told
