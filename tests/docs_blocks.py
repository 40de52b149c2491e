"""The fenced blocks of the documents: what each is, whether it is run, and why not.

A block is run unless the line above says ``<!-- not run: WHY -->``. Knows nothing of what the commands do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHELL = ("sh", "bash", "console")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- not run: (?P<why>[^\n]+?) -->\n*\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    kind: str
    text: str
    why_not: str
    """Why it is not run; empty: it is."""

    @property
    def shell(self) -> bool:
        return self.kind in SHELL

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """What people read; the reference is made from the code."""
    docs = ROOT / "docs"
    written = [page for page in docs.rglob("*.md") if page.parent.name != "reference" and page.name != "template.md"]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(written)]


def blocks(page: Path) -> Iterator[Block]:
    """Those of one page, in order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        mark = _MARK.search(text[: found.start()])
        indent = len(found["indent"])
        yield Block(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, found.start()) + 1,
            kind=found["kind"],
            text="".join(line[indent:] if line.strip() else line for line in found["text"].splitlines(keepends=True)),
            why_not=mark["why"] if mark else "",
        )


def every_block() -> list[Block]:
    return [block for page in pages() for block in blocks(page)]
