"""Whose snapshots run: signatures, owners, secrets and locks in an installation with the real CRIU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_installation import Installation, a_place, eventually, manifest_of, network, rewritten, small

from restorer.storage import keyring, stamps

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with a_place("trust") as folder:
        yield folder


@pytest.fixture(scope="module")
def system(place: Path) -> Iterator[Installation]:
    mapped, hold = place / "lib.bin", place / "hold"
    mapped.write_bytes(b"version 1")
    strict = {"on_no_snapshot": "reject", "on_restore_failure": "reject"}
    secret = small(mapped, hold)
    secret["engine"]["env"] = {"HF_TOKEN": "hf-not-a-real-one"}
    models = {name: small(mapped, hold, **strict) for name in ("edited", "tampered", "revoked", "open", "used")}
    models |= {"soft": small(mapped, hold), "secret": secret, "foreign": small(mapped, hold, **strict)}
    (place / "keys").mkdir(mode=0o700)
    keyring.make(place / "keys/maker")
    keyring.make(place / "keys/stranger")
    system = Installation(place, network(20), models, failure_backoff_s=0.3)
    system.configure(trust={"sign_with": str(place / "keys/maker"), "secrets": "refuse"})
    with system.running():
        yield system


def refused(system: Installation, model: str) -> str:
    """A request for a model is refused at once, before CRIU runs, and the command line says 3; the reason."""
    time.sleep(0.5)  # an earlier answer of this model is given for 0.3 s
    before = system.calls("restore")
    answer = system.complete(model)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "restore_failed"), answer.text
    assert system.calls("restore") == before
    return str(answer.json()["error"]["message"])


def flip(path: Path, at: int = 0) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    path.chmod(mode)


def faults(system: Installation, model: str, kind: str) -> float:
    """What metrics have counted of one kind."""
    series = re.compile(rf'^rewake_snapshot_faults_total{{(?=.*kind="{kind}")(?=.*model="{model}").*}} (\S+)$', re.MULTILINE)
    return sum(float(value) for value in series.findall(system.http.get("/metrics").text))


def served(system: Installation, model: str) -> None:
    """It is restored, once what it answered before is forgotten."""
    answer = eventually(lambda: (found := system.complete(model)).status_code == 200 and found, f"{model} to be served")
    assert answer.headers["x-rewake-start"] == "restored"
    system.park(model)


def test_restore_case_84_an_edited_image_with_its_hash_updated_is_refused_before_criu(system: Installation) -> None:
    folder = system.snapshot("edited")
    signer = next((folder / "signatures").iterdir()).stem
    assert f"signed by {signer}" in system.cli("snapshot", "ls").stdout
    image = next((folder / "images").glob("core-*.img"))
    flip(image, 40)
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    name = str(image.relative_to(folder))
    objects = tuple(one.model_copy(update={"sha256": digest}) if one.path == name else one for one in manifest_of(folder).objects)
    rewritten(folder, objects=objects)
    reason = refused(system, "edited")
    for word in ("signature", signer, "trust.policy require"):
        assert word in reason, reason
    eventually(lambda: faults(system, "edited", "signature"), "the refusal to be counted")
    (id,) = [one["id"] for one in json.loads(system.cli("snapshot", "ls", "--json").stdout) if one["model"] == "edited"]
    assert "refused: forged" in system.cli("snapshot", "ls").stdout
    verified = system.cli("snapshot", "verify", id)
    assert verified.returncode == 1
    assert f"forged by {signer}" in verified.stdout, verified.stdout
    explained = system.cli("snapshot", "explain", "edited")
    assert explained.returncode == 3
    assert "signature" in explained.stdout
    # The verdict is about who made it, so the snapshot is not quarantined.
    assert "quarantined" not in explained.stdout


def _object(pattern: str) -> Callable[[Path], Path]:
    return lambda folder: max(folder.glob(pattern), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "victim",
    [
        _object("images/pages-*.img"),
        _object("images/core-*.img"),
        _object("images/inventory.img"),
        _object("scratch/*/tree.json"),
        _object("signatures/*.sig"),
        _object("manifest.json"),
    ],
    ids=["pages", "core", "inventory", "scratch", "signature", "manifest"],
)
def test_a_flipped_byte_anywhere_is_refused_before_criu(system: Installation, victim: Callable[[Path], Path]) -> None:
    folder = system.snapshot("tampered")
    path = victim(folder)
    flip(path, path.stat().st_size // 2)
    reason = refused(system, "tampered")
    assert re.search(r"was changed|signature|there is no snapshot|quarantined", reason), reason
    assert system.cli("snapshot", "rm", folder.name).returncode == 0


def test_forged_remembered_hashes_are_believed_by_no_later_restorer(system: Installation) -> None:
    """The image is changed, and its hash noted as if it had just been read: without this boot's key that is worth nothing."""
    folder = system.snapshot("tampered")
    image = _object("images/core-*.img")(folder)
    real = hashlib.sha256(image.read_bytes()).hexdigest()
    flip(image, 60)
    facts, file = image.stat(), system.folder / "state/stamps.json"
    marks = json.loads(file.read_bytes().partition(b"\n")[2])
    marks[str(image)] = {
        "dev": facts.st_dev, "ino": facts.st_ino, "size": facts.st_size, "mtime_ns": facts.st_mtime_ns,
        "ctime_ns": facts.st_ctime_ns, "sha256": real,
    }  # fmt: skip
    data = json.dumps(marks, separators=(",", ":")).encode()
    system.kill_restorer()
    for key in (b"", b"guess"):
        file.write_bytes(stamps._seal(key, data) + b"\n" + data)
        system.kill_restorer()
        eventually(system.ready, "ready")
        reason = refused(system, "tampered")
        assert image.name in reason or "quarantined" in reason, reason
    assert system.cli("snapshot", "rm", folder.name).returncode == 0


def test_a_key_that_is_revoked_is_trusted_no_more_at_the_next_start_and_rotation_keeps_what_is_signed_anew(
    system: Installation, place: Path
) -> None:
    folder = system.snapshot("revoked")
    served(system, "revoked")
    system.configure(trust={"sign_with": str(place / "keys/stranger")})
    assert system.cli("reload").returncode == 0
    reason = refused(system, "revoked")
    maker = next((folder / "signatures").iterdir()).stem
    assert f"one by {maker}" in reason
    assert "trust.keys" in reason
    signed = system.cli("snapshot", "sign", folder.name)
    assert signed.returncode == 0, signed.stderr
    assert len(list((folder / "signatures").iterdir())) == 2
    served(system, "revoked")
    system.configure(trust={"sign_with": str(place / "keys/maker"), "secrets": "refuse"})
    assert system.cli("reload").returncode == 0


def test_under_warn_an_unsigned_snapshot_is_restored_and_the_log_says_so(system: Installation, place: Path) -> None:
    folder = system.snapshot("foreign")
    shutil.rmtree(folder / "signatures")
    assert "found none" in refused(system, "foreign")
    system.configure(trust={"policy": "warn", "sign_with": str(place / "keys/maker"), "secrets": "refuse"})
    assert system.cli("reload").returncode == 0
    served(system, "foreign")
    assert f"snapshot {folder.name} is restored all the same: signature" in (system.folder / "up.log").read_text()
    system.configure(trust={"sign_with": str(place / "keys/maker"), "secrets": "refuse"})
    assert system.cli("reload").returncode == 0


def test_what_others_can_write_is_refused_and_the_chmod_mends_it(system: Installation, place: Path) -> None:
    system.snapshot("open")
    store = system.folder / "state/snapshots"
    store.chmod(0o770)
    reason = refused(system, "open")
    assert f"chmod go-w {store}" in reason, reason
    eventually(lambda: faults(system, "open", "owner"), "the refusal to be counted")
    store.chmod(0o700)
    served(system, "open")
    os.chown(store, 65534, -1)
    assert f"chown 0 {store}" in refused(system, "open")
    os.chown(store, 0, -1)
    served(system, "open")


def test_restore_case_44_a_donor_with_secrets_serves_and_is_not_captured(system: Installation) -> None:
    made = system.cli("snapshot", "create", "secret")
    assert made.returncode == 1
    said = made.stdout + made.stderr
    assert "env HF_TOKEN" in said, said
    assert "hf-not-a-real-one" not in said
    written = [path for path in (system.folder / "state").rglob("*") if path.is_file()]
    assert not [path for path in written if b"hf-not-a-real-one" in path.read_bytes()]


def test_what_runs_is_not_removed(system: Installation) -> None:
    folder = system.snapshot("used")
    answer = system.complete("used")
    assert answer.headers["x-rewake-start"] == "restored"
    removed = system.cli("snapshot", "rm", folder.name)
    assert removed.returncode == 1
    assert "used by replica used#0" in removed.stderr
    system.kill_restorer()
    assert "used by replica used#0" in system.cli("snapshot", "rm", folder.name).stderr
    eventually(system.ready, "ready")
    eventually(lambda: system.replicas("used"), "its adoption")
    system.park("used")
    eventually(lambda: system.cli("snapshot", "rm", folder.name).returncode == 0, "its removal")


def test_explain_says_on_one_screen_why_it_starts_cold_and_who_would_do(system: Installation) -> None:
    folder = system.snapshot("soft")
    fits = system.cli("snapshot", "explain", "soft")
    assert (fits.returncode, fits.stdout.splitlines()[0]) == (0, f"soft would be restored from {folder.name}"), fits.stdout
    facts = manifest_of(folder).host
    rewritten(folder, host=facts.model_copy(update={"kernel": "9.9-other", "cpu_flags": (*(facts.cpu_flags or ()), "avx512f")}))
    (system.folder / "lib.bin").write_bytes(b"version 2")
    try:
        told = system.cli("snapshot", "explain", "soft")
        assert told.returncode == 3
        for word in ("would start cold", "host.kernel", "9.9-other", "avx512f", "lib.bin", "signature", "superset", "equal"):
            assert word in told.stdout, told.stdout
        assert len(told.stdout.splitlines()) <= 24
        document = json.loads(system.cli("snapshot", "explain", "soft", "--json").stdout)
        (model,) = document["models"]
        assert (model["fits"], model["chosen"]) == (False, None)
        (snapshot,) = model["snapshots"]
        assert {one["field"] for one in snapshot["mismatches"]} >= {"signature", "host.kernel", "host.cpu_flags"}
        assert all(one["remedy"] for one in snapshot["mismatches"])
        assert [one["field"] for one in next(iter(snapshot["hosts"].values()))] == ["host.kernel", "host.cpu_flags"]
        started = system.complete("soft")
        assert started.headers["x-rewake-start"] == "cold"
        assert "9.9-other" in system.cli("ps").stdout or "signature" in system.cli("ps").stdout
    finally:
        (system.folder / "lib.bin").write_bytes(b"version 1")
    system.park("soft")
