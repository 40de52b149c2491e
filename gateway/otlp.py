"""Sends spans to a collector, by OTLP over HTTP. The one module that knows OpenTelemetry's library, which says what the process
is as its environment variables want it; loaded only when something is traced.

A thread of its own makes and sends them, many at a time. What waits is bounded, and a collector that is slow, or is none, costs
spans, which are counted: never a request.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - as netrc: used when something is sent, and it may lie where only root can read
import netrc  # noqa: F401
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import requests
from opentelemetry.sdk.resources import Resource

from gateway import logs, spanwire
from gateway.version import version
from policies.observing import Tracing

_GATHER_S = 2.0
_BATCH = 512
_TIMEOUT_S = 5.0
_AGAIN_S = (0.0, 1.0, 2.0)
"""A collector that could not be asked, or has no time, is asked again after so long each."""
_BUSY = frozenset((408, 429, 502, 503, 504))
_CERTIFICATES = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE")


def preload() -> None:
    """Load what the libraries would load when they are first used: it may lie where only root can read.

    Raises:
        ImportError: something of it is not installed.
    """
    Resource.create()
    with requests.Session() as session:
        session.get_adapter("https://")


class Sender:
    """Sends for one process; its thread lives from :meth:`start` to :meth:`close`.

    Args:
        id: of this process, among those of one service.
        report: called in any thread with ``exported``, ``dropped`` or ``failed``, and the number of spans (of requests, for
            ``dropped``).
    """

    def __init__(self, settings: Tracing, id: str, report: Callable[[str, int], None]) -> None:
        self._bound = settings.queue
        self._report = report
        resource = Resource.create({"service.name": "rewake-gateway", "service.version": version(), "service.instance.id": id})
        self._resource = dict(resource.attributes)
        self._endpoint = settings.endpoint or ""
        self._session = requests.Session()
        self._session.headers.update({"Content-Type": "application/x-protobuf", **settings.headers})
        self._verify = next((os.environ[name] for name in _CERTIFICATES if os.environ.get(name)), None)
        self._waiting: deque[Callable[[], Iterable[bytes]]] = deque()
        self._some = threading.Event()
        self._ending = threading.Event()
        self._failing = False
        # A daemon: a collector that does not answer must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, spans: Callable[[], Iterable[bytes]]) -> None:
        """Take in what is to be sent."""
        if len(self._waiting) >= self._bound:
            self._report("dropped", 1)
            return
        self._waiting.append(spans)
        if not self._some.is_set():
            self._some.set()

    def close(self, within_s: float = 2.0) -> None:
        """Send what waits, and end; what could not be sent by then is lost. Blocks for so long at most."""
        self._ending.set()
        self._some.set()
        if self._thread.is_alive():
            self._thread.join(within_s)
        self._session.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._some.wait()
            self._ending.wait(_GATHER_S)
            self._some.clear()
            batch: list[bytes] = []
            while self._waiting:
                batch += self._made(self._waiting.popleft())
                if len(batch) >= _BATCH:
                    self._send(batch)
                    batch = []
            if batch:
                self._send(batch)

    def _made(self, spans: Callable[[], Iterable[bytes]]) -> Sequence[bytes]:
        """What is to be sent; one that cannot be made must not end the thread."""
        try:
            return tuple(spans())
        except Exception as error:
            logs.error("bug", error)
            self._report("failed", 1)
            return ()

    def _send(self, batch: Sequence[bytes]) -> None:
        data, reason = spanwire.request(self._resource, "rewake", version(), batch), ""
        for pause_s in _AGAIN_S:
            if pause_s and self._ending.wait(pause_s):
                break
            reason, again = self._post(data)
            if not again:
                break
        well = not reason
        self._report("exported" if well else "failed", len(batch))
        if not well and not self._failing:
            logs.warning("spans cannot be sent to the collector; they are dropped until it answers", reason=reason)
        elif well and self._failing:
            logs.info("the collector answers again")
        self._failing = not well

    def _post(self, data: bytes) -> tuple[str, bool]:
        """What went wrong, empty for nothing, and whether it may go better in a moment."""
        try:
            # TLS is checked against the system's certificates unless one is named.
            answer = self._session.post(self._endpoint, data=data, timeout=_TIMEOUT_S, verify=self._verify)
        except requests.RequestException as error:
            return str(error), isinstance(error, requests.ConnectionError)
        return ("", False) if answer.ok else (f"it answered {answer.status_code}", answer.status_code in _BUSY)
