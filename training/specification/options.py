"""Lists the keys of a kind from the models that check them, for `espalier options` and docs/options.md.

Knows sections, fields and their descriptions. Has no own text about keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from espalier.errors import InvalidConfig

from ..specification.linear import LinearConfig
from ..specification.models import SPECIFICATION
from ..specification.ranker import RANKER_CONFIG
from ..specification.sections import Section, kind_key, kinds_of, sections_in

PYTHON_NAMES = {"int": "integer", "float": "number", "bool": "true or false", "str": "string", "Path": "path"}
FAMILIES = (("Models (`fit --config`)", SPECIFICATION.sections), ("Rankers (`fit-ranker --config`)", RANKER_CONFIG.sections))
TEXTS = tuple(section for section in SPECIFICATION.sections if issubclass(section, LinearConfig))
HISTORIES = tuple(section for section in SPECIFICATION.sections if section not in TEXTS)
PAGE_PARTS = (("Histories and vectors", HISTORIES), ("Texts and sparse features", TEXTS), FAMILIES[1])


@dataclass(frozen=True)
class Option:
    """A key of a configuration.

    name     dotted, without the kinds of sections
    only     the kinds of its section that have it; empty: all
    default  in TOML; None if there is none
    """

    name: str
    only: str
    type: str
    required: bool
    default: str | None
    meaning: str


def kinds() -> dict[str, type[BaseModel]]:
    """Every kind, with the section of its keys."""
    return {kind: section for _, sections in FAMILIES for section in sections for kind in kinds_of(section)}


def section_of(kind: str) -> type[BaseModel]:
    """The section of a kind's keys. Raises InvalidConfig."""
    section_of_kind = kinds()
    if kind not in section_of_kind:
        raise InvalidConfig("KIND", kind, f"one of {', '.join(section_of_kind)}")
    return section_of_kind[kind]


def options(section: type[BaseModel], prefix: str = "", only: str = "") -> Iterator[Option]:
    """The keys of a section, with those of inner sections at the position of their key."""
    key_of_kind = kind_key(section)
    fields = sorted(section.model_fields.items(), key=lambda entry: entry[0] != key_of_kind)  # the kind first
    for name, field in fields:
        inner = sections_in(field.annotation)
        if issubclass(section, Section) and name in section.FIXED:
            continue
        if not inner:
            meaning = "which keys there are" if name == key_of_kind else _description(section, name)
            default = None if field.is_required() or field.default is None else _toml(field.default)
            yield Option(prefix + name, only, _type(field), field.is_required(), default, meaning)
        elif len(inner) == 1:
            brackets = "[]" if "tuple" in str(field.annotation) else ""
            yield from options(inner[0], f"{prefix}{name}{brackets}.", only)
        else:
            yield from _merged(f"{prefix}{name}.", field, inner)


def summary() -> str:
    lines = []
    for title, sections in FAMILIES:
        lines += [f"{title}:"] + [f"  {kind:14} {_first_line(section)}" for section in sections for kind in kinds_of(section)] + [""]
    return "\n".join([*lines, "espalier options KIND lists the keys of one."])


def as_text(kind: str) -> str:
    """The keys of a kind, for a terminal."""
    section = section_of(kind)
    lines = [f"{kind}: {_first_line(section)}", ""]
    for option in options(section):
        restriction = f" ({option.only})" if option.only else ""
        lines += [f"{option.name} = {_default(option, kind)}{restriction}", f"    {option.type}. {option.meaning}".rstrip()]
    return "\n".join(lines)


def as_markdown() -> str:
    lines = [
        "# Options",
        "",
        "All keys of all [kinds](train.md#the-configuration), with the first sentence of each description. `espalier options KIND` prints",
        "the whole, with types and limits. Words in italics restrict a row to kinds, or to values of the section's own kind. This page is",
        "generated: `espalier options --markdown > docs/options.md`.",
    ]
    shared = _shared_keys(SPECIFICATION.sections)
    lines += ["", "## All models (`fit --config`)", *_table(shared, _every_kind(SPECIFICATION.sections))]
    for title, sections in PAGE_PARTS:
        lines += ["", f"## {title}", *_tables(sections, shared)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Variant:
    """A key's default and meaning in some kinds."""

    kinds: tuple[str, ...]
    only: str
    default: str
    meaning: str

    def label(self, all_kinds: tuple[str, ...]) -> str:
        """The kinds that have the variant, in italics; empty if all have it."""
        other_kinds = [kind for kind in all_kinds if kind not in self.kinds]
        names = [f"not {', '.join(other_kinds)}" if len(other_kinds) < len(self.kinds) else ", ".join(self.kinds)] if other_kinds else []
        return f"*{': '.join([*names, *([self.only] if self.only else [])])}*" if names or self.only else ""


Variants = Mapping[str, Sequence[_Variant]]
"""The name of each key, with its variants."""


def _every_kind(sections: Sequence[type[BaseModel]]) -> tuple[str, ...]:
    return tuple(kind for section in sections for kind in kinds_of(section))


def _shared_keys(sections: Sequence[type[BaseModel]]) -> Variants:
    """The keys with the same meaning in all kinds."""
    all_kinds = _every_kind(sections)
    return {
        name: variants
        for name, variants in _by_name(sections).items()
        if len({variant.meaning for variant in variants}) == 1
        and not any(variant.only for variant in variants)
        and sum(len(variant.kinds) for variant in variants) == len(all_kinds)
    }


def _tables(sections: Sequence[type[BaseModel]], shared: Variants) -> list[str]:
    """A table for each section of the file, without the shared keys. A table does not name kinds without its section."""
    tables: dict[str, dict[str, Sequence[_Variant]]] = {}
    for name, variants in _by_name(sections).items():
        if name not in shared:
            table = name.split(".")[0].removesuffix("[]") if "." in name else ""
            tables.setdefault(table, {})[name] = variants
    lines = []
    for table, keys in tables.items():
        owners = {kind for variants in keys.values() for variant in variants for kind in variant.kinds}
        all_kinds = tuple(kind for kind in _every_kind(sections) if kind in owners)
        lines += [*(["", f"### {table}"] if table else []), *_table(keys, all_kinds)]
    return lines


def _table(keys: Variants, all_kinds: tuple[str, ...]) -> list[str]:
    return ["", "key | default | meaning", "---|---|---", *(_row(name, variants, all_kinds) for name, variants in keys.items())]


def _by_name(sections: Sequence[type[BaseModel]]) -> dict[str, list[_Variant]]:
    """Key → its variants. Kinds with the same default and meaning share a variant."""
    kinds_by_text: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for section in sections:
        for option in options(section):
            if option.name != "kind":
                texts = option.only, _default(option, None), _first_sentence(option.meaning)
                kinds_by_text.setdefault(option.name, {}).setdefault(texts, []).extend(kinds_of(section))
    return {name: [_Variant(tuple(dict.fromkeys(kinds)), *text) for text, kinds in texts.items()] for name, texts in kinds_by_text.items()}


def _row(name: str, variants: Sequence[_Variant], all_kinds: tuple[str, ...]) -> str:
    """The row of a key: one default and one meaning if all variants agree, else each with its kinds."""
    labels = [variant.label(all_kinds) for variant in variants]
    defaults = [variant.default for variant in variants]
    meanings = [variant.meaning for variant in variants]
    differ = len(set(defaults)) > 1
    default = ", ".join(map("{} {}".format, defaults, labels)) if differ else defaults[0]
    if len(set(meanings)) > 1:
        meaning = ". ".join(map("{}: {}".format, labels, meanings))
    elif differ or not all(labels):
        meaning = meanings[0]
    else:
        meaning = f"{', '.join(labels)}: {meanings[0]}"
    return f"`{name}` | {default} | {meaning}"


def _first_sentence(description: str) -> str:
    return description.split(". ")[0].removesuffix(".")


def _merged(prefix: str, field: FieldInfo, sections: tuple[type[BaseModel], ...]) -> Iterator[Option]:
    """The keys of a union: a key that is the same in several kinds appears once."""
    options_by_text: dict[tuple[str, str | None, str], list[tuple[Option, tuple[str, ...]]]] = {}
    name = next(filter(None, map(kind_key, sections)), None)
    for section in sections:
        for option in options(section):
            if option.name != name:
                options_by_text.setdefault((option.name, option.default, option.meaning), []).append((option, kinds_of(section)))
    all_kinds = [kind for section in sections for kind in kinds_of(section)]
    if name is not None:
        default = getattr(field.default, name, None)
        described = [(kind, _first_sentence(_first_line(section))) for section in sections for kind in kinds_of(section)]
        meaning = "; ".join(f"`{json.dumps(kind)}`: {text}" for kind, text in described)
        choices = " or ".join(json.dumps(kind) for kind in all_kinds)
        yield Option(prefix + name, "", choices, default is None, None if default is None else json.dumps(default), meaning)
    for same_options in options_by_text.values():
        option = same_options[0][0]
        kinds_here = [kind for _, kinds in same_options for kind in kinds]
        only = "" if len(kinds_here) == len(all_kinds) else ", ".join([*kinds_here, *([option.only] if option.only else [])])
        yield Option(prefix + option.name, only, option.type, option.required, option.default, option.meaning)


def _description(section: type[BaseModel], name: str) -> str:
    """The description of a field, or of the inherited field that it overrides, on one line."""
    fields = (base.model_fields[name] for base in section.__mro__ if issubclass(base, BaseModel) and name in base.model_fields)
    return " ".join(next((field.description for field in fields if field.description), "").split())


def _type(field: FieldInfo) -> str:
    """A field's type and limits in words."""
    limits = []
    for limit in field.metadata:
        match limit:
            case Ge(ge=low):
                limits.append(f"at least {low}")
            case Gt(gt=low):
                limits.append(f"above {low}")
            case Le(le=high):
                limits.append(f"at most {high}")
            case Lt(lt=high):
                limits.append(f"below {high}")
            case MinLen(min_length=least):
                limits.append("not empty" if least == 1 else f"at least {least} of them")
    return ", ".join([_name(field.annotation), *limits])


def _name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(json.dumps(value) for value in inner)
    if origin is tuple:
        return f"list of {_name(inner[0])}"
    if origin is not None and type(None) not in inner and not hasattr(annotation, "__metadata__"):
        return " or ".join(_name(part) for part in inner)
    if hasattr(annotation, "__metadata__"):
        return _name(inner[0])
    if inner:
        return " or ".join(_name(part) for part in inner if part is not type(None))
    return PYTHON_NAMES.get(getattr(annotation, "__name__", ""), str(annotation))


def _default(option: Option, kind: str | None) -> str:
    if option.name == "kind" and kind is not None:
        return json.dumps(kind)
    if option.default is not None:
        return option.default if kind is not None else f"`{option.default}`"
    return "required" if option.required else "none"


def _toml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _first_line(section: type[BaseModel]) -> str:
    return (section.__doc__ or "").splitlines()[0]
