"""Keys and signatures as a person at the command line meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_rewake_cli import Place, flip, snapshot, store_of

from policies.manifest import Manifest, Needs, Profile
from policies.verdicts import Note
from restorer.machine import hostfacts


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, capsys)


def keyed(place: Place, **trust: object) -> str:
    """A pair of keys, and a configuration that signs with it; the key's id."""
    code, out, _ = place.run("snapshot", "key", str(place.folder / "k"), "--json")
    assert code == 0
    place.write(port=1, trust={"sign_with": str(place.folder / "k"), **trust})
    return str(json.loads(out)["id"])


def test_a_key_is_made_shown_and_used(place: Place) -> None:
    manifest = snapshot(place)
    key = keyed(place)
    code, out, _ = place.run("snapshot", "key")
    assert code == 0
    assert out.splitlines()[1].split()[0] == key
    assert out.splitlines()[1].endswith("yes")
    assert out.splitlines()[-1] == "policy: require"
    assert "refused: unsigned" in place.run("snapshot", "ls")[1]
    code, out, _ = place.run("snapshot", "verify", manifest.id)
    assert code == 1
    assert "trust.policy require" in out
    assert "rewake snapshot sign" in place.run("snapshot", "show", manifest.id)[1]
    assert place.run("snapshot", "sign", manifest.id[:4]) == (0, f"{manifest.id}: signed by {key}\n", "")
    assert f"signed by {key}" in place.run("snapshot", "ls")[1]
    code, out, _ = place.run("snapshot", "verify", manifest.id)
    assert code == 0
    assert f"whole, signed by {key}" in out
    document = json.loads(place.run("snapshot", "show", manifest.id, "--json")[1])
    assert document["signature"] == {"state": "signed", "keys": [key], "allowed": True}
    assert store_of(place).load(manifest.id) == manifest


def test_a_damaged_snapshot_is_not_signed(place: Place) -> None:
    manifest = snapshot(place)
    keyed(place)
    flip(store_of(place).folder(manifest.id) / "images" / "pages-1.img")
    code, out, err = place.run("snapshot", "sign", manifest.id)
    assert (code, out) == (1, "")
    assert "images/pages-1.img" in err
    assert "was not signed" in err
    assert not (store_of(place).folder(manifest.id) / "signatures").exists()


def test_signing_without_a_key_says_how_to_get_one(place: Place) -> None:
    manifest = snapshot(place)
    code, _, err = place.run("snapshot", "sign", manifest.id)
    assert code == 1
    assert "rewake snapshot key FILE" in err
    place.run("snapshot", "key", str(place.folder / "own"))
    assert place.run("snapshot", "sign", manifest.id, "--with", str(place.folder / "own"))[0] == 0


async def test_doctor_speaks_of_keys_and_of_who_can_write(place: Place) -> None:
    findings = {one["name"]: one for one in json.loads((await place.call("doctor", "--json"))[1])}
    assert findings["trust"]["ok"] == "warn"
    assert "rewake snapshot key" in findings["trust"]["remedy"]
    assert findings["ownership"]["ok"] == "ok"
    keyed(place)
    (place.folder / "k").chmod(0o644)
    place.state_dir.chmod(0o777)
    findings = {one["name"]: one for one in json.loads((await place.call("doctor", "--json"))[1])}
    assert findings["trust"]["ok"] == "fail"
    assert f"chmod 600 {place.folder / 'k'}" in findings["trust"]["found"]
    assert findings["ownership"]["ok"] == "fail"
    assert findings["ownership"]["remedy"].endswith(f"chmod go-w {place.state_dir}")


# ---------------------------------------------------------------- gc and rm


def test_gc_says_what_would_go_and_then_removes_it(place: Place) -> None:
    first, second = snapshot(place, 1000), snapshot(place, 2000)
    place.write(port=1, restorer={"criu": "/no/such/criu"}, retention={"keep_last": 1, "grace_s": 0, "spare_newest": False})
    code, out, _ = place.run("snapshot", "gc", "--dry-run")
    assert code == 0
    assert out.splitlines()[0].startswith("WOULD GO")
    assert out.splitlines()[1].startswith(first.id)
    assert "retention.keep_last" in out
    assert len(store_of(place).list()) == 2
    document = json.loads(place.run("snapshot", "gc", "--json")[1])
    assert [one["id"] for one in document["removed"]] == [first.id]
    assert [one.id for one in store_of(place).list()] == [second.id]
    assert place.run("snapshot", "gc") == (0, "nothing is to go\n", "")


def test_rm_says_who_uses_it(place: Place) -> None:
    manifest = snapshot(place)
    with store_of(place).use(manifest.id):
        code, out, err = place.run("snapshot", "rm", manifest.id)
    assert (code, out) == (1, "")
    assert f"{manifest.id} is used by pid " in err
    assert place.run("snapshot", "rm", manifest.id)[0] == 0


def test_gc_and_rm_of_a_remote(place: Place) -> None:
    folder = place.folder / "remote"
    folder.mkdir()
    made = [snapshot(place, at, secrets=()).id for at in (1000, 2000, 3000)]
    remote = {"url": f"file://{folder}", "retention": {"keep_last": 1, "grace_s": 0, "spare_newest": False}}
    place.write(port=1, storage={"remotes": {"team": remote}})
    for id in made:
        assert place.run("snapshot", "push", id, "team")[0] == 0
    code, out, _ = place.run("snapshot", "rm", made[0][:8], "--remote", "team")
    assert code == 0
    assert out.startswith(f"removed {made[0]} from remote team")
    code, out, _ = place.run("snapshot", "gc", "--remote", "team", "--dry-run")
    assert code == 0
    assert out.splitlines()[0].startswith("WOULD GO")
    assert out.splitlines()[1].startswith(made[1])
    assert "would remove" in out
    document = json.loads(place.run("snapshot", "gc", "--remote", "team", "--json")[1])
    assert [one["id"] for one in document["removed"]] == [made[1]]
    assert document["objects"] > 0
    assert document["left"] == ""
    listed = json.loads(place.run("snapshot", "ls", "--remote", "team", "--json")[1])
    assert [one["id"] for one in listed] == [made[2]]
    assert len(store_of(place).list()) == 3, "what is here stays"
    code, _, err = place.run("snapshot", "rm", made[0], "--remote", "team")
    assert code == 1
    assert "there is no snapshot" in err
    assert place.run("snapshot", "gc", "--remote", "nobody")[0] == 1


# ---------------------------------------------------------------- explain


def fitting(place: Place, **changes: Any) -> Manifest:
    """A snapshot of the model ``m`` as it is configured, made on this very host."""
    here = hostfacts.probe(None)
    facts = here.model_copy(update={"criu_version": "4.2", "criu_features": (), **changes})
    profile = Profile(model="m", engine="http", command=("/bin/true",), env={}, port=8000, weights={})
    needs = Needs(memory_bytes=1, shm_bytes=0, hugepages={}, nofile=64, memlock=0)
    return snapshot(place, pids=(1000,), profile=profile, host=facts, needs=needs, engine_version="b42", model_revision="c0" * 20)


@pytest.fixture
def criu(place: Place) -> str:
    """What says that it is CRIU 4.2 and that it works."""
    path = place.folder / "criu"
    path.write_text('#!/bin/sh\ncase "$1$3" in --version) echo "Version: 4.2" ;; check) ;; *) exit 1 ;; esac\n')
    path.chmod(0o755)
    place.write(port=1, restorer={"criu": str(path)})
    return str(path)


def test_explain_names_the_snapshot_that_would_be_restored(place: Place, criu: str) -> None:
    manifest = fitting(place)
    code, out, _ = place.run("snapshot", "explain", "alias")
    assert code == 0, out
    assert out.splitlines()[0] == f"m would be restored from {manifest.id}"
    assert "http b42, revision c0c0c0c0c0c0" in out
    assert "fits this host" in out
    assert "other hosts: unknown, since no gateway answers" in out
    code, out, _ = place.run("snapshot", "explain", manifest.id[:5], "--all")
    assert code == 0
    assert "at_least" in out


def test_explain_lists_every_mismatch_and_exits_with_3(place: Place, criu: str) -> None:
    manifest = fitting(place, kernel="1.2.3", xsave_size=11008)
    (place.folder / "engine-binary").write_bytes(b"another")
    keyed(place, policy="warn")
    place.write(port=1, restorer={"criu": criu}, trust={"policy": "warn", "sign_with": str(place.folder / "k")},
                matching={"rules": {"xsave_size": "report"}})  # fmt: skip
    code, out, _ = place.run("snapshot", "explain")
    assert code == 3
    assert "m would start cold: its one snapshot does not fit" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert "1.2.3" in rows["host.kernel"]
    assert "equal" in rows["host.kernel"]
    assert "let pass by matching.rules.xsave_size: report" in rows["host.xsave_size"]
    assert "allowed" in rows["signature"]
    assert str(place.folder / "engine-binary") in out
    code, out, _ = place.run("snapshot", "explain", "--json")
    assert code == 3
    (model,) = json.loads(out)["models"]
    (found,) = model["snapshots"]
    assert (found["id"], found["fits"], model["fits"], model["chosen"]) == (manifest.id, False, False, None)
    assert {one["field"] for one in found["mismatches"]} == {"host.kernel", f"file {place.folder / 'engine-binary'}"}
    assert {one["field"] for one in found["allowed"]} == {"host.xsave_size", "signature"}


def test_explain_says_what_else_keeps_a_model_cold(place: Place, criu: str) -> None:
    code, out, _ = place.run("snapshot", "explain", "m")
    assert code == 3
    assert "there is no snapshot of it; make one with `rewake snapshot create m`" in out
    manifest = fitting(place)
    store_of(place).verdicts.note(
        manifest.id, Note(what="failed", host=store_of(place).verdicts.host, certain=True, reason="its canary differed")
    )
    code, out, _ = place.run("snapshot", "explain", "m")
    assert code == 3
    assert "quarantined: " in out
    assert "its canary differed" in out
    place.write(port=1, restorer={"criu": "/no/such/criu"})
    code, out, _ = place.run("snapshot", "explain", "m")
    assert code == 3
    assert "/no/such/criu is not installed" in out
    (store_of(place).folder(manifest.id) / "manifest.json").chmod(0o600)
    (store_of(place).folder(manifest.id) / "manifest.json").write_text("{}")
    assert "is not a readable manifest" in place.run("snapshot", "explain")[1]
    assert place.run("snapshot", "explain", "nobody")[0] == 1


def test_restore_case_36_a_cpu_that_differs_is_found_without_any_file_of_crius(place: Place, criu: str) -> None:
    """Our own capture of the CPU decides: the snapshot has no cpuinfo.img, as those that runc asks for have none."""
    manifest = fitting(place, cpu_flags=("avx512_of_nobody",))
    assert not list(store_of(place).folder(manifest.id).rglob("cpuinfo.img"))
    code, out, _ = place.run("snapshot", "explain", manifest.id)
    assert code == 3
    assert "avx512_of_nobody" in out
