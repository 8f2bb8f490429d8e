"""The TOML file of keys, which is usually mounted from a secret: the role, models, expiry and limits of each key.

    [[keys]]
    name = "shop-web"               # in logs, audit and metrics
    key = "at least 16 characters"  # or sha256 = "64 hex digits" of it
    role = "retrieve"               # retrieve, write, admin or internal
    models = ["books", "films"]     # default: all; models that do not exist yet may be named
    expires = 2027-01-01T00:00:00Z
    rate = 50                       # requests a second, with `burst` (default: one second's) at once
    cost = 0.5                      # engine seconds a second

Knows the file. Does not know requests, nor how keys are checked.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from espalier.errors import expectation

Role = Literal["retrieve", "write", "admin", "internal"]
MOST_KEYS = 1000
"""Most keys of a file. Each has labels in the metrics, and every request is compared with all keys."""
MOST_BYTES, MOST_LINE = 1 << 18, 4096
"""Most bytes of a file and of a line. (Parsing a name of many dotted parts takes memory by the square of their number.)"""
MIN_LIMIT = 1e-3
"""Least rate and cost. To ban a client, remove its key."""
SHOWN_FIELDS = ("rate", "burst", "cost", "expires")
"""Fields whose wrong values are shown in messages. A wrong value of any other field may be a key."""
LEAST_CHARACTERS = 16
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name
    key: Annotated[str, StringConstraints(min_length=LEAST_CHARACTERS, max_length=1024)] | None = None
    sha256: Digest | None = None
    role: Role
    models: list[Annotated[str, StringConstraints(min_length=1, max_length=200)]] | None = None
    expires: AwareDatetime | None = None
    rate: float | None = Field(default=None, ge=MIN_LIMIT, le=1e6)
    burst: int | None = Field(default=None, ge=1, le=1_000_000)
    cost: float | None = Field(default=None, ge=MIN_LIMIT, le=1e4)

    @model_validator(mode="after")
    def _check_combinations(self) -> Entry:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("either `key` or `sha256`")
        if self.burst is not None and self.rate is None:
            raise ValueError("`burst` beside a `rate` alone")
        return self


class File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    keys: list[Entry] = Field(max_length=MOST_KEYS)


@dataclass(frozen=True)
class Key:
    """A key that the service knows.

    name               in logs, audit and metrics
    digest             SHA-256 of the key
    models             models that it may name; None: all
    expires            None: never
    rate, burst, cost  limits, see the module; None: no limit
    """

    name: str
    digest: bytes
    role: Role
    models: frozenset[str] | None = None
    expires: datetime | None = None
    rate: float | None = None
    burst: float = 1.0
    cost: float | None = None


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises ValueError, whose message names the faulty key by its number and shows no key."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if len(raw) > MOST_BYTES:
        raise ValueError(f"{path}: more than {MOST_BYTES:,} bytes")
    if any(len(line) > MOST_LINE for line in raw.splitlines()):
        raise ValueError(f"{path}: a line of more than {MOST_LINE:,} bytes")
    try:
        document = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # its message may quote a key
        position = re.search(r"\(at [^()]*\)$", str(error))
        raise ValueError(f"{path}: no TOML{'' if position is None else f' {position[0]}'}") from None
    try:
        entries = File.model_validate(document).keys
    except ValidationError as error:
        raise ValueError(f"{path}: {_first_error(error)}") from None
    for noun, values in (("name", [entry.name for entry in entries]), ("key", [_digest(entry) for entry in entries])):
        if len(set(values)) < len(values):
            duplicate = next(position for position, value in enumerate(values) if value in values[:position])
            raise ValueError(f"{path}: keys[{duplicate}]: its {noun} is that of another one, expected each once")
    return tuple(_key_of_entry(entry) for entry in entries)


def _key_of_entry(entry: Entry) -> Key:
    burst = max(1.0, entry.rate or 1.0) if entry.burst is None else float(entry.burst)
    models = None if entry.models is None else frozenset(entry.models)
    return Key(entry.name, _digest(entry), entry.role, models, entry.expires, entry.rate, burst, entry.cost)


def _digest(entry: Entry) -> bytes:
    return hashlib.sha256((entry.key or "").encode()).digest() if entry.sha256 is None else bytes.fromhex(entry.sha256)


def _first_error(error: ValidationError) -> str:
    """The first error, with the path of its field."""
    first_error = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first_error["loc"]).lstrip(".")
    got = f"got {str(first_error['input'])[:80]!r}, " if first_error["loc"] and first_error["loc"][-1] in SHOWN_FIELDS else ""
    return f"{path or 'the file'}: {got}expected {expectation(first_error)}"
