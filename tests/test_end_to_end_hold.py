"""Held streams with a real engine that CRIU restores meanwhile: signs of life, true estimates, a death in mid-answer."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from e2e_installation import PROMPT, Installation, a_place, eventually, llama, network

pytestmark = pytest.mark.criu

HOLD = {"silent_s": 0.5, "keepalive_s": 0.2}
STREAM = {**PROMPT, "model": "base", "stream": True}


@pytest.fixture(scope="module")
def system() -> Iterator[Installation]:
    with a_place("hold") as folder, Installation(folder, network(23), {"base": llama(hold=HOLD)}).running() as system:
        system.snapshot("base")
        yield system


def test_gateway_case_34_a_real_restore_under_signs_of_life(system: Installation) -> None:
    """Comments while CRIU is held back, then the restored engine's tokens behind them on the same answer."""
    flag = system.folder / "hold-before-restore"
    flag.touch()
    text = ""
    with system.http.stream("POST", "/v1/completions", json=STREAM) as answer:
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        assert "x-rewake-start" not in answer.headers
        for piece in answer.iter_text():
            text += piece
            if flag.exists() and text.count(": queued position=1") == 3:
                flag.unlink()
    waited, _, served = text.partition(": dispatched start=restored incarnation=")
    assert waited.count(": queued position=1") >= 3
    assert "data: " not in waited
    assert served.rstrip().endswith("data: [DONE]")


def test_the_openai_client_sees_a_slow_first_token(system: Installation) -> None:
    system.park("base")
    with openai.OpenAI(base_url=f"{system.base}/v1", api_key="unused", http_client=httpx.Client(trust_env=False)) as client:
        whole = client.completions.create(**{**STREAM, "stream": False})
        system.park("base")
        chunks = list(client.completions.create(**STREAM))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_estimates_follow_what_restores_took(system: Installation) -> None:
    """After a few restores: the list of models says when, and a client that cannot wait for so long is told at once."""
    system.park("base")
    took = []
    for _ in range(2):
        since = time.monotonic()
        assert system.complete("base").status_code == 200
        took.append(time.monotonic() - since)
        system.park("base")
    card = system.http.get("/v1/models/base").json()["rewake"]
    assert card["state"] == "cold"
    assert 0 < card["eta_seconds"] < 30
    since = time.monotonic()
    refused = system.complete("base", headers={"x-rewake-deadline-s": "0.02"})
    assert time.monotonic() - since < 10
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "cold_start_timeout")
    assert 1 <= int(refused.headers["retry-after"]) <= 1 + 1.25 * card["eta_seconds"]


def test_gateway_case_39_an_engine_killed_in_mid_answer_is_an_error_for_the_openai_client(system: Installation) -> None:
    eventually(lambda: system.complete("base").status_code == 200, "the model to be warm")
    (replica,) = system.replicas("base")
    with openai.OpenAI(base_url=f"{system.base}/v1", api_key="unused", http_client=httpx.Client(trust_env=False)) as client:
        stream = client.completions.create(**{**STREAM, "max_tokens": 400}, extra_body={"ignore_eos": True})
        seen = [next(stream) for _ in range(3)]
        for pid in system.engines(replica["incarnation"]):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError) as raised:
            seen.extend(stream)
    assert len(seen) < 400
    assert re.search("broke off|onnection", str(raised.value))
    # And the next request gets another replica.
    assert system.complete("base").headers["x-rewake-incarnation"] != replica["incarnation"]
