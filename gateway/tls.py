"""The server's certificate: checked before it is used, and replaced without a pause.

Connections that are open keep the certificate that they began with; each handshake uses the one in force. Knows PEM texts, not
where they are kept.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field


class CertificateError(Exception):
    """A certificate and its key cannot be used together; the message says why."""


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificate chain (the server's own first) and private key, as PEM texts."""

    certificate: str
    key: str = field(repr=False)


class Certificates:
    """The pair in force.

    Raises:
        CertificateError: the first one is not usable.
    """

    def __init__(self, pem: Pem) -> None:
        self.pem = pem
        self._current = _context(pem)
        self.context = _context(pem)
        """What a listening socket is given; every handshake on it moves to the pair in force."""
        self.context.sni_callback = self._choose

    def replace(self, pem: Pem) -> None:
        """Put another pair in force.

        Raises:
            CertificateError: it is not usable, and the old one stays.
        """
        self._current = _context(pem)
        self.pem = pem

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake, also when the client names no server."""
        connection.context = self._current


def _context(pem: Pem) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # The ssl module reads files only; these exist in memory alone.
    files = [_in_memory(text) for text in (pem.certificate, pem.key)]
    try:
        certificate, key = (f"/proc/self/fd/{fd}" for fd in files)
        context.load_cert_chain(certificate, key, _no_password)
    except ssl.SSLError as error:
        raise CertificateError(_why(error)) from None
    finally:
        for fd in files:
            os.close(fd)
    return context


def _in_memory(text: str) -> int:
    fd = os.memfd_create("pem", os.MFD_CLOEXEC)
    data = text.encode()
    while data:
        data = data[os.write(fd, data) :]
    return fd


def _no_password() -> str:
    raise CertificateError("the key is encrypted; give one without a passphrase, readable by the process's user alone")


def _why(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate; give the two that were issued together"
    if error.reason in ("NO_START_LINE", None):
        return "the certificate or the key is not PEM; give text files that begin with -----BEGIN"
    return f"the certificate or the key cannot be used: {error.reason.replace('_', ' ').lower()}"
