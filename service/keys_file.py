"""The file of keys, TOML, which a secret mounts and rotates: what each key may do, with which models, until when, and how much of it.

    [[keys]]
    name = "shop-web"               # in logs, audit and metrics
    key = "at least 16 characters"  # or sha256 = "64 hex digits" of it
    role = "retrieve"               # retrieve, write, admin or internal
    models = ["books", "films"]     # all, where it is left out; names that are not there yet are taken
    expires = 2027-01-01T00:00:00Z
    rate = 50                       # requests a second, with `burst` (default: one second's) at once
    cost = 0.5                      # engine seconds a second

Knows the file. Does not know requests, nor what is done with a key.
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
"""Of a file: each has a place among the metrics, and every request is compared with all of them."""
MOST_BYTES, MOST_LINE = 1 << 18, 4096
"""Of a file and of a line: a name of many dotted parts takes memory by their square."""
LEAST = 1e-3
"""Of a rate and of a cost: less is no limit but a ban, for which there is no key."""
SHOWN = ("rate", "burst", "cost", "expires")
"""Fields whose values are shown where they are wrong. In the place of any other one may stand a key."""
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
    rate: float | None = Field(default=None, ge=LEAST, le=1e6)
    burst: int | None = Field(default=None, ge=1, le=1_000_000)
    cost: float | None = Field(default=None, ge=LEAST, le=1e4)

    @model_validator(mode="after")
    def _whole(self) -> Entry:
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

    name     in logs, audit and metrics
    digest   SHA-256 of it
    models   that it may name; None: all
    expires  None: never
    rate, burst, cost  its limits, None where it has none; see the module
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
    """The keys of a file. Raises ValueError, which says what is wrong with which key and shows none."""
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
    except (ValueError, RecursionError) as error:  # what it says may quote a key
        place = re.search(r"\(at [^()]*\)$", str(error))
        raise ValueError(f"{path}: no TOML{'' if place is None else f' {place[0]}'}") from None
    try:
        entries = File.model_validate(document).keys
    except ValidationError as error:
        raise ValueError(f"{path}: {_first(error)}") from None
    for what, values in (("name", [entry.name for entry in entries]), ("key", [_digest(entry) for entry in entries])):
        if len(set(values)) < len(values):
            twice = next(place for place, value in enumerate(values) if value in values[:place])
            raise ValueError(f"{path}: keys[{twice}]: its {what} is that of another one, expected each once")
    return tuple(_known(entry) for entry in entries)


def _known(entry: Entry) -> Key:
    burst = max(1.0, entry.rate or 1.0) if entry.burst is None else float(entry.burst)
    models = None if entry.models is None else frozenset(entry.models)
    return Key(entry.name, _digest(entry), entry.role, models, entry.expires, entry.rate, burst, entry.cost)


def _digest(entry: Entry) -> bytes:
    return hashlib.sha256((entry.key or "").encode()).digest() if entry.sha256 is None else bytes.fromhex(entry.sha256)


def _first(error: ValidationError) -> str:
    """What is wrong first, by its place."""
    wrong = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong["loc"]).lstrip(".")
    given = f"got {str(wrong['input'])[:80]!r}, " if wrong["loc"] and wrong["loc"][-1] in SHOWN else ""
    return f"{where or 'the file'}: {given}expected {expectation(wrong)}"
