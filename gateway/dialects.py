"""How each API speaks of errors and of waiting: shapes of errors, last frames of broken streams, signs of life.

Owns wording on the wire, per API; knows nothing of when it is due. A frame is whole: it ends with the blank line.

What SDKs make of it decided the shapes. A comment is invisible to all of them; an event without ``data`` crashes some. A
stream that just ends counts as success, so a failure is a frame that they raise for, and then a connection that breaks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from gateway import errors
from gateway.errors import GatewayError, Unavailable
from gateway.exchange import Reply
from policies.holding import KeepAlive

_SHOWN = 2000
"""Characters that are repeated of an answer that has no known shape."""


class Dialect:
    """OpenAI's, without a chunk of its own to keep a stream alive with."""

    name = "openai"
    id_headers: tuple[str, ...] = ()
    """Headers, besides ``x-request-id``, in which this API's clients look for the request's id."""

    def render(self, error: GatewayError, id: str) -> Reply:
        """The whole answer, for a request that has had none yet; ``id`` is the request's."""
        return errors.render(error)

    def late(self, error: GatewayError, id: str) -> bytes:
        """The last frame of a stream that has begun and cannot be completed."""
        return self._frame(
            {"message": str(error), "type": error.type, "param": error.param, "code": error.code}, error.status, id
        )

    def relayed(self, status: int, body: bytes, id: str) -> bytes:
        """The last frame of a stream that had begun when the replica answered with an error of its own."""
        return self._frame(_fault(status, body), status, id)

    def sign(self, mode: KeepAlive, *, position: int, eta_s: float | None, model: str) -> bytes:
        """What shows a held stream's client that it still waits; empty when this dialect has nothing for ``mode``."""
        if mode == "comment":
            eta = "" if eta_s is None else f" eta={math.ceil(eta_s)}"
            return f": queued position={position}{eta}\n\n".encode()
        return self._chunk(model) if mode == "chunk" else b""

    def dispatched(self, mode: KeepAlive, *, start: str, incarnation: str) -> bytes:
        """What a held stream's client is told when its replica is there, for its head was sent before."""
        return f": dispatched start={start} incarnation={incarnation}\n\n".encode() if mode == "comment" else b""

    def _frame(self, fault: Mapping[str, object], status: int, id: str) -> bytes:
        return _event({"error": fault})

    def _chunk(self, model: str) -> bytes:
        return b""


class _Chat(Dialect):
    name = "chat"

    def _chunk(self, model: str) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return _event({"id": "", "object": "chat.completion.chunk", "created": 0, "model": model, "choices": [choice]})


class _Completions(Dialect):
    name = "completions"

    def _chunk(self, model: str) -> bytes:
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        return _event({"id": "", "object": "text_completion", "created": 0, "model": model, "choices": [choice]})


class _Responses(Dialect):
    """The documented ``error`` event is only yielded by SDKs; with a nested ``error`` they raise."""

    name = "responses"

    def _frame(self, fault: Mapping[str, object], status: int, id: str) -> bytes:
        flat = {
            "type": "error",
            "code": fault["code"],
            "message": fault["message"],
            "param": fault["param"],
            "sequence_number": 0,
        }
        return _event({**flat, "error": fault}, "error")

    def _chunk(self, model: str) -> bytes:
        return _event({"type": "keepalive", "sequence_number": 0}, "keepalive")


class _Anthropic(Dialect):
    """Overload is 529, and ``ping`` is a documented event."""

    name = "anthropic"
    id_headers: tuple[str, ...] = ("request-id",)
    _TYPES: Mapping[int, str] = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        504: "timeout_error",
        529: "overloaded_error",
    }

    def render(self, error: GatewayError, id: str) -> Reply:
        plain, status = errors.render(error), self._status(error)
        document = {"type": "error", "error": {"type": self._type(status), "message": str(error)}, "request_id": id}
        return Reply(status, json.dumps(document, ensure_ascii=False).encode(), {**plain.headers, "request-id": id})

    def late(self, error: GatewayError, id: str) -> bytes:
        return self._frame({"message": str(error)}, self._status(error), id)

    def _frame(self, fault: Mapping[str, object], status: int, id: str) -> bytes:
        error = {"type": self._type(status), "message": fault["message"]}
        return _event({"type": "error", "error": error, "request_id": id}, "error")

    def _chunk(self, model: str) -> bytes:
        return _event({"type": "ping"}, "ping")

    def _status(self, error: GatewayError) -> int:
        return 529 if isinstance(error, Unavailable) else error.status

    def _type(self, status: int) -> str:
        return self._TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


OPENAI, CHAT, COMPLETIONS = Dialect(), _Chat(), _Completions()
RESPONSES, ANTHROPIC = _Responses(), _Anthropic()
_BY_PATH: Mapping[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
}


def of(path: str) -> Dialect:
    """The dialect spoken on a path, also on one that leads nowhere: OpenAI's, unless it is another API's."""
    path = path.rstrip("/")
    if path.startswith("/v1/messages/"):
        return ANTHROPIC
    return _BY_PATH.get(path, OPENAI)


def _event(document: object, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document)}\n\n".encode()


def _fault(status: int, body: bytes) -> dict[str, object]:
    """What an error answer of a replica says, whatever its shape: OpenAI's, a flat one, or no JSON at all."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    inner = document.get("error", document) if isinstance(document, dict) else document
    told = inner if isinstance(inner, dict) else {"message": inner} if isinstance(inner, str) else {}
    shown = body[:_SHOWN].decode(errors="replace") or f"The replica answered {status} without a reason."
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "message": _text(told.get("message"), shown),
        "type": _text(told.get("type"), kind),
        "param": told.get("param"),
        "code": told.get("code", status),
    }


def _text(value: object, otherwise: str) -> str:
    return value if isinstance(value, str) and value else otherwise
