"""The building blocks of configurations: sections of keys, unions over a kind, and one way to refuse a wrong value.

A section whose key `kind` (or `format`) has fixed values belongs to those kinds. Unions of sections are discriminated by that key. So a key
of another kind is an error, which names the kinds that have it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from espalier.errors import MISSING, InvalidConfig, expectation
from espalier.manifest import MAX_BEAM

T = TypeVar("T")
Raw = Mapping[str, Any]
"""A configuration as it stands in TOML or JSON."""


class Section(BaseModel):
    """Some keys of a configuration. Unknown keys are refused, and so are infinities and NaN: TOML can write them.

    The string below a key describes it (`options.py`). A key without one inherits its description from the base section.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    FIXED: ClassVar[tuple[str, ...]] = ()
    """Keys that must have their default in this section. No page lists them."""

    @field_validator("*")
    @classmethod
    def _is_fixed(cls, value: object, info: ValidationInfo) -> object:
        if info.field_name in cls.FIXED and value != cls.model_fields[info.field_name].default:
            raise ValueError("no such key: its kind leaves no choice")
        return value


class SearchLimits(Section):
    """The exported model's defaults for requests, and the limits of requests."""

    beam_size: int = Field(default=200, ge=1, le=MAX_BEAM)
    """default beam size"""
    m: int = Field(default=50, ge=1, le=MAX_BEAM)
    """default number of results"""
    max_beam_size: int = Field(default=1000, ge=1, le=MAX_BEAM)
    """largest beam size of a request. Requests for more are refused"""
    max_m: int = Field(default=1000, ge=1, le=MAX_BEAM)
    """largest number of results of a request. Requests for more are refused"""
    min_beam_size: int | None = Field(default=None, ge=1)
    """smallest beam near a deadline; without it 10. As large as the largest beam: a beam is never shrunk"""

    @model_validator(mode="after")
    def _within_limits(self) -> SearchLimits:
        for name in ("beam_size", "m"):
            limit = getattr(self, f"max_{name}")
            if getattr(self, name) > limit:
                raise InvalidConfig(f"search.{name}", getattr(self, name), f"at most search.max_{name}, {limit}")
        return self


def auto_or(expected: str, fits: Callable[[float], bool], kind: type[int] | UnionType = int | float) -> BeforeValidator:
    """A validator of a key that is "auto" or a number of a kind that fits. Its error says what is expected."""

    def checked(value: object) -> object:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if value != "auto" and not (is_number and fits(cast(float, value))):
            raise ValueError(f'"auto" or {expected}')
        return value

    return BeforeValidator(checked)


SHARE = auto_or("a number from 0 to 1", lambda value: 0 <= value <= 1)


def auto_or_integer(least: int, most: int) -> BeforeValidator:
    """A validator of a key that is "auto" or an integer from `least` to `most`."""
    return auto_or(f"an integer from {least} to {most}", lambda value: least <= value <= most, int)


class Form(Generic[T]):
    """A configuration that can be checked: one section, or a union of sections over their kind."""

    def __init__(self, annotation: Any) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(annotation)
        self.sections = sections_in(annotation)

    def checked(self, raw: Raw) -> T:
        """The configuration in a mapping. Raises InvalidConfig, which names the key, its value and what was expected."""
        try:
            return self._adapter.validate_python(raw)
        except ValidationError as error:
            first = error.errors()[0]
            raise self._refusal(raw, first) from error

    def _refusal(self, raw: Raw, error: ErrorDetails) -> InvalidConfig:
        kind, value, context = error["type"], error["input"], error.get("ctx", {})
        key = _key(raw, error["loc"], kind == "missing")
        if kind == "union_tag_invalid":
            return InvalidConfig(_joined(key, context["discriminator"].strip("'")), context["tag"], _with_or(context["expected_tags"]))
        if kind == "union_tag_not_found" and isinstance(value, dict):
            name = context["discriminator"].strip("'").split("(")[0]
            kinds = dict.fromkeys(kind for section in self._sections_at(key) for kind in kinds_of(section))
            return InvalidConfig(_joined(key, name), MISSING, _with_or(", ".join(map(repr, kinds))))
        if kind in ("union_tag_not_found", "model_type", "model_attributes_type", "dict_type"):
            return InvalidConfig(key or "configuration", value, "a table of keys")
        if kind == "extra_forbidden":
            return InvalidConfig(key, value, self._expected_keys(key))
        if kind == "missing":
            return InvalidConfig(key, MISSING, "a value, since there is no default")
        return InvalidConfig(key or "configuration", value, expectation(error))

    def _sections_at(self, key: str) -> tuple[type[BaseModel], ...]:
        """The sections at a dotted key; those of the configuration itself for ""."""
        sections = self.sections
        for name in filter(None, key.split(".")):
            fields = [section.model_fields[name] for section in sections if name in section.model_fields]
            sections = tuple(inner for field in fields for inner in sections_in(field.annotation))
        return sections

    def owners(self, key: str) -> dict[str, list[str]]:
        """The kinds that have a dotted key: dotted key of the kind → its values. Empty if no kind has it."""
        kinds_by_key: dict[str, list[str]] = {}
        for section in self.sections:
            _find_owners(section, "", [part for part in key.split(".") if not part.isdecimal()], ("", ()), kinds_by_key)
        return kinds_by_key

    def _expected_keys(self, key: str) -> str:
        owners = self.owners(key)
        if not owners:
            section, _, name = key.rpartition(".")
            keys = list(dict.fromkeys(field for one in self._sections_at(section) for field in one.model_fields))
            nearest = get_close_matches(name, keys, 1)
            hint = f"did you mean {_joined(section, nearest[0])}?" if nearest else "`espalier options` lists all"
            return f"no such key; {hint}"
        return "no such key here: it is one of " + ", ".join(
            f"{name} {_with_or(', '.join(map(repr, kinds)))}" for name, kinds in owners.items()
        )


def number_of(key: str, value: T | Literal["auto"]) -> T:
    """A number that is configured or was read from the log. Raises InvalidConfig if it is still "auto"."""
    if value == "auto":
        raise InvalidConfig(key, value, "a number, or a log that it is read from")
    return value


def default_kind(kind: str, key: str = "kind") -> BeforeValidator:
    """A validator of a union over a kind. It sets the default kind if the key is absent."""
    return BeforeValidator(lambda raw: {key: kind} | raw if isinstance(raw, dict) else raw)


def sections_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The sections in a field's type; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_in(part))


def kind_key(section: type[BaseModel]) -> str | None:
    """The key that distinguishes a section from the others of its union."""
    for name in ("kind", "format"):
        if name in section.model_fields and get_origin(section.model_fields[name].annotation) is Literal:
            return name
    return None


def kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The kinds of a section; none if it has no key for them."""
    name = kind_key(section)
    return () if name is None else get_args(section.model_fields[name].annotation)


def read_toml(file: Path) -> dict[str, Any]:
    """A configuration as it stands in its file. Raises InvalidConfig."""
    if not file.is_file():
        raise InvalidConfig("--config", str(file), "a TOML file that exists")
    try:
        return tomllib.loads(file.read_text())
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are no text, and a number with too many digits
        raise InvalidConfig(str(file), str(error), "valid TOML") from error


def _find_owners(
    section: type[BaseModel], prefix: str, key: list[str], owner: tuple[str, tuple[str, ...]], kinds_by_key: dict[str, list[str]]
) -> None:
    name = kind_key(section)
    if name is not None:
        owner = prefix + name, kinds_of(section)
    if key[0] not in section.model_fields:
        return
    if len(key) == 1:
        if owner[1]:
            owner_kinds = kinds_by_key.setdefault(owner[0], [])
            owner_kinds += [kind for kind in owner[1] if kind not in owner_kinds]
        return
    for inner in sections_in(section.model_fields[key[0]].annotation):
        _find_owners(inner, f"{prefix}{key[0]}.", key[1:], owner, kinds_by_key)


def _key(raw: Any, location: Iterable[str | int], missing: bool) -> str:
    """The dotted key of an error. pydantic's locations also contain the kinds of unions, which are no keys."""
    names: list[str] = []
    for name in location:
        if isinstance(raw, Mapping):
            if name not in raw:
                continue
            raw = raw[name]
        elif isinstance(raw, list | tuple) and isinstance(name, int):
            raw = raw[name]
        else:
            break  # pydantic names the type of a plain union that did not fit
        names.append(str(name))
    return ".".join([*names, *([str([*location][-1])] if missing else [])])


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _with_or(names: str) -> str:
    """'a', 'b', 'c' → 'a', 'b' or 'c'."""
    first, comma, last = names.rpartition(", ")
    return f"{first} or {last}" if comma else last
