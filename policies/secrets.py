"""What in an engine's environment and command is a secret, by its name or by what its value plainly is; and what becomes of it.

A snapshot holds the environment of its donor as it was, so whoever can read a copy of it has its secrets. Names are written
down, values never: where settings are compared, a secret is represented by a slow hash of it.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from policies.manifest import Manifest
from policies.trust import Trust

NAMES = (
    *("*_TOKEN", "TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "*_ACCESS_TOKEN", "*_AUTH_TOKEN", "*_BEARER"),
    *("*_API_KEY", "*_APIKEY", "API_KEY", "APIKEY", "*_ACCESS_KEY", "*_ACCESS_KEY_ID", "*_ACCOUNT_KEY", "*_SAS_TOKEN"),
    *("*_SECRET", "*_SECRET_*", "SECRET", "SECRET_*", "*_CLIENT_SECRET", "*_PRIVATE_KEY", "*_SIGNING_KEY", "*_ENCRYPTION_KEY"),
    *("*_PASSWORD", "PASSWORD", "*_PASSWD", "PASSWD", "*_PASSPHRASE", "PGPASSWORD", "MYSQL_PWD", "*_PWD"),
    *("*_CREDENTIALS", "*_CREDENTIALS_JSON", "*_CREDENTIAL", "*_CONNECTION_STRING", "*_DSN", "*_WEBHOOK_URL"),
    *("AWS_*", "AZURE_*", "VAULT_*", "DOCKER_AUTH_CONFIG", "NETRC", "*_COOKIE", "*_LICENSE_KEY"),
)
"""Names of variables, and of options without their dashes, whose values are secrets. ``trust.secret_names`` adds to them."""
HARMLESS = (
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_DEFAULT_OUTPUT", "AWS_CA_BUNDLE", "AWS_MAX_ATTEMPTS"),
    *("AWS_RETRY_MODE", "AWS_ENDPOINT_URL*", "AWS_EC2_METADATA_*", "AWS_SDK_*", "AWS_STS_REGIONAL_ENDPOINTS", "AWS_CONFIG_FILE"),
    *("AZURE_STORAGE_ACCOUNT*_NAME", "AZURE_TENANT_ID", "AZURE_CLIENT_ID", "VAULT_ADDR", "VAULT_NAMESPACE", "OLDPWD"),
    *("*_FILE", "*_PATH", "*_DIR", "GOOGLE_APPLICATION_CREDENTIALS", "HF_HUB_DISABLE_IMPLICIT_TOKEN"),
    *("*BOS_TOKEN", "*EOS_TOKEN", "*PAD_TOKEN", "*UNK_TOKEN", "*MASK_TOKEN", "*STOP_TOKEN"),
)
"""Names that look like those, and only say where or how. ``trust.not_secret`` adds to them."""
_TELLING = re.compile(
    r"(hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|nvapi-|AKIA|ASIA|AIza)[A-Za-z0-9_\-]{12,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}"
)
"""Values that are secrets whatever they are called."""
_USERINFO = re.compile(r"[a-z][a-z0-9+.\-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
"""A URL with a password in it."""
_SHORTEST = 3
"""A shorter value, such as ``0`` or ``no``, is a switch."""


def is_secret(name: str, value: str, trust: Trust) -> bool:
    """A variable or an option (its dashes aside) holds a secret."""
    name = name.lstrip("-").replace("-", "_").replace(".", "_").upper()
    if trust.is_exempt(name) or not value:
        return False
    if _is_one_of(name, trust.secret_names) or _TELLING.search(value) or _USERINFO.match(value):
        return True
    return len(value) > _SHORTEST and not _is_one_of(name, HARMLESS) and _is_one_of(name, NAMES)


def found(environ: Mapping[str, str], argv: Sequence[str], trust: Trust) -> Iterator[str]:
    """What is a secret, by its name: ``env HF_TOKEN``, ``option --api-key``; never a value."""
    for name in sorted(environ):
        if is_secret(name, environ[name], trust):
            yield f"env {name}"
    for at, option, value in _options(argv):
        if is_secret(option, value, trust):
            yield f"option {option}" if option else f"argument {at}"


def hidden(environ: Mapping[str, str], trust: Trust) -> dict[str, str]:
    """An environment with a slow hash in place of each secret, so that equal ones are still equal."""
    return {name: _digest(name, value) if is_secret(name, value, trust) else value for name, value in environ.items()}


def hidden_argv(argv: Sequence[str], trust: Trust) -> tuple[str, ...]:
    """The same of a command."""
    shown = list(argv)
    for at, option, value in _options(argv):
        if is_secret(option, value, trust):
            # The value is the end of its word, or all of it.
            shown[at] = shown[at].removesuffix(value) + _digest(option, value)
    return tuple(shown)


def publishable(manifest: Manifest, *, encrypted: bool) -> str | None:
    """Why a snapshot must not leave this host, with the remedy; None when it may."""
    if encrypted or manifest.secrets == ():
        return None
    remedy = "encrypt its copies (key_file of the remote), or make a new snapshot of a donor that reads its secrets from files"
    if manifest.secrets is None:
        return f"it was made by a version that did not look for secrets in its donor's environment; {remedy}"
    return f"its donor's environment holds secrets ({', '.join(manifest.secrets)}), and a copy would too; {remedy}"


def _options(argv: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """(place of the word with the value, option, value) of ``--option value``, ``--option=value`` and words without one."""
    option = ""
    for at, word in enumerate(argv):
        if word.startswith("-") and len(word) > 1:
            option, equals, value = word.partition("=")
            if equals:
                yield at, option, value
                option = ""
        else:
            yield at, option, word
            option = ""


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern.upper()) for pattern in patterns)


@functools.lru_cache(maxsize=256)
def _digest(name: str, value: str) -> str:
    """Slow on purpose: a password is short, and the manifest is read by more people than the configuration is."""
    data = value.encode("utf-8", "surrogateescape")
    return f"scrypt:{hashlib.scrypt(data, salt=name.encode(), n=1 << 14, r=8, p=1, dklen=16).hex()}"
