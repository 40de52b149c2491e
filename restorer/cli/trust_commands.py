"""``rewake snapshot key`` and ``rewake snapshot sign``: keys, and signatures on snapshots that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from policies.manifest import canonical
from policies.trust import Trust
from restorer.cli.commands import AsJson, ConfigFile
from restorer.cli.console import bytes_bar, print_json, print_table
from restorer.cli.operator import Failed, load
from restorer.cli.snapshot_commands import store_of
from restorer.storage import keyring, signatures
from restorer.storage.keyring import KeyRing

_SHOWN = 3


def key(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Make a pair: FILE, private, and FILE.pub.")] = None,
    config: ConfigFile = None,
    json_: AsJson = False,
) -> None:
    """Make a key pair to sign snapshots with; without FILE, list the keys that this host trusts."""
    if file is not None:
        made = keyring.make(file.absolute())
        if json_:
            return print_json(
                {"id": made.id, "fingerprint": made.fingerprint, "private": str(file.absolute()), "public": str(made.path)}
            )
        print(f"{file}: the private key; name it in trust.sign_with on hosts that make snapshots, and let it leave them nowhere")
        print(f"{made.path}: the public key {made.id} (SHA256 {made.fingerprint}); name it in trust.keys on hosts that restore")
        return None
    ring = KeyRing(load(config)[1].trust)
    keys, faults = ring.trusted()
    rows: list[dict[str, Any]] = [
        {"id": one.id, "fingerprint": one.fingerprint, "file": str(one.path), "signs": str(one.path) == ring.trust.sign_with}
        for one in sorted(keys.values(), key=lambda one: one.id)
    ]
    if json_:
        return print_json({"policy": ring.trust.demand, "keys": rows, "faults": list(faults)})
    print_table(
        ["KEY", "FINGERPRINT (SHA256)", "FILE", "SIGNS"],
        [[row["id"], row["fingerprint"], row["file"], "yes" if row["signs"] else "no"] for row in rows],
    )
    for fault in faults:
        print(f"not trusted: {fault}")
    print(f"policy: {ring.trust.demand}")
    return None


def sign(
    id: Annotated[str, typer.Argument(help="Its ID, or the beginning of it.")],
    config: ConfigFile = None,
    with_: Annotated[Path | None, typer.Option("--with", metavar="FILE", help="Private key; default: trust.sign_with.")] = None,
    json_: AsJson = False,
) -> None:
    """Sign a snapshot that is there, after every byte of it was read and found as it was made. Its ID stays."""
    parsed = load(config)[1]
    trust = parsed.trust if with_ is None else Trust(sign_with=str(with_.absolute()))
    ring, store = KeyRing(trust), store_of(parsed)
    signer = ring.signer()
    manifest = store.load(id)
    with store.use(manifest.id), bytes_bar(manifest.id, sum(item.bytes for item in manifest.objects)) as report:
        faults = store.verify(manifest, full=True, progress=report)
    if faults:
        raise Failed(f"snapshot {manifest.id} is not as it was made, and was not signed: {'; '.join(map(str, faults[:_SHOWN]))}")
    signed = ring.sign(canonical(manifest))
    assert signed is not None
    signatures.write(store.folder(manifest.id), *signed)
    if json_:
        return print_json({"id": manifest.id, "key": signer.id})
    print(f"{manifest.id}: signed by {signer.id}")
    return None
