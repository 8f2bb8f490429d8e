"""The specification of a training run: a union of all kinds, read from a TOML file or from the manifest of a bundle.

The kinds are in `deep.py` (tree models over users' lists), `linear.py` and `xreg.py` (texts and sparse features).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from espalier.errors import InvalidConfig
from espalier.manifest import ManifestDraft
from training.specification.deep import SHARES, DataConfig, DeepConfig, DeepKinds, SequenceConfig, WindowConfig
from training.specification.legacy import ANY, Legacy, RemovedKey
from training.specification.linear import LinearConfig
from training.specification.sections import Form, Raw, kind_key, kinds_of, read_toml, sections_in
from training.specification.xreg import XRegConfig

Specification = Annotated[DeepKinds | LinearConfig | XRegConfig, Field(discriminator="kind")]
SPECIFICATION: Form[DeepConfig | LinearConfig] = Form(Specification)

Family = TypeVar("Family", bound=DeepConfig | LinearConfig)


def _trains_with_beam(raw: Raw) -> bool:
    return str(raw.get("objective", {}).get("kind", "otm-robust")).startswith("otm")


def _embeds_items(raw: Raw) -> bool:
    return raw.get("tree", {}).get("kind", "kmeans") == "kmeans" and raw.get("earlier_model") is None


LEGACY = Legacy(
    SPECIFICATION.sections,
    default_kind="otm-robust",
    renamed={"algorithm": "kind", "objective.kind": "kind", "linear.few": "linear.min_positives"},
    removed={
        "tree.embedding_dim": RemovedKey(64, _embeds_items),
        "objective.beam_schedule": RemovedKey("fixed", _trains_with_beam),
        "objective.stochastic_beam": RemovedKey(False, _trains_with_beam),
        "optimiser.checkpoint_every": RemovedKey(500, lambda raw: False),
        "threads": RemovedKey(0, lambda raw: False, now="the number of cores"),
        "linear.beam_size": RemovedKey(10, lambda raw: raw.get("linear", {}).get("negatives") != "teacher"),
        "linear.tolerance": RemovedKey(0.1),
        "linear.passes": RemovedKey(10),
        "linear.bias": RemovedKey(1.0),
    },
    unused={
        **dict.fromkeys(("tree.gap", "tree.samples", "tree.gamma", "scorer.attention_hidden"), ANY),
        **dict.fromkeys(
            (f"objective.{key}" for key in ("beam_size", "warm_start", "random_nodes", "level_decay", "negatives", "negative_decay")), ANY
        ),
        "data.format.separator": ANY,
        "data.format.header": ANY,
        "data.format.quoted": ANY,
        "data.format.user": "user",
        "data.format.item": "item",
        "data.format.timestamp": None,
        "data.format.timestamp_type": "integer",
        "data.format.category": None,
        "tree.rounds": 1,
        "scorer.dropout": 0,
        "objective.gamma": 0,
        "labels.columns": [],
    },
)
"""What became of the keys of configurations without a `kind`."""


def check_config(raw: Raw) -> DeepConfig | LinearConfig:
    """The specification that a mapping holds. Raises InvalidConfig naming the key, its value and what was expected."""
    return SPECIFICATION.checked(_modernised(raw, "file"))


def deep_config(raw: Raw) -> DeepConfig:
    """The specification of a tree model that a mapping holds. Raises InvalidConfig."""
    return _of_family(check_config(raw), DeepConfig, "kind")


def window_config(raw: Raw) -> WindowConfig:
    """The specification of a tree model that reads histories in windows. Raises InvalidConfig."""
    return _of_family(check_config(raw), WindowConfig, "kind")


def read_config(file: Path, earlier: Path | None = None, **files: Path | None) -> DeepConfig | LinearConfig:
    """The specification in a TOML file. Raises InvalidConfig.

    earlier  what `earlier_model` is instead, where there is one
    files    what `data.train` and `data.test` of linear models are instead, unless None
    """
    raw = _modernised(read_toml(file), "file")
    if earlier is not None and raw.get("earlier_model") is not None:
        raw["earlier_model"] = str(earlier)
    if raw["kind"] in (*kinds_of(LinearConfig), *kinds_of(XRegConfig)) and isinstance(raw.get("data"), dict):
        raw["data"] |= {key: path for key, path in files.items() if path is not None}
    return SPECIFICATION.checked(raw)


def read_deep_config(file: Path) -> DeepConfig:
    """The specification of a tree model in a TOML file. Raises InvalidConfig."""
    return deep_config(read_toml(file))


def config_of(manifest: ManifestDraft, family: type[Family]) -> Family:
    """The specification that a bundle was trained with. Raises InvalidConfig where it was trained elsewhere, or is of another family."""
    if not was_trained_here(manifest):
        raise InvalidConfig("--model", f"{manifest.name} version {manifest.version}", "a model that was trained here")
    return _of_family(earlier_config(manifest.training), family, "--model")


def earlier_config(raw: Raw) -> DeepConfig | LinearConfig:
    """The specification that an earlier run wrote down. Raises InvalidConfig."""
    return SPECIFICATION.checked(_modernised(raw, "manifest"))


def was_trained_here(manifest: ManifestDraft) -> bool:
    """Whether a manifest holds a specification. That of an imported model says where it came from, no more."""
    return "data" in manifest.training


def _modernised(raw: Raw, source: Literal["file", "manifest"]) -> dict[str, Any]:
    """The mapping as it would be written today, with its kind: where a file says none, the recipe."""
    scorer = raw.get("scorer")
    reads_sequences = isinstance(scorer, Mapping) and scorer.get("kind") == "sequence"
    is_recipe = reads_sequences or (source == "file" and "earlier_model" not in raw and _has_sequences(raw) and _fits(SequenceConfig, raw))
    return LEGACY.modernised({"kind": "otm-sequence", **raw} if is_recipe else raw, source)


def _has_sequences(raw: Raw) -> bool:
    """Whether the log of a configuration holds lists with an order."""
    data = raw.get("data")
    layout = data.get("format", {}) if isinstance(data, Mapping) else {}
    return isinstance(layout, Mapping) and layout.get("order") != "none" and layout.get("format") != "vectors"


def _fits(section: type[BaseModel], raw: Raw) -> bool:
    """Whether all keys of a mapping are keys of the section, and its kind one of the section's."""
    name = kind_key(section)
    if name is not None and raw.get(name, kinds_of(section)[0]) not in kinds_of(section):
        return False
    for key, value in raw.items():
        known = section.model_fields.get(key)
        if known is None and (section is not DataConfig or key not in SHARES):
            return False
        inner = () if known is None else sections_in(known.annotation)
        if isinstance(value, Mapping) and inner and not any(_fits(one, value) for one in inner):
            return False
    return True


def _of_family(config: DeepConfig | LinearConfig, family: type[Family], where: str) -> Family:
    if not isinstance(config, family):
        kinds = [kind for section in SPECIFICATION.sections if issubclass(section, family) for kind in kinds_of(section)]
        raise InvalidConfig(where, config.kind, f"a model of kind {', '.join(kinds)}")
    return config
