"""What one gateway process is told at its start, read and checked. Only this module reads files of the operator."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import yaml

from gateway.tls import Pem
from policies.config import Config, ConfigError, parse
from policies.control import Told


class SettingsError(Exception):
    """The process cannot start, or reload, as told; the message says what, where, and how to mend it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that :func:`gateway.app.build` needs."""

    config: Config
    store_url: str
    admin_token: str
    id: str
    """Names this process in the store; new at each start."""
    worker: int = 0
    pem: Pem | None = None
    """Certificate and key, when ``gateway.tls`` is set."""
    file: Path | None = None
    """The configuration file, for a reload; None when a supervisor owns it."""


def load(*, config: Path | Told, store_url: str, admin_token_file: Path, worker: int) -> Settings:
    """Read the files; or take what a supervisor has read.

    Raises:
        SettingsError: one of them cannot be read or does not hold what it should.
    """
    parsed, pem = told(config) if isinstance(config, Told) else read(config)
    token = _text(admin_token_file, "the admin token").strip()
    if not token:
        raise SettingsError(f"{admin_token_file}: the admin token is empty; write a long random line into it")
    if "://" not in store_url:
        raise SettingsError(f"--store {store_url}: not a URL; give redis://, rediss:// or unix://")
    file = None if isinstance(config, Told) else config
    return Settings(parsed, store_url, token, f"gw{worker}-{secrets.token_hex(4)}", worker, pem, file)


def read(file: Path) -> tuple[Config, Pem | None]:
    """The configuration, and the certificate that it names.

    Raises:
        SettingsError: with every fault.
    """
    try:
        parsed = parse(yaml.safe_load(_text(file, "the configuration")))
    except yaml.YAMLError as error:
        raise SettingsError(f"{file}: not YAML: {error}") from None
    except ConfigError as error:
        raise SettingsError(f"{file}:\n{error}") from None
    tls = parsed.gateway.tls
    if tls is None:
        return parsed, None
    certificate = _text(Path(tls.certificate), "gateway.tls.certificate")
    return parsed, Pem(certificate, _text(Path(tls.key), "gateway.tls.key"))


def told(message: Told) -> tuple[Config, Pem | None]:
    """What a supervisor says is the configuration.

    Raises:
        SettingsError: it has faults: the supervisor is of another version.
    """
    try:
        parsed = parse(message.config)
    except ConfigError as error:
        raise SettingsError(f"the supervisor's configuration does not fit this version; start it anew:\n{error}") from None
    return parsed, Pem(message.certificate, message.key) if message.certificate else None


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except PermissionError:
        raise SettingsError(
            f"{path}: {what} may not be read by the user of this process; let it be read by that user, or run `rewake up`, "
            "which reads it as root"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {what} cannot be read: {error}") from None
