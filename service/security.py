"""Who may do what: API keys with roles, sent as `Authorization: Bearer KEY`.

Knows keys and roles. Does not know routes. Keys are compared as their SHA-256, so that comparing takes the same time whatever is sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Literal

from pydantic import SecretStr

from service.errors import Forbidden, Unauthorized

Role = Literal["retrieve", "admin"]


class Keys:
    """The known keys.

    retrieve  for retrieval; where there are none, everybody may retrieve
    admin     for everything; where there are none, the admin routes are off
    """

    def __init__(self, retrieve: Sequence[SecretStr], admin: Sequence[SecretStr]) -> None:
        self._retrieve = [_digest(key.get_secret_value().encode()) for key in retrieve]
        self._admin = [_digest(key.get_secret_value().encode()) for key in admin]

    @property
    def open(self) -> bool:
        """Whether everybody may retrieve."""
        return not self._retrieve

    def check(self, role: Role, authorization: bytes | None) -> None:
        """Raise Unauthorized or Forbidden unless the value of an Authorization header allows the role."""
        if role == "retrieve" and not self._retrieve:
            return
        if role == "admin" and not self._admin:
            raise Forbidden("The admin routes are off: the service was started without an admin key (ESPALIER_ADMIN_KEYS).")
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise Unauthorized("Expected a header `Authorization: Bearer KEY`.")
        digest = _digest(key.strip())
        is_admin, is_retrieve = _among(digest, self._admin), _among(digest, self._retrieve)
        if not (is_admin or is_retrieve):
            raise Unauthorized("The key is not known.")
        if role == "admin" and not is_admin:
            raise Forbidden("This key may retrieve; this route needs an admin key.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _among(digest: bytes, known: Sequence[bytes]) -> bool:
    """Compares with every key, so that the time does not tell which one matched."""
    return sum([hmac.compare_digest(digest, one) for one in known]) > 0
