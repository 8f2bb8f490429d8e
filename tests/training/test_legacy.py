"""Configurations and manifests of before load with the same meaning, and say what became of their keys."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import InvalidConfig
from espalier.manifest import ManifestDraft
from training.specification.deep import DeepConfig, HsmConfig, OtmConfig, SequenceConfig
from training.specification.linear import LinearConfig
from training.specification.models import SPECIFICATION, check_config, config_of, read_config
from training.specification.ranker import HighwayConfig, LinearRankerConfig, ranker_config

BEFORE = Path(__file__).parent / "before"
"""The configurations of 2026-11-21, and what bundles trained with them, and with other kinds, have in their manifests."""
MANIFESTS: dict[str, dict[str, Any]] = json.loads((BEFORE / "manifests.json").read_text())
DEEP: dict[str, Any] = {"name": "books", "data": {"log": "log.csv"}}
LINEAR: dict[str, Any] = {"algorithm": "xr-linear", "name": "books", "data": {"format": "xmc", "train": "train.txt"}}


def manifest(training: dict[str, Any]) -> ManifestDraft:
    return ManifestDraft.model_construct(name="books", version=3, training=training)


def meaning(config: DeepConfig | LinearConfig) -> dict[str, Any]:
    """All keys with their values, under the names of before."""
    found = leaves(config.model_dump(mode="json"))
    kind = found.pop("kind")
    if isinstance(config, LinearConfig):
        assert found.pop("linear.weights") == "float16"  # a bundle trained by an earlier file today is stored so
        later = {
            "linear.relative_threshold": 0,
            "linear.intercept": "zero",
            "data.label_weights": None,
            "data.views": None,
            "data.clicks": None,
            "data.smoothing": 10,
        }
        assert all(found.pop(key, value) == value for key, value in later.items())
        assert {key: found.pop(key) for key in list(found) if key.startswith("relevance.")}["relevance.source"] == "weights"
        assert found.pop("tree.count") == 1
        assert {key: found.pop(key) for key in list(found) if key.startswith("tail.")}["tail.form"] == "none"
        assert {key: found.pop(key) for key in list(found) if key.startswith("stacking.")}["stacking.model"] == "auto"  # chosen today
        for key in ("linear.cost", "linear.gamma", "tree.max_leaf"):  # numbers of before are kept; what had none is chosen today
            if found[key] == "auto":
                del found[key]
        renamed = {"linear.few": found.pop("linear.min_positives"), "linear.activation": config.linear.ranking.activation}
        return found | renamed | {"algorithm": kind}
    assert found.pop("data.split.kind") == "users"
    new = {key: found.pop(key) for key in list(found) if key.startswith(("content.", "memory."))}
    assert {key: new[key] for key in ("content.columns", "memory.weight")} == {"content.columns": [], "memory.weight": "auto"}
    assert found.pop("data.split.unseen_items") == 0
    shares = {f"data.{name}": found.pop(f"data.split.{name}") for name in ("test_share", "validation_share")}
    return found | shares | {"objective.kind": kind}


def leaves(raw: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in raw.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize("file", sorted(BEFORE.glob("*.toml")), ids=lambda file: file.stem)
def test_a_file_of_before_means_what_it_did_but_for_the_recipe(file: Path) -> None:
    """A file without a kind and without its keys is trained by the recipe of today, on the same log, split and search."""
    config, before = read_config(file), leaves(MANIFESTS[file.stem])
    found = meaning(config)
    if isinstance(config, SequenceConfig):
        found = {key: value for key, value in found.items() if key.startswith(("name", "seed", "data.", "tree.", "search."))}
    assert found.items() <= before.items()


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_of_before_is_read_in_silence_and_means_what_it_did(name: str, caplog: pytest.LogCaptureFixture) -> None:
    part = MANIFESTS[name]
    config = config_of(manifest(part), LinearConfig if "algorithm" in part else DeepConfig)
    assert meaning(config).items() <= leaves(part).items()
    assert caplog.text == ""


def test_todays_manifests_keep_the_kind() -> None:
    for part in MANIFESTS.values():
        config = check_config(part)
        kept = json.loads(json.dumps(config.model_dump(mode="json")))
        assert SPECIFICATION.checked(kept) == config


@pytest.mark.parametrize(
    ("raw", "warnings"),
    [
        (DEEP, []),
        (DEEP | {"objective": {"kind": "otm"}}, ["objective.kind is `kind` now"]),
        (LINEAR, ["algorithm is `kind` now"]),
        (LINEAR | {"linear": {"few": 2}}, ["algorithm is `kind` now", "linear.few is `linear.min_positives` now"]),
        (LINEAR | {"threads": 4}, ["threads is gone: it is always the number of cores", "algorithm is `kind` now"]),
        (DEEP | {"optimiser": {"checkpoint_every": 50}}, ["optimiser.checkpoint_every is gone: it is always 500"]),
        (DEEP | {"tree": {"kind": "random", "embedding_dim": 8}}, ["tree.embedding_dim is gone: it is always 64"]),
        (DEEP | {"tree": {"kind": "random", "gap": 3}}, ["tree.gap has no effect: it is no key of tree.kind random"]),
        (DEEP | {"objective": {"stochastic_beam": False}}, ["objective.stochastic_beam is gone: it is always false"]),
        (
            DEEP | {"objective": {"kind": "plt", "beam_size": 9}},
            ["objective.kind is `kind` now", "objective.beam_size has no effect: it is no key of kind plt"],
        ),
        (
            DEEP | {"data": {"log": "log", "format": {"format": "parquet", "separator": ";"}}},
            ["data.format.separator has no effect: it is no key of data.format.format parquet"],
        ),
    ],
)
def test_each_old_key_of_a_file_gets_one_warning(raw: dict[str, Any], warnings: list[str], caplog: pytest.LogCaptureFixture) -> None:
    check_config(raw)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == warnings


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (DEEP | {"tree": {"embedding_dim": 8}}, "tree.embedding_dim"),
        (DEEP | {"objective": {"beam_schedule": "growing"}}, "objective.beam_schedule"),
        (DEEP | {"objective": {"kind": "otm", "stochastic_beam": True}}, "objective.stochastic_beam"),
        (LINEAR | {"linear": {"tolerance": 0.01}}, "linear.tolerance"),
        (LINEAR | {"linear": {"bias": 0}}, "linear.bias"),
    ],
)
def test_a_value_that_made_another_model_and_is_gone_is_warned_of(raw: dict[str, Any], key: str, caplog: pytest.LogCaptureFixture) -> None:
    check_config(raw)
    (message,) = [message for message in caplog.messages if message.startswith(f"{key} is gone: it was ")]
    assert message.endswith(": expect another model")


def test_a_manifest_with_such_a_value_is_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(manifest(DEEP | {"tree": {"kind": "kmeans", "embedding_dim": 8}}), DeepConfig)
    assert config.tree.kind == "kmeans"
    assert caplog.messages == ["tree.embedding_dim is gone: it was 8 here, now it is always 64: expect another model"]


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"objective": {"kind": "tdm", "gamma": 0.5}}, "objective.gamma"),
        ({"scorer": {"kind": "mlp", "dropout": 0.1}}, "scorer.dropout"),
        ({"tree": {"kind": "kmeans", "rounds": 2}}, "tree.rounds"),
        ({"data": {"log": "log", "format": {"format": "lists", "category": 2}}}, "data.format.category"),
    ],
)
def test_what_was_refused_before_still_is(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        check_config(DEEP | sections)
    assert caught.value.field == key


def test_the_default_kinds_of_sections_are_those_of_before() -> None:
    config = check_config(DEEP | {"objective": {"beam_size": 9}})
    assert isinstance(config, DeepConfig)
    assert (config.kind, config.tree.kind, config.scorer.kind) == ("otm-robust", "kmeans", "product")
    assert isinstance(check_config(DEEP | {"objective": {"kind": "hsm"}}), HsmConfig)
    assert isinstance(check_config(DEEP | {"kind": "otm"}), OtmConfig)


def test_a_file_with_a_kind_is_of_today(caplog: pytest.LogCaptureFixture) -> None:
    for raw in (DEEP | {"kind": "otm", "tree": {"embedding_dim": 64}}, DEEP | {"kind": "plt", "objective": {"beam_size": 9}}):
        with pytest.raises(InvalidConfig, match="no such key"):
            check_config(raw)
    assert caplog.text == ""


def test_a_ranker_file_of_before_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "ranker.toml"
    file.write_text('hidden = 7\noptimizer = "adam"\n')
    assert ranker_config(file) == HighwayConfig(hidden=7)
    assert ranker_config(file, kind="linear") == LinearRankerConfig()
    assert caplog.messages[1:] == [
        'optimizer is gone: it is always "adam"',
        "hidden has no effect: it is no key of kind linear",
    ]
    file.write_text("batch_queries = 8\n")
    assert ranker_config(file) == HighwayConfig()
    assert caplog.messages[-1] == "batch_queries is gone: it was 8 here, now it is always 16: expect another model"
