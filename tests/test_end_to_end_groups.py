"""Two real engines that share one place, as a user runs them: swaps under traffic, drains, preloading, an engine that hangs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2e_installation import PROMPT, Installation, a_place, argv_of, eventually, llama, network

pytestmark = pytest.mark.criu

GROUPED = {"group": "gpu", "concurrency": 1, "idle_park_s": 600}


@pytest.fixture(scope="module")
def system() -> Iterator[Installation]:
    with a_place("groups") as place:
        models = {
            "left": llama(**GROUPED, preload=True),
            "right": llama(**GROUPED),
            "hung": llama(first_byte_timeout_s=2),
        }
        system = Installation(place, network(17), models)
        system.configure(groups={"gpu": {"min_tenure_s": 1, "max_wait_s": 6}})
        with system.running():
            yield system


class Watch:
    """Looks all the time which models of the group have an engine, by processes alone."""

    def __init__(self, system: Installation) -> None:
        self._system = system
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.looks: list[int] = []

    def _look(self) -> None:
        while not self._end.is_set():
            # Not those of CRIU, which works inside the boxes.
            self.looks.append(sum(b"--ctx-size" in argv_of(pid) for pid in self._system.engines()))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_the_preloaded_model_runs_before_anybody_asks(system: Installation) -> None:
    (replica,) = eventually(lambda: system.replicas("left"), "the preloaded model", 30)
    assert (replica["start"], system.replicas("right")) == ("cold", [])
    assert system.complete("left").headers["x-rewake-incarnation"] == replica["incarnation"]
    system.park("left")


def test_gateway_cases_07_21_two_models_swap_under_traffic_and_never_run_together(system: Installation) -> None:
    """Both are asked all the time, so each swap displaces a busy model; every request is answered, whole."""
    for model in ("left", "right"):
        system.snapshot(model)
    end = time.monotonic() + 20
    served: list[tuple[str, str]] = []

    def client(model: str) -> None:
        with httpx.Client(base_url=system.base, timeout=60, trust_env=False) as http:
            while time.monotonic() < end:
                answer = http.post("/v1/completions", json={**PROMPT, "model": model})
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"]
                served.append((model, answer.headers["x-rewake-incarnation"]))

    with Watch(system) as watch, concurrent.futures.ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(client, model) for model in ("left", "right") * 2]:
            future.result(timeout=90)
    assert max(watch.looks) == 1, "two engines at once"
    lives = list(dict.fromkeys(served))
    swaps = [model for model, _ in lives]
    assert swaps.count("left") >= 2, lives
    assert swaps.count("right") >= 2, lives
    # Turns, not a swap for each request.
    assert len(served) > 4 * len(lives)


def test_gateway_case_42_a_displaced_model_finishes_what_it_has_begun(system: Installation) -> None:
    """A stream on the one; the other's request waits for its end, and is held meanwhile."""
    for model in ("left", "right"):
        system.park(model)
    body: dict[str, Any] = {**PROMPT, "model": "left", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with (
        Watch(system) as watch,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        system.http.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        waiting = pool.submit(system.complete, "right")
        got = [line for line in lines if line]
        assert got[-1] == "data: [DONE]"
        answer = waiting.result(timeout=60)
    assert answer.status_code == 200, answer.text
    assert max(watch.looks) == 1
    (left,) = system.replicas("left", "stopped")
    assert left["reason"].startswith("displaced by right: ")


def test_an_operator_is_told_who_has_the_place(system: Installation) -> None:
    assert system.complete("right").status_code == 200
    refused = system.cli("scale", "left", "1")
    assert refused.returncode == 1
    assert "has no place for 'left': 'right' comes first" in refused.stdout + refused.stderr


def test_gateway_case_30_an_engine_that_hangs_is_replaced(system: Installation) -> None:
    """Stopped by a signal, it lives, and the kernel accepts connections for it."""
    first = system.complete("hung")
    incarnation = first.headers["x-rewake-incarnation"]
    (engine,) = system.engines(incarnation)
    os.kill(engine, signal.SIGSTOP)
    try:
        failed = system.complete("hung")
        assert failed.status_code in (502, 503, 504), failed.text
        (replica,) = eventually(lambda: system.replicas("hung", "failed"), "the hung engine to be found out", 40)
        assert replica["incarnation"] == incarnation
        assert replica["reason"].startswith("hung: ")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
    second = system.complete("hung")
    assert second.status_code == 200, second.text
    assert second.headers["x-rewake-incarnation"] != incarnation
