"""The canary: what counts as the same answer, and what as none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from policies.config import Model
from policies.manifest import Exchange, canonical
from restorer.adapters.canary import Verdict, check, record
from restorer.adapters.engines import HttpEngine
from restorer.errors import EngineNotReady, SnapshotError

MODEL = Model.model_validate(
    {"engine": {"kind": "http", "command": ["/x"]}, "canary": {"prompts": ["one", "two"], "max_tokens": 2, "timeout_s": 0.2}}
)
ENGINE = HttpEngine("m", MODEL)


def body(logprob: str = "-0.1", text: str = "Paris", **more: Any) -> str:
    """An answer as bytes on the wire, with a number exactly as given."""
    rest = json.dumps({"id": "cmpl", "usage": {"completion_tokens": 2}, **more})[1:]
    return f'{{"choices": [{{"text": {json.dumps(text)}, "logprobs": {{"token_logprobs": [{logprob}, -2]}}}}], {rest}'


class Scripted:
    """An engine that gives these answers in turn, then the last one for ever."""

    def __init__(self, *answers: str | int | Exception) -> None:
        self.answers: Iterator[str | int | Exception] = iter(answers)
        self.last: str | int | Exception = body()
        self.asked: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.content))
        self.last = next(self.answers, self.last)
        if isinstance(self.last, Exception):
            raise self.last
        return httpx.Response(self.last, text="sorry") if isinstance(self.last, int) else httpx.Response(200, text=self.last)


def client(answer: Callable[[httpx.Request], Any]) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer))


async def donor() -> tuple[Exchange, ...]:
    async with client(Scripted(body())) as http:
        return (await record(http, ENGINE))[0]


async def replica(*answers: str | int | Exception) -> Verdict:
    exchanges = await donor()
    async with client(Scripted(*answers)) as http:
        return await check(http, ENGINE, exchanges)


async def test_the_donor_is_asked_everything_twice() -> None:
    engine = Scripted(body())
    async with client(engine) as http:
        exchanges, _ = await record(http, ENGINE)
    assert [asked["prompt"] for asked in engine.asked] == ["one", "two", "one", "two"]
    assert [(exchange.path, exchange.request["prompt"], exchange.tokens) for exchange in exchanges] == [
        ("/v1/completions", "one", 2),
        ("/v1/completions", "two", 2),
    ]


async def test_a_donor_that_does_not_repeat_itself_is_refused_with_the_first_difference() -> None:
    async with client(Scripted(body(), body(), body(), body("-0.10000000000000002"))) as http:
        with pytest.raises(
            SnapshotError, match=r'donor is not stable.*request 2: choices\[0\].*expected "-0\.1", found "-0\.10000'
        ):
            await record(http, ENGINE)


async def test_an_equal_replica() -> None:
    assert await replica(body(created=99, id="another", timings={"ms": 1.5})) == Verdict(requests=2, tokens=4, equal=True)


@pytest.mark.parametrize(
    ("answer", "where"),
    [
        (body("-0.10"), "choices[0].logprobs.token_logprobs[0]"),
        (body("-0.1000000000000000055"), "choices[0].logprobs.token_logprobs[0]"),
        (body("-1e-1"), "choices[0].logprobs.token_logprobs[0]"),
        (body("NaN"), "choices[0].logprobs.token_logprobs[0]"),
        (body("true"), "choices[0].logprobs.token_logprobs[0]"),
        (body("null"), "choices[0].logprobs.token_logprobs[0]"),
        (body(text="Paris "), "choices[0].text"),
        (body().replace("-2]", "-2.0]"), "choices[0].logprobs.token_logprobs[1]"),
        (body().replace("-2]", "-2, -3]"), "choices[0].logprobs.token_logprobs: expected 2 items, found 3"),
        (body().replace('"text"', '"finish_reason": "stop", "text"'), "choices[0].finish_reason: not expected"),
        (body().replace('"logprobs"', '"x"'), "choices[0].logprobs: missing"),
    ],
)
async def test_a_difference_is_found_however_small_and_said_where(answer: str, where: str) -> None:
    verdict = await replica(body(), answer)
    assert (verdict.requests, verdict.tokens, verdict.equal) == (2, 2, False)
    assert verdict.difference is not None
    assert verdict.difference.startswith(f"request 2: {where}")


async def test_the_check_stops_at_the_first_difference() -> None:
    exchanges = await donor()
    engine = Scripted(body(text="London"))
    async with client(engine) as http:
        verdict = await check(http, ENGINE, exchanges)
    assert len(engine.asked) == 1
    assert verdict == Verdict(1, 0, False, 'request 1: choices[0].text: expected "Paris", found "London"')


@pytest.mark.parametrize(
    ("answer", "why"), [(500, "answered with 500: sorry"), ("<html>", "no JSON: <html>"), ("{}", "no list of choices")]
)
async def test_an_answer_that_is_none_differs_and_refuses_a_donor(answer: str | int, why: str) -> None:
    verdict = await replica(answer)
    assert not verdict.equal
    assert verdict.difference is not None
    assert why in verdict.difference
    async with client(Scripted(answer)) as http:
        with pytest.raises(SnapshotError, match=why):
            await record(http, ENGINE)


async def test_silence_and_refusal_prove_nothing_either_way() -> None:
    async def silent(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    exchanges = await donor()
    async with client(silent) as http:
        with pytest.raises(EngineNotReady, match=r"within 0\.2 s"):
            await check(http, ENGINE, exchanges)
    async with client(Scripted(httpx.ReadError("reset"))) as http:
        with pytest.raises(EngineNotReady, match="reset"):
            await check(http, ENGINE, exchanges)


async def test_what_was_recorded_survives_the_manifest_bit_for_bit() -> None:
    awkward = body("-0.12345678901234567890", text="é\u2028\x7f").replace("Paris", "\\ud83d")
    awkward = awkward.replace('"text": "', '"text": "\\ud83d')
    async with client(Scripted(awkward)) as http:
        exchanges, _ = await record(http, ENGINE)
        stored = [Exchange.model_validate_json(canonical(exchange)) for exchange in exchanges]
        assert stored == list(exchanges)
        assert (await check(http, ENGINE, stored)).equal
