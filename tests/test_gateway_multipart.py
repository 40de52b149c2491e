"""Forms: every part found where it stands, and whatever two parsers could read differently refused."""

from __future__ import annotations

import email.parser
import email.policy

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import multipart
from gateway.errors import InvalidRequest


def form(*fields: tuple[str, object]) -> tuple[bytes, bytes]:
    """What httpx makes of fields; a tuple value is a file."""
    files = [(name, value if isinstance(value, tuple) else (None, value)) for name, value in fields]
    request = httpx.Request("POST", "http://g", files=files)
    return request.read(), multipart.boundary(request.headers["content-type"])


def read(body: bytes, boundary: bytes) -> list[tuple[str, bytes, bool]]:
    found, _ = multipart.parts(body, boundary)
    return [(part.name, bytes(body[part.value : part.end]), part.file) for part in found]


TEXT = st.text(st.characters(exclude_characters='"\\', exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@settings(deadline=None, max_examples=150)
@given(fields=st.lists(st.tuples(TEXT, st.binary(max_size=60)), min_size=1, max_size=5), file=st.binary(max_size=200))
def test_whatever_a_client_library_writes_is_read(fields, file):
    body, boundary = form(*fields, ("file", ("a.wav", file, "audio/wav")))
    assert read(body, boundary) == [*((name, value, False) for name, value in fields), ("file", file, True)]


@settings(deadline=None, max_examples=300)
@given(
    body=st.lists(
        st.sampled_from([b"--b", b"\r\n", b"--", b"x", b'Content-Disposition: form-data; name="model"', b"\n", b"m", b": "])
    )
)
def test_any_bytes_are_refused_or_read_as_the_standard_library_reads_them(body):
    data = b"".join(body)
    try:
        ours = read(data, b"b")
    except InvalidRequest:
        return
    whole = b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + data
    theirs = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(whole)
    assert [part.get_param("name", header="content-disposition") for part in theirs.get_payload()] == [
        name for name, _, _ in ours
    ]


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=utf-8; Boundary="a b:c"', b"a b:c"),
        ("multipart/form-data;boundary=----WebKitFormBoundaryx", b"----WebKitFormBoundaryx"),
    ],
)
def test_boundaries(content_type, boundary):
    assert multipart.boundary(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=a; boundary=b",
        "multipart/mixed; boundary=a",
        f"multipart/form-data; boundary={'x' * 71}",
        'multipart/form-data; boundary="a\\"b"',
        "multipart/form-data; boundary=é",
        "multipart/form-data; boundary=a b",
    ],
)
def test_unusable_boundaries_are_refused(content_type):
    with pytest.raises(InvalidRequest) as refused:
        multipart.boundary(content_type)
    assert refused.value.code == "invalid_multipart"


NAMED = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b\r\n",
        NAMED,
        NAMED + b"--b",
        NAMED + b"--bx--\r\n",
        NAMED + b"--b--\r\nmore",
        b"preamble\r\n" + NAMED + b"--b--\r\n",
        NAMED.replace(b"\r\n\r\nm", b"\r\n\r\n--b--"),
        NAMED.replace(b"\r\n", b"\n") + b"--b--\n",
        b"--b \r\n" + NAMED[5:] + b"--b--\r\n",
        NAMED.replace(b'name="model"', b'name="mod\\el"') + b"--b--\r\n",
        NAMED.replace(b'name="model"', b'name="x"; name="model"') + b"--b--\r\n",
        NAMED.replace(b'name="model"', b"name*=utf-8''model") + b"--b--\r\n",
        NAMED.replace(b'name="model"', b'name="model') + b"--b--\r\n",
        NAMED.replace(b"form-data;", b"attachment;") + b"--b--\r\n",
        NAMED.replace(b"\r\n\r\nm", b"\r\nContent-Transfer-Encoding: base64\r\n\r\nbQ==") + b"--b--\r\n",
        NAMED.replace(b"\r\n\r\nm", b"\r\n folded: x\r\n\r\nm") + b"--b--\r\n",
        NAMED.replace(b"\r\n\r\nm", b'\r\nContent-Disposition: form-data; name="x"\r\n\r\nm') + b"--b--\r\n",
        b"--b\r\n" + b"X: " + b"y" * (17 << 10) + b"\r\n" + NAMED[5:] + b"--b--\r\n",
        NAMED.replace(b"model", b"x") * 1001 + b"--b--\r\n",
    ],
)
def test_what_parsers_read_differently_is_refused(body):
    with pytest.raises(InvalidRequest) as refused:
        multipart.parts(body, b"b")
    assert refused.value.code == "invalid_multipart"


@pytest.mark.parametrize(
    "body",
    [
        NAMED + NAMED + b"--b--\r\n",
        NAMED.replace(b'"model"', b'"model"; filename="f"') + b"--b--\r\n",
        NAMED.replace(b"\r\n\r\nm", b"\r\n\r\n\xff") + b"--b--\r\n",
        NAMED.replace(b"\r\n\r\nm", b"\r\n\r\n" + b"m" * (17 << 10)) + b"--b--\r\n",
    ],
)
def test_a_model_that_is_no_plain_field_is_refused(body):
    found, _ = multipart.parts(body, b"b")
    with pytest.raises(InvalidRequest):
        multipart.field(body, found, "model")


def test_a_boundary_across_two_windows_is_found(monkeypatch):
    monkeypatch.setattr(multipart, "_WINDOW", 7)
    for size in range(30):
        body = NAMED.replace(b"\r\n\r\nm", b"\r\n\r\n" + b"\r\n-" * size) + b"--b--\r\n"
        assert read(body, b"b") == [("model", b"\r\n-" * size, False)]


def test_a_field_written_by_us_is_read_again():
    body = NAMED + multipart.written("n", "ü\n", b"b") + b"--b--"
    assert read(body, b"b")[1] == ("n", "ü\n".encode(), False)
