"""API keys and their roles. A request has its key as `Authorization: Bearer KEY`.

Knows keys, their names, roles, models and limits. Does not know routes. The SHA-256 of keys are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import SecretStr

from ..errors import Forbidden, Unauthorized
from ..http.key_limits import KeyLimits
from ..keys_file import Key, Role, read_keys
from ..settings import Settings, is_local, named_key
from ..watched_files import WatchedFiles

__all__ = ["Access", "Keys", "Role"]

log = logging.getLogger(__name__)

Access = Role | Literal["private"]
"""What a route needs: a key of a role; or `private`, an admin key, and none where there are no keys and no other machine reaches it."""

ID_DIGITS = 8
"""Hex digits of its SHA-256 that identify a key without a name: enough to distinguish keys, no help in guessing one."""


class Keys:
    """The known keys: those of the settings, each as KEY or NAME:KEY, and those of a file, which is read again when it changes.

    retrieve  allow retrieval; without any, and without a file, no key is needed to retrieve
    admin     allow everything; without any, the admin routes are off
    write     allow to put and delete items, and nothing else; without any, these routes are off, for admin keys too
    internal  allow routers to search shards, and nothing else; without any, no key is needed for it where there are no keys at all, else
              these routes are off

    Without any keys, `private` routes are off where other machines reach a service that was not said to be open. What is wrong with the
    file later changes nothing, and is logged.

    limits  how much of the service keys have had
    clock   seconds, for the looks at the file; now: the date and time, for keys that expire
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
        self._own = [_known(key, role) for role, keys in roles for key in keys]
        self._file, self._now = settings.keys_file, now
        self._shared = not settings.open and not is_local(settings.private_host)
        self.limits = KeyLimits(None if settings.run_folder is None else settings.run_folder / "key-limits")
        self._watched = WatchedFiles([] if self._file is None else [self._file], clock)
        self._known = self._own if self._file is None else [*self._own, *read_keys(self._file)]

    @property
    def public(self) -> bool:
        """Whether retrieval needs no key."""
        return self._file is None and not self._of("retrieve")

    @property
    def open(self) -> bool:
        """Whether there are no keys at all, as on a laptop."""
        return self._file is None and not self._known

    @property
    def shows_all(self) -> bool:
        """Whether the `private` routes need no key."""
        return self.open and not self._shared

    @property
    def roles(self) -> list[Role]:
        self._look()
        return [role for role in _OFF_OR_NOT if self._of(role)]

    def check(self, access: Access, authorization: bytes | None) -> Key | None:
        """The key in the value of an Authorization header; None where no key is needed.

        Raises Unauthorized or Forbidden unless it allows the access. Whether it may name a model, and has not had enough, `admit` says.
        """
        self._look()
        if access == "private" and self.open and self._shared:
            raise Forbidden(_SHARED, "admin", "off")
        if access in ("private", "internal") and self.open:
            return None
        role: Role = "admin" if access == "private" else access
        if not self._of(role):
            if role == "retrieve" and self._file is None:
                return None
            if role in _OFF:
                raise Forbidden(f"{_OFF[role]} (ESPALIER_{role.upper()}_KEYS).", role, "off")
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise Unauthorized("Expected one header `Authorization: Bearer KEY`.", role, "malformed" if authorization else "missing")
        digest = _digest(key.strip())
        found = [known for known in self._known if hmac.compare_digest(digest, known.digest)]  # all, so that the time shows no match
        if not found:
            raise Unauthorized("The key is not known.", role, "unknown")
        valid = [known for known in found if known.expires is None or self._now() < known.expires]
        if not valid:
            raise Unauthorized("The key has expired.", role, "expired", found[0].name)
        allowed = [known for known in valid if known.role in ("admin", role)]
        if not allowed:
            raise Forbidden(f"This key may {_ALLOWED[valid[0].role]}; this route needs {_NEEDED[role]} key.", role, "role", valid[0].name)
        return min(allowed, key=lambda known: known.role != "admin")

    def admit(self, key: Key | None, model: str | None, role: Role) -> None:
        """Count a request of a key that `check` has let in, to a model or to none.

        Raises Forbidden where it may not name the model, KeyLimit where it has had enough.
        """
        if key is not None:
            if model is not None:
                may_use(key, model, role)
            self.limits.take(key)

    def _of(self, role: Role) -> list[Key]:
        return [key for key in self._known if key.role == role]

    def _look(self) -> None:
        if self._file is None or not self._watched.have_changed():
            return
        try:
            self._known = [*self._own, *read_keys(self._file)]
            log.info("the file of keys has changed: %d keys", len(self._known) - len(self._own))
        except ValueError as error:
            log.error("the file of keys has changed, and the keys of before stay in force: %s", error)


def may_use(key: Key | None, model: str, role: Role) -> None:
    """Raise Forbidden where a key may not name a model."""
    if key is not None and key.models is not None and model not in key.models:
        raise Forbidden(f"This key may not use the model {model!r}.", role, "model", key.name)


_OFF: dict[Role, str] = {
    "admin": "The admin routes are off: the service was started without an admin key",
    "write": "Writing is off: the service was started without a write key",
    "internal": "The routes of routers are off: the service was started with keys, but without an internal one",
}
_SHARED = (
    "What people did is shown to nobody: other machines reach this service, and it has no keys (ESPALIER_ADMIN_KEYS, or ESPALIER_OPEN=1 to "
    "show it to everybody)."
)
_OFF_OR_NOT: tuple[Role, ...] = ("admin", "write", "retrieve", "internal")
_ALLOWED: dict[Role, str] = {"admin": "admin", "write": "write", "retrieve": "retrieve", "internal": "search shards"}
_NEEDED: dict[Role, str] = {"admin": "an admin", "write": "a write", "retrieve": "a retrieval", "internal": "an internal"}


def _known(secret: SecretStr, role: Role) -> Key:
    name, key = named_key(secret.get_secret_value())
    digest = _digest(key.encode())
    return Key(name or digest.hex()[:ID_DIGITS], digest, role)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
