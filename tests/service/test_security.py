"""API keys and their roles."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from service.errors import Forbidden, Unauthorized
from service.http.api_keys import Keys, Role

RETRIEVE, WRITE, ADMIN = "retrieve-0123456789", "write-0123456789", "admin-0123456789"


def keys(
    retrieve: tuple[str, ...] = (RETRIEVE,), admin: tuple[str, ...] = (ADMIN, "admin-second-key-1"), write: tuple[str, ...] = (WRITE,)
) -> Keys:
    return Keys(*([SecretStr(key) for key in own] for own in (retrieve, admin, write)))


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_a_key_opens_what_its_role_allows() -> None:
    keys().check("retrieve", bearer(RETRIEVE))
    keys().check("retrieve", bearer(ADMIN))
    keys().check("admin", bearer("admin-second-key-1"))
    keys().check("retrieve", b"bearer  " + RETRIEVE.encode() + b" ")


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic abc", RETRIEVE.encode(), bearer(RETRIEVE[:-1]), bearer("x")])
@pytest.mark.parametrize("role", ["retrieve", "write", "admin"])
def test_without_a_known_key_nothing_is_open(header: bytes | None, role: Role) -> None:
    with pytest.raises(Unauthorized):
        keys().check(role, header)


def test_a_retrieval_key_is_no_admin_key() -> None:
    with pytest.raises(Forbidden, match="admin key"):
        keys().check("admin", bearer(RETRIEVE))


def test_a_write_key_writes_and_does_nothing_else() -> None:
    keys().check("write", bearer(WRITE))
    keys().check("write", bearer(ADMIN))
    for role in ("retrieve", "admin"):
        with pytest.raises(Forbidden, match="This key may write") as raised:
            keys().check(role, bearer(WRITE))
        assert (raised.value.role, raised.value.reason) == (role, "role")
    with pytest.raises(Forbidden, match="a write key"):
        keys().check("write", bearer(RETRIEVE))


def test_a_key_of_two_roles_has_both() -> None:
    both = keys(write=(RETRIEVE,))
    both.check("retrieve", bearer(RETRIEVE))
    both.check("write", bearer(RETRIEVE))


def test_without_write_keys_nobody_writes() -> None:
    for key in (RETRIEVE, ADMIN):
        with pytest.raises(Forbidden, match="ESPALIER_WRITE_KEYS") as raised:
            keys(write=()).check("write", bearer(key))
        assert raised.value.reason == "off"


def test_without_keys_everybody_retrieves_and_nobody_administers() -> None:
    keys(retrieve=(), admin=()).check("retrieve", None)
    with pytest.raises(Forbidden, match="ESPALIER_ADMIN_KEYS"):
        keys(retrieve=(), admin=()).check("admin", bearer(ADMIN))
    keys(retrieve=()).check("retrieve", None)
