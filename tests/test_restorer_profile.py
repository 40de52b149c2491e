"""Profiles: what a model would be started with, and its weights by hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from policies.compat import mismatches
from policies.config import Engine, Model
from policies.manifest import HostFacts, Manifest, Profile
from restorer.errors import Environment
from restorer.machine.profile import resolve
from restorer.storage.stamps import Stamps


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def model(*weights: Path | str) -> Model:
    return Model(engine=Engine(kind="http", command=("/bin/engine", "-x"), env={"A": "1"}), weights=tuple(map(str, weights)))


@pytest.fixture
def stamps(tmp_path: Path) -> Stamps:
    return Stamps(tmp_path / "stamps.json")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A model cache as hubs lay it out: names are symlinks to blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(b"weights")
    snapshot = tmp_path / "snapshot"
    (snapshot / "deep").mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../blobs/1")
    (snapshot / "deep" / "config.json").write_bytes(b"{}")
    (snapshot / "deep" / "loop").symlink_to("..")
    return snapshot


def test_every_weights_file_is_in_the_profile(cache: Path, stamps: Stamps, tmp_path: Path) -> None:
    (tmp_path / "adapter.bin").write_bytes(b"lora")
    profile = resolve("m", model(cache, tmp_path / "adapter.bin", cache / "model.safetensors"), stamps)
    assert profile == Profile(
        model="m",
        engine="http",
        command=("/bin/engine", "-x"),
        env={"A": "1"},
        port=8000,
        weights={
            str(tmp_path / "adapter.bin"): sha(b"lora"),
            str(cache / "deep/config.json"): sha(b"{}"),
            str(cache / "model.safetensors"): sha(b"weights"),
        },
    )


def test_a_changed_byte_behind_a_symlink_makes_another_profile(cache: Path, stamps: Stamps, tmp_path: Path) -> None:
    facts = {field: None for field in HostFacts.model_fields} | {"hostname": "h"}
    before = resolve("m", model(cache), stamps)
    (tmp_path / "blobs" / "1").write_bytes(b"Weights")
    after = resolve("m", model(cache), stamps)
    assert before.digest != after.digest
    manifest = Manifest(
        created_ms=0, profile=before, host=HostFacts(**facts), objects=(), files=(), canary=(), root_pid=1, pids=(),
        scratch=(), criu_options=(), cold_start_s=0, bytes=0, bytes_written=0,
    )  # fmt: skip
    fields = [found.field for found in mismatches(manifest, after, HostFacts(**facts)) if found.field.startswith("profile")]
    assert fields == [f"profile.weights.{cache / 'model.safetensors'}"]


def test_no_weights_are_fine(stamps: Stamps) -> None:
    assert resolve("m", model(), stamps).weights == {}


def test_missing_weights_say_which_setting_and_path(stamps: Stamps, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "broken").symlink_to("/nowhere")
    for path, why in {
        "gone": "does not exist",
        "empty": "is a folder without files",
        "half": "cannot be read: No such file",
    }.items():
        with pytest.raises(Environment, match=rf"^models\.m\.weights: {tmp_path / path}\S* {why}"):
            resolve("m", model(tmp_path / path), stamps)
