"""Every error that a client can get from the gateway itself: one class, one status, one code.

Rendered in one place, shaped as OpenAI's errors are, marked as ours by ``x-rewake-error``. Knows nothing of when an
error is due: that is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gateway.exchange import Reply, reply
from policies.admission import Code
from policies.eta import retry_after_s as whole_seconds


class GatewayError(Exception):
    """500: a bug; the gateway's log has it under the request's id.

    Base of the tree. The message is for the person behind the client.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    param: ClassVar[str | None] = None
    should_retry: ClassVar[bool | None] = None
    """``x-should-retry``; None leaves it to the client's own rules."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.headers = headers or {}


class InvalidRequest(GatewayError):
    """400: the request itself is at fault; ``code`` says how."""

    status, type, should_retry = 400, "invalid_request_error", False

    def __init__(self, message: str, code: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, headers=headers)
        self.code = code


FAULTS: Mapping[str, str] = {
    "invalid_json": "the body is no JSON object, or gives a field more than once",
    "missing_model": "no model is named",
    "invalid_deadline": "`x-rewake-deadline-s` is no positive number of seconds",
    "invalid_http": "what arrived is not HTTP/1.1, or not framed properly",
    "invalid_scheme": "plain HTTP was spoken to a port of HTTPS",
    "invalid_request": "the request contradicts itself, or a body of the admin API does not fit",
    "invalid_multipart": "the body is no proper form",
    "invalid_encoding": "the body is no whole, valid gzip",
    "invalid_config": "reload: the configuration file has faults, all of which are named; the old one stays in force",
}
"""Codes of :class:`InvalidRequest`, and what each means."""


class MissingModel(InvalidRequest):
    """400: no usable ``model`` in the body."""

    param = "model"


class Unauthorized(GatewayError):
    """401: no API key or an unknown one; the admin API without its token."""

    status, type, code, should_retry = 401, "authentication_error", "invalid_api_key", False


class PermissionDenied(GatewayError):
    """403: this tenant may not use the model."""

    status, type, code, param, should_retry = 403, "permission_error", "model_not_allowed", "model", False


class NotFound(GatewayError):
    """404: no such path or thing."""

    status, type, code, should_retry = 404, "invalid_request_error", "not_found", False


class ModelNotFound(NotFound):
    """404: the configuration has no such model."""

    code, param = "model_not_found", "model"


class MethodNotAllowed(GatewayError):
    """405: the path exists, the method does not."""

    status, type, code, should_retry = 405, "invalid_request_error", "method_not_allowed", False


class SlowRequest(GatewayError):
    """408: the client stopped sending its body."""

    status, type, code, should_retry = 408, "invalid_request_error", "request_timeout", False


class Busy(GatewayError):
    """409: scale-down with ``if_idle`` of a model in use; a group that is full; a worker that cannot be replaced."""

    status, type, code, should_retry = 409, "invalid_request_error", "busy", False


class RequestTooLarge(GatewayError):
    """413: the body is over ``gateway.max_body_bytes``, or unpacks to more, or to more than 100 times its size."""

    status, type, code, should_retry = 413, "invalid_request_error", "request_too_large", False


class UnsupportedEncoding(GatewayError):
    """415: the body is compressed otherwise than with gzip."""

    status, type, code, should_retry = 415, "invalid_request_error", "unsupported_encoding", False


class UnsupportedMediaType(GatewayError):
    """415: a form, or another type, where this path takes JSON alone."""

    status, type, code, should_retry = 415, "invalid_request_error", "unsupported_media_type", False


class ExpectationFailed(GatewayError):
    """417: ``Expect`` asks for something else than ``100-continue``."""

    status, type, code, should_retry = 417, "invalid_request_error", "expectation_failed", False


class UpgradeRequired(GatewayError):
    """426: the path speaks WebSocket, and the request does not."""

    status, type, code, should_retry = 426, "invalid_request_error", "upgrade_required", False


class HeadersTooLarge(GatewayError):
    """431: the target or a header is over 32 KiB, or there are too many headers."""

    status, type, code, should_retry = 431, "invalid_request_error", "headers_too_large", False


class RateLimited(GatewayError):
    """429: the tenant's requests, tokens, places or concurrency are used up; ``Retry-After`` says when there is more."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class CapacityExceeded(GatewayError):
    """429: replicas run, and no slot became free before the deadline. ``Retry-After: 1``."""

    status, type, code = 429, "rate_limit_error", "capacity_exceeded"


class Unavailable(GatewayError):
    """503 with a promise: the client should come back after ``Retry-After``."""

    status, should_retry = 503, True


class ModelLoading(Unavailable):
    """503: nothing runs, and the model does not hold requests. With ``Retry-After``."""

    code = "model_loading"


class QueueFull(Unavailable):
    """503: the waiting room has no place left. With ``Retry-After``."""

    code = "queue_full"


class QueueBytesFull(Unavailable):
    """503: the waiting room has no room left for this body. With ``Retry-After``."""

    code = "queue_bytes_full"


class ColdStartTimeout(Unavailable):
    """503: held until its deadline, and still no replica. With ``Retry-After``."""

    code = "cold_start_timeout"


class ShuttingDown(Unavailable):
    """503: this gateway process is stopping; another one may serve. ``Retry-After: 1``."""

    code = "shutting_down"


def broke_off(reason: str) -> UpstreamError:
    """An answer's body has no end, since its connection ended."""
    return UpstreamError(f"The replica's answer broke off: {reason}.")


def stood_still(idle_s: float) -> UpstreamTimeout:
    """An answer's body has no end, since no more of it came."""
    return UpstreamTimeout(f"The replica sent nothing more for {idle_s:g} s.")


def took_too_long(total_s: float) -> UpstreamTimeout:
    """An answer's body has no end, since it may not last longer."""
    return UpstreamTimeout(f"The answer was not complete within {total_s:g} s.")


def unfinished() -> ShuttingDown:
    """The drain was over before the answer was."""
    return ShuttingDown("This gateway stopped before the answer was complete.", retry_after_s=1.0)


class StoreUnavailable(Unavailable):
    """503: admin API and ``/ready`` only: the store does not answer; serving goes on. ``Retry-After: 1``."""

    code = "store_unavailable"


class SpoolFailed(Unavailable):
    """503: the disk that large request bodies are kept on is full or broken. ``Retry-After: 5``."""

    code = "spool_failed"


class NotRunning(GatewayError):
    """503: a path that starts nothing, and no replica runs."""

    status, code, should_retry = 503, "model_not_running", False


class RestoreFailed(GatewayError):
    """503: no replica can come for now, and coming back will not change it; the message says why."""

    status, code, should_retry = 503, "restore_failed", False


class UpstreamError(GatewayError):
    """502: the replica's connection failed after the request was sent, or its answer broke off."""

    status, code = 502, "upstream_error"


class UpstreamTimeout(GatewayError):
    """504: the replica was silent for too long; not to be repeated, for it may still be working on it."""

    status, code, should_retry = 504, "upstream_timeout", False


REFUSALS: Mapping[Code, tuple[type[GatewayError], str]] = {
    "model_loading": (ModelLoading, "Model {model!r} is being started and does not hold requests; retry after the given time."),
    "queue_full": (QueueFull, "Too many requests already wait for model {model!r}."),
    "queue_bytes_full": (QueueBytesFull, "The requests that wait for model {model!r} leave no room for this body."),
    "capacity_exceeded": (CapacityExceeded, "All replicas of model {model!r} are busy and none became free in time."),
    "cold_start_timeout": (ColdStartTimeout, "Model {model!r} was not ready before this request's deadline."),
    "restore_failed": (RestoreFailed, "Model {model!r} cannot be started: {detail}"),
    "rate_limit_exceeded": (RateLimited, "This key has used up what it may have at once of model {model!r}; retry later."),
    "model_not_found": (ModelNotFound, "The model {model!r} is offered no more."),
    "shutting_down": (ShuttingDown, "This gateway is shutting down; retry to reach another one."),
}
"""What a refusal by :func:`policies.admission.decide` becomes."""


_NO_PROMISE = (RestoreFailed, NotFound)
_AT_ONCE_S = 1.0
"""Another gateway process is there already."""


def refusal(code: Code, *, model: str, detail: str, retry_after_s: float) -> GatewayError:
    """The error for a refused request; ``retry_after_s``: when coming back should help, if it can."""
    kind, text = REFUSALS[code]
    promise = None if issubclass(kind, _NO_PROMISE) else _AT_ONCE_S if kind is ShuttingDown else retry_after_s
    return kind(text.format(model=model, detail=detail), retry_after_s=promise)


def envelope(error: GatewayError) -> dict[str, object]:
    """The JSON body, also used inside a stream that has already begun."""
    return {"error": {"message": str(error), "type": error.type, "param": error.param, "code": error.code}}


def render(error: GatewayError) -> Reply:
    """Status, headers and body."""
    headers = {"x-rewake-error": error.code, **error.headers}
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if error.retry_after_s is not None:
        seconds = whole_seconds(error.retry_after_s, 1.0)
        headers["Retry-After"], headers["retry-after-ms"] = str(seconds), str(seconds * 1000)
    return reply(envelope(error), error.status, headers)
