"""What a donor is asked before its snapshot is taken, so that whatever requests of that shape need is compiled and in it."""

from __future__ import annotations

from typing import NamedTuple

from policies.scalars import Count, PositiveSeconds, Section

_MOST = 4


class Warmup(Section):
    """Shapes of requests that a donor has served before it is captured: each prompt, at each concurrency."""

    lengths: tuple[Count, ...] = ()
    """Prompts of about so many tokens."""
    prompts: tuple[str, ...] = ()
    """Prompts to send as they are. None of these and no lengths: the canary's first prompt."""
    concurrency: tuple[Count, ...] = ()
    """How many of each at a time. None: 1, and as many as a replica may have in flight, at most 4."""
    max_tokens: Count = 2
    """Tokens generated for each."""
    embeddings: bool = False
    """Ask for the embedding of each prompt too."""
    timeout_s: PositiveSeconds = 600.0
    """For each shape: what is compiled for it may take minutes."""


class Shape(NamedTuple):
    """Requests that are sent at the same time."""

    prompt: str | int
    """A text, or how many tokens."""
    at_once: int
    embeddings: bool

    def __str__(self) -> str:
        what = f"a prompt of {self.prompt} tokens" if isinstance(self.prompt, int) else f"the prompt {self.prompt[:40]!r}"
        return f"{self.at_once} of {what}" + (", for its embedding" if self.embeddings else "")


def shapes(wanted: Warmup, canary: str, concurrency: int) -> tuple[Shape, ...]:
    """Every shape to go through, short prompts and few at a time first: what is small fails soon.

    Args:
        canary: the canary's first prompt.
        concurrency: requests that a replica may have in flight.
    """
    prompts: tuple[str | int, ...] = (*wanted.prompts, *sorted(set(wanted.lengths))) or (canary,)
    at_once = sorted(set(wanted.concurrency or (1, min(concurrency, _MOST))))
    kinds = (False, True) if wanted.embeddings else (False,)
    return tuple(Shape(prompt, count, embeddings) for embeddings in kinds for prompt in prompts for count in at_once)
