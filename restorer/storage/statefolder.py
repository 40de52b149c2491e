"""What lies in the state folder, opened as one configuration says: for the restorer, and for commands beside it."""

from __future__ import annotations

from pathlib import Path

from policies.config import Config
from restorer.errors import Environment
from restorer.storage.keyring import KeyRing
from restorer.storage.signatures import Judge
from restorer.storage.stamps import Stamps, boot_key


def stamps_of(config: Config, name: str) -> Stamps:
    """Remembered hashes; sealed for this boot where signatures are demanded.

    Args:
        name: of the file. Each process has one of its own: a restorer writes its at any time.

    Raises:
        Environment: the key of the seal cannot be kept.
    """
    key = b""
    if config.trust.demand != "off":
        try:
            key = boot_key(Path(config.run_dir))
        except OSError as error:
            raise Environment(f"{error.filename}: {error.strerror}; run as root, or set run_dir to another folder") from None
    return Stamps(Path(config.state_dir) / name, key=key)


def judge_of(config: Config) -> Judge:
    """What signatures are worth."""
    return Judge(KeyRing(config.trust))
