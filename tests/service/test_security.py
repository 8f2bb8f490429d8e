"""API keys and their roles. tests/service/test_contract.py asks each route."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from service.errors import Denied, Forbidden, Unauthorized
from service.http.api_keys import Access, Keys
from service.settings import Settings

RETRIEVE, WRITE, ADMIN, NAMED = "retrieve-0123456789", "write-0123456789", "admin-0123456789", "admin-key-of-alice"
INTERNAL = "internal-0123456789"
RETRIEVE_ID, ADMIN_ID = "0e9c038e", "2e7be159"
"""The first hex digits of a key's SHA-256: printf %s KEY | sha256sum."""


def keys(
    retrieve: tuple[str, ...] = (RETRIEVE,), admin: tuple[str, ...] = (ADMIN, f"alice:{NAMED}"), write: tuple[str, ...] = (WRITE,)
) -> Keys:
    return Keys(*([SecretStr(key) for key in own] for own in (retrieve, admin, write, (f"router:{INTERNAL}",))))


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_a_key_opens_what_its_role_allows_and_is_told_by_its_name_or_its_hash() -> None:
    assert keys().check("retrieve", bearer(RETRIEVE)) == RETRIEVE_ID
    assert keys().check("retrieve", bearer(ADMIN)) == ADMIN_ID
    assert keys().check("retrieve", b"bearer  " + ADMIN.encode() + b" ") == ADMIN_ID
    for access in ("retrieve", "write", "admin"):
        assert keys().check(access, bearer(NAMED)) == "alice"
    assert keys().check("internal", bearer(INTERNAL)) == "router"
    assert keys().roles == ["admin", "write", "retrieve", "internal"]
    assert keys(write=()).roles == ["admin", "retrieve", "internal"]
    with pytest.raises(Denied):
        keys().check("admin", bearer(f"alice:{NAMED}"))  # the name is no part of it


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic abc", RETRIEVE.encode(), bearer(RETRIEVE[:-1]), bearer("x")])
@pytest.mark.parametrize("access", ["retrieve", "write", "admin", "private"])
def test_without_a_known_key_nothing_is_open(header: bytes | None, access: Access) -> None:
    with pytest.raises(Unauthorized) as raised:
        keys().check(access, header)
    assert raised.value.reason == ("missing" if not header else "unknown" if header.startswith(b"Bearer ") and header[7:] else "malformed")


@pytest.mark.parametrize(
    ("key", "access", "role", "message"),
    [
        (RETRIEVE, "admin", "admin", "This key may retrieve; this route needs an admin key"),
        (RETRIEVE, "private", "admin", "This key may retrieve; this route needs an admin key"),
        (RETRIEVE, "write", "write", "This key may retrieve; this route needs a write key"),
        (WRITE, "retrieve", "retrieve", "This key may write; this route needs a retrieval key"),
        (WRITE, "admin", "admin", "This key may write; this route needs an admin key"),
        (WRITE, "internal", "internal", "This key may write; this route needs an internal key"),
        (INTERNAL, "retrieve", "retrieve", "This key may search shards; this route needs a retrieval key"),
    ],
)
def test_a_key_of_another_role_is_refused(key: str, access: Access, role: str, message: str) -> None:
    with pytest.raises(Forbidden, match=message) as raised:
        keys().check(access, bearer(key))
    assert (raised.value.role, raised.value.reason) == (role, "role")


def test_a_key_of_two_roles_has_both() -> None:
    for access in ("retrieve", "write"):
        assert keys(write=(RETRIEVE,)).check(access, bearer(RETRIEVE)) == RETRIEVE_ID


def test_the_name_does_not_make_a_key_long_enough() -> None:
    Settings(admin_keys=(SecretStr(f"alice:{NAMED}"),))
    with pytest.raises(ValidationError, match="at least 16 characters"):
        Settings(admin_keys=(SecretStr("alice-of-the-long-name:short"),))
