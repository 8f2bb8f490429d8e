"""What a router is told."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from espalier.errors import InvalidConfig
from service.router.config import RouterConfig, with_key_of
from service.settings import Settings


@pytest.mark.parametrize(
    ("own", "internal_keys", "shown"),
    [
        (None, "router-2026:a-key-of-many-letters,another-key-of-letters", "a-key-of-many-letters"),
        (None, "another-key-of-letters", "another-key-of-letters"),
        ("mine", "a-key-of-many-letters", "mine"),
        (None, None, None),
    ],
)
def test_shards_are_shown_the_configured_key_or_the_first_of_the_processs_own(
    own: str | None, internal_keys: str | None, shown: str | None
) -> None:
    settings = Settings.model_validate({} if internal_keys is None else {"internal_keys": internal_keys})
    found = with_key_of(RouterConfig(key=None if own is None else SecretStr(own)), settings).key
    assert (None if found is None else found.get_secret_value()) == shown


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    settings = Settings.model_validate({"internal_keys": "schlüssel:ein-langer-schlüssel"})
    with pytest.raises(InvalidConfig, match="ESPALIER_INTERNAL_KEYS: got 'a first key with other characters', expected a key of ASCII"):
        with_key_of(RouterConfig(), settings)
