"""What a router is told."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from espalier.errors import InvalidConfig
from service.router.config import RouterConfig, with_key_of
from service.settings import Settings


def test_the_key_that_shards_are_shown_is_the_first_of_the_processs_own_without_its_name() -> None:
    settings = Settings.model_validate({"internal_keys": "router-2026:a-key-of-many-letters,another-key-of-letters"})
    found = with_key_of(RouterConfig(shards=("http://shard",)), settings).key
    assert found is not None
    assert found.get_secret_value() == "a-key-of-many-letters"
    plain = with_key_of(RouterConfig(), Settings.model_validate({"internal_keys": "another-key-of-letters"})).key
    assert plain is not None
    assert plain.get_secret_value() == "another-key-of-letters"


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    settings = Settings.model_validate({"internal_keys": "schlüssel:ein-langer-schlüssel"})
    with pytest.raises(InvalidConfig, match="ESPALIER_INTERNAL_KEYS: got 'a first key with other characters', expected a key of ASCII"):
        with_key_of(RouterConfig(), settings)


def test_a_key_of_the_configuration_wins() -> None:
    settings = Settings.model_validate({"internal_keys": "a-key-of-many-letters"})
    assert with_key_of(RouterConfig(key=SecretStr("mine")), settings).key == SecretStr("mine")
    assert with_key_of(RouterConfig(), Settings()).key is None
