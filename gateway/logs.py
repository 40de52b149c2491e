"""Log lines as JSON objects, one a line, on stderr. Never a prompt, a body or a token."""

from __future__ import annotations

import json
import logging
import sys
import time

_LOGGER = logging.getLogger("gateway")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup() -> None:
    """Send everything from level INFO on to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def info(event: str, **fields: object) -> None:
    _LOGGER.info(event, extra={"fields": fields})


def warning(event: str, **fields: object) -> None:
    _LOGGER.warning(event, extra={"fields": fields})


def error(event: str, failure: BaseException | None = None, **fields: object) -> None:
    """A fault of the gateway itself; with its traceback when there is an exception."""
    _LOGGER.error(event, exc_info=failure, extra={"fields": fields})
