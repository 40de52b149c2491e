"""A model's edits of a request: the engine's own name for it, parameters put in, parameters taken out.

Byte-safe: what is not edited stays as the client wrote it, byte for byte, in JSON and in forms. Decides by the model's
settings alone; knows nothing of connections.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from urllib.parse import quote

import msgspec
from pydantic import JsonValue

from gateway import multipart
from gateway.body import Body, Splice, spliced
from gateway.errors import InvalidRequest
from gateway.intake import unpacked
from gateway.members import Buffer, Crowded, Repeated, members
from policies.config import Model

_PACK_RATIO_IS_KNOWN = 1 << 62
"""A body was unpacked once already, within bounds, when its model was read."""


def wanted(body: Body, model: Model) -> bool:
    """The model's settings ask for an edit of this body."""
    renames = body.named and model.served_name is not None and model.served_name != body.model
    return renames or (_has_parameters(body) and bool(model.defaults or model.strip))


async def apply(body: Body, model: Model) -> Body:
    """Make the edits, in a thread if the body is large; the same body is returned.

    Raises:
        InvalidRequest: a field is there twice, so that nobody can say which one counts.
    """
    if wanted(body, model):
        made: list[_Edit] = []
        await body.look(lambda data: made.append(_edit(body, data, model)))
        _put(body, made[0])
    return body


def apply_now(body: Body, model: Model) -> Body:
    """The same for a small body in memory, without a task switch."""
    if wanted(body, model):
        assert body.data is not None
        _put(body, _edit(body, body.data, model))
    return body


def requeried(query: str, model: Model) -> str:
    """A query whose ``model`` is the engine's own name; all else stays."""
    if model.served_name is None:
        return query
    name = f"model={quote(model.served_name, safe='')}"
    return "&".join(name if part.partition("=")[0] == "model" else part for part in query.split("&")) if query else query


_Edit = tuple[Splice, ...] | bytes
"""Splices, or the whole content of a body that was compressed."""


def _put(body: Body, edit: _Edit) -> None:
    if isinstance(edit, bytes):
        body.replace(edit)
    else:
        body.change(edit)


def _edit(body: Body, data: Buffer, model: Model) -> _Edit:
    if body.form.gzip:
        content = unpacked(data, _PACK_RATIO_IS_KNOWN)
        return spliced(content, _splices(body, content, model))
    return _splices(body, data, model)


def _splices(body: Body, data: Buffer, model: Model) -> tuple[Splice, ...]:
    name = model.served_name if body.named and model.served_name != body.model else None
    strip, defaults = (frozenset(model.strip), dict(model.defaults)) if _has_parameters(body) else (frozenset[str](), {})
    if body.form.boundary is not None:
        return tuple(_in_form(data, body.form.boundary, name, strip, defaults))
    try:
        return tuple(_in_json(data, name, strip, defaults))
    except Repeated:
        raise InvalidRequest("The request body gives a field more than once.", "invalid_json") from None
    except Crowded:
        raise InvalidRequest("The request body has too many fields to be edited.", "invalid_json") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.", "invalid_json") from None


def _has_parameters(body: Body) -> bool:
    """Engines' extras have parameters of their own, which a model's settings do not mean."""
    return body.found.route.model == "body"


def _in_json(data: Buffer, name: str | None, strip: frozenset[str], defaults: dict[str, JsonValue]) -> Iterator[Splice]:
    found = members(data)
    kept = [member.key not in strip for member in found]
    for n, member in enumerate(found):
        if kept[n]:
            if member.key == "model" and name is not None:
                yield Splice(member.value, member.end, json.dumps(name).encode())
        elif any(kept[:n]):
            yield Splice(found[n - 1].end, member.end)
        else:
            yield Splice(member.start, found[n + 1].start if n + 1 < len(found) else member.end)
    there = {member.key for member, keep in zip(found, kept, strict=True) if keep}
    added = [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in defaults.items() if key not in there]
    if added:
        at = found[-1].end if found else data.find(b"{") + 1
        yield Splice(at, at, ("," * any(kept) + ",".join(added)).encode())


def _in_form(
    data: Buffer, boundary: bytes, name: str | None, strip: frozenset[str], defaults: dict[str, JsonValue]
) -> Iterator[Splice]:
    found, last = multipart.parts(data, boundary)
    starts: Sequence[int] = [*(part.start for part in found[1:]), last]
    there = set[str]()
    for part, after in zip(found, starts, strict=True):
        if part.name in strip:
            yield Splice(part.start, after)
            continue
        there.add(part.name)
        if part.name == "model" and name is not None:
            yield Splice(part.value, part.end, name.encode())
    added = [multipart.written(key, _text(value), boundary) for key, value in defaults.items() if key not in there]
    if added:
        yield Splice(last, last, b"".join(added))


def _text(value: JsonValue) -> str:
    """A parameter as a form spells it."""
    return value if isinstance(value, str) else json.dumps(value)
