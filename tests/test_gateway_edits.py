"""Edits of bodies: what was asked for happens, and every other byte stays."""

from __future__ import annotations

import gzip
import json

import pytest
from fake_replica import configuration
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import edits, intake, multipart, routes
from gateway.body import Body
from gateway.errors import InvalidRequest
from gateway.members import Repeated, members

SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text()
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=8
)
KEYS = st.sampled_from(["a", "b", "c", 'q"', "\\", "é", "temperature"]) | st.text(max_size=5)
CHAT = routes.find("POST", "/v1/chat/completions")
AUDIO = routes.find("POST", "/v1/audio/transcriptions")


def body_of(data: bytes, found: routes.Found = CHAT, **headers: str) -> Body:
    return intake.whole(found, headers, data, configuration())


def model(**changes):
    return configuration(**{f"model__{key}": value for key, value in changes.items()}).models["m"]


def spaced(document: dict, spaces: list[str], ascii: bool) -> bytes:
    """JSON with arbitrary white space between the members."""
    space = iter(spaces * (4 * len(document) + 4))
    members = (
        f"{next(space)}{json.dumps(key, ensure_ascii=ascii)}{next(space)}:{next(space)}{json.dumps(value, ensure_ascii=ascii)}"
        for key, value in document.items()
    )
    return (next(space) + "{" + ",".join(members) + next(space) + "}" + next(space)).encode()


@settings(deadline=None, max_examples=150)
@given(
    document=st.dictionaries(KEYS, JSON, max_size=6),
    at=st.integers(0, 6),
    spaces=st.lists(st.sampled_from(["", " ", "\n", "\t\r "]), min_size=1, max_size=5),
    ascii=st.booleans(),
    strip=st.sets(st.sampled_from(["a", "b", "c", "é", "temperature"])),
    defaults=st.dictionaries(st.sampled_from(["a", "temperature", "new", 'q"']), JSON),
    served=st.none() | st.text(min_size=1),
)
def test_edits_do_what_they_say_and_nothing_else(document, at, spaces, ascii, strip, defaults, served):
    document = {key: value for key, value in document.items() if key not in ("model", "stream")}
    items = list(document.items())
    items.insert(at, ("model", "m"))
    data = spaced(dict(items), spaces, ascii)
    spec = model(strip=sorted(strip), defaults=defaults, served_name=served)
    edited = edits.apply_now(body_of(data), spec)
    wanted = {key: value for key, value in items if key not in strip}
    wanted = {**defaults, **wanted, "model": served or "m"}
    assert json.loads(edited.data) == wanted
    assert edited.size == len(edited.data)
    # What stays, stays byte for byte and in order.
    spans = {span.key: data[span.value : span.end] for span in members(data)}
    after = {span.key: edited.data[span.value : span.end] for span in members(edited.data)}
    kept = [key for key, _ in items if key not in strip]
    assert list(after)[: len(kept)] == kept
    assert all(after[key] == spans[key] for key in kept if key != "model")


def test_without_edits_the_very_same_bytes_pass():
    data = b'{ "model" :"m" , "x":1.0e0,"y":"\\u00e9" }\n'
    assert edits.apply_now(body_of(data), model()).data is data
    assert edits.apply_now(body_of(data), model(served_name="m")).data is data
    assert not edits.wanted(body_of(data), model())


@pytest.mark.parametrize(
    ("data", "strip", "defaults", "after"),
    [
        (b'{"a":1, "model":"m"}', ("a",), {}, b'{"model":"m"}'),
        (b'{"model":"m" , "a":1 }', ("a",), {}, b'{"model":"m" }'),
        (b'{"a":1,"b":2, "model":"m","c":3}', ("a", "b", "c"), {}, b'{"model":"m"}'),
        (b'{"model":"m"}', (), {"t": 0.5}, b'{"model":"m","t":0.5}'),
        (b'{"model":"m","t":1}', (), {"t": 0.5}, b'{"model":"m","t":1}'),
        (b'{"model":"m","t":1}', ("t",), {"t": 0.5}, b'{"model":"m","t":0.5}'),
        (b'{"t":null,"model":"m"}', (), {"t": 0.5}, b'{"t":null,"model":"m"}'),
    ],
)
def test_edits_byte_by_byte(data, strip, defaults, after):
    assert edits.apply_now(body_of(data), model(strip=strip, defaults=defaults)).data == after


@settings(deadline=None, max_examples=200)
@given(pairs=st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), JSON), max_size=6), odd=st.booleans())
def test_spans_are_exact_or_refused(pairs, odd):
    key = (lambda k: f'"\\u00{ord(k):02x}"') if odd else json.dumps
    text = ("{" + ",".join(f"{key(k)}:{json.dumps(v)}" for k, v in pairs) + "}").encode()
    keys = [k for k, _ in pairs]
    if len(set(keys)) < len(keys):
        with pytest.raises(Repeated):
            members(text)
        return
    assert [(span.key, json.loads(text[span.value : span.end])) for span in members(text)] == pairs


TOKENS = st.sampled_from(
    [
        *(b"{", b"}", b"[", b"]", b",", b":", b" ", b'"', b"\\", b"\xff", b"\x00", b"1", b"-", b"1e9", b"true", b"null"),
        *(
            b'"model"',
            b'"m"',
            b'"mod\\u0065l"',
            b'"stream"',
            b'"a"',
            b'"\\u0061"',
            b'"\xff"',
            b'"\\ud800"',
            b'"model":"m"',
            b'"a":1',
        ),
    ]
)


@settings(deadline=None, max_examples=500)
@given(inside=st.lists(TOKENS, max_size=12), first=st.booleans())
def test_whatever_the_bytes_they_are_edited_exactly_or_refused(inside, first):
    """Never a crash, never another model than the one that was read, never a change that was not asked for."""
    data = b'{"model":"m",' * first + b"".join(inside) + b"}" * first
    try:
        body = body_of(data)
        edited = edits.apply_now(body, model(strip=["a"], served_name="n"))
    except InvalidRequest:
        return
    document = json.loads(data.decode("utf-8", "replace"))
    after = json.loads(edited.data.decode("utf-8", "replace"))
    assert document.pop("model") == body.model
    assert after.pop("model") == "n"
    document.pop("a", None)
    assert after == document


def test_a_repeated_field_is_not_edited_but_refused():
    body = body_of(b'{"model":"m","t":1,"t":2}')
    with pytest.raises(InvalidRequest, match="more than once"):
        edits.apply_now(body, model(strip=["t"]))


async def test_compressed_bodies_are_unpacked_only_when_edited():
    packed = gzip.compress(b'{"model":"m","t":1}')
    head = [("Content-Encoding", "gzip"), ("A", "b")]
    body = body_of(packed, **{"Content-Encoding": "gzip"})
    assert (await edits.apply(body, model())).data == packed
    assert body.headers(head) == head
    assert (await edits.apply(body, model(served_name="n"))).data == b'{"model":"n","t":1}'
    assert body.headers(head) == [("A", "b")]
    assert body.size == 19


def test_extras_keep_their_parameters_but_get_the_engines_name():
    body = body_of(b'{"content":"x","model":"m"}', routes.find("POST", "/tokenize"))
    edited = edits.apply_now(body, model(strip=["content"], defaults={"t": 1}, served_name="n"))
    assert edited.data == b'{"content":"x","model":"n"}'


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\nRIFF\x00\r\n--\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    b'--b\r\ncontent-disposition: form-data; name="t"\r\nX-Odd: 1\r\n\r\n0\r\n--b--\r\n'
)


def test_forms_are_edited_part_by_part():
    spec = model(strip=["t"], defaults={"language": "de", "n": 2, "model_options": {"a": True}}, served_name="served/ü")
    body = edits.apply_now(body_of(FORM, AUDIO, **{"Content-Type": "multipart/form-data; boundary=b"}), spec)
    found, _ = multipart.parts(body.data, b"b")
    values = [(part.name, bytes(body.data[part.value : part.end])) for part in found]
    assert values == [
        ("file", b"RIFF\x00\r\n--"),
        ("model", "served/ü".encode()),
        ("language", b"de"),
        ("n", b"2"),
        ("model_options", b'{"a": true}'),
    ]
    assert body.data.startswith(FORM[: FORM.index(b"m\r\n--b")])
    assert body.size == len(body.data)


def test_queries_get_the_engines_name():
    assert edits.requeried("a=1&model=m&b=%20", model(served_name="o/n")) == "a=1&model=o%2Fn&b=%20"
    assert edits.requeried("a=1&model=m", model()) == "a=1&model=m"
    assert edits.requeried("", model(served_name="x")) == ""


@pytest.mark.parametrize("change", [{"strip": ["model"]}, {"defaults": {"stream": True}}, {"strip": ["stream"]}])
def test_what_requests_are_routed_by_cannot_be_edited(change):
    with pytest.raises(ValueError, match="cannot change"):
        model(**change)
