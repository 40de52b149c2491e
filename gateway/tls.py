"""The server's certificate: checked before it is used, and replaced without a pause; who speaks plain HTTP to it is told so.

Connections that are open keep the certificate that they began with; each handshake uses the one in force. Knows PEM texts, not
where they are kept.
"""

from __future__ import annotations

import importlib
import os
import ssl
from dataclasses import dataclass, field
from typing import Any

from gateway import errors

_PLAIN = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST")
"""What OpenSSL says of a handshake that began with an HTTP method."""


def preload() -> None:
    """Load what reads a certificate's dates: it may lie where only root can read. Only where there is one, for its size."""
    importlib.import_module("cryptography.x509")


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
        self.ends = _ends(pem)
        """Seconds since the epoch; 0: it is not known."""
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
        self.pem, self.ends = pem, _ends(pem)

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake, also when the client names no server."""
        connection.context = self._current


class _Connection(ssl.SSLObject):
    """One connection's TLS, which answers who speaks plain HTTP to it."""

    outgoing: ssl.MemoryBIO
    _answered = False

    def do_handshake(self) -> None:
        if self._answered:
            raise ssl.SSLError("plain HTTP, and more of it")
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason not in _PLAIN:
                raise
            self.outgoing.write(_plain_http())
            self._answered = True
            # What has been written is sent before the client is waited for: it leaves, or the time for handshakes ends.
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "spoken to in plain HTTP") from None


class _Context(ssl.SSLContext):
    """What makes a :class:`_Connection` for each connection."""

    sslobject_class = _Connection

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(made, _Connection)
        made.outgoing = outgoing
        return made


def _plain_http() -> bytes:
    answer = errors.render(errors.InvalidRequest("Plain HTTP was spoken to a port of HTTPS: use https://.", "invalid_scheme"))
    head = {**answer.headers, "Content-Type": answer.content_type, "Content-Length": str(len(answer.body)), "Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {answer.status} Bad Request\r\n{lines}\r\n".encode() + answer.body


def _context(pem: Pem) -> ssl.SSLContext:
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
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


def _ends(pem: Pem) -> float:
    """When the server's own certificate does."""
    x509 = importlib.import_module("cryptography.x509")
    try:
        return float(x509.load_pem_x509_certificates(pem.certificate.encode())[0].not_valid_after_utc.timestamp())
    except ValueError:  # OpenSSL may take what this does not
        return 0.0


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
