"""Reading bodies: bounds of size, memory, time and ratio; what is understood; nothing is kept that was refused."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import tempfile
import threading
import zlib

import pytest
from conftest import eventually
from fake_replica import configuration
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import edits, errors, intake, routes, spool
from gateway.body import Body, Splice
from gateway.current import Current
from gateway.errors import GatewayError

CHAT = routes.find("POST", "/v1/chat/completions")
AUDIO = routes.find("POST", "/v1/audio/transcriptions")
BODY = b'{"model":"m","stream":true}'


class Feed:
    """A body in pieces; an exception is raised, an event waited for."""

    def __init__(self, *pieces: object) -> None:
        self._pieces = list(pieces)

    async def readany(self) -> bytes:
        piece = self._pieces.pop(0) if self._pieces else b""
        if isinstance(piece, BaseException):
            raise piece
        if isinstance(piece, asyncio.Event):
            await piece.wait()
            return b""
        return piece


def door(**gateway: object) -> intake.Intake:
    return intake.Intake(Current(configuration(**{f"gateway__{key}": value for key, value in gateway.items()})))


async def collected(body: Body) -> bytes:
    return b"".join([piece async for piece in body.pieces()])


async def refused(door_: intake.Intake, feed: Feed, found=CHAT, **headers: str) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await door_.read(found, {name.replace("_", "-"): value for name, value in headers.items()}, feed)
    assert door_.buffered == 0
    return caught.value


async def test_small_bodies_stay_in_memory_as_they_came():
    entrance = door()
    with await entrance.read(CHAT, {}, Feed(BODY[:9], BODY[9:])) as body:
        assert (body.data, body.size, body.model, body.stream) == (BODY, len(BODY), "m", True)
        assert await collected(body) == BODY
        assert entrance.buffered == len(BODY)
    assert entrance.buffered == 0
    body.close()
    assert entrance.buffered == 0


@pytest.mark.parametrize("bounds", [{"spool_bytes": 1000}, {"hold": {"max_bytes": 1000}}])
async def test_case_54_large_bodies_go_to_disk_and_can_be_read_again_and_edited(bounds):
    entrance = door(**bounds)
    data = json.dumps({"image": "x" * (3 << 20), "model": "alias/of-m", "n": 1}).encode()
    with await entrance.read(CHAT, {}, Feed(*(data[at : at + 65536] for at in range(0, len(data), 65536)))) as body:
        assert (body.data, body.size, body.model, body.stream) == (None, len(data), "alias/of-m", False)
        assert entrance.buffered == 0
        assert [await collected(body) for _ in range(2)] == [data, data]
        body.change((Splice(1, 1, b'"a":1,'), Splice(len(data) - 8, len(data) - 1)))
        assert await collected(body) == data[:1] + b'"a":1,' + data[1:-8] + data[-1:]
        assert body.size == len(await collected(body))
    with pytest.raises(errors.SpoolFailed):
        await collected(body)


async def test_a_body_that_is_closed_while_a_thread_reads_it_ends_cleanly():
    kept = spool.Spool()
    await kept.append(b"x" * (1 << 20))
    entered, leave = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(data) -> bytes:
        loop.call_soon_threadsafe(entered.set)
        leave.wait(30)
        return bytes(data[:1])

    looking = asyncio.create_task(kept.look(slow))
    await entered.wait()
    kept.close()
    assert not kept._file.closed
    leave.set()
    assert await looking == b"x"
    assert kept._file.closed


async def test_case_54_a_full_disk_is_503_and_nothing_stays(monkeypatch):
    def full(*_args: object, **_more: object):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    error = await refused(door(spool_bytes=10), Feed(BODY))
    assert (error.status, error.code) == (503, "spool_failed")
    assert "No space left" in str(error)


async def test_case_52_twenty_megabytes_pass_and_too_much_is_413():
    image = json.dumps({"model": "m", "image": "A" * (20 << 20)}).encode()
    with await door().read(CHAT, {}, Feed(image)) as body:
        assert body.size == len(image)
    error = await refused(door(max_body_bytes=1000), Feed(b"x" * 600, b"x" * 600))
    assert (error.status, error.code) == (413, "request_too_large")
    unread = Feed(AssertionError("was read"))
    assert (await refused(door(max_body_bytes=1000), unread, Content_Length="1001")).status == 413
    assert (await refused(door(), unread, Content_Length="9" * 5000)).status == 413


async def test_slow_bodies_are_408_whether_they_stop_or_drip(monkeypatch):
    monkeypatch.setattr(intake, "PAUSE_S", 0.05)
    assert (await refused(door(), Feed(b"{", asyncio.Event()))).code == "request_timeout"

    class Drip:
        async def readany(self) -> bytes:
            await asyncio.sleep(0.01)
            return b" "

    monkeypatch.setattr(intake, "GRACE_S", 0.1)
    with pytest.raises(errors.SlowRequest):
        await asyncio.wait_for(door().read(CHAT, {}, Drip()), 30)


async def test_a_client_that_leaves_in_mid_body_leaves_nothing():
    entrance, gate = door(), asyncio.Event()
    reading = asyncio.create_task(entrance.read(CHAT, {}, Feed(b"{", gate)))
    await eventually(lambda: entrance.buffered)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    assert entrance.buffered == 0


async def test_case_51_who_expects_is_told_once_just_before_the_first_read():
    told: list[str] = []

    async def before() -> None:
        told.append("100")

    with await door().read(CHAT, {"Expect": "100-Continue"}, Feed(BODY), before):
        assert told == ["100"]
    with await door().read(CHAT, {}, Feed(BODY), before):
        assert told == ["100"]
    with pytest.raises(errors.RequestTooLarge):
        await door(max_body_bytes=1).read(CHAT, {"Expect": "100-continue", "Content-Length": "9"}, Feed(BODY), before)
    assert told == ["100"]
    error = await refused(door(), Feed(BODY), Expect="foo")
    assert (error.status, error.code) == (417, "expectation_failed")


async def test_case_55_gzip_is_unpacked_only_to_be_understood():
    packed = gzip.compress(BODY)
    with await door().read(CHAT, {"Content-Encoding": "gzip"}, Feed(packed)) as body:
        assert (body.data, body.model, body.stream) == (packed, "m", True)


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (gzip.compress(b"[" + b" " * (200 << 20)), 413, "request_too_large"),
        (gzip.compress(b" " * (2 << 20)), 413, "request_too_large"),
        (gzip.compress(BODY)[:-4], 400, "invalid_encoding"),
        (gzip.compress(BODY) + gzip.compress(BODY), 400, "invalid_encoding"),
        (gzip.compress(BODY) + b"x", 400, "invalid_encoding"),
        (zlib.compress(BODY), 400, "invalid_encoding"),
        (b"", 400, "invalid_encoding"),
        (gzip.compress(b"{"), 400, "invalid_json"),
    ],
    ids=["bomb", "ratio", "cut", "two members", "tail", "zlib", "empty", "not json"],
)
async def test_case_55_gzip_bombs_and_broken_gzip(data, status, code):
    error = await refused(door(), Feed(data), Content_Encoding="gzip")
    assert (error.status, error.code) == (status, code)


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "identity, gzip", "zstd", "x"])
async def test_other_encodings_are_refused_before_a_byte_is_read(encoding):
    error = await refused(door(), Feed(AssertionError("was read")), Content_Encoding=encoding)
    assert (error.status, error.code) == (415, "unsupported_encoding")


async def test_headers_that_must_be_single_are():
    with pytest.raises(errors.InvalidRequest, match="more than one content-type"):
        intake.check(CHAT, _Twice(), configuration())


class _Twice(dict[str, str]):
    def items(self):
        return [("Content-Type", "application/json"), ("content-type", "multipart/form-data; boundary=b")]


def form(*parts: tuple[str, bytes], boundary: bytes = b"b") -> bytes:
    made = (b"--%s\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (boundary, n.encode(), v) for n, v in parts)
    return b"".join(made) + b"--" + boundary + b"--\r\n"


@pytest.mark.parametrize("spooled", [False, True])
async def test_case_53_the_model_of_a_form_may_stand_behind_the_file(spooled):
    data = form(('name="file"; filename="a.wav"', b"\x00\r\n--" * 400_000), ('name="stream"', b"True"), ('name="model"', b"w/1"))
    head = {"Content-Type": "multipart/form-data; boundary=b"}
    with await door(spool_bytes=1 if spooled else 1 << 30).read(AUDIO, head, Feed(data[:5], data[5:])) as body:
        assert (body.model, body.stream, body.size) == ("w/1", True, len(data))
        assert await collected(body) == data


async def test_forms_only_where_a_form_is_taken():
    error = await refused(door(), Feed(AssertionError("was read")), Content_Type="multipart/form-data; boundary=b")
    assert (error.status, error.code) == (415, "unsupported_media_type")
    error = await refused(door(), Feed(form(('name="file"', b""))), AUDIO, Content_Type="multipart/form-data; boundary=b")
    assert (error.status, error.code) == (400, "missing_model")


@pytest.mark.parametrize(
    ("method", "target", "header", "data", "model"),
    [
        ("POST", "/tokenize", None, b'{"content":"x","model":"m"}', "m"),
        ("POST", "/tokenize", "m", b'{"content":"x"}', "m"),
        ("POST", "/tokenize?model=o%2Fn", None, b"{}", "o/n"),
        ("POST", "/tokenize?model=m", "m", b'{"model":"m"}', "m"),
        ("GET", "/v1/responses/r?model=m", None, b"", "m"),
        ("GET", "/v1/realtime?model=m&x=1", None, b"", "m"),
        ("POST", "/v1/responses/r/cancel", "模型", b"", "模型"),
        ("POST", "/tokenize", None, b"{}", None),
        ("POST", "/tokenize", "a", b'{"model":"b"}', None),
        ("POST", "/tokenize?model=a", "b", b"{}", None),
        ("POST", "/tokenize?model=a&model=b", None, b"{}", None),
        ("GET", "/v1/responses/r", None, b"", None),
        ("POST", "/v1/chat/completions?model=m", "m", b"{}", None),
    ],
)
async def test_where_a_model_may_be_named(method, target, header, data, model):
    headers = {} if header is None else {"x-rewake-model": header}
    found = routes.find(method, target)
    if model is None:
        with pytest.raises(errors.InvalidRequest):
            await door().read(found, headers, Feed(data))
        return
    with await door().read(found, headers, Feed(data)) as body:
        assert body.model == model
        assert body.named is (b"model" in data)


@settings(deadline=None, max_examples=200)
@given(
    data=st.binary(max_size=40)
    | st.sampled_from([BODY, b'{"model":"m","model":"n"}', b'{"model":7}', gzip.compress(BODY), gzip.compress(BODY)[:-1]])
    | st.dictionaries(st.sampled_from(["model", "stream", "x"]), st.text() | st.booleans() | st.none()).map(
        lambda document: json.dumps(document).encode()
    ),
    headers=st.dictionaries(
        st.sampled_from(["content-encoding", "content-type", "expect", "x-rewake-model"]),
        st.sampled_from(["gzip", "application/json", "multipart/form-data; boundary=b", "100-continue", "m", ""]),
    ),
    target=st.sampled_from(["/v1/chat/completions", "/tokenize", "/v1/audio/transcriptions", "/tokenize?model=m"]),
    cut=st.integers(0, 40),
    spooled=st.booleans(),
)
def test_a_body_is_understood_alike_at_once_in_pieces_and_on_disk(data, headers, target, cut, spooled):
    """What serves the plain case and what serves every other must never come to different models."""
    found, config = routes.find("POST", target), configuration(gateway__spool_bytes=0 if spooled else 1 << 20)

    def outcome(body: Body) -> tuple[object, ...]:
        with body:
            return body.model, body.named, body.stream, body.size

    async def read() -> tuple[object, ...]:
        pieces = [piece for piece in (data[:cut], data[cut:]) if piece]
        return outcome(await intake.Intake(Current(config)).read(found, headers, Feed(*pieces)))

    try:
        at_once: tuple[object, ...] = outcome(intake.whole(found, headers, data, config))
    except GatewayError as error:
        at_once = error.status, error.code
    try:
        in_pieces = asyncio.run(read())
    except GatewayError as error:
        in_pieces = error.status, error.code
    assert in_pieces == at_once


def crowd(count: int, more: bytes = b"") -> bytes:
    return b'{"model":"m",' + b",".join(b'"k%d" :1' % n for n in range(count)) + more + b"}"


async def test_a_crowd_of_fields_costs_no_memory():
    """A large body that must be looked at closely is refused if it consists of keys; one that need not be passes."""
    error = await refused(door(), Feed(crowd(300_000, b',"\\u0061":1')))
    assert (error.status, error.code) == (400, "invalid_json")
    with await door().read(CHAT, {}, Feed(crowd(300_000))) as body, pytest.raises(errors.InvalidRequest, match="too many fields"):
        edits.apply_now(body, configuration(model__strip=["k1"]).models["m"])
    with await door().read(CHAT, {}, Feed(crowd(100_000, b',"\\u0061":1'))) as body:
        assert edits.apply_now(body, configuration(model__strip=["k1"]).models["m"]).size == body.size


async def test_keys_that_are_no_text_are_400():
    error = await refused(door(), Feed(b'{"model":"m","\xff":1,"\\u0061":2}'))
    assert (error.status, error.code) == (400, "invalid_json")


async def test_unframed_bodies_are_400():
    assert (await refused(door(), Feed(b"{", intake.Unframed("chunk size")))).code == "invalid_http"


@pytest.mark.parametrize("name", ["模型/名", "a\u202eb", "🤖", "x" * 5000, "\u0000", "ünï"])
@pytest.mark.parametrize("ascii", [True, False])
async def test_unicode_model_names_are_read_as_they_are(name, ascii):
    data = json.dumps({"model": name}, ensure_ascii=ascii).encode()
    with await door().read(CHAT, {}, Feed(data)) as body:
        assert body.model == name


@pytest.mark.parametrize(
    "data", [b'{"model":"\\ud800"}', b'{"model":"\xff"}', b"\xff\xfe{\x00", b"\xef\xbb\xbf{}", b"", b"[]", b"{}"]
)
async def test_odd_json_is_400(data):
    assert (await refused(door(), Feed(data))).status == 400
