"""The keys that snapshots are signed with and trusted by: made, read, used. The one module that knows the crypto library.

Ed25519. A private key is a PEM file (PKCS #8) for its owner alone, a public one a PEM file (SubjectPublicKeyInfo) that nobody
else may write; so openssl and every key management can make and use them. A key's id is the beginning of its fingerprint, the
SHA-256 of its DER form. Files are read at each use: a key that is taken away is trusted no more.

Decides nothing: :mod:`policies.trust` does. Every method blocks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policies.trust import Signature, Trust, Verdict, judge
from restorer.errors import Environment
from restorer.storage.ownership import read_private
from restorer.system.files import write_durable

_MOST_BYTES = 16 << 10
_ID_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Key:
    """A public key and where it was found."""

    fingerprint: str
    """SHA-256 (hex) of its DER form."""
    path: Path
    public: Ed25519PublicKey = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        """What its signatures are filed under."""
        return self.fingerprint[:_ID_DIGITS]


class KeyRing:
    """The keys that one configuration trusts, and the one that it signs with."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust

    def trusted(self) -> tuple[Mapping[str, Key], tuple[str, ...]]:
        """(key id -> key, why files of keys could not be used). A key that cannot be used is not trusted."""
        keys: dict[str, Key] = {}
        faults: list[str] = []
        for path in self._files(faults):
            try:
                key = read_public(path)
            except Environment as error:
                faults.append(str(error))
            else:
                keys[key.id] = key
        if self.trust.sign_with is not None:
            try:
                own = self.signer()
            except Environment as error:
                faults.append(str(error))
            else:
                keys[own.id] = own
        return keys, tuple(faults)

    def judge(self, data: bytes, signatures: Mapping[str, bytes]) -> Verdict:
        """May a manifest with these bytes be believed?

        Args:
            signatures: key id -> signature, as found beside it.
        """
        if self.trust.demand == "off":
            return judge("off", (), ())
        keys, faults = self.trusted()
        found = [Signature(id, _fits(keys[id], signature, data) if id in keys else None) for id, signature in signatures.items()]
        return judge(self.trust.demand, sorted(keys), sorted(found, key=lambda one: one.key), faults)

    def signer(self) -> Key:
        """The public side of ``trust.sign_with``.

        Raises:
            Environment: it is not set or cannot be used.
        """
        if self.trust.sign_with is None:
            raise Environment("trust.sign_with names no private key; make one with `rewake snapshot key FILE` and name it there")
        path = Path(self.trust.sign_with)
        return _key(_read_private(path).public_key(), path)

    def sign(self, data: bytes) -> tuple[str, bytes] | None:
        """(key id, signature) over a manifest's bytes; None where the configuration signs nothing.

        Raises:
            Environment: the private key cannot be used.
        """
        if self.trust.sign_with is None:
            return None
        path = Path(self.trust.sign_with)
        private = _read_private(path)
        return _key(private.public_key(), path).id, private.sign(data)

    def _files(self, faults: list[str]) -> Iterator[Path]:
        for given in map(Path, self.trust.keys):
            if not given.is_dir():
                yield given
                continue
            try:
                yield from sorted(path for path in given.iterdir() if path.suffix == ".pub")
            except OSError as error:
                faults.append(f"{given}: {error.strerror}; let the restorer's user read it")


def make(path: Path) -> Key:
    """Make a key pair: ``path`` for its owner alone, ``path.pub`` for everybody.

    Raises:
        Environment: there is a file already, or it cannot be written.
    """
    public = path.with_name(f"{path.name}.pub")
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for file in (path, public):
        if os.path.lexists(file):
            raise Environment(f"{file} is there already, and what it signed would lose its key; name another file")
    try:
        write_durable(path, pem, 0o600)
        write_durable(public, _pem(private.public_key()), 0o644)
    except OSError as error:
        raise Environment(f"{path}: {error.strerror}; name a file in a folder that you may write") from None
    return _key(private.public_key(), public)


def read_public(path: Path) -> Key:
    """The public key in a file.

    Raises:
        Environment: it cannot be read, is no such key, or others could have written it.
    """
    data = read_private(path, most=_MOST_BYTES, secret=False)
    try:
        found = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise Environment(f"{path} is no public key in PEM; `rewake snapshot key` makes pairs") from None
    if not isinstance(found, Ed25519PublicKey):
        raise Environment(f"{path} is a key of another kind than Ed25519; `rewake snapshot key` makes pairs")
    return _key(found, path)


def _read_private(path: Path) -> Ed25519PrivateKey:
    data = read_private(path, most=_MOST_BYTES, secret=True)
    try:
        found = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise Environment(f"{path} is no private key in PEM without a passphrase; `rewake snapshot key` makes pairs") from None
    if not isinstance(found, Ed25519PrivateKey):
        raise Environment(f"{path} is a key of another kind than Ed25519; `rewake snapshot key` makes pairs")
    return found


def _fits(key: Key, signature: bytes, data: bytes) -> bool:
    try:
        key.public.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _key(public: Ed25519PublicKey, path: Path) -> Key:
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Key(hashlib.sha256(der).hexdigest(), path, public)


def _pem(public: Ed25519PublicKey) -> bytes:
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
