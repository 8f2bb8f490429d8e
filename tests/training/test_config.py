"""A bad configuration is refused with the key, the value and what was expected; a good one survives the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import InvalidConfig
from tests import ROOT
from training.specification.deep import DeepConfig
from training.specification.models import SPECIFICATION, deep_config, read_config, read_deep_config, window_config
from training.specification.scorers import MlpScorer, ProductScorer
from training.specification.splits import DateSplit

CONFIGS = ROOT / "training" / "configs"
KINDS = "'otm-robust', 'otm-sequence', 'otm', 'otm-no-bs', 'otm-no-optest', 'tdm', 'plt', 'hsm', 'xr-linear' or 'xreg'"


def raw(**sections: Any) -> dict[str, object]:
    """The smallest configuration, of kind otm-robust, with some sections changed."""
    return {"kind": "otm-robust", "name": "books", "data": {"log": "log.csv"} | sections.pop("data", {}), **sections}


def test_only_a_kind_a_name_and_a_log_are_needed() -> None:
    config = deep_config(raw())
    assert (config.kind, config.name, config.data.log) == ("otm-robust", "books", Path("log.csv"))


@pytest.mark.parametrize(
    ("raw", "key", "expected"),
    [
        (
            {"kind": "tdm", "objective": {"gamma": 0.5}},
            "objective.gamma",
            "one of kind 'otm-robust', 'otm-sequence', 'otm', 'otm-no-bs' or",
        ),
        ({"kind": "otm", "tree": {"kind": "random", "gap": 3}}, "tree.gap", "one of tree.kind 'earlier' or 'jtm'"),
        ({"kind": "otm", "tree": {"gamma": 0.5}}, "tree.gamma", "one of tree.kind 'jtm'"),
        ({"kind": "otm", "scorer": {"kind": "mlp", "dropout": 0.1}}, "scorer.dropout", "one of scorer.kind 'product'"),
        ({"kind": "otm", "scorer": {"attention_hidden": 9}}, "scorer.attention_hidden", "one of scorer.kind 'attention'"),
        ({"kind": "otm", "data": {"log": "a", "format": {"format": "lists", "user": 0}}}, "data.format.user", "'csv' or 'parquet'"),
        ({"kind": "otm", "linear": {"cost": 3}}, "linear", "one of kind 'xr-linear'"),
        ({"kind": "xr-linear", "instances": {"targets": 3}}, "instances", "one of kind 'otm-robust'"),
        ({"kind": "xr-linear", "data": {"format": "xmc", "train": "a", "query": "q"}}, "data.query", "one of data.format 'log'"),
        ({"kind": "xr-linear", "labels": {"columns": ["title"]}}, "labels.columns", "one of labels.kind 'text' or 'both'"),
        ({"kind": "xr-linear", "text": [{"unit": "word", "m": 1, "n": 2}]}, "text.0.m", "`python -m training options` lists all"),
    ],
)
def test_a_key_of_another_kind_is_refused_and_its_kinds_are_named(raw: dict[str, Any], key: str, expected: str) -> None:
    data = {"format": "xmc", "train": "train.txt"} if raw["kind"] == "xr-linear" else {"log": "log.csv"}
    with pytest.raises(InvalidConfig) as caught:
        SPECIFICATION.checked({"name": "books", "data": data} | raw)
    assert caught.value.field == key
    assert expected in caught.value.expected


def test_a_scorer_has_the_defaults_of_its_kind_and_only_a_product_does_without_layers() -> None:
    product, mlp, attention = (window_config(raw(scorer={"kind": kind})).scorer for kind in ("product", "mlp", "attention"))
    assert product == deep_config(raw()).scorer == ProductScorer(node_dim=128, hidden=(256,), dropout=0.3)
    assert mlp == MlpScorer(node_dim=24, hidden=(128, 64, 24))
    assert (attention.node_dim, attention.hidden) == (mlp.node_dim, mlp.hidden)
    assert window_config(raw(scorer={"hidden": []})).scorer.hidden == ()
    error = refused({"scorer": {"kind": "mlp", "hidden": []}})
    assert (error.field, error.expected) == ("scorer.hidden", "at least 1 value")


@pytest.mark.parametrize("weight", [0, 0.001, 1_000_000, "auto"])
def test_a_memory_may_have_no_weight_or_one_that_counts(weight: object) -> None:
    assert deep_config(raw(memory={"weight": weight})).memory.weight == weight


@pytest.mark.parametrize("weight", [-1, 0.0009, 1e-50, 5e-324, 2e6, 1e300, float("nan"), float("inf"), True, "much"])
def test_a_weight_of_a_memory_has_a_limit(weight: object) -> None:
    error = refused({"memory": {"weight": weight}})
    assert (error.field, error.expected) == ("memory.weight", '"auto" or 0, or a number from 0.001 to 1000000')


def test_one_column_of_content_is_a_list_too() -> None:
    error = refused({"content": {"columns": "title"}})
    assert (error.field, error.expected) == ("content.columns", '"auto" or a list of column names')


@pytest.mark.parametrize("neighbours", [0, 4097, 2.5, True])
def test_the_neighbours_of_a_memory_have_a_limit(neighbours: object) -> None:
    error = refused({"memory": {"neighbours": neighbours}})
    assert (error.field, error.expected) == ("memory.neighbours", '"auto" or an integer from 1 to 4096')


def test_an_objective_has_the_defaults_of_its_kind() -> None:
    kinds = {kind: deep_config(raw() | {"kind": kind}).objective.model_dump() for kind in ("otm-robust", "otm", "otm-no-bs", "tdm", "plt")}
    negatives = {"negatives": 200, "negative_decay": 0.7}
    beam = {"beam_size": 200, "gamma": 0, "warm_start": 0} | negatives
    assert kinds == {
        "otm-robust": beam | {"beam_size": 50, "gamma": 0.5, "random_nodes": 50, "level_decay": 0.7},
        "otm": beam | {"random_nodes": 0},
        "otm-no-bs": beam,
        "tdm": negatives,
        "plt": {},
    }


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_a_shipped_configuration_is_valid(file: Path) -> None:
    assert read_config(file).name == file.stem.removeprefix("xr-linear-")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"search": {"gamma": 0.8, "beam_size": 10}, "instances": {"windows": [3, 2]}},
        {"data": {"items": "items.parquet", "format": {"user": 0, "item": 1, "header": False}}},
        {"kind": "plt", "tree": {"kind": "random"}},
    ],
)
def test_a_configuration_survives_the_manifest(sections: dict[str, Any]) -> None:
    config = deep_config(raw(**sections))
    kept = json.loads(json.dumps(config.model_dump(mode="json")))
    assert deep_config(kept) == config


def test_the_toml_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "books.toml"
    file.write_text('kind = "otm-robust"\nname = "books"\nseed = 7\n[data]\nlog = "log.csv"\n[instances]\nwindows = [4, 1]\n')
    config = read_deep_config(file)
    assert (config.seed, config.windowed_instances.windows) == (7, (4, 1))


def refused(sections: dict[str, Any]) -> InvalidConfig:
    with pytest.raises(InvalidConfig) as caught:
        deep_config(raw(**sections))
    return caught.value


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
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
        ("objective", "warm_start", 1, "less than 1"),
        ("objective", "negative_decay", 0, "greater than 0"),
        ("optimiser", "learning_rate", 0, "greater than 0"),
        ("optimiser", "learning_rate", "fast", "number"),
        ("optimiser", "steps", 0, "greater than or equal to 1"),
        ("optimiser", "batch", None, "integer"),
        ("search", "m", 0, "greater than or equal to 1"),
        ("search", "exclude_seen", "perhaps", "true or false"),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_what_was_expected(section: str, key: str, value: object, expected: str) -> None:
    error = refused({section: {key: value}})
    assert error.field == f"{section}.{key}"
    assert error.value == repr(value)
    assert expected in error.expected


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("instances", "nearness", -1, '"auto" or a number from 0 to 10'),
        ("instances", "nearness", True, '"auto" or a number from 0 to 10'),
        ("instances", "targets", "auto", "integer"),
        ("optimiser", "epochs", 0, '"auto" or a number above 0'),
    ],
)
def test_a_bad_value_of_a_sequences_key_is_named(section: str, key: str, value: object, expected: str) -> None:
    error = refused({"kind": "otm-sequence", section: {key: value}})
    assert (error.field, error.value) == (f"{section}.{key}", repr(value))
    assert expected in error.expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("test_share", 1.0, "less than 1"), ("test_share", -0.1, "greater than or equal to 0"), ("validation_share", 0, "greater than 0")],
)
def test_a_bad_share_of_held_out_users_is_named(key: str, value: object, expected: str) -> None:
    error = refused({"data": {"split": {key: value}}})
    assert (error.field, error.value) == (f"data.split.{key}", repr(value))
    assert expected in error.expected


@pytest.mark.parametrize("section", ["data", "instances", "tree", "scorer", "objective", "optimiser", "search"])
def test_an_unknown_key_is_named(section: str) -> None:
    error = refused({section: {"learning_rte": 3}})
    assert (error.field, error.value) == (f"{section}.learning_rte", "3")


@pytest.mark.parametrize(
    ("changed", "key", "expected"),
    [
        ({"kind": "tmd"}, "kind", KINDS),
        ({"kind": None}, "kind", KINDS),
        ({}, "kind", f"this key, which is required: {KINDS}"),
        ({"algorithm": "otm"}, "kind", f"this key, which is required: {KINDS}"),
        ({"scorer": {"kind": "sequence"}}, "kind", f"this key, which is required: {KINDS}"),
        ({"kind": "xr-linear", "data": {"train": "train.txt"}}, "data.format", "this key, which is required: 'xmc', 'npz' or 'log'"),
        ({"kind": "xr-linear", "data": {"format": "csv", "train": "train.txt"}}, "data.format", "'xmc', 'npz' or 'log'"),
        ({"kind": "otm", "tree": 3}, "tree", "a table of keys"),
        ({"kind": "otm", "data": "log.csv"}, "data", "a table of keys"),
    ],
)
def test_a_kind_that_is_missing_or_does_not_exist_is_told_those_that_do(changed: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        SPECIFICATION.checked({"name": "books", "data": {"log": "log.csv"}} | changed)
    assert (caught.value.field, caught.value.expected) == (key, expected)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"^data\.log: .*required"):
        deep_config({"kind": "otm-robust", "name": "books", "data": {}})


@pytest.mark.parametrize("name", ["Books", "", "a/b", "../up", "a" * 65])
def test_a_name_must_be_a_model_name(name: str) -> None:
    with pytest.raises(InvalidConfig, match=r"^name: "):
        deep_config(raw() | {"name": name})


@pytest.mark.parametrize("value", [1, 2, 69])
def test_the_windows_say_how_long_a_history_is(value: int) -> None:
    assert deep_config(raw(instances={"windows": [1] * value})).history_length == value


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
        ({"tree": {"kind": "jtm", "rounds": 2}, "earlier_model": "models/a/1"}, "scorer.init: got 'embeddings'", "tree.rounds"),
        ({"kind": "plt", "search": {"gamma": 0.5}}, "search.gamma: got 0.5", "path products"),
    ],
)
def test_values_that_do_not_fit_together_are_named(sections: dict[str, Any], key: str, message: str) -> None:
    error = refused(sections)
    assert key in str(error)
    assert message in error.expected


def test_plt_may_say_the_gamma_that_it_has() -> None:
    assert deep_config(raw(search={"gamma": 1}) | {"kind": "plt"}).search.gamma == 1


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--config: .*none\.toml.* a TOML file that exists"):
        read_config(tmp_path / "none.toml")
    for content in (b"name = ", b"\xff\xfe", b"seed = " + b"9" * 5000, b"seed = " + b"[" * 100_000):
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
    assert refused({"data": {"split": {"test_share": 0.6, "validation_share": 0.5}}}).field == "data.split.validation_share"


def test_a_seed_that_no_library_takes_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="seed"):
        deep_config(raw() | {"seed": 2**32})


def test_a_configuration_cannot_be_changed_after_the_check() -> None:
    config = deep_config(raw())
    assert isinstance(config, DeepConfig)
    with pytest.raises(ValueError, match="frozen"):
        setattr(config, "seed", 3)  # noqa: B010


# -- what is held out -------------------------------------------------------------------------------------------------------

DATED = {"timestamp": "time", "timestamp_type": "datetime", "order": "timestamp"}


def data_of(format: dict[str, Any], split: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "otm-robust", "name": "x", "data": {"log": "log.csv", "format": format, "split": split}}


@pytest.mark.parametrize(
    ("format", "split", "field"),
    [
        ({"order": "none"}, {"kind": "last"}, "data.split.kind"),
        ({}, {"kind": "date"}, "data.split.kind"),
        (DATED, {"kind": "date", "test_from": 3}, "data.split.test_from"),
        ({"timestamp": "time", "order": "timestamp"}, {"kind": "date", "test_from": float("nan")}, "data.split.test_from"),
        (DATED, {"kind": "date", "validation_from": "May"}, "data.split.validation_from"),
        ({"timestamp": "time", "order": "timestamp"}, {"kind": "date", "test_from": "2024-05-01"}, "data.split.test_from"),
        ({}, {"kind": "file"}, "data.split.test"),
        ({}, {"kind": "halves"}, "data.split.kind"),
        ({}, {"kind": "last", "test_share": 0.1}, "data.split.test_share"),
    ],
)
def test_a_split_that_the_log_does_not_allow_is_refused_by_name(format: dict[str, Any], split: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        deep_config(data_of(format, split))
    assert error.value.field == field


def test_a_date_of_toml_is_a_date(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        'kind = "otm-robust"\nname = "x"\n[data]\nlog = "log.csv"\nsplit = { kind = "date", test_from = 2024-05-01 }\n'
        'format = { timestamp = "time", timestamp_type = "datetime", order = "timestamp" }\n'
    )
    split = read_deep_config(tmp_path / "x.toml").data.split
    assert isinstance(split, DateSplit)
    assert split.test_from == "2024-05-01"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"optimiser": {"setps": 10}}, "optimiser.setps: got 10, expected no such key; did you mean optimiser.steps?"),
        ({"optimizer": {"steps": 10}}, "optimizer: got .*, expected no such key; did you mean optimiser?"),
        ({"data": {"format": {"rating": "stars"}}}, "data.format.rating: got 'stars', expected no such key; `python -m training options`"),
        ({"data": {"format": {"usr": "id"}}}, "data.format.usr: got 'id', expected no such key; did you mean data.format.user?"),
    ],
)
def test_a_misspelt_key_names_the_nearest(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidConfig, match=expected):
        deep_config(raw(**sections))


@pytest.mark.parametrize("steps", [10, 60, 1000, 8000])
def test_a_short_training_warms_up_for_a_fifth_of_its_steps(steps: int) -> None:
    config = deep_config(raw(kind="otm-sequence", optimiser={"steps": steps}))
    rates = [config.optimiser.learning_rate_at(step) for step in range(steps)]
    assert max(rates) >= 0.79 * config.optimiser.learning_rate
    assert rates.index(max(rates)) <= min(200, steps // 5)
