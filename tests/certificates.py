"""Self-signed certificates for tests, made by the openssl program."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Pair:
    """Two PEM files."""

    certificate: Path
    key: Path

    def install(self, other: Pair) -> None:
        """Put another pair in place of this one, as a renewal does: by renaming."""
        for mine, theirs in ((self.certificate, other.certificate), (self.key, other.key)):
            new = mine.with_suffix(".new")
            new.write_bytes(theirs.read_bytes())
            new.replace(mine)

    @property
    def der(self) -> bytes:
        """What a client sees."""
        return ssl.PEM_cert_to_DER_cert(self.certificate.read_text())

    def client(self) -> ssl.SSLContext:
        """A client that trusts this certificate alone."""
        return ssl.create_default_context(cafile=str(self.certificate))


def make(folder: Path, name: str, *, kind: str = "ec", days: int = 2) -> Pair:
    """A certificate for localhost and 127.0.0.1; ``kind``: ``ec`` or ``rsa``; ``days``: how long it is valid."""
    program = shutil.which("openssl")
    if program is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs openssl")
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    key = ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"] if kind == "ec" else ["rsa:2048"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(pair.key), "-out", str(pair.certificate)]
    argv = [program, "req", "-x509", "-nodes", "-days", str(days), "-newkey", *key, *names, *files]
    subprocess.run(argv, check=True, capture_output=True, timeout=30)
    return pair
