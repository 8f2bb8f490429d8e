"""The configuration of a router: where its shards are, and how long it waits for them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from espalier.errors import MISSING, InvalidConfig, expectation

from ..router.replicas import SHARE
from ..settings import Settings, named_key, service_address

DNS = "dns+"
"""Prefix of an address whose name may resolve to several: `dns+http://NAME:PORT`."""

MAX_ADDRESSES = 1024


def _address(value: str) -> str:
    prefix = DNS if value.startswith(DNS) else ""
    return prefix + service_address(value.removeprefix(DNS))


def _for_a_header(key: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[\x21-\x7e]+", key.get_secret_value()):
        raise ValueError("expected a key of ASCII characters without spaces and line ends")
    return key


class Patience(BaseModel):
    """How long a router waits for shards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    calls: int = Field(default=4, ge=1, le=64, description="Searches of one version that are under way at once.")
    hedge: float = Field(default=SHARE, ge=0, le=1, description="Second tries at slow shards, as a share of first tries; 0: none.")
    poll_s: float = Field(default=1.0, gt=0, le=60, description="Seconds between two looks at what each address holds.")
    poll_timeout_s: float = Field(default=0.5, gt=0, le=60, description="Seconds in which a look must be answered.")
    patience_s: float = Field(default=10.0, gt=0, le=600, description="Seconds to wait for golden queries.")
    placing_s: float = Field(
        default=3.0, gt=0, le=60, description="Seconds to wait for the places of some new items; other writes wait behind them."
    )


class RouterConfig(Patience):
    """The options of `espalier route`, or the keys of its configuration file."""

    shards: tuple[Annotated[str, AfterValidator(_address)], ...] = Field(
        default=(),
        max_length=MAX_ADDRESSES,
        description="Addresses of services that hold shards, in any order.",
    )
    key: Annotated[SecretStr, AfterValidator(_for_a_header)] | None = Field(default=None, description="Key of their role `internal`.")
    min_replicas: int = Field(default=1, ge=1, le=64, description="Replicas that each shard of a version must have before it serves.")
    connect_timeout_s: float = Field(default=0.25, gt=0, le=60, description="Seconds in which a connection must be made.")
    connections: int = Field(default=64, ge=1, le=4096, description="Most searches under way at one address.")


def read_config(path: Path | None, shards: str | None) -> RouterConfig:
    """The configuration of a TOML file, if there is one. shards: addresses in place of the file's, comma-separated.

    Raises InvalidConfig, which shows no keys, and OSError.
    """
    try:
        values = {} if path is None else tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(path), "other text", f"a TOML file ({error})") from None
    if shards is not None:
        values["shards"] = [address.strip() for address in shards.split(",") if address.strip()]
    try:
        config = RouterConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        shown = "a key" if field.startswith("key") else first["input"]
        raise InvalidConfig(field, shown, expectation({**first, "input": shown})) from None
    if not config.shards:
        raise InvalidConfig("shards", MISSING, "addresses of services that hold shards, by --shards or in --config")
    return config


def with_key_of(config: RouterConfig, settings: Settings) -> RouterConfig:
    """The configuration with a key: without one of its own, the first internal key of this process. Names of keys are not sent.

    Raises InvalidConfig if the key cannot be sent in a header.
    """
    if config.key is not None or not settings.internal_keys:
        return config
    _, key = named_key(settings.internal_keys[0].get_secret_value())
    try:
        return config.model_copy(update={"key": _for_a_header(SecretStr(key))})
    except ValueError as error:
        raise InvalidConfig("ESPALIER_INTERNAL_KEYS", "a first key with other characters", str(error).removeprefix("expected ")) from None
