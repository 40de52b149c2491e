"""How what leaves this host is wrapped: compressed where that pays, encrypted and bound to its name where there is a key.

::

    "RWK" version flags                    flags: 1 compressed, 2 encrypted
    [nonce, 12 random bytes]               AES-256-GCM under a key of this name's own; the head and the name are authenticated
    content, or its zstd frame

Each name has a key of its own, derived from the master key, and each writing a random nonce: a nonce that came twice would have
to come twice for one name. What is wrapped for one name cannot be passed off as another. With a key, names that tell of content
are themselves keyed hashes: equal content has equal names under one key, and says nothing to who has not got it.

Knows names and bytes, neither stores nor snapshots.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from restorer.errors import Environment, SnapshotError

_MAGIC, _VERSION = b"RWK", 1
_HEAD = len(_MAGIC) + 2
_COMPRESSED, _SEALED = 1, 2
_NONCE, _TAG = 12, 16
_NAMES, _KEYS, _PRINT = ("rewake 1 " + purpose for purpose in ("names of chunks", "keys of objects", "fingerprint"))


class Seal:
    """One way of wrapping.

    Args:
        key: 32 bytes; None: nothing is encrypted.
        level: of zstd; 0: nothing is compressed.
    """

    def __init__(self, key: bytes | None, level: int) -> None:
        self._level = level
        self._names = None if key is None else blake3(key, derive_key_context=_NAMES).digest()
        self._keys = None if key is None else blake3(key, derive_key_context=_KEYS).digest()
        self.fingerprint = None if key is None else blake3(key, derive_key_context=_PRINT).hexdigest()[:16]
        """Tells keys apart, and nothing of them."""

    def name(self, what: str, id: str) -> str:
        """64 hex digits (or ``id`` itself where there is no key) by which something is known elsewhere."""
        return id if self._names is None else blake3(f"{what}/{id}".encode(), key=self._names).hexdigest()

    def wrap(self, name: str, data: bytes | memoryview) -> bytes:
        """``data`` as it is stored under ``name``."""
        flags, body = 0, data
        if self._level:
            packed = zstandard.ZstdCompressor(level=self._level).compress(data)
            if len(packed) < len(data):
                flags, body = _COMPRESSED, packed
        if self._keys is None:
            return b"".join((_MAGIC, bytes((_VERSION, flags)), body))
        head, nonce = _MAGIC + bytes((_VERSION, flags | _SEALED)), os.urandom(_NONCE)
        return b"".join((head, nonce, self._cipher(name).encrypt(nonce, body, head + name.encode())))

    def unwrap(self, name: str, blob: bytes | memoryview, most: int) -> bytes:
        """What was wrapped.

        Args:
            most: bytes that it can have; a longer one is not taken apart.

        Raises:
            SnapshotError: it is damaged, of another name, or wrapped under another key.
        """
        view = memoryview(blob)
        if bytes(view[:3]) != _MAGIC or len(view) < _HEAD or view[3] != _VERSION or view[4] & ~(_COMPRESSED | _SEALED):
            raise SnapshotError(f"{name} is not a whole object of Rewake's")
        head, body, flags = bytes(view[:_HEAD]), view[_HEAD:], view[4]
        if bool(flags & _SEALED) != (self._keys is not None):
            raise SnapshotError(f"{name} is {'encrypted' if flags & _SEALED else 'not encrypted'}, against the setting key_file")
        if flags & _SEALED:
            if len(body) < _NONCE + _TAG:
                raise SnapshotError(f"{name} is cut short")
            try:
                opened = self._cipher(name).decrypt(bytes(body[:_NONCE]), body[_NONCE:], head + name.encode())
            except InvalidTag:
                raise SnapshotError(f"{name} was changed, or is encrypted with another key") from None
            body = memoryview(opened)
        if flags & _COMPRESSED:
            return _unpacked(name, body, most)
        if len(body) > most:
            raise SnapshotError(f"{name} has {len(body)} bytes, more than {most}")
        return bytes(body)

    def _cipher(self, name: str) -> AESGCM:
        assert self._keys is not None
        return AESGCM(blake3(name.encode(), key=self._keys).digest())


def _unpacked(name: str, body: memoryview, most: int) -> bytes:
    try:
        said = zstandard.frame_content_size(body)
        if not 0 <= said <= most:
            raise SnapshotError(f"{name} says that it has {said} bytes, but at most {most} are expected")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=most)
    except zstandard.ZstdError as error:
        raise SnapshotError(f"{name} is damaged: {error}") from None


def load_key(path: Path) -> bytes:
    """The key in a file that only its owner can read.

    Raises:
        Environment: there is none, others can read it, or it is not a key; says how to mend that.
    """
    make = f"make one: (umask 077; openssl rand -hex 32 > {path}), and give it to every host that shares the copies"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Environment(f"key_file {path} is not there; {make}") from None
    except OSError as error:
        raise Environment(f"key_file {path}: {error.strerror}") from None
    with open(fd, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise Environment(f"key_file {path} is not a regular file; {make}")
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise Environment(f"key_file {path} can be read by others: chown {os.geteuid()} {path} && chmod 600 {path}")
        text = file.read(200).strip()
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise Environment(f"key_file {path} does not hold 64 hex digits; {make}")
    return key
