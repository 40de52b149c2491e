"""`rewake support`: what is in the bundle, what is not, and that it works when nothing else does."""

from __future__ import annotations

import json
import socket
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import rewake
from restorer.boxes.box import Box
from restorer.boxes.remains import KEPT, Remains
from restorer.cli import support

PLANTED = "hunter2-" + "planted"
CRIU_LINE = "(00.100) Error (criu/files-reg.c:1): File a.so has bad size 1 (expect 2)"


def box(state: Path, id: str, log: str, **facts: Any) -> Box:
    """As it lies on the disk when its engine has run."""
    folder = state / "boxes" / id
    one = Box(id, 0, 0, "", "", folder, Path("/box"), state / f"{id}.json", dict(facts))
    one.private.mkdir(parents=True)
    one.work.mkdir()
    one.log.write_text(log)
    (one.work / "restore.log").write_text(f"{CRIU_LINE}\n")
    return one


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with a secret wherever one fits, and what a run has left behind."""
    monkeypatch.chdir(tmp_path)
    # The real log of a host that has been up for a day may have no line left that is about engines.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dmesg").write_text(
        "#!/bin/sh\necho 'bridge: port 1 entered forwarding state'\necho 'Out of memory: Killed process 7'\n"
    )
    (tmp_path / "bin/dmesg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    engine = {"kind": "llama-server", "command": ["/bin/llama-server", "--api-key", PLANTED], "env": {"MY_TOKEN": PLANTED}}
    unknown = {"kind": "http", "command": ["/bin/true"]}
    config = {
        "models": {"m": {"engine": engine}, "u": {"engine": unknown}},
        "gateway": {"port": 1},
        "store": {"url": f"redis://bob:{PLANTED}@127.0.0.1:1/0"},
        "restorer": {"criu": "/no/such/criu"},
        "state_dir": str(tmp_path / "state"),
        "run_dir": str(tmp_path / "run"),
    }
    (tmp_path / "rewake.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/admin-token").write_text("the-admin-token-itself")
    remains = Remains(tmp_path / "state/ended")
    said = f"loaded with {PLANTED} and the-admin-token-itself\nReceived request: prompt: 'my plan'\nout of memory\n"
    for id, model in (("aa", "m"), ("bb", "u")):
        remains.keep(box(tmp_path / "state", id, said, model=model, replica=f"{model}#0"))
    (tmp_path / "state/journal").mkdir()
    trail = {"do": "failed", "error": 'the engine ended by itself; its log ends: asked "my plan"', "n": 1}
    (tmp_path / "state/journal/j1.jsonl").write_text(json.dumps(trail) + "\n")
    folder = tmp_path / "state/snapshots/0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"canary": [{"prompt": "my plan"}], "profile": {"model": "m"}}))
    return tmp_path


def bundled(place: Path, *options: str) -> tuple[str, dict[str, str]]:
    """What the command printed, and the files of its bundle."""
    path = place / "out.tar.gz"
    path.unlink(missing_ok=True)
    done = CliRunner().invoke(rewake.app, ["support", "-c", str(place / "rewake.yaml"), "-o", str(path), *options])
    assert done.exit_code == 0, done.output
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        files = {one.name.partition("/")[2]: archive.extractfile(one) for one in archive.getmembers()}
        return done.output, {name: file.read().decode() for name, file in files.items() if file is not None}


def test_it_explains_and_gives_nothing_away(place: Path) -> None:
    said, files = bundled(place)
    everything = "\n".join(files.values())
    for secret in (PLANTED, "the-admin-token-itself", "my plan"):
        assert secret not in everything
        assert secret not in said
    assert "127.0.0.1:1/0" in files["configuration.yaml"]
    assert "out of memory" in files["ended/aa/engine.log"]
    assert "1 lines that may repeat requests left out" in said
    assert "ended/bb/engine.log" not in files
    assert "--engine-logs takes it along" in said
    assert CRIU_LINE in files["ended/bb/restore.log"]
    assert files["kernel.log"] == "Out of memory: Killed process 7\n"
    assert "[left out]" in files["journal/j1.jsonl"]
    assert "no prompts" in said
    manifest = json.loads(files["manifest.json"])
    assert {part["name"] for part in manifest["parts"] if part["bytes"]} == set(files) - {"manifest.json"}


def test_what_cannot_be_had_is_named_with_its_reason(place: Path) -> None:
    _, files = bundled(place)
    parts = {part["name"]: part["note"] for part in json.loads(files["manifest.json"])["parts"]}
    assert parts["overview.json"].startswith("missing: no gateway answers at http://127.0.0.1:1")
    assert parts["metrics.txt"].startswith("missing: no metrics at http://127.0.0.1:1")
    assert {"versions.json", "doctor.json", "host.json", "configuration.yaml"} <= set(files)


@pytest.mark.parametrize("text", ["models: [", "models: {m: {engine: {kind: nobody}}}\npassword: " + PLANTED, ""])
def test_a_configuration_with_faults_is_part_of_the_bundle(place: Path, text: str) -> None:
    (place / "rewake.yaml").write_text(text)
    _, files = bundled(place)
    note = next(part["note"] for part in json.loads(files["manifest.json"])["parts"] if part["name"] == "configuration.yaml")
    assert note
    assert PLANTED not in "".join(files.values())


def test_engines_logs_are_whole_only_when_that_is_asked_for(place: Path) -> None:
    said, files = bundled(place, "--engine-logs")
    assert "my plan" in files["ended/bb/engine.log"]
    assert PLANTED not in "".join(files.values())
    assert "may hold prompts" in said


def test_its_size_is_bounded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_PART_BYTES", 1000)
    monkeypatch.setattr(support, "_WHOLE_BYTES", 5000)
    bundle = support.Bundle(left=2500)
    for number in range(4):
        bundle.text(f"{number}", "a log", "x" * 999 + "\n" + "the end\n" * 20)
    assert [len(data) for data in bundle.files.values()] == [1000, 1000, 500, 0]
    assert bundle.files["0"].endswith(b"the end\n")
    assert "the last" in bundle.parts[0].note


def test_only_the_last_boxes_are_kept_and_only_their_ends(tmp_path: Path) -> None:
    remains = Remains(tmp_path / "ended")
    for number in range(KEPT + 3):
        remains.keep(box(tmp_path, f"b{number}", "x" * (300 << 10) + "the end", model="m", replica="m#0"))
    kept = remains.list()
    assert len(kept) == KEPT
    assert kept[0].id == f"b{KEPT + 2}"
    assert remains.find("m#0") == kept[0]
    found = remains.find("b5-2")
    assert found is not None
    assert found.id == "b5"
    assert found.log().stat().st_size == 256 << 10
    assert found.log().read_text().endswith("the end")
    assert remains.find("../..") is None


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    one = box(tmp_path, "b1", "")
    one.log.unlink()
    one.log.symlink_to("/etc/passwd")
    (one.work / "restore.log").unlink()
    Remains(tmp_path / "ended").keep(one)
    assert Remains(tmp_path / "ended").list() == []


def test_the_name_of_the_bundle_says_where_and_when(place: Path) -> None:
    done = CliRunner().invoke(rewake.app, ["support", "-c", str(place / "rewake.yaml"), "--json"])
    told = json.loads(done.output)
    assert Path(told["file"]).name.startswith(f"rewake-support-{socket.gethostname()}-")
    assert told["bytes"] == Path(told["file"]).stat().st_size
