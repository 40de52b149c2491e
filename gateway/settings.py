"""What one gateway process is told at its start, read once and checked. Only this module reads files of the operator."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import yaml

from policies.config import Config, ConfigError, parse


class SettingsError(Exception):
    """The process cannot start as told; the message says what, where, and how to mend it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that :func:`gateway.app.build` needs."""

    config: Config
    store_url: str
    admin_token: str
    id: str
    """Names this process in the store; new at each start."""
    worker: int = 0


def load(*, config: Path, store_url: str, admin_token_file: Path, worker: int) -> Settings:
    """Read the files.

    Raises:
        SettingsError: one of them cannot be read or does not hold what it should.
    """
    try:
        document = yaml.safe_load(_text(config, "the configuration"))
        parsed = parse(document)
    except yaml.YAMLError as error:
        raise SettingsError(f"{config}: not YAML: {error}") from None
    except ConfigError as error:
        raise SettingsError(f"{config}:\n{error}") from None
    token = _text(admin_token_file, "the admin token").strip()
    if not token:
        raise SettingsError(f"{admin_token_file}: the admin token is empty; write a long random line into it")
    if "://" not in store_url:
        raise SettingsError(f"--store {store_url}: not a URL; give redis://, rediss:// or unix://")
    return Settings(parsed, store_url, token, f"gw{worker}-{secrets.token_hex(4)}", worker)


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {what} cannot be read: {error}") from None
