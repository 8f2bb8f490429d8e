"""API keys and their roles. A request sends its key as `Authorization: Bearer KEY`.

Knows keys, their names, roles, models and limits. Does not know routes. The SHA-256 of keys are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import SecretStr

from espalier.errors import spelled

from ..errors import Forbidden, Unauthorized
from ..http.key_limits import KeyLimits
from ..keys_file import Key, Role, read_keys
from ..settings import Settings, is_local, named_key
from ..watched_files import FromFiles

Access = Role | Literal["private"]
"""The role that a route needs. `private` needs an admin key, or none if there are no keys and no other machine can reach the service."""

ID_DIGITS = 8
"""A key without a name is identified by this many hex digits of its SHA-256: enough to tell keys apart, no help in guessing one."""


class Keys:
    """The known keys: those of the settings, each as KEY or NAME:KEY, and those of a file, which is read again when it changes.

    retrieve  allows retrieval. Without such a key and without a file, retrieval needs no key
    admin     allows everything. Without such a key, the admin routes are off
    write     allows only to put and delete items. Without such a key, these routes are off, for admin keys too
    internal  allows only routers' searches of shards. Without such a key, these routes need no key if there are no keys at all; else they
              are off

    If there are no keys, `private` routes are off on a service that other machines can reach, unless the setting `open` allows them. If the
    changed file has an error, the error is logged and the former keys stay.

    limits  requests and engine seconds that keys have used
    clock   seconds, for looking at the file; now: date and time, for keys that expire
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        roles: tuple[tuple[Role, Sequence[SecretStr]], ...] = (
            ("admin", settings.admin_keys),
            ("write", settings.write_keys),
            ("retrieve", settings.retrieve_keys),
            ("internal", settings.internal_keys),
        )
        self._settings_keys = [_key_of_setting(key, role) for role, keys in roles for key in keys]
        file, self._now = settings.keys_file, now
        self._is_exposed = not settings.open and not is_local(settings.private_host)
        self.limits = KeyLimits(None if settings.run_folder is None else settings.run_folder / "key-limits")
        self._file_keys = None if file is None else FromFiles([file], lambda: read_keys(file), "keys", clock)
        self._last_file_keys: tuple[Key, ...] = ()
        self._keys = dict.fromkeys(self._settings_keys)  # an ordered set
        self._reload()

    @property
    def public(self) -> bool:
        """Whether retrieval needs no key."""
        return self._file_keys is None and not self._keys_of("retrieve")

    @property
    def open(self) -> bool:
        """Whether there are no keys at all, as on a laptop."""
        return self._file_keys is None and not self._keys

    @property
    def shows_all(self) -> bool:
        """Whether the `private` routes need no key."""
        return self.open and not self._is_exposed

    @property
    def roles(self) -> list[Role]:
        self._reload()
        return [role for role in _ROLES if self._keys_of(role)]

    def check(self, access: Access, authorization: bytes | None) -> Key | None:
        """The key in the value of an Authorization header; None if no key is needed.

        Raises Unauthorized or Forbidden unless the key allows the access. `admit` checks its models and limits.
        """
        self._reload()
        if access == "private" and self.open and self._is_exposed:
            raise Forbidden(_PRIVATE_OFF, "admin", "off")
        if access in ("private", "internal") and self.open:
            return None
        role: Role = "admin" if access == "private" else access
        if not self._keys_of(role):
            if role == "retrieve" and self._file_keys is None:
                return None
            if role in _OFF:
                raise Forbidden(f"{_OFF[role]} (ESPALIER_{role.upper()}_KEYS).", role, "off")
        scheme, _, secret = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not secret:
            raise Unauthorized("Expected one header `Authorization: Bearer KEY`.", role, "malformed" if authorization else "missing")
        digest = _digest(secret.strip())  # compared with all keys, so that the time does not depend on a match
        matching_keys = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        if not matching_keys:
            raise Unauthorized("The key is not known.", role, "unknown")
        valid_keys = [key for key in matching_keys if self._is_valid(key)]
        if not valid_keys:
            raise Unauthorized("The key has expired.", role, "expired", matching_keys[0].name)
        allowed_keys = [key for key in valid_keys if key.role in ("admin", role)]
        if not allowed_keys:
            key = valid_keys[0]
            raise Forbidden(f"This key may {_ALLOWED[key.role]}; this route needs {_NEEDED[role]} key.", role, "role", key.name)
        return min(allowed_keys, key=lambda key: key.role != "admin")

    def check_again(self, access: Access, authorization: bytes | None, key: Key | None) -> Key | None:
        """`check` for one more line of a request, with the key of the line before. Digests are compared only if that key has changed."""
        self._reload()
        if key is None or (key in self._keys and self._is_valid(key)):
            return key
        return self.check(access, authorization)

    def admit(self, key: Key | None, model: str | None, role: Role) -> None:
        """Count a request with a key that `check` has returned, to a model or to none.

        Raises Forbidden if the key may not name the model, KeyLimit if it exceeds a limit.
        """
        if key is not None:
            if model is not None:
                may_use(key, model, role)
            self.limits.take(key)

    def _is_valid(self, key: Key) -> bool:
        return key.expires is None or self._now() < key.expires

    def _keys_of(self, role: Role) -> list[Key]:
        return [key for key in self._keys if key.role == role]

    def _reload(self) -> None:
        if self._file_keys is not None and (file_keys := self._file_keys.current()) is not self._last_file_keys:
            self._last_file_keys = file_keys
            self._keys = dict.fromkeys([*self._settings_keys, *file_keys])


def may_use(key: Key | None, model: str, role: Role) -> None:
    """Raise Forbidden if the key may not name the model."""
    if key is not None and key.models is not None and model not in key.models:
        raise Forbidden(f"This key may not use the model {spelled(model)}.", role, "model", key.name)


_OFF: dict[Role, str] = {
    "admin": "The admin routes are off: the service was started without an admin key",
    "write": "Writing is off: the service was started without a write key",
    "internal": "The routes of routers are off: the service was started with keys, but without an internal one",
}
_PRIVATE_OFF = (
    "What people did is shown to nobody: other machines reach this service, and it has no keys (ESPALIER_ADMIN_KEYS, or ESPALIER_OPEN=1 to "
    "show it to everybody)."
)
_ROLES: tuple[Role, ...] = ("admin", "write", "retrieve", "internal")
_ALLOWED: dict[Role, str] = {"admin": "admin", "write": "write", "retrieve": "retrieve", "internal": "search shards"}
_NEEDED: dict[Role, str] = {"admin": "an admin", "write": "a write", "retrieve": "a retrieval", "internal": "an internal"}


def _key_of_setting(secret: SecretStr, role: Role) -> Key:
    name, key = named_key(secret.get_secret_value())
    digest = _digest(key.encode())
    return Key(name or digest.hex()[:ID_DIGITS], digest, role)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
