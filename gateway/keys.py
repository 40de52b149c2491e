"""New API keys, and the hash by which the configuration recognises each: ``rewake key``. No process of the gateway needs this."""

from __future__ import annotations

import json
import re
import secrets
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from policies.tenancy import key_hash

PREFIX = "rwk-"
"""So that a key can be told from other secrets when one is found where it should not be."""
_BYTES = 32
_LEAST = 24
"""Characters of a key of somebody's own: a shorter one could be guessed from its hash."""
_PLAIN = re.compile(r"[\x21-\x7e]+")


class UnusableKey(ValueError):
    """A given key would not be safe, or could not be sent."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key and what the configuration holds of it."""

    key: str
    hash: str


def new() -> Key:
    """A key of 256 random bits."""
    key = PREFIX + secrets.token_urlsafe(_BYTES)
    return Key(key, key_hash(key))


def given(key: str) -> Key:
    """A key that somebody has already.

    Raises:
        UnusableKey: it is too short, or holds what no header can.
    """
    if len(key) < _LEAST:
        raise UnusableKey(f"the key has {len(key)} characters; one of fewer than {_LEAST} could be guessed from its hash")
    if not _PLAIN.fullmatch(key):
        raise UnusableKey("the key holds spaces or characters beyond ASCII, which no header can carry safely")
    return Key(key, key_hash(key))


def key(
    stdin: Annotated[bool, typer.Option("--stdin", help="Hash a key that you have already: one line of standard input.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make an API key for a tenant. It is printed this once, with the hash that the configuration holds of it."""
    try:
        made = given(sys.stdin.readline().strip()) if stdin else new()
    except UnusableKey as error:
        raise typer.BadParameter(f"{error}; `rewake key` makes a good one") from None
    if json_:
        print(json.dumps(asdict(made)))
        return
    print(f"key   {made.key}\nhash  {made.hash}", flush=True)
    print("Give the key to its owner, put the hash under tenants.NAME.keys, and run `rewake reload`.", file=sys.stderr)
