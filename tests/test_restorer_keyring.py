"""Keys and signatures: real Ed25519, real files, and openssl as somebody else who makes and checks them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_restorer_snapshots import committed, draft, edit, fill

from policies.manifest import canonical
from policies.trust import Trust, judge
from restorer.errors import Environment
from restorer.storage import keyring, signatures
from restorer.storage.keyring import KeyRing
from restorer.storage.ownership import way_to
from restorer.storage.signatures import Judge
from restorer.storage.snapshots import SnapshotStore
from restorer.storage.stamps import Stamps
from restorer.system.files import hash_file

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with two pairs: a.key, a.key.pub, b.key, b.key.pub."""
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    for name in ("a", "b"):
        keyring.make(folder / f"{name}.key")
    return folder


def ring(folder: Path, *trusted: str, signs: str | None = None, policy: str | None = None) -> KeyRing:
    keys = [str(folder / f"{name}.key.pub") for name in trusted]
    return KeyRing(Trust.model_validate({"keys": keys, "sign_with": signs and str(folder / f"{signs}.key"), "policy": policy}))


def store(tmp_path: Path, signer: KeyRing) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", Stamps(tmp_path / "stamps.json"), signer.sign)


def test_a_pair_is_for_its_owner_alone_and_is_never_made_twice(keys: Path) -> None:
    assert (keys / "a.key").stat().st_mode & 0o777 == 0o600
    assert (keys / "a.key.pub").stat().st_mode & 0o777 == 0o644
    with pytest.raises(Environment, match=r"a\.key is there already"):
        keyring.make(keys / "a.key")
    (keys / "b.key").unlink()
    with pytest.raises(Environment, match=r"b\.key\.pub is there already"):
        keyring.make(keys / "b.key")


def test_what_is_committed_is_signed_before_its_manifest_is_there(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = store(tmp_path, ring(keys, signs="a"))
    seen: list[bool] = []
    real = signatures.write
    monkeypatch.setattr(signatures, "write", lambda f, k, s: (seen.append((f / "manifest.json").exists()), real(f, k, s))[1])
    manifest = committed(snapshots)
    assert seen == [False]
    verdict = Judge(ring(keys, "a")).judge(snapshots.folder(manifest.id), manifest)
    assert (verdict.state, verdict.allowed, verdict.mismatch) == ("signed", True, None)
    assert snapshots.verify(manifest.id, full=True) == []


def test_a_snapshot_gains_signatures_without_a_new_name(tmp_path: Path, keys: Path) -> None:
    snapshots = store(tmp_path, KeyRing(Trust()))
    manifest = committed(snapshots)
    folder = snapshots.folder(manifest.id)
    judge = Judge(ring(keys, "a"))
    assert str(judge.judge(folder, manifest)) == "unsigned"
    for name in ("b", "a"):
        signed = ring(keys, signs=name).sign(canonical(manifest))
        assert signed is not None
        signatures.write(folder, *signed)
    assert len(signatures.read(folder)) == 2
    assert judge.judge(folder, manifest).state == "signed"
    assert snapshots.verify(snapshots.load(manifest.id).id, full=True) == []


def test_rotation_and_revocation_take_effect_at_the_next_look(tmp_path: Path, keys: Path) -> None:
    snapshots = store(tmp_path, ring(keys, signs="a"))
    manifest = committed(snapshots)
    trusted = tmp_path / "trusted"
    trusted.mkdir(mode=0o700)
    judge = Judge(KeyRing(Trust(keys=(str(trusted),))))

    def state() -> str:
        return judge.judge(snapshots.folder(manifest.id), manifest).state

    shutil.copy(keys / "a.key.pub", trusted / "a.pub")
    assert state() == "signed"
    shutil.copy(keys / "b.key.pub", trusted / "b.pub")
    assert state() == "signed"
    (trusted / "a.pub").unlink()
    assert state() == "untrusted"
    (trusted / "b.pub").unlink()
    assert state() == "untrusted"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), where=st.sampled_from(["manifest", "signature"]))
def test_a_flipped_bit_of_manifest_or_signature_is_refused(keys: Path, at: int, bit: int, where: str) -> None:
    data = canonical(draft())
    signed = ring(keys, signs="a").sign(data)
    assert signed is not None
    key, signature = signed

    def flipped(content: bytes) -> bytes:
        place = at % len(content)
        return content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]

    changed = (flipped(data), signature) if where == "manifest" else (data, flipped(signature))
    for policy in ("require", "warn"):
        verdict = ring(keys, "a", policy=policy).judge(changed[0], {key: changed[1]})
        assert (verdict.state, verdict.allowed) == ("forged", False)


def test_restore_case_84_an_image_edited_with_its_hash_updated_is_refused_without_the_key(tmp_path: Path, keys: Path) -> None:
    """Everything agrees with everything, as only somebody who can write the store could arrange; but for the signature."""
    signer, judge = ring(keys, signs="a"), Judge(ring(keys, "a"))
    snapshots = store(tmp_path, signer)
    manifest = committed(snapshots)
    image = snapshots.folder(manifest.id) / "images/core-1000.img"
    edit(image, 5)
    objects = tuple(
        one.model_copy(update={"sha256": hash_file(image, sparse=True)}) if one.path == "images/core-1000.img" else one
        for one in manifest.objects
    )
    forged = manifest.model_copy(update={"objects": objects})
    snapshots.folder(manifest.id).rename(snapshots.folder(forged.id))
    folder = snapshots.folder(forged.id)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_bytes(canonical(forged))
    assert snapshots.load(forged.id) == forged
    assert snapshots.verify(forged.id, full=True) == []
    verdict = judge.judge(folder, forged)
    assert (verdict.state, verdict.allowed) == ("forged", False)
    # Signed again, but with a key of the attacker's own: nobody here trusts it.
    shutil.rmtree(folder / "signatures")
    assert judge.judge(folder, forged).state == "unsigned"
    own = ring(keys, signs="b").sign(canonical(forged))
    assert own is not None
    signatures.write(folder, *own)
    verdict = judge.judge(folder, forged)
    assert (verdict.state, verdict.allowed) == ("untrusted", False)
    # ... not even under the trusted key's name.
    (folder / "signatures" / f"{own[0]}.sig").rename(folder / "signatures" / f"{signer.signer().id}.sig")
    assert judge.judge(folder, forged).state == "forged"


def test_a_refusal_names_the_keys_the_policy_and_the_remedy(tmp_path: Path, keys: Path) -> None:
    data = canonical(draft())
    trusted = ring(keys, "a")
    (known,) = trusted.trusted()[0]
    stranger = ring(keys, signs="b").sign(data)
    assert stranger is not None
    verdict = trusted.judge(data, dict([stranger]))
    assert verdict.mismatch is not None
    for word in (known, stranger[0], "trust.policy require", "trust.keys", "rewake snapshot sign"):
        assert word in str(verdict.mismatch)
    warned = ring(keys, "a", policy="warn").judge(data, {})
    assert warned.allowed
    assert warned.mismatch is not None


def test_without_keys_nobody_looks_and_a_policy_without_keys_is_a_fault() -> None:
    assert Trust().demand == "off"
    assert KeyRing(Trust()).judge(b"anything", {}).state == "not checked"
    assert Trust(keys=("/k.pub",)).demand == Trust(sign_with="/k").demand == "require"
    for policy in ("require", "warn"):
        with pytest.raises(ValueError, match="no key is trusted"):
            Trust.model_validate({"policy": policy})


def test_a_ring_that_is_empty_refuses_everything(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    verdict = KeyRing(Trust(keys=(str(tmp_path / "none"), str(tmp_path / "gone.pub")))).judge(b"data", {})
    assert not verdict.allowed
    assert "there is none" in str(verdict.mismatch)
    assert "gone.pub: No such file" in str(verdict.mismatch)


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o602])
def test_a_key_that_others_can_write_is_not_trusted_and_the_chmod_is_named(keys: Path, mode: int) -> None:
    (keys / "a.key.pub").chmod(mode)
    trusted, faults = ring(keys, "a", "b").trusted()
    assert len(trusted) == 1
    (fault,) = faults
    assert f"chmod go-w {keys / 'a.key.pub'}" in fault


def test_a_private_key_that_others_can_read_signs_nothing(keys: Path) -> None:
    (keys / "a.key").chmod(0o640)
    with pytest.raises(Environment, match=f"chmod 600 {keys}/a.key"):
        ring(keys, signs="a").sign(b"data")


def test_a_folder_that_others_can_write_makes_its_keys_worthless(keys: Path) -> None:
    keys.chmod(0o775)
    trusted, faults = ring(keys, "a").trusted()
    assert not trusted
    assert f"chmod go-w {keys}" in faults[0]


@needs_root
def test_a_key_of_another_user_is_not_trusted_and_the_chown_is_named(keys: Path) -> None:
    os.chown(keys / "a.key.pub", 65534, 65534)
    trusted, (fault,) = ring(keys, "a").trusted()
    assert not trusted
    assert f"chown 0 {keys / 'a.key.pub'}" in fault


def test_keys_are_files_not_links_fifos_or_other_keys(tmp_path: Path, keys: Path) -> None:
    (keys / "link.key.pub").symlink_to(keys / "a.key.pub")
    os.mkfifo(keys / "fifo.key.pub")
    (keys / "text.key.pub").write_text("hello")
    (keys / "long.key.pub").write_bytes(bytes(1 << 20))
    (keys / "private.key.pub").write_bytes((keys / "a.key").read_bytes())
    subprocess.run(["openssl", "genpkey", "-algorithm", "X25519", "-out", tmp_path / "x"], check=True)
    subprocess.run(["openssl", "pkey", "-in", tmp_path / "x", "-pubout", "-out", keys / "other.key.pub"], check=True)
    names = ("link", "fifo", "text", "long", "private", "other")
    trusted, faults = ring(keys, *names).trusted()
    assert not trusted
    assert len(faults) == len(names)
    for fault, what in zip(
        faults, ("is a link", "not a regular file", "no public key", "more than", "no public key", "another kind"), strict=True
    ):
        assert what in fault


def test_signatures_that_are_links_or_cut_short_count_as_wrong_ones(tmp_path: Path, keys: Path) -> None:
    snapshots = store(tmp_path, ring(keys, signs="a"))
    manifest = committed(snapshots)
    folder = snapshots.folder(manifest.id)
    (name,) = (folder / "signatures").iterdir()
    whole = name.read_bytes()
    judge = Judge(ring(keys, "a"))
    name.rename(tmp_path / "away")
    name.symlink_to(tmp_path / "away")
    assert judge.judge(folder, manifest).state == "forged"
    name.unlink()
    name.write_bytes(whole[:-1])
    assert judge.judge(folder, manifest).state == "forged"
    (folder / "signatures").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / name.name).write_bytes(whole)
    (folder / "signatures").symlink_to(tmp_path / "elsewhere")
    assert judge.judge(folder, manifest).state == "unsigned"
    assert "signatures" in [fault.path for fault in snapshots.verify(manifest.id, full=False)]


def test_what_else_lies_among_the_signatures_is_a_fault(tmp_path: Path, keys: Path) -> None:
    snapshots = store(tmp_path, ring(keys, signs="a"))
    manifest = committed(snapshots)
    folder = snapshots.folder(manifest.id) / "signatures"
    (folder / "evil.so").write_bytes(b"")
    (folder / ("f" * 16 + ".sig")).write_bytes(bytes(64))
    (folder / ("f" * 16 + ".sig")).chmod(0o666)
    assert {fault.path for fault in snapshots.verify(manifest.id, full=False)} == {
        "signatures/evil.so",
        f"signatures/{'f' * 16}.sig",
    }


def test_a_key_that_cannot_be_used_publishes_nothing(tmp_path: Path, keys: Path) -> None:
    (keys / "a.key").unlink()
    snapshots = store(tmp_path, KeyRing(Trust(sign_with=str(keys / "a.key"))))
    with snapshots.stage() as staging:
        fill(staging)
        with pytest.raises(Environment, match=r"a\.key: No such file"):
            snapshots.commit(staging, draft())
    assert snapshots.list() == []
    assert len(snapshots.sweep(older_than_s=0)) <= 1


def test_openssl_checks_our_signatures_and_we_its(tmp_path: Path, keys: Path) -> None:
    snapshots = store(tmp_path, ring(keys, signs="a"))
    manifest = committed(snapshots)
    folder = snapshots.folder(manifest.id)
    (signature,) = (folder / "signatures").iterdir()
    argv = ["openssl", "pkeyutl", "-rawin", "-in", folder / "manifest.json"]
    verify = [*argv, "-verify", "-pubin", "-inkey", keys / "a.key.pub", "-sigfile", signature]
    checked = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert "Verified Successfully" in checked.stdout, checked.stderr
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", keys / "o.key"], check=True)
    subprocess.run(["openssl", "pkey", "-in", keys / "o.key", "-pubout", "-out", keys / "o.key.pub"], check=True)
    (keys / "o.key").chmod(0o600)
    (keys / "o.key.pub").chmod(0o644)
    other = ring(keys, "o", signs="o")
    out = tmp_path / "o.sig"
    subprocess.run(
        ["openssl", "pkeyutl", "-sign", "-inkey", keys / "o.key", "-rawin", "-in", folder / "manifest.json", "-out", out],
        check=True,
    )
    signatures.write(folder, other.signer().id, out.read_bytes())
    assert Judge(other).judge(folder, manifest).state == "signed"


def test_a_manifest_that_others_can_write_is_a_fault_and_no_debris(tmp_path: Path, keys: Path) -> None:
    snapshots = store(tmp_path, ring(keys, signs="a"))
    manifest = committed(snapshots)
    path = snapshots.folder(manifest.id) / "manifest.json"
    path.chmod(0o664)
    assert [str(fault) for fault in snapshots.verify(manifest.id, full=False)] == [
        "manifest.json: expected writable by its owner alone, found mode 0664"
    ]
    assert [f"{one.found}; {one.remedy}" for one in way_to(path)] == [
        f"its group may write it (mode 0664); if you trust what is in it: chmod go-w {path}"
    ]
    assert snapshots.sweep(older_than_s=0) == []


def test_the_policy_alone_decides() -> None:
    assert judge("off", (), ()).allowed
    assert not judge("require", ("k",), ()).allowed
    assert judge("warn", ("k",), ()).allowed
