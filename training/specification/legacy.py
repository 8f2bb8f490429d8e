"""Configurations as they were before each kind had keys of its own, and what became of their keys.

A configuration that names its `kind` is of today and stays as it is. In any other, old keys get their new names; removed keys, and keys
that its kind never looked at, are left out. A file gets one warning for each such key. The manifest of a bundle is read in silence, unless
a value that trained the model can no longer be given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from training.specification.sections import Raw, kind_key, kinds_of, sections_in

log = logging.getLogger(__name__)
Source = Literal["file", "manifest"]


@dataclass(frozen=True)
class RemovedKey:
    """A key that configurations no longer have.

    always   the value that holds now
    matters  where another value made another model; the warning says so there, for a manifest too
    now      what holds now, in words, where the value does not say it
    """

    always: object
    matters: Callable[[Raw], bool] = lambda raw: True
    now: str = ""


@dataclass(frozen=True)
class Legacy:
    """The old keys of some configurations.

    sections      those of today's kinds
    default_kind  where neither `kind` nor an old key says which
    renamed       old dotted key → new one
    removed       dotted keys that configurations no longer have
    unused        dotted keys that a section had whatever its kind → the only value that was accepted where the kind did not look at it,
                  or ANY
    """

    sections: tuple[type[BaseModel], ...]
    default_kind: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, RemovedKey] = field(default_factory=dict)
    unused: Mapping[str, object] = field(default_factory=dict)

    def modernised(self, raw: Raw, source: Source) -> dict[str, Any]:
        """A configuration with the keys of today."""
        if "kind" in raw:
            return dict(raw)
        warn = log.warning if source == "file" else log.debug
        found = _copied(raw)
        for key, removed in self.removed.items():
            if key in _keys(found):
                value = _popped(found, key)
                if value == removed.always or not removed.matters(raw):
                    warn("%s is gone: it is always %s", key, removed.now or _written(removed.always))
                else:
                    log.warning(
                        "%s is gone: it was %s here, now it is always %s: expect another model",
                        key,
                        _written(value),
                        _written(removed.always),
                    )
        for key, name in self.renamed.items():
            if key in _keys(found):
                _set(found, name, _popped(found, key))
                warn("%s is `%s` now", key, name)
        found.setdefault("kind", self.default_kind)
        section = next((section for section in self.sections if found["kind"] in kinds_of(section)), None)
        if section is not None:
            self._leave_out_unused(section, found, "", f"kind {found['kind']}", warn)
        return found

    def _leave_out_unused(self, section: type[BaseModel], raw: dict[str, Any], prefix: str, kind: str, warn: Callable[..., None]) -> None:
        for name in list(raw):
            key, value = prefix + name, raw[name]
            known = section.model_fields.get(name)
            if known is not None:
                inner = _chosen(known, value) if isinstance(value, dict) else None
                if inner is not None:
                    of_inner = f"{key}.{kind_key(inner)} {' or '.join(kinds_of(inner))}" if kind_key(inner) else kind
                    self._leave_out_unused(inner, value, f"{key}.", of_inner, warn)
            elif key in self.unused and self.unused[key] in (ANY, value):
                del raw[name]
                warn("%s has no effect: it is no key of %s", key, kind)


ANY = object()


def _chosen(known: FieldInfo, value: Raw) -> type[BaseModel] | None:
    """The section of a union that a mapping is of; None where it is of none of them."""
    for section in sections_in(known.annotation):
        name = kind_key(section)
        if name is None or value.get(name, getattr(known.default, name, None)) in kinds_of(section):
            return section
    return None


def _copied(raw: Raw) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in raw.items()}


def _keys(raw: Raw, prefix: str = "") -> set[str]:
    """The dotted keys of a mapping."""
    inner = [_keys(value, f"{prefix}{key}.") for key, value in raw.items() if isinstance(value, Mapping)]
    return {prefix + key for key in raw}.union(*inner)


def _popped(raw: dict[str, Any], key: str) -> Any:
    *path, name = key.split(".")
    for part in path:
        raw = raw[part]
    return raw.pop(name)


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        raw = raw.setdefault(part, {})
    raw[name] = value


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if not isinstance(value, str) else f'"{value}"'
