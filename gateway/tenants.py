"""Whose a key is, and which models its owner may use.

Keys are known by their hashes alone, and appear in no message. Knows nothing of how much a tenant may use, nor of HTTP beyond
the headers' names.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping

from gateway.current import Current
from gateway.errors import PermissionDenied, Unauthorized
from policies.config import Config
from policies.tenancy import key_hash

KEY_HEADERS = ("authorization", "x-api-key", "api-key")
"""Where clients put their key: the OpenAI SDKs, the Anthropic SDKs, the Azure ones. The first that holds one counts."""
_HIDDEN = re.compile(r"(?:^|,)\s*openai-insecure-api-key\.([^,\s]+)")
"""Browsers can set no header on a WebSocket: OpenAI's clients put the key among the protocols that they offer."""
_HOW = "Send `Authorization: Bearer KEY`."


class Tenants:
    """The configuration's tenants."""

    def __init__(self, current: Current) -> None:
        self._current = current
        self._indexed: Config | None = None
        self._index: dict[str, tuple[str, str]] = {}

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """The tenant whose key a request carries; empty when the configuration has no tenants.

        Args:
            headers: looked up by lower-case names.

        Raises:
            Unauthorized: there are tenants, and the key is absent or nobody's.
        """
        if not self._current.config.tenants:
            return ""
        key = presented(headers)
        if not key:
            raise _unauthorized(f"You did not provide an API key. {_HOW}")
        tenant = self._owner(key)
        if tenant is None:
            raise _unauthorized(f"The API key is not known here. {_HOW} If the key is new, it may not have been configured yet.")
        return tenant

    def allows(self, tenant: str, model: str) -> bool:
        """Whether the tenant may use a configured model."""
        found = self._current.config.tenants.get(tenant)
        return found is None or found.models is None or model in found.models

    def may_use(self, tenant: str, model: str) -> None:
        """Raises:
        PermissionDenied: it may not.
        """
        if not self.allows(tenant, model):
            raise PermissionDenied(f"Tenant {tenant!r} may not use model {model!r}.")

    def _owner(self, key: str) -> str | None:
        """The time that this takes tells nothing: what is looked up is a hash that a stranger cannot steer, and what is found is
        compared in constant time."""
        config = self._current.config
        if config is not self._indexed:
            self._index = {hash: (hash, name) for name, tenant in config.tenants.items() for hash in tenant.keys}
            self._indexed = config
        hash = key_hash(key)
        expected, tenant = self._index.get(hash, ("", ""))
        return tenant if hmac.compare_digest(expected, hash) else None


def presented(headers: Mapping[str, str]) -> str:
    """The key in a request's head, empty if there is none."""
    for name in KEY_HEADERS:
        value = headers.get(name, "").strip()
        if name == "authorization":
            scheme, _, value = value.partition(" ")
            value = value.strip() if scheme.lower() == "bearer" else ""
        if value:
            return value
    hidden = _HIDDEN.search(headers.get("sec-websocket-protocol", ""))
    return hidden[1] if hidden else ""


def _unauthorized(message: str) -> Unauthorized:
    return Unauthorized(message, headers={"WWW-Authenticate": "Bearer"})
