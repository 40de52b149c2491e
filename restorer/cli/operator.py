"""What every command of the operator needs: the configuration file, the admin API, the end of an operation.

Owns how mistakes of an operator are worded and which exit code they get. Prints nothing; speaks to the gateway by HTTP
only.
"""

from __future__ import annotations

import os
import ssl
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import yaml
from pydantic import ValidationError

from policies.config import Config, ConfigError, parse
from policies.replica import COMING
from policies.wire import Operation, OperationState
from restorer.installation import rundir
from restorer.installation.listening import base_url, metrics_url
from restorer.installation.rundir import TOKEN, Address

FAILED, USAGE = 1, 2
DEFAULTS = (Path("rewake.yaml"), Path("/etc/rewake/rewake.yaml"))
EXAMPLE = """\
models:
  tiny:
    engine:
      kind: llama-server
      command: [/usr/local/bin/llama-server, --host, 0.0.0.0, --port, "8000", --model, /srv/models/tiny.gguf]
    weights: [/srv/models/tiny.gguf]
"""
_CALL_S = 15.0
_POLL_S = 1.0


class Failed(Exception):
    """A command cannot do what it was asked; the message says why, and how to mend it. ``code`` is the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def find(given: Path | None) -> Path:
    """The configuration file to use, absolute.

    Raises:
        Failed: none was given, and there is none at the default places.
    """
    if given is not None:
        return given.absolute()
    for path in DEFAULTS:
        if path.exists():
            return path.absolute()
    places = " or ".join(map(str, DEFAULTS))
    raise Failed(f"no configuration: give one with -c FILE, or write {places}. The smallest is\n\n{EXAMPLE}", USAGE)


def load(given: Path | None) -> tuple[Path, Config]:
    """The configuration file and what it says.

    Raises:
        Failed: it cannot be read, anybody could have written it, or it has faults (all are listed).
    """
    path = find(given)
    try:
        facts, text = path.stat(), path.read_text()
        document = yaml.safe_load(text)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}; give the configuration with -c FILE", USAGE) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Failed(f"{path} is not YAML: {' '.join(str(error).split())}", USAGE) from None
    # It names programs that run as this user.
    if facts.st_mode & stat.S_IWOTH:
        raise Failed(f"{path} can be written by anybody, and it names programs to run: chmod o-w {path}", USAGE)
    if given is None and os.geteuid() == 0 and facts.st_uid not in (0, int(os.environ.get("SUDO_UID", "0"))):
        raise Failed(f"{path} was found, not given, and belongs to uid {facts.st_uid}: name it with -c to trust it", USAGE)
    try:
        return path, parse(document)
    except ConfigError as error:
        raise Failed(f"{path} has faults:\n{error}", USAGE) from None


def _trust(certificate: str | None) -> ssl.SSLContext | bool:
    """Trust the gateway's own certificate and no other, whatever name it is for: it is on this machine, and we know its file."""
    if certificate is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except OSError as error:
        raise Failed(f"{certificate}: gateway.tls.certificate cannot be used: {error}") from None
    return context


def _address(config: Config) -> Address:
    """Where the gateway is: as the `rewake up` that runs has written down, or as the configuration says."""
    found = rundir.address(Path(config.run_dir), Path(config.state_dir))
    if found is not None:
        return found
    if config.gateway.port == 0:
        raise Failed(
            "gateway.port is 0 and no `rewake up` runs here, so nobody knows where the gateway listens; set a port", USAGE
        )
    certificate = None if config.gateway.tls is None else config.gateway.tls.certificate
    return Address(url=base_url(config), certificate=certificate, run_dir=config.run_dir)


class Admin:
    """A client of the gateway's admin API on this machine. A context manager; every method blocks.

    Raises:
        Failed: (every method) the gateway does not answer, does not accept the token, or refuses.
    """

    def __init__(self, config: Config) -> None:
        address = _address(config)
        self._base = address.url
        self._metrics = f"{metrics_url(config) or address.url}/metrics"
        self._token_file = Path(address.run_dir) / TOKEN
        # Loopback is never behind a proxy, and the token must not travel through one.
        self._client = httpx.Client(
            base_url=f"{self._base}/admin/v1",
            headers={"Authorization": f"Bearer {self._token()}"},
            trust_env=False,
            verify=_trust(address.certificate),
        )

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def replicas(self) -> list[dict[str, Any]]:
        """Every replica's record with ``inflight``, by slot."""
        return sorted(self.call("GET", "replicas")["replicas"], key=lambda replica: str(replica["id"]))

    def overview(self, after: str = "", wait_s: float = 0.0) -> dict[str, Any]:
        """Everything at a glance; what came after version ``after``, or as it is ``wait_s`` seconds later."""
        return self.call("GET", "overview", query={"after": after, "wait": f"{wait_s:g}"}, more_s=wait_s)

    def why(self, name: str) -> dict[str, Any]:
        """The story of a model or a replica that is not what it should be."""
        return self.call("GET", "why", query={"of": name})

    def metrics(self) -> str:
        """What the gateway shows to Prometheus."""
        try:
            return self._client.get(self._metrics, timeout=_CALL_S).raise_for_status().text
        except httpx.HTTPError as error:
            raise Failed(f"no metrics at {self._metrics}: {error}") from None

    def replica(self, name: str) -> dict[str, Any]:
        """One replica, by its slot or its incarnation."""
        replicas = self.replicas()
        for replica in replicas:
            if name in (replica["id"], replica["incarnation"]):
                return replica
        known = ", ".join(str(replica["id"]) for replica in replicas) or "none"
        raise Failed(f"there is no replica {name!r}; known: {known}", USAGE)

    def operation(self, id: str, wait_s: float) -> Operation:
        """An operation as it stands when it has ended, or after ``wait_s`` seconds."""
        return self._operation(self.call("GET", f"operations/{quote(id, safe='')}", query={"wait": f"{wait_s:g}"}, more_s=wait_s))

    def begin(self, verb: str, body: Mapping[str, object]) -> Operation:
        """Start an operation: ``scale-up``, ``scale-down``, ``drain``, ``move`` or ``snapshots``."""
        return self._operation(self.call("POST", verb, body=body))

    def follow(self, operation: Operation, *, within: float, progress: Callable[[float, Sequence[str]], None]) -> Operation:
        """Wait for the end of an operation, at most ``within`` seconds.

        Args:
            progress: called at least once a second with the seconds so far and what each replica of the model does.
        """
        began = time.monotonic()
        while operation.state == OperationState.RUNNING:
            elapsed = time.monotonic() - began
            if elapsed >= within:
                raise Failed(f"operation {operation.id} still runs after {elapsed:.0f} s; it goes on by itself")
            doing = [r for r in self.replicas() if r["model"] == operation.model and r["state"] in (*COMING, "draining")]
            progress(elapsed, [f"{replica['id']} {replica['state']}" for replica in doing])
            operation = self.operation(operation.id, min(_POLL_S, within - elapsed))
        return operation

    def task(self, body: Mapping[str, object], within: float) -> dict[str, Any]:
        """What one host's restorer found: it was asked by name."""
        task = self.call("POST", "tasks", body=body)
        deadline = time.monotonic() + within
        while task["state"] == "running":
            if time.monotonic() > deadline:
                raise Failed(f"the restorer on {body['host']} has not answered within {within:g} s; does it run there?")
            task = self.call("GET", f"tasks/{task['id']}", query={"wait": f"{_POLL_S:g}"}, more_s=_POLL_S)
        if task["state"] == "failed":
            raise Failed(str(task["detail"]))
        return dict(task["result"])

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, str] | None = None,
        more_s: float = 0.0,
    ) -> dict[str, Any]:
        """One call; its JSON object."""
        try:
            answer = self._client.request(method, path, json=body, params=query, timeout=_CALL_S + more_s)
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise Failed(
                f"no gateway answers at {self._base} ({said}); is `rewake up` running with this configuration?"
            ) from None
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise Failed(
                f"the gateway at {self._base} does not accept the token in {self._token_file}: it was started with another "
                "run_dir, or the token was replaced since; restart it with this configuration"
            )
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Failed(f"what answers at {self._base} is no Rewake gateway (HTTP {answer.status_code}); see gateway.port")
        if answer.is_error:
            fault = found.get("error")
            said = str(fault.get("message")) if isinstance(fault, dict) else answer.text
            raise Failed(said, USAGE if answer.status_code in (400, 404) else FAILED)
        return found

    def _operation(self, document: Mapping[str, Any]) -> Operation:
        try:
            return Operation.model_validate(document)
        except ValidationError as error:
            raise Failed(f"the gateway at {self._base} is of another version: {str(error).splitlines()[0]}") from None

    def _token(self) -> str:
        try:
            return self._token_file.read_text().strip()
        except FileNotFoundError:
            raise Failed(f"{self._token_file} is not there: is `rewake up` running with this configuration?") from None
        except PermissionError:
            raise Failed(f"{self._token_file} may not be read; run this as the user that runs `rewake up`") from None
        except OSError as error:
            raise Failed(f"{self._token_file}: {error.strerror}") from None
