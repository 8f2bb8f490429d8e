"""A bad configuration is refused with the key, the value and what was expected; a good one survives the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import InvalidConfig
from tests import ROOT
from training.config import TrainingConfig, check_config, checked, read_config, read_toml
from training.linear.config import LinearConfig

CONFIGS = ROOT / "training" / "configs"


def raw(**sections: dict[str, Any]) -> dict[str, object]:
    """The smallest configuration, with some sections changed."""
    return {"name": "books", "data": {"log": "log.csv"} | sections.pop("data", {}), **sections}


def test_only_a_name_and_a_log_are_needed() -> None:
    config = check_config(raw())
    assert (config.name, config.data.log) == ("books", Path("log.csv"))
    assert config.objective.kind == "otm-robust"


@pytest.mark.parametrize(
    ("objective", "key", "expected"),
    [
        ({"kind": "tdm", "gamma": 0.5}, "objective.gamma", "0, since tdm trains none"),
        ({"kind": "otm-robust", "random_nodes": 0}, "objective.random_nodes", "at least 1"),
    ],
)
def test_an_objective_refuses_what_would_mean_nothing_to_it(objective: dict[str, Any], key: str, expected: str) -> None:
    error = refused({"objective": objective})
    assert error.field == key
    assert expected in error.expected


def test_a_scorer_has_the_defaults_of_its_kind_and_only_a_product_does_without_layers() -> None:
    kinds = {kind: check_config(raw(scorer={"kind": kind})).scorer for kind in ("product", "mlp", "attention")}
    assert kinds["product"] == check_config(raw()).scorer
    assert (kinds["product"].node_dim, kinds["product"].hidden) == (128, (256,))
    assert all((kinds[kind].node_dim, kinds[kind].hidden) == (24, (128, 64, 24)) for kind in ("mlp", "attention"))
    assert [kinds[kind].dropout for kind in kinds] == [0.3, 0, 0]
    assert check_config(raw(scorer={"hidden": []})).scorer.hidden == ()
    assert refused({"scorer": {"kind": "mlp", "dropout": 0.1}}).field == "scorer.dropout"
    error = refused({"scorer": {"kind": "mlp", "hidden": []}})
    assert (error.field, "at least one layer" in error.expected) == ("scorer.hidden", True)


def test_an_objective_has_the_defaults_of_its_kind() -> None:
    kinds = {kind: check_config(raw() | {"objective": {"kind": kind}}).objective for kind in ("otm-robust", "otm", "tdm")}
    assert {kind: (part.beam_size, part.random_nodes, part.gamma) for kind, part in kinds.items()} == {
        "otm-robust": (50, 50, 0.5),
        "otm": (200, 0, 0.0),
        "tdm": (200, 0, 0.0),
    }
    assert check_config(raw() | {"objective": {"kind": "otm", "beam_size": 20}}).objective.beam_size == 20


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_a_shipped_configuration_is_valid(file: Path) -> None:
    written = read_toml(file)
    assert (checked(LinearConfig, written) if "algorithm" in written else read_config(file)).name == file.stem.removeprefix("xr-linear-")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"search": {"gamma": 0.8, "beam_size": 10}, "instances": {"windows": [3, 2]}},
        {"data": {"items": "items.parquet", "format": {"user": 0, "item": 1, "header": False}}},
        {"objective": {"kind": "plt"}, "tree": {"kind": "random"}},
    ],
)
def test_a_configuration_survives_the_manifest(sections: dict[str, Any]) -> None:
    config = check_config(raw(**sections))
    kept = json.loads(json.dumps(config.model_dump(mode="json")))
    assert check_config(kept) == config


def test_the_toml_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "books.toml"
    file.write_text('name = "books"\nseed = 7\n[data]\nlog = "log.csv"\n[instances]\nwindows = [4, 1]\n')
    config = read_config(file)
    assert (config.seed, config.instances.windows) == (7, (4, 1))


def refused(sections: dict[str, Any]) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        check_config(raw(**sections))
    return caught.value


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("data", "test_share", 1.0, "less than 1"),
        ("data", "test_share", -0.1, "greater than or equal to 0"),
        ("data", "validation_share", 0, "greater than 0"),
        ("instances", "split", "thirds", "'half' or 'random'"),
        ("instances", "targets", 0, "greater than or equal to 1"),
        ("instances", "targets", "many", "integer"),
        ("instances", "cold_share", 1, "less than 1"),
        ("tree", "branching", 1, "greater than or equal to 2"),
        ("tree", "branching", 2.5, "integer"),
        ("tree", "kind", "oak", "'random', 'category', 'kmeans', 'earlier' or 'jtm'"),
        ("scorer", "node_dim", 1, "greater than or equal to 2"),
        ("scorer", "init_std", 0, "greater than 0"),
        ("scorer", "dtype", "int8", "'float32' or 'float16'"),
        ("objective", "kind", "tmd", "'tdm', 'plt' or 'hsm'"),
        ("objective", "warm_start", 1, "less than 1"),
        ("objective", "negative_decay", 0, "greater than 0"),
        ("optimiser", "learning_rate", 0, "greater than 0"),
        ("optimiser", "learning_rate", "fast", "number"),
        ("optimiser", "steps", 0, "greater than or equal to 1"),
        ("optimiser", "batch", None, "integer"),
        ("search", "m", 0, "greater than or equal to 1"),
        ("search", "exclude_seen", "perhaps", "boolean"),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_what_was_expected(section: str, key: str, value: object, expected: str) -> None:
    error = refused({section: {key: value}})
    assert error.field == f"{section}.{key}"
    assert error.value == repr(value)
    assert expected in error.expected


@pytest.mark.parametrize("section", ["data", "instances", "tree", "scorer", "objective", "optimiser", "search"])
def test_an_unknown_key_is_named(section: str) -> None:
    error = refused({section: {"learning_rte": 3}})
    assert (error.field, error.value) == (f"{section}.learning_rte", "3")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"^data\.log: .*required"):
        check_config({"name": "books", "data": {}})


@pytest.mark.parametrize("name", ["Books", "", "a/b", "../up", "a" * 65])
def test_a_name_must_be_a_model_name(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"^name: "):
        check_config(raw() | {"name": name})


@pytest.mark.parametrize("value", [1, 2, 69])
def test_the_windows_say_how_long_a_history_is(value: int) -> None:
    assert sum(check_config(raw(instances={"windows": [1] * value})).instances.windows) == value


def test_a_bad_window_is_named_with_its_place() -> None:
    assert refused({"instances": {"windows": [3, 0]}}).field == "instances.windows.1"


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        ({"search": {"beam_size": 20, "max_beam_size": 10}}, "search.beam_size: got 20", "at most search.max_beam_size, 10"),
        ({"search": {"m": 20, "max_m": 10}}, "search.m: got 20", "at most search.max_m, 10"),
        ({"tree": {"kind": "category"}}, "data.format.category: got None", "tree.kind is category"),
        (
            {"tree": {"kind": "category"}, "data": {"log": "log.txt", "format": {"format": "lists"}}},
            "tree.kind: got 'category'",
            "lists have no categories",
        ),
        ({"tree": {"kind": "random"}, "earlier_model": "models/a/1"}, "tree.kind: got 'random'", "kmeans"),
        ({"tree": {"kind": "jtm"}}, "earlier_model: got None", "tree.kind is jtm"),
        ({"scorer": {"init": "earlier"}, "earlier_model": "models/a/1"}, "tree.kind: got 'kmeans'", "earlier or jtm"),
        ({"tree": {"kind": "earlier", "rounds": 2}, "earlier_model": "models/a/1"}, "tree.rounds: got 2", "1, since tree.kind is earlier"),
        ({"tree": {"kind": "jtm", "rounds": 2}, "earlier_model": "models/a/1"}, "scorer.init: got 'embeddings'", "tree.rounds"),
        ({"objective": {"kind": "plt"}, "search": {"gamma": 0.5}}, "search.gamma: got 0.5", "path products"),
    ],
)
def test_values_that_do_not_fit_together_are_named(sections: dict[str, Any], key: str, message: str) -> None:
    error = refused(sections)
    assert key in str(error)
    assert message in error.expected


def test_plt_may_say_the_gamma_that_it_has() -> None:
    assert check_config(raw(objective={"kind": "plt"}, search={"gamma": 1})).search.gamma == 1


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--config: .*none\.toml.* a TOML file that exists"):
        read_config(tmp_path / "none.toml")
    for content in (b"name = ", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(InvalidConfig, match=r"bad\.toml: .*expected valid TOML"):
            read_config(tmp_path / "bad.toml")


@pytest.mark.parametrize("gamma", [1.5, -0.1, "none"])
def test_a_bad_gamma_is_told_both_forms(gamma: object) -> None:
    error = refused({"search": {"gamma": gamma}})
    assert error.field == "search.gamma"
    assert "auto" in error.expected
    assert "1" in error.expected


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("instances", "windows", []),  # a history of length 0 fails when the bundle is written, after training
        ("instances", "windows", [5000]),  # and so does one of more than 4096
    ],
)
def test_what_no_model_can_be_made_of_is_refused_at_once(section: str, key: str, value: object) -> None:
    assert refused({section: {key: value}}).field == f"{section}.{key}"


def test_shares_that_leave_no_training_users_are_refused_at_once() -> None:
    assert "data." in str(refused({"data": {"test_share": 0.6, "validation_share": 0.5}}))


def test_a_seed_that_no_library_takes_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="seed"):
        check_config(raw() | {"seed": 2**32})


def test_a_configuration_cannot_be_changed_after_the_check() -> None:
    config = check_config(raw())
    assert isinstance(config, TrainingConfig)
    with pytest.raises(ValueError, match="frozen"):
        setattr(config, "seed", 3)  # noqa: B010
