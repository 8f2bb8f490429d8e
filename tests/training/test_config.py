"""A bad configuration is refused with the key, the value and what was expected; `training options` lists the keys as they are."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from espalier.errors import InvalidConfig
from tests import ROOT
from tests.training.commands import command
from training.specification.linear import LinearConfig, TreeShape
from training.specification.models import SPECIFICATION, deep_config, read_config, read_deep_config, window_config
from training.specification.options import as_markdown, as_text, kinds, options, section_of
from training.specification.ranker import ranker_config
from training.specification.sections import sections_in
from training.specification.splits import DateSplit

CONFIGS = ROOT / "training" / "configs"
MODELS = ["otm-robust", "otm-sequence", "otm", "otm-no-bs", "otm-no-optest", "tdm", "plt", "hsm", "neighbours", "xr-linear", "xreg"]
KINDS = ", ".join(map(repr, MODELS[:-1])) + " or 'xreg'"
NAN, INF = float("nan"), float("inf")

Raw = dict[str, Any]


def raw(**sections: Any) -> Raw:
    """The smallest configuration, of kind otm-robust, with some sections changed."""
    return {"kind": "otm-robust", "name": "books", "data": {"log": "log.csv"} | sections.pop("data", {}), **sections}


# -- what is refused ------------------------------------------------------------------------------------------------------

TIMED = {"timestamp": "time", "order": "timestamp"}
DATED = TIMED | {"timestamp_type": "datetime"}
EARLIER = {"earlier_model": "models/a/1"}
VECTORS = {"format": "vectors"}
WEIGHT, NEIGHBOURS = '"auto" or 0, or a number from 0.001 to 1000000', '"auto" or an integer from 1 to 4096'
GAMMA = '"auto" or a number from 0 to 1'


def of_data(format: Raw, split: Raw) -> Raw:
    return {"data": {"format": format, "split": split}}


NETWORKS: list[tuple[Raw, str, str]] = [
    # values of one key
    ({"instances": {"targets": 0}}, "instances.targets", "greater than or equal to 1"),
    ({"instances": {"windows": [5000]}}, "instances.windows", "4096"),
    ({"tree": {"branching": 1}}, "tree.branching", "an integer from 2 to 256"),
    ({"tree": {"kind": "oak"}}, "tree.kind", "'random', 'category', 'kmeans', 'earlier' or 'jtm'"),
    *(({"search": {"gamma": gamma}}, "search.gamma", GAMMA) for gamma in (1.5, -0.1, "none")),
    *(({"memory": {"weight": weight}}, "memory.weight", WEIGHT) for weight in (-1, 0.0009, 5e-324, 2e6, NAN, INF, True, "much")),
    *(({"memory": {"neighbours": count}}, "memory.neighbours", NEIGHBOURS) for count in (0, 4097, 2.5, True)),
    ({"content": {"columns": "title"}}, "content.columns", '"auto" or a list of column names'),
    *(({"name": name}, "name", "") for name in ("Books", "", "a/b", "../up", "a" * 65)),
    # keys that are not there
    *(({section: {"rte": 3}}, f"{section}.rte", "no such key") for section in ("data", "scorer")),
    ({"optimiser": {"setps": 10}}, "optimiser.setps", "no such key; did you mean optimiser.steps?"),
    ({"optimizer": {"steps": 10}}, "optimizer", "no such key; did you mean optimiser?"),
    ({"data": {"format": {"rating": "stars"}}}, "data.format.rating", "no such key; `espalier options`"),
    ({"data": {"format": {"usr": "id"}}}, "data.format.usr", "no such key; did you mean data.format.user?"),
    ({"data": {"log": None}}, "data.log", ""),
    # kinds, and keys of other kinds
    *(({"kind": kind}, "kind", KINDS) for kind in ("tmd", None)),
    ({"tree": 3}, "tree", "a table of keys"),
    ({"kind": "tdm", "objective": {"gamma": 0.5}}, "objective.gamma", "one of kind 'otm-robust', 'otm-sequence', 'otm', 'otm-no-bs' or"),
    ({"tree": {"kind": "random", "gap": 3}}, "tree.gap", "one of tree.kind 'earlier' or 'jtm'"),
    ({"tree": {"gamma": 0.5}}, "tree.gamma", "one of tree.kind 'jtm'"),
    ({"scorer": {"kind": "mlp", "dropout": 0.1}}, "scorer.dropout", "one of scorer.kind 'product'"),
    ({"scorer": {"attention_hidden": 9}}, "scorer.attention_hidden", "one of scorer.kind 'attention'"),
    (of_data({"format": "lists", "user": 0}, {}), "data.format.user", "'csv' or 'parquet'"),
    ({"linear": {"cost": 3}}, "linear", "one of kind 'xr-linear'"),
    # values that do not fit together
    ({"search": {"beam_size": 20, "max_beam_size": 10}}, "search.beam_size", "at most search.max_beam_size, 10"),
    ({"search": {"m": 20, "max_m": 10}}, "search.m", "at most search.max_m, 10"),
    ({"tree": {"kind": "category"}}, "data.format.category", "tree.kind is category"),
    (of_data({"format": "lists"}, {}) | {"tree": {"kind": "category"}}, "tree.kind", "lists have no categories"),
    ({"tree": {"kind": "random"}} | EARLIER, "tree.kind", "kmeans"),
    ({"tree": {"kind": "jtm"}}, "earlier_model", "tree.kind is jtm"),
    ({"scorer": {"init": "earlier"}} | EARLIER, "tree.kind", "earlier or jtm"),
    ({"tree": {"kind": "jtm", "rounds": 2}} | EARLIER, "scorer.init", "tree.rounds"),
    ({"kind": "plt", "search": {"gamma": 0.5}}, "search.gamma", "path products"),
    ({"data": {"split": {"test_share": 0.6, "validation_share": 0.5}}}, "data.split.validation_share", ""),
    (of_data({"order": "none"}, {"kind": "last"}), "data.split.kind", ""),
    (of_data({}, {"kind": "date"}), "data.split.kind", ""),
    (of_data(DATED, {"kind": "date", "test_from": 3}), "data.split.test_from", ""),
    (of_data(DATED, {"kind": "date", "validation_from": "May"}), "data.split.validation_from", ""),
    (of_data(TIMED, {"kind": "date", "test_from": NAN}), "data.split.test_from", ""),
    (of_data(TIMED, {"kind": "date", "test_from": "2024-05-01"}), "data.split.test_from", ""),
    (of_data({}, {"kind": "file"}), "data.split.test", ""),
    (of_data({}, {"kind": "halves"}), "data.split.kind", ""),
    (of_data({}, {"kind": "last", "test_share": 0.1}), "data.split.test_share", ""),
    # a sequence encoder
    ({"kind": "otm-sequence", "instances": {"nearness": -1}}, "instances.nearness", '"auto" or a number from 0 to 10'),
    ({"kind": "otm-sequence", "instances": {"nearness": True}}, "instances.nearness", '"auto" or a number from 0 to 10'),
    ({"kind": "otm-sequence", "instances": {"targets": "auto"}}, "instances.targets", "integer"),
    ({"kind": "otm-sequence", "instances": {"windows": [5]}}, "instances.windows", "kind 'otm-robust'"),
    ({"kind": "otm-sequence", "optimiser": {"epochs": 0}}, "optimiser.epochs", '"auto" or a number above 0'),
    ({"kind": "otm-sequence", "scorer": {"heads": 3}}, "scorer.node_dim", "a multiple of 6"),
    ({"kind": "otm-sequence", "scorer": {"length": 5000}}, "scorer.length", "4096"),
    ({"kind": "otm-sequence", "scorer": {"node_dim": 7}} | of_data({"order": "none"}, {}), "scorer.node_dim", "a multiple of 2"),
    ({"kind": "otm-sequence"} | of_data(VECTORS, {}), "kind", "a kind without a sequence encoder"),
    # vectors
    (of_data(VECTORS, {}) | {"scorer": {"kind": "attention"}}, "scorer.kind", "product or mlp, since data.format.format is vectors"),
    (of_data(VECTORS, {}) | {"instances": {"windows": [4, 2]}}, "instances.windows", "since data.format.format is vectors"),
    (of_data(VECTORS, {}) | {"instances": {"cold_share": 0.5}}, "instances.cold_share", "its default 0.02"),
    (of_data(VECTORS, {}) | {"tree": {"kind": "category"}}, "tree.kind", "vectors have no categories"),
    (of_data(VECTORS, {}) | {"search": {"exclude_seen": True}}, "search.exclude_seen", "false"),
    (of_data(VECTORS, {"kind": "last"}), "data.split.kind", ""),
    (of_data(VECTORS, {"kind": "date"}), "data.split.kind", ""),
    (of_data(VECTORS | {"items": "vector"}, {}), "data.format", "different columns for vector and items"),
]
"""Changes of the smallest configuration of a network, the key that is named, and words of what was expected."""

XMC, LOG = {"format": "xmc", "train": "a"}, {"format": "log", "train": "a"}
NPZ = {"format": "npz", "train": "a", "train_labels": "b"}

LINEAR: list[tuple[Raw, str, str]] = [
    ({"data": {"train": "train.txt"}}, "data.format", "'xmc', 'npz' or 'log'"),
    ({"data": {"format": "csv"}}, "data.format", "'xmc', 'npz' or 'log'"),
    ({"data": {"format": "xmc"}}, "data.train", "a value, since there is no default"),
    ({"data": {"format": "log"}}, "data.train", "a log, or data.own_texts to learn from"),
    ({"data": {"format": "log", "own_texts": ["title"]}}, "data.items", "a table of items"),
    ({"data": LOG | {"own_texts": ["t"], "own_weights": [1, 2], "items": "i"}}, "data.own_weights", "none, or 1, one for each of data.own"),
    ({"data": LOG | {"own_texts": ["t"], "own_weights": [1e-25], "items": "i"}}, "data.own_weights.0", "0.001"),
    ({"data": LOG | {"texts": "b"}}, "data.text_columns", "columns exactly where"),
    ({"data": LOG | {"views": "v"}}, "data.clicks", "a column exactly where data.views is one"),
    ({"data": LOG | {"clicks": "v"}}, "data.clicks", "a column exactly where data.views is one"),
    ({"data": LOG | {"views": "v", "clicks": "c", "weight": "w"}}, "data.weight", "nothing, since data.views"),
    ({"data": LOG | {"views": "v", "clicks": "c", "own_texts": ["t"], "items": "i"}}, "data.own_texts", "nothing, since such texts"),
    ({"data": NPZ | {"test": "c"}}, "data.test_labels", "a file exactly"),
    ({"data": XMC | {"query": "q"}}, "data.query", "one of data.format 'log'"),
    ({"data": XMC, "instances": {"targets": 3}}, "instances", "one of kind 'otm-robust'"),
    ({"data": XMC, "text": [{"unit": "word", "n": 1}]}, "text", "nothing, since data of format xmc"),
    ({"data": LOG, "text": [{"unit": "word", "m": 1, "n": 2}]}, "text.0.m", "`espalier options` lists all"),
    ({"data": LOG, "linear": {"gamma": 2}}, "linear.gamma", GAMMA),
    ({"data": LOG, "linear": {"costs": 1}}, "linear.costs", "no such key"),
    ({"data": LOG, "linear": {"cost": 1e10}}, "linear.cost", "at most 1e+09"),
    ({"data": LOG, "linear": {"intercept": "base-rate"}}, "linear.intercept", '"zero" where linear.loss is "squared-hinge"'),
    ({"data": LOG, "search": {"m": 2000}}, "search.m", "at most search.max_m, 1000"),
    ({"data": NPZ, "tree": {"count": 1}, "tail": {"form": "product"}}, "tail.form", '"none" where tree.count is 1'),
    (
        {"data": NPZ, "tree": {"count": 2}, "tail": {"form": "product"}, "stacking": {"model": "network"}},
        "stacking.model",
        "",
    ),
]
"""As NETWORKS, of kind xr-linear."""


def checked(changed: Raw) -> object:
    return deep_config(raw(**changed))


def checked_linear(changed: Raw) -> object:
    return SPECIFICATION.checked({"kind": "xr-linear", "name": "any"} | changed)


def given(changed: Raw, key: str) -> object:
    """The value of a key, None where it is not among what was changed."""
    value: Any = changed
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else value[int(part)] if isinstance(value, list) else None
    return value


@pytest.mark.parametrize(
    ("check", "changed", "key", "words"),
    [*((checked, *row) for row in NETWORKS), *((checked_linear, *row) for row in LINEAR)],
)
def test_what_cannot_be_is_refused_by_key_value_and_what_was_expected(
    check: Callable[[Raw], object], changed: Raw, key: str, words: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        check(changed)
    assert caught.value.field == key
    assert words in caught.value.expected
    value = given(changed, key)
    if isinstance(value, int | float | str):
        assert repr(caught.value.value) == repr(value)


@pytest.mark.parametrize("changed", [{}, {"algorithm": "otm"}, {"scorer": {"kind": "sequence"}}])
def test_a_kind_is_never_guessed(changed: Raw) -> None:
    with pytest.raises(InvalidConfig) as caught:
        SPECIFICATION.checked({"name": "books", "data": {"log": "log.csv"}} | changed)
    assert (caught.value.field, caught.value.expected) == ("kind", KINDS)


@pytest.mark.parametrize("wrong", [{"kind": "tree"}, {"kind": "mlp"}, {"hidden": "7"}, {"learning_rate": NAN}])
def test_a_bad_value_of_a_ranker_is_named(wrong: Raw) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(wrong))):
        ranker_config(**wrong)


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--config: .*none\.toml.* a TOML file that exists"):
        read_config(tmp_path / "none.toml")
    for content in (b"name = ", b"\xff\xfe", b"seed = " + b"9" * 5000, b"seed = " + b"[" * 100_000):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(InvalidConfig, match=r"bad\.toml: .*expected valid TOML"):
            read_config(tmp_path / "bad.toml")


# -- what is taken --------------------------------------------------------------------------------------------------------


def test_values_at_their_limits_are_taken() -> None:
    for weight in (0, 0.001, 1_000_000, "auto"):
        assert deep_config(raw(memory={"weight": weight})).memory.weight == weight
    for windows in ([1], [1] * 2, [1] * 69, [4096]):
        assert deep_config(raw(instances={"windows": windows})).history_length == sum(windows)
    assert deep_config(raw(kind="plt", search={"gamma": 1})).search.gamma == 1
    assert window_config(raw(scorer={"hidden": []})).scorer.hidden == ()
    assert not deep_config(raw(**of_data(VECTORS, {}))).search.exclude_seen
    deep_config(raw(**of_data(TIMED | {"timestamp_type": "seconds"}, {"kind": "date", "test_from": "2024-01-01"})))
    tail = {"data": NPZ, "tree": {"count": 2}, "tail": {"form": "product"}}
    assert isinstance(checked_linear(tail), LinearConfig)
    SPECIFICATION.checked({"kind": "xreg", "name": "any", "data": NPZ, "linear": {"intercept": "base-rate"}})


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_a_shipped_configuration_is_valid(file: Path) -> None:
    assert read_config(file).name == file.stem.removeprefix("xr-linear-")


def test_the_toml_file_is_read_and_a_date_of_toml_is_a_date(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        'kind = "otm-robust"\nname = "x"\nseed = 7\n[data]\nlog = "log.csv"\nsplit = { kind = "date", test_from = 2024-05-01 }\n'
        'format = { timestamp = "time", timestamp_type = "datetime", order = "timestamp" }\n[instances]\nwindows = [4, 1]\n'
    )
    config = read_deep_config(tmp_path / "x.toml")
    assert (config.seed, config.windowed_instances.windows) == (7, (4, 1))
    assert isinstance(config.data.split, DateSplit)
    assert config.data.split.test_from == "2024-05-01"


@pytest.mark.parametrize("steps", [10, 60, 1000, 8000])
def test_a_short_training_warms_up_for_a_fifth_of_its_steps(steps: int) -> None:
    config = deep_config(raw(kind="otm-sequence", optimiser={"steps": steps}))
    rates = [config.optimiser.learning_rate_at(step) for step in range(steps)]
    assert max(rates) >= 0.79 * config.optimiser.learning_rate
    assert rates.index(max(rates)) <= min(200, steps // 5)


# -- the list of keys -----------------------------------------------------------------------------------------------------


def test_all_kinds_are_listed_with_a_line_and_another_is_refused() -> None:
    assert list(kinds()) == [*MODELS, "highway", "linear"]
    listed = command("options")
    assert listed.status == 0
    for kind in kinds():
        assert re.search(rf"^  {kind} +\w.*\.$", listed.out, re.MULTILINE), kind
        assert all(option.meaning and option.type for option in options(section_of(kind)))
    refused = command("options", "tmd")
    assert refused.status == 1
    assert "KIND: got 'tmd', expected one of otm-robust, otm" in refused.err


def test_keys_are_printed_with_type_default_and_meaning() -> None:
    out = command("options", "otm-robust").out
    assert "\nobjective.random_nodes = 50\n    integer, at least 1. random nodes" in out
    assert "\nscorer.node_dim = 128 (product)\n" in out
    assert "\nscorer.node_dim = 24 (mlp, attention)\n" in out
    assert "\ndata.log = required\n    path." in out
    assert "level_decay" not in as_text("otm")
    assert "\nobjective.random_nodes = 0\n" in as_text("otm")


def is_fixed(section: type[BaseModel], name: str) -> bool:
    """Whether a dotted key has no other value than its default."""
    key, _, rest = name.partition(".")
    inner = sections_in(section.model_fields[key].annotation)
    return key in getattr(section, "FIXED", ()) or (
        bool(rest) and any(is_fixed(one, rest) for one in inner if rest.split(".")[0] in one.model_fields)
    )


@pytest.mark.parametrize("kind", MODELS)
def test_the_keys_of_a_kind_are_those_of_its_configuration_with_their_defaults(kind: str) -> None:
    data = {"format": "xmc", "train": "train.txt"} if kind in ("xr-linear", "xreg") else {"log": "log.csv"}
    plain = leaves(SPECIFICATION.checked({"kind": kind, "name": "any", "data": data}).model_dump(mode="json"))
    listed: dict[str, list[Any]] = {}
    for option in options(section_of(kind)):
        listed.setdefault(option.name, []).append(None if option.default is None else json.loads(option.default))
    required = {"kind", "name", "data.log", "data.train", "data.format", "text"}
    plain = {name: value for name, value in plain.items() if not is_fixed(section_of(kind), name)}
    assert {name for name, value in plain.items() if value not in listed.get(name, ["no such key"])} <= required


def leaves(raw: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in raw.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def test_the_page_of_options_is_this_commands_output() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == as_markdown(), "espalier options --markdown > docs/options.md"
    assert command("options", "--markdown").out == page
    for kind in kinds():
        for option in options(section_of(kind)):
            assert f"`{option.name}`" in page or option.name == "kind"


# -- numbers are finite -------------------------------------------------------------------------------------------------


def sections() -> list[type[BaseModel]]:
    """All sections of all kinds, inner ones included, each once."""
    found: dict[type[BaseModel], None] = {}
    waiting = list(kinds().values())
    while waiting:
        section = waiting.pop()
        if section not in found:
            found[section] = None
            waiting += [inner for field in section.model_fields.values() for inner in sections_in(field.annotation)]
    return list(found)


def takes_float(annotation: Any) -> bool:
    return annotation is float or (get_origin(annotation) is not Literal and any(map(takes_float, get_args(annotation))))


def number_keys() -> Iterator[tuple[type[BaseModel], str]]:
    for section in sections():
        for name, field in section.model_fields.items():
            if takes_float(field.annotation):
                yield section, name


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_every_number_has_to_be_finite(value: float) -> None:
    assert {name for _, name in number_keys()} >= {"learning_rate", "init_std", "weight", "dropout", "cost", "gamma", "unseen_items"}
    accepted = []
    for section, name in number_keys():
        try:
            section.model_validate({name: value})
        except ValidationError as error:
            if any(part["loc"][:1] == (name,) for part in error.errors()):
                continue
        accepted.append(f"{section.__name__}.{name}")
    assert accepted == []


@pytest.mark.parametrize(
    ("search", "items", "beam_size"),
    [({}, 9_000, 100), ({}, 40_000, 200), ({"max_beam_size": 60}, 9_000, 60), ({}, 1_048_576, 1000), ({"beam_size": 7}, 40_000, 7)],
)
def test_own_texts_are_searched_with_a_beam_for_their_number(search: dict[str, int], items: int, beam_size: int) -> None:
    data = {"format": "log", "items": "items.parquet", "own_texts": ["title"]}
    config = LinearConfig.model_validate({"kind": "xr-linear", "name": "any", "data": data, "search": search})
    shape = TreeShape(128, 32, is_wide=False)
    with_beam = config.with_beam(items, shape)
    assert with_beam.search.beam_size == beam_size
    assert with_beam.with_beam(3 * items, shape) == with_beam, "a bundle's configuration keeps its beam"
    without = config.model_copy(update={"data": config.data.model_copy(update={"own_texts": ()})})
    assert without.with_beam(items, shape) == without
    assert without.with_beam(items, shape._replace(is_wide=True)).search.beam_size == beam_size
