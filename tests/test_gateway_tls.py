"""Certificates in real handshakes: the first, its successor, and one that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop
from certificates import Pair, make

from gateway.tls import CertificateError, Certificates, Pem


def pem(pair: Pair) -> Pem:
    return Pem(pair.certificate.read_text(), pair.key.read_text())


async def seen(port: int, *, name: str | None = "localhost", **options: object) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for option, value in options.items():
        setattr(context, option, value)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return bytes(found)


@contextlib.asynccontextmanager
async def echo_server(certificates: Certificates) -> AsyncIterator[int]:
    """Its port. All its connections have ended afterwards."""
    ended: list[asyncio.Task[None]] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ended.append(task)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while line := await reader.readline():
                writer.write(line)
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=certificates.context)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await asyncio.wait_for(asyncio.gather(*ended), 30)


async def test_the_next_handshake_shows_the_new_certificate_and_open_connections_stay(tmp_path: Path) -> None:
    # Of different kinds: an old key of another kind must not go on beside the new one.
    old, new = make(tmp_path, "old", kind="rsa"), make(tmp_path, "new")
    certificates = Certificates(pem(old))
    async with echo_server(certificates) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=old.client(), server_hostname="localhost")
        assert await seen(port) == old.der
        certificates.replace(pem(new))
        assert await seen(port) == new.der
        # Without a server name the callback is asked as well; an address sends none.
        assert await seen(port, name="127.0.0.1") == new.der
        assert await seen(port, maximum_version=ssl.TLSVersion.TLSv1_2) == new.der
        writer.write(b"still here\n")
        assert await reader.readline() == b"still here\n"
        writer.close()
        await writer.wait_closed()


async def test_a_pair_that_cannot_be_used_says_why_and_leaves_the_old_one(tmp_path: Path) -> None:
    old, new = make(tmp_path, "old"), make(tmp_path, "new")
    certificates = Certificates(pem(old))
    async with echo_server(certificates) as port:
        for bad, says in (
            (Pem(pem(new).certificate, pem(old).key), "does not belong"),
            (Pem("rubbish", pem(new).key), "not PEM"),
            (Pem(pem(new).certificate, ""), "not PEM"),
            (Pem(pem(new).certificate[:200], pem(new).key), "certificate or the key"),
        ):
            with pytest.raises(CertificateError, match=says):
                certificates.replace(bad)
            assert await seen(port) == old.der
    assert certificates.pem == pem(old)


def test_it_says_when_the_one_in_force_ends(tmp_path: Path) -> None:
    old, new = make(tmp_path, "old", days=2), make(tmp_path, "new", days=90)
    now = time.time()
    certificates = Certificates(pem(old))
    assert certificates.ends == pytest.approx(now + 2 * 86400, abs=300)
    with pytest.raises(CertificateError):
        certificates.replace(Pem(pem(new).certificate, pem(old).key))
    assert certificates.ends == pytest.approx(now + 2 * 86400, abs=300)
    certificates.replace(pem(new))
    assert certificates.ends == pytest.approx(now + 90 * 86400, abs=300)


def test_an_encrypted_key_is_refused_instead_of_asking_the_terminal(tmp_path: Path) -> None:
    pair = make(tmp_path, "a")
    encrypting = ["openssl", "pkcs8", "-topk8", "-in", str(pair.key), "-passout", "pass:secret"]
    encrypted = subprocess.run(encrypting, check=True, capture_output=True, text=True, timeout=30).stdout
    with pytest.raises(CertificateError, match="encrypted"):
        Certificates(Pem(pair.certificate.read_text(), encrypted))


async def test_old_protocols_are_refused(tmp_path: Path) -> None:
    async with echo_server(Certificates(pem(make(tmp_path, "a")))) as port:
        with pytest.warns(DeprecationWarning, match="TLSv1"), pytest.raises((ssl.SSLError, ConnectionError)):
            await seen(port, minimum_version=ssl.TLSVersion.TLSv1, maximum_version=ssl.TLSVersion.TLSv1_1)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "CONNECT"])
def test_plain_http_is_told_to_use_https(tmp_path: Path, method: str, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{method} /v1/models HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))
        # Whoever goes on in plain HTTP is cut off.
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                assert not await reader.read()
        writer.close()
        return head + body

    async def both() -> None:
        certificates = Certificates(pem(make(tmp_path, "own")))
        async with echo_server(certificates) as port:
            answer = await ask(port)
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert b"connection: close" in answer.lower()
            body = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert body["error"]["code"] == "invalid_scheme"
            assert "https://" in body["error"]["message"]
            # And nobody else is the worse for it.
            assert await seen(port) == ssl.PEM_cert_to_DER_cert(certificates.pem.certificate)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(both())


async def test_what_is_neither_tls_nor_http_is_cut_off_without_a_word(tmp_path: Path) -> None:
    async with echo_server(Certificates(pem(make(tmp_path, "own")))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x00\x01\x02 what is this?\r\n\r\n")
        async with asyncio.timeout(20):
            assert not (await reader.read()).startswith(b"HTTP")
        writer.close()


def test_a_key_is_never_printed(tmp_path: Path) -> None:
    pair = make(tmp_path, "a")
    assert "PRIVATE" not in repr(pem(pair))
