"""Where copies of snapshots are kept besides this host's disk, as settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from policies.retention import RemoteRetention
from policies.scalars import Bytes, PositiveSeconds, Section

_SECRET = re.compile(r"secret|token(?!ize)|password|access_key|account_key|master_key|sas_|service_account_key", re.IGNORECASE)


class Remote(Section):
    """One place for copies: a bucket, a container or a folder that several hosts see."""

    url: Annotated[str, Field(pattern=r"^(s3|gs|az)://[^/?#]+|^file:///")]
    """``s3://BUCKET/PREFIX``, ``gs://BUCKET/PREFIX``, ``az://CONTAINER/PREFIX``, or ``file:///FOLDER``, mounted.
    Credentials come from the environment of ``rewake`` (such as AWS_ACCESS_KEY_ID) or the machine's own role, never from here;
    so does Azure's account (AZURE_STORAGE_ACCOUNT_NAME), or from ``settings`` (``account_name``)."""
    settings: Mapping[str, str] = {}
    """Further settings of the object store by obstore's names, such as ``endpoint`` or ``region``; no secrets."""
    env: Mapping[str, str] = {}
    """Settings that are read from the environment: obstore's name -> name of the variable, such as
    ``secret_access_key: TEAM_B_SECRET``, where two remotes need different credentials."""
    zstd: Annotated[int, Field(ge=0, le=19)] = 3
    """Level of compression of what is stored there; 0: none. What does not get smaller is stored as it is."""
    key_file: Annotated[str, Field(pattern="^/")] | None = None
    """File of mode 0600 with the key that everything is encrypted with there (AES-256-GCM): 64 hex digits, as
    ``openssl rand -hex 32`` prints. Lost key, lost copies. None: not encrypted."""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 16
    """Requests at a time."""
    timeout_s: PositiveSeconds = 60.0
    """How long one request may take, its repetitions included."""
    retention: RemoteRetention = RemoteRetention()
    """Which copies are kept."""

    @field_validator("settings")
    @classmethod
    def _no_secrets(cls, settings: Mapping[str, str]) -> Mapping[str, str]:
        for name in settings:
            if _SECRET.search(name):
                raise ValueError(f"{name} is a secret, which does not belong into this file; name a variable for it under env")
        return settings

    @property
    def is_folder(self) -> bool:
        """It is a path of this host, mounted or not."""
        return self.url.startswith("file:")


class Storage(Section):
    """Copies of snapshots elsewhere, and how starts use them."""

    remotes: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], Remote] = {}
    """Places for copies, each by a name of yours."""
    pull: str | None = None
    """The remote that a start pulls from when no snapshot on this host fits. None: a start uses what is here."""
    pull_timeout_s: PositiveSeconds = 900.0
    """How long a start may pull, before it goes on without; what has come stays for the next time."""
    reserve_bytes: Bytes = 1 << 30
    """What a pull leaves free on the disk of ``state_dir``."""

    @model_validator(mode="after")
    def _known(self) -> Storage:
        if self.pull is not None and self.pull not in self.remotes:
            raise ValueError(f"pull names {self.pull!r}, which is not under remotes")
        return self
