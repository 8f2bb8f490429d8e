"""The specification of a training run: a union of all kinds, read from a TOML file or from the manifest of a bundle.

The kinds are in `deep.py` (tree models over users' lists), `linear.py` (texts and sparse features).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from espalier.errors import InvalidConfig
from espalier.manifest import ManifestDraft

from ..specification.deep import DeepConfig, DeepKinds, WindowConfig
from ..specification.linear import LinearConfig, XRegConfig
from ..specification.sections import Form, Raw, kinds_of, read_toml

Specification = Annotated[DeepKinds | LinearConfig | XRegConfig, Field(discriminator="kind")]
SPECIFICATION: Form[DeepConfig | LinearConfig] = Form(Specification)
LINEAR_KINDS = (*kinds_of(LinearConfig), *kinds_of(XRegConfig))
SHARED_KEYS = ("name", "seed", "data")
"""Keys with the same meaning for every kind."""

Family = TypeVar("Family", bound=DeepConfig | LinearConfig)


def deep_config(raw: Raw) -> DeepConfig:
    """The specification of a tree model in a mapping. Raises InvalidConfig."""
    return _of_family(SPECIFICATION.checked(raw), DeepConfig, "kind")


def window_config(raw: Raw) -> WindowConfig:
    """The specification of a tree model with windowed histories, in a mapping. Raises InvalidConfig."""
    return _of_family(SPECIFICATION.checked(raw), WindowConfig, "kind")


def read_config(file: Path, earlier: Path | None = None, kind: str | None = None, **files: Path | None) -> DeepConfig | LinearConfig:
    """The specification in a TOML file. Raises InvalidConfig.

    kind     replaces the file's kind; data, seed, name and search.exclude_seen stay, other keys get the kind's defaults; None: the file's
    earlier  replaces `earlier_model`, if the file has it
    files    replace `data.train` and `data.test` of linear models, unless None
    """
    raw = read_toml(file)
    if kind is not None and kind != raw.get("kind"):
        search = raw.get("search")
        raw = {key: raw[key] for key in SHARED_KEYS if key in raw} | {"kind": kind}
        if isinstance(search, dict) and "exclude_seen" in search:  # a part of the task
            raw["search"] = {"exclude_seen": search["exclude_seen"]}
    if earlier is not None and raw.get("earlier_model") is not None:
        raw["earlier_model"] = str(earlier)
    if raw.get("kind") in LINEAR_KINDS and isinstance(raw.get("data"), dict):
        raw["data"] |= {key: path for key, path in files.items() if path is not None}
    try:
        return SPECIFICATION.checked(raw)
    except InvalidConfig as refusal:
        if kind is None:
            raise
        raise InvalidConfig("--kind", kind, f"a kind that trains on the data of {file}; with this one, {refusal}") from refusal


def read_deep_config(file: Path) -> DeepConfig:
    """The specification of a tree model in a TOML file. Raises InvalidConfig."""
    return deep_config(read_toml(file))


def config_of(manifest: ManifestDraft, family: type[Family], option: str = "--model") -> Family:
    """The specification that a bundle was trained with. Raises InvalidConfig with `option` if it was imported, or is of another family."""
    if not was_trained_here(manifest):
        raise InvalidConfig(option, f"{manifest.name} version {manifest.version}", "a model that was trained here")
    return _of_family(SPECIFICATION.checked(manifest.training), family, option)


def was_trained_here(manifest: ManifestDraft) -> bool:
    """Whether a manifest has a specification. The manifest of an imported model only names its origin."""
    return "data" in manifest.training


def _of_family(config: DeepConfig | LinearConfig, family: type[Family], option: str) -> Family:
    if not isinstance(config, family):
        kinds = [kind for section in SPECIFICATION.sections if issubclass(section, family) for kind in kinds_of(section)]
        raise InvalidConfig(option, config.kind, f"a model of kind {', '.join(kinds)}")
    return config
