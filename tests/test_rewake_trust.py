"""Keys and signatures as a person at the command line meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_rewake_cli import Place, flip, snapshot, store_of


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
