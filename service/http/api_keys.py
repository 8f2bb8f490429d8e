"""API keys and their roles. A request has its key as `Authorization: Bearer KEY`.

Knows keys, their names and roles. Does not know routes. The SHA-256 of keys are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Literal

from pydantic import SecretStr

from ..errors import Forbidden, Role, Unauthorized
from ..settings import named_key

__all__ = ["Access", "Keys", "Role"]

Access = Role | Literal["private"]
"""What a route needs: a key of a role; or `private`, an admin key where the service has any keys, and none where it has none."""

ID_DIGITS = 8
"""Hex digits of its SHA-256 that identify a key without a name: enough to distinguish keys, no help in guessing one."""


class Keys:
    """The known keys, each as KEY or NAME:KEY.

    retrieve  allow retrieval; without any, no key is needed to retrieve
    admin     allow everything; without any, the admin routes are off
    write     allow to put and delete items, and nothing else; without any, these routes are off, for admin keys too
    internal  allow routers to search shards, and nothing else; without any, no key is needed for it where there are no keys at all, else
              these routes are off
    """

    def __init__(
        self,
        retrieve: Sequence[SecretStr],
        admin: Sequence[SecretStr],
        write: Sequence[SecretStr] = (),
        internal: Sequence[SecretStr] = (),
    ) -> None:
        roles: tuple[tuple[Role, Sequence[SecretStr]], ...]
        roles = ("admin", admin), ("write", write), ("retrieve", retrieve), ("internal", internal)
        self._keys = {role: [_known(key) for key in keys] for role, keys in roles}

    @property
    def public(self) -> bool:
        """Whether retrieval needs no key."""
        return not self._keys["retrieve"]

    @property
    def open(self) -> bool:
        """Whether there are no keys at all, as on a laptop."""
        return not any(self._keys.values())

    @property
    def roles(self) -> list[Role]:
        """The roles that have keys."""
        return [role for role, keys in self._keys.items() if keys]

    def check(self, access: Access, authorization: bytes | None) -> str | None:
        """The name or id of the key in the value of an Authorization header; None where no key is needed.

        Raises Unauthorized or Forbidden unless it allows the access.
        """
        if access in ("private", "internal") and self.open:
            return None
        role: Role = "admin" if access == "private" else access
        if not self._keys[role]:
            if role == "retrieve":
                return None
            raise Forbidden(f"{_OFF[role]} (ESPALIER_{role.upper()}_KEYS).", role, "off")
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise Unauthorized("Expected one header `Authorization: Bearer KEY`.", role, "malformed" if authorization else "missing")
        digest = _digest(key.strip())
        names = {own: name for own, keys in self._keys.items() if (name := _among(digest, keys)) is not None}
        if not names:
            raise Unauthorized("The key is not known.", role, "unknown")
        allowed = names.get("admin") or names.get(role)
        if allowed is None:
            own, name = next(iter(names.items()))
            raise Forbidden(f"This key may {_ALLOWED[own]}; this route needs {_NEEDED[role]} key.", role, "role", name)
        return allowed


_OFF: dict[Role, str] = {
    "admin": "The admin routes are off: the service was started without an admin key",
    "write": "Writing is off: the service was started without a write key",
    "internal": "The routes of routers are off: the service was started with keys, but without an internal one",
}
_ALLOWED: dict[Role, str] = {"admin": "admin", "write": "write", "retrieve": "retrieve", "internal": "search shards"}
_NEEDED: dict[Role, str] = {"admin": "an admin", "write": "a write", "retrieve": "a retrieval", "internal": "an internal"}


def _known(secret: SecretStr) -> tuple[bytes, str]:
    """(digest, name or id) of a key."""
    name, key = named_key(secret.get_secret_value())
    digest = _digest(key.encode())
    return digest, name or digest.hex()[:ID_DIGITS]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _among(digest: bytes, known: Sequence[tuple[bytes, str]]) -> str | None:
    """The name of a key among these. Compares with all of them, so that the time does not show which one matched."""
    matched = [name for own, name in known if hmac.compare_digest(digest, own)]
    return matched[0] if matched else None
