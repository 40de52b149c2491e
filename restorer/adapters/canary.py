"""The proof that a replica answers as its donor did: fixed requests, and answers compared bit for bit.

Numbers are compared as the engine wrote them, never as floats, so nothing is rounded on the way. Knows the engine through
its adapter and an HTTP client; what follows from a difference is decided elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from policies.manifest import Exchange
from restorer.adapters.engines import HttpEngine
from restorer.errors import SnapshotError

_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found."""

    requests: int
    """Requests answered, the differing one included."""
    tokens: int
    """Tokens that were equal."""
    equal: bool
    difference: str | None = None
    """The first difference: where, expected, found."""


async def record(client: httpx.AsyncClient, engine: HttpEngine) -> tuple[tuple[Exchange, ...], float]:
    """(the donor's answers, the seconds that it took for them: of both times that it was asked, the faster).

    Everything is asked twice: a donor that does not repeat itself cannot vouch for a replica.

    Raises:
        SnapshotError: the two answers differ, or hold no token.
        EngineNotReady: no answer, or none within the canary's deadline for one request.
    """
    exchanges, begun = [], time.perf_counter()
    for path, body in engine.canary_requests():
        answer, tokens = engine.essence(_parse(await engine.ask(client, path, body)))
        exchanges.append(Exchange(path=path, request=body, answer=answer, tokens=tokens))
    asked_again = time.perf_counter()
    verdict = await check(client, engine, exchanges)
    seconds = min(asked_again - begun, time.perf_counter() - asked_again)
    if not verdict.equal:
        raise SnapshotError(
            f"donor is not stable: asked the same twice, {engine.name} answered differently ({verdict.difference}); a snapshot "
            "of it could not be verified: let it run one request at a time without caches or random choices "
            "(vLLM, SGLang: engine.deterministic: true), or leave it cold"
        )
    return tuple(exchanges), seconds


async def check(client: httpx.AsyncClient, engine: HttpEngine, exchanges: Sequence[Exchange]) -> Verdict:
    """Ask the donor's requests again and compare; stops at the first difference.

    An answer with another status, or that is no JSON, differs. No answer at all proves nothing either way.

    Raises:
        EngineNotReady: no answer, or none within the canary's deadline for one request.
    """
    tokens = 0
    for number, exchange in enumerate(exchanges, 1):
        try:
            found, _ = engine.essence(_parse(await engine.ask(client, exchange.path, exchange.request)))
        except SnapshotError as error:
            return Verdict(number, tokens, False, f"request {number}: {error}")
        difference = next(_differences(exchange.answer, found, ""), None)
        if difference is not None:
            return Verdict(number, tokens, False, f"request {number}: {difference}")
        tokens += exchange.tokens
    return Verdict(len(exchanges), tokens, True)


def _parse(response: httpx.Response) -> Any:
    """The body, with every number that is no integer as the text it was written as."""
    if response.status_code != httpx.codes.OK:
        raise SnapshotError(f"the canary was answered with {response.status_code}: {response.text[:_SHOWN]}")
    try:
        answer = json.loads(response.content, parse_float=str, parse_constant=str)
    except ValueError:
        raise SnapshotError(f"the canary's answer is no JSON: {response.text[:_SHOWN]}") from None
    return _encodable(answer)


def _encodable(value: Any) -> Any:
    """A lone surrogate (half of a character, as some engines send) cannot be written as UTF-8; its escape can."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


def _differences(expected: Any, found: Any, at: str) -> Iterator[str]:
    """Where two JSON values differ, in the order in which a person reads them. Types count: 1 is neither true nor "1"."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key in expected and key in found:
                yield from _differences(expected[key], found[key], f"{at}.{key}" if at else str(key))
            else:
                yield f"{at}.{key}: {'missing' if key in expected else 'not expected'}".lstrip(".")
    elif isinstance(expected, list) and isinstance(found, list):
        for n, (left, right) in enumerate(zip(expected, found, strict=False)):
            yield from _differences(left, right, f"{at}[{n}]")
        if len(expected) != len(found):
            yield f"{at}: expected {len(expected)} items, found {len(found)}"
    elif type(expected) is not type(found) or expected != found:
        yield f"{at}: expected {_show(expected)}, found {_show(found)}"


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
