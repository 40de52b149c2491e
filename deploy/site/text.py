"""Markdown out of what code says of itself: tables, code, docstrings' markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are Markdown already."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Markdown of one line that does not end its cell."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def code(value: object) -> str:
    """A value as code."""
    return f"`{value}`"


def prose(docstring: str) -> str:
    """A docstring as Markdown: its roles and double backticks become code."""
    text = re.sub(r":\w+:`[~.]?([^`]+)`", r"`\1`", docstring)
    return re.sub(r"``([^`]+)``", r"`\1`", text)
