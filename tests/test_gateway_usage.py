"""Tokens are read from answers as engines really send them, however the bytes are cut."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.usage import Usage, meter

EVENTS, JSON = "text/event-stream; charset=utf-8", "application/json"


def sse(*documents: Any, done: bool = True) -> bytes:
    frames = [b"data: " + json.dumps(document).encode() + b"\n\n" for document in documents]
    return b"".join(frames) + (b"data: [DONE]\n\n" if done else b"")


def named(*documents: dict[str, Any]) -> bytes:
    """Events as Anthropic's and the Responses protocol write them."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (d["type"].encode(), json.dumps(d).encode()) for d in documents)


def chunk(text: str = "x", **more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}], **more}


def read(body: bytes, content_type: str, encoding: str = "", cuts: int = 0) -> Usage | None:
    found = meter(content_type, encoding)
    step = cuts or max(1, len(body))
    for at in range(0, len(body), step):
        found.feed(body[at : at + step])
    return found.usage()


ENDED = {"prompt_tokens": 7, "completion_tokens": 40, "total_tokens": 47, "prompt_tokens_details": None}
OPENAI = sse(*[chunk() for _ in range(40)], chunk(usage=None), {"id": "c", "choices": [], "usage": ENDED})
CONTINUOUS = sse(*[chunk(usage={"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n}) for n in range(1, 41)])
LLAMA = sse(*[chunk() for _ in range(3)], chunk(timings={"cache_n": 5, "prompt_n": 2, "prompt_ms": 1.5, "predicted_n": 40}))
ANTHROPIC = named(
    {
        "type": "message_start",
        "message": {"id": "m", "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 1}},
    },
    *[{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word " * 9}} for _ in range(200)],
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 40}},
    {"type": "message_stop"},
)
RESPONSES = named(
    {"type": "response.created", "response": {"id": "r", "usage": None}},
    *[{"type": "response.output_text.delta", "delta": "word"} for _ in range(100)],
    {
        "type": "response.completed",
        "response": {
            "output": ["long " * 3000],
            "usage": {"input_tokens": 7, "output_tokens": 40, "total_tokens": 47},
            "user": None,
        },
    },
)
STREAMS = {"openai": OPENAI, "continuous": CONTINUOUS, "llama.cpp": LLAMA, "anthropic": ANTHROPIC, "responses": RESPONSES}


@pytest.mark.parametrize("cuts", [0, 1, 7, 1000])
@pytest.mark.parametrize("name", STREAMS)
def test_the_end_of_a_stream_tells(name: str, cuts: int) -> None:
    assert read(STREAMS[name], EVENTS, cuts=cuts) == (7, 40, True)


DOCUMENTS = {
    "chat": {"id": "c", "choices": [{"message": {"content": "x" * 9000}}], "usage": ENDED},
    "usage first": {"usage": ENDED, "data": [{"embedding": [0.1] * 5000}]},
    "usage in the middle": {"data": ["x" * 9000], "usage": ENDED, "prompt_logprobs": [{"1": 0.5}] * 5000},
    "words that look like it": {"choices": [{"message": {"content": '"usage": {"prompt_tokens": 1}'}}], "usage": ENDED},
    "a schema that is echoed": {"usage": ENDED, "tools": [{"properties": {"usage": {"type": "string"}}}]},
    "responses": {"output": [], "usage": {"input_tokens": 7, "output_tokens": 40, "total_tokens": 47}},
    "anthropic": {"content": [], "usage": {"input_tokens": 3, "cache_creation_input_tokens": 4, "output_tokens": 40}},
    "llama.cpp": {"content": "…", "timings": {"prompt_n": 7, "predicted_n": 40}},
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("cuts", [0, 1, 1000])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_tells_wherever_it_says_so(name: str, cuts: int, indent: int | None) -> None:
    assert read(json.dumps(DOCUMENTS[name], indent=indent).encode(), JSON, cuts=cuts) == (7, 40, True)


def test_embeddings_and_reranks_have_a_prompt_alone() -> None:
    assert read(b'{"data":[],"usage":{"prompt_tokens":9,"total_tokens":9}}', JSON) == (9, 0, True)
    assert read(b'{"results":[],"usage":{"total_tokens":9}}', JSON) == (9, 0, True)


def test_without_counts_each_event_is_a_token() -> None:
    body = b": ping\n\n" + sse(*[chunk() for _ in range(25)])
    assert read(body, EVENTS) == read(body, EVENTS, cuts=64) == (0, 25, False)


def test_a_stream_that_was_cut_counts_as_far_as_it_came() -> None:
    assert read(ANTHROPIC[: len(ANTHROPIC) // 2], EVENTS) == (7, 101, False)
    assert read(ANTHROPIC[:400], EVENTS) == (7, 3, False)
    assert read(sse(chunk(), done=False), EVENTS) == (0, 1, False)
    assert read(b"", EVENTS) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"not json",
        b'{"usage": null}',
        b'{"usage": {}}',
        b'{"usage": "lots"}',
        b'{"usage": [1]}',
        b'{"usage": {"prompt_tokens": true}}',
        b'{"usage": {"prompt_tokens": "7"}}',
        b'{"usage": {"prompt_tokens": 7',
        b'{"usage": {"type": "duration", "seconds": 9}}',
        b'{"usage": ' + b'{"a":' * 400,
    ],
)
def test_what_says_nothing_counts_nothing(body: bytes) -> None:
    assert read(body, JSON) is None


def test_absurd_counts_are_bounded() -> None:
    assert read(b'{"usage":{"prompt_tokens":-5,"completion_tokens":1' + b"0" * 50 + b"}}", JSON) == (0, 10**9, True)


@pytest.mark.parametrize("content_type", ["audio/mpeg", "", "text/plain", "application/octet-stream"])
def test_other_kinds_are_not_looked_at(content_type: str) -> None:
    assert read(b'{"usage":{"prompt_tokens":9}}', content_type) is None


def test_case_55_a_compressed_answer_is_read_as_it_passes() -> None:
    document = json.dumps(DOCUMENTS["usage in the middle"]).encode()
    assert read(gzip.compress(document), JSON, "gzip", cuts=100) == (7, 40, True)
    assert read(gzip.compress(OPENAI), EVENTS, "gzip", cuts=50) == (7, 40, True)
    assert read(document, JSON, "gzip") is None
    assert read(document, JSON, "br") is None


def test_a_gzip_bomb_is_given_up() -> None:
    bomb = gzip.compress(b" " * (100 << 20) + b'{"usage":{"prompt_tokens":9}}')
    assert read(bomb, JSON, "gzip", cuts=1 << 16) is None


def test_a_long_stream_takes_no_memory() -> None:
    found = meter(EVENTS)
    frame = sse(chunk("x" * 200), done=False)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            found.feed(bytes(bytearray(frame)))
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None)
@given(body=st.sampled_from([*STREAMS.values(), *[json.dumps(d).encode() for d in DOCUMENTS.values()]]), data=st.data())
def test_however_the_bytes_are_cut(body: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=20)))
    found = meter(EVENTS if b"data: " in body[:80] else JSON)
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        found.feed(body[start:end])
    assert found.usage() == (7, 40, True)


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(st.binary(max_size=300) | st.sampled_from([b'"usage"', b":", b"{", b"}", b"data: ", b"\n\n"]), max_size=30)
)
def test_rubbish_raises_nothing(chunks: list[bytes]) -> None:
    for kind in (EVENTS, JSON):
        found = meter(kind)
        for piece in chunks:
            found.feed(piece)
        found.usage()
