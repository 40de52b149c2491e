"""What must not leave a host in a support bundle: secrets, wherever they stand, and what clients have asked.

Errs on the side of hiding: a hidden path costs a question, a secret that got out cannot be called back. Pure: takes texts and
documents, returns them without.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

HIDDEN = "[hidden]"
_LEAST = 6
"""Shorter literals would hide too much else."""
_SECRET_NAME = (
    r"(?:[A-Za-z0-9]+[_.-])*(?:api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key|key[_-]?id|keys?|token|secret|passw(?:or)?d|"
    r"passphrase|credentials?|authorization|auth|cookie|session|signature|salt|pat)(?:[_.-][A-Za-z0-9]+)*"
)
_NAME = re.compile(rf"(?i){_SECRET_NAME}")
_HARMLESS = re.compile(
    r"(?i)(?:.*tokens|max[_-]?tokens?|tokens?_per_minute|prompt_tokens|key_file|keyid|trusted_keys|tokenizer.*)"
)
"""Names that only look like one."""
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # A URL's user and password; the host stays.
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@'\"]*@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)\b(bearer|basic|digest|negotiate)\s+[A-Za-z0-9._~+/=-]{4,}"), rf"\1 {HIDDEN}"),
    # name=value, name: value, "name": "value", --name value
    (re.compile(rf"(?i)((?:--?)?\b{_SECRET_NAME}[\"']?\s*[=:]\s*)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&}}\]]+)"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)((?:^|\s)--?{_SECRET_NAME}\s+)(?!-)(?:\"[^\"\n]*\"|'[^'\n]*'|\S+)"), rf"\1{HIDDEN}"),
    # What well-known services' tokens look like.
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abprs]-[\w-]{8,}"
            r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|nvapi-[\w-]{8,}|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?|rw-[A-Za-z0-9_-]{16,})"
        ),
        HIDDEN,
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
)
_ASKED = re.compile(
    r"(?i)\bprompts?\b\s*[\"']?\s*[:=]|[\"'](?:messages|content|input|text|query|documents)[\"']\s*:|\bprompt_token_ids\b|input_ids"
    r"|received request|\brequest body\b|\bGenerate(?:ReqInput)?\(|\bgenerated text\b|\bcompletion\s*[:=]\s*['\"]"
)
_TELLING = re.compile(
    r"(?i)^(?:--enable-log-requests|--log-requests|--enable-log-outputs|--verbose|-v+|--log-verbosity|-lv|--verbosity)(?:=.*)?$"
)


def text(value: str, literals: Collection[str] = ()) -> str:
    """Without secrets.

    Args:
        literals: secrets known by their value.
    """
    for literal in sorted((one for one in literals if len(one) >= _LEAST), key=len, reverse=True):
        value = value.replace(literal, HIDDEN)
    for pattern, instead in _PATTERNS:
        value = pattern.sub(instead, value)
    return value


def document(value: Any, literals: Collection[str] = (), name: str = "") -> Any:
    """A configuration or a record without secrets: what its names say are some, all environments, and any text that holds one."""
    if isinstance(value, Mapping):
        # The values of an environment are nobody's business; that a variable is set often explains things.
        inside = "*" if name in ("env", "environment") else ""
        return {key: document(one, literals, inside or str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        if name in ("command", "argv", "gpu_helper"):
            return _command([str(one) for one in value], literals)
        return [document(one, literals, name) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return HIDDEN if value is not None and not isinstance(value, bool) and name == "*" else value
    return HIDDEN if name == "*" or (secret(name) and value) else text(str(value), literals)


def secret(name: str) -> bool:
    """Whether what is called so is one."""
    return _NAME.fullmatch(name) is not None and _HARMLESS.fullmatch(name) is None


def values(value: Any, name: str = "") -> set[str]:
    """The literal secrets of a configuration: what has such a name, or stands in an environment under one."""
    if isinstance(value, Mapping):
        return set().union(*(values(one, str(key)) for key, one in value.items())) if value else set()
    if isinstance(value, list | tuple):
        return set().union(*(values(one, name) for one in value)) if value else set()
    found = {str(value)} if isinstance(value, str) and value and secret(name) else set()
    if isinstance(value, str):
        found |= {match[1] for match in re.finditer(r"://[^\s/@:]*:([^\s/@]+)@", value)}
    return found


def unasked(log: str) -> tuple[str, int]:
    """An engine's log without the lines that may repeat what clients asked or were answered; how many those are."""
    lines = log.splitlines()
    kept = [line for line in lines if not _ASKED.search(line)]
    return "".join(f"{line}\n" for line in kept), len(lines) - len(kept)


def tells_requests(command: Collection[str]) -> bool:
    """Whether an engine is told to write its clients' requests into its log."""
    return any(_TELLING.match(argument) for argument in command)


def _command(argv: list[str], literals: Collection[str]) -> list[str]:
    """A flag whose name says so hides what follows it."""
    shown, hide = [], False
    for argument in argv:
        shown.append(HIDDEN if hide and not argument.startswith("-") else text(argument, literals))
        hide = argument.startswith("-") and "=" not in argument and secret(argument.lstrip("-"))
    return shown
