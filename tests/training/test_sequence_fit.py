"""Training with a sequence encoder, on planted successors: it learns the order, resumes exactly, is exported, served and trained on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import InvalidConfig, InvalidData
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from training.data.interactions import Interactions
from training.data.user_item_matrix import events_of_items
from training.deep.first_model import build_model, popularity_biases
from training.deep.fit import fit
from training.deep.prepare import Prepared, build_tree, prepare
from training.deep.run import fit_and_export
from training.deep.scorers.sequence import SequenceQuery
from training.deep.sequence.batches import SequenceBatch
from training.deep.sequence.places import Places, trained_places
from training.deep.sequence.rules import with_rules
from training.deep.sequence.steps import SequenceSteps
from training.deep.topology import Topology
from training.deep.validation import search_pairs, validation_pairs
from training.specification.deep import DeepConfig, SequenceConfig
from training.specification.models import config_of, deep_config

CPU = torch.device("cpu")
ITEMS, USERS = 40, 240


def successors() -> dict[int, int]:
    """Each item's successor: one circle through all items."""
    circle = np.random.default_rng(7).permutation(ITEMS).tolist()
    return dict(zip(circle, circle[1:] + circle[:1], strict=True))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lists that follow the circle. What comes next is known from the last item alone, and no item is more popular by much."""
    rng, after = np.random.default_rng(3), successors()
    lines = ["user,item"]
    for user in range(USERS):
        item = int(rng.integers(ITEMS))
        for _ in range(int(rng.integers(4, 14))):
            lines.append(f"u{user},i{item}")
            item = after[item]
    file = tmp_path_factory.mktemp("log") / "log.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def settings(log: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "kind": "otm-sequence",
        "name": "planted",
        "data": {"log": str(log), "format": {"order": "file"}, "split": {"kind": "last"}},
        "tree": {"branching": 3},
        "instances": {"targets": 1},
        "scorer": {"kind": "sequence", "node_dim": 16, "layers": 1, "length": 10, "dropout": 0.1, "init": "random"},
        "objective": {"negatives": 12, "whole": 20},
        "optimiser": {"steps": 200, "places": 200, "learning_rate": 1e-2, "warm_steps": 10, "average": 20, "validate_every": 50},
        "search": {"beam_size": 10, "m": 5, "max_beam_size": 64, "max_m": 20, "exclude_seen": False},
    }
    return plain | {name: plain.get(name, {}) | section for name, section in sections.items()}


def ready(raw: dict[str, Any], work: Path) -> tuple[DeepConfig, Prepared]:
    work.mkdir(exist_ok=True)
    config = deep_config(raw)
    prepared = prepare(config, None, work)
    return with_rules(config, prepared), prepared


@pytest.fixture(scope="module")
def bundle(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    trained = fit_and_export(deep_config(settings(log)), None, tmp_path_factory.mktemp("models") / "planted" / "1", CPU, resume=False)
    assert trained is not None
    return trained


# -- what is learned and served -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["reference", "compiled-cpu"])
def test_a_trained_bundle_answers_with_the_successor(bundle: Bundle, engine: str) -> None:
    """Histories longer than the encoder reads, shorter ones, and repeated items: the last item alone says what follows."""
    after, kind = successors(), HistoryKind(length=10)
    rng = np.random.default_rng(1)
    histories = [rng.integers(ITEMS, size=size) for size in (1, 2, 5, 10, 30, 30)]
    row_of = bundle.items.rows_of([f"i{item}" for item in range(ITEMS)])
    queries = pad_histories(kind, [row_of[history] for history in histories])
    found = open_engine(bundle, engine=engine).search(queries, SearchParams.uniform(len(histories), ITEMS, 5))
    expected = row_of[[after[int(history[-1])] for history in histories]]
    assert (found.item_rows_BM[:, 0] == expected).mean() > 0.6
    assert np.isfinite(found.ranks_BM).all()


def test_the_bundle_says_what_it_reads_and_a_query_without_history_has_an_answer(bundle: Bundle) -> None:
    assert bundle.graph_scorer.encoder == "sequence"
    assert bundle.graph_scorer.state_levels == bundle.tree.height + 1
    config = config_of(bundle.manifest, DeepConfig)
    assert (config.kind, config.history_length, bundle.graph_kind) == ("otm-sequence", 10, HistoryKind(length=10))
    one = open_engine(bundle).search(pad_histories(bundle.graph_kind, [np.zeros(0, np.int64)]), SearchParams.uniform(1, 10, 5))
    assert np.isfinite(one.ranks_BM).all()
    assert bundle.manifest.metrics["test"]["raw"][0]["recall"] > 0.5


def test_every_part_of_a_row_starts_from_the_same_embeddings_and_the_popularity_of_what_is_below(log: Path, tmp_path: Path) -> None:
    config, prepared = ready(settings(log, scorer={"init": "embeddings", "node_dim": 16}), tmp_path / "log")
    tree = build_tree(config, prepared)
    model = build_model(config, tree, prepared)
    assert isinstance(model.encoder, SequenceQuery)
    first, second = (model.node_rows.detach()[:, part.columns] for part in model.encoder.each)
    assert first.shape[1] == 8
    assert_array_equal(first, second)
    assert first[:, :-1].abs().max() > 0
    events_I = events_of_items(prepared.interactions, prepared.split.train)
    assert_allclose(first[:, -1], popularity_biases(tree, events_I, config.objective.gamma), rtol=1e-6)


# -- a run is a function of its configuration -----------------------------------------------------------------------------


def weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def test_length_and_places_come_from_the_log_unless_they_are_configured(log: Path, tmp_path: Path) -> None:
    config, _ = ready(settings(log, scorer={"length": "auto"}, optimiser={"places": "auto"}), tmp_path / "log")
    assert (config.history_length, config.optimiser.model_dump()["places"]) == (50, 1024)
    with pytest.raises(InvalidConfig, match=r"scorer\.length"):
        _ = deep_config(settings(log, scorer={"length": "auto"})).history_length


def test_a_loss_that_is_not_finite_ends_training_with_advice(log: Path, tmp_path: Path) -> None:
    config, prepared = ready(settings(log, optimiser={"learning_rate": 1e30, "warm_steps": 0}), tmp_path / "log")
    with pytest.raises(FloatingPointError, match=r"lower optimiser\.learning_rate"):
        fit(config, prepared, build_tree(config, prepared), CPU, tmp_path, resume=False)


# -- rules and earlier models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", ["earlier", "jtm"])
def test_training_goes_on_from_a_bundle(log: Path, bundle: Bundle, tmp_path: Path, tree: str) -> None:
    raw = settings(log, tree={"kind": tree, "branching": 3}, scorer={"init": "earlier"}, optimiser={"steps": 1, "learning_rate": 1e-9})
    raw["earlier_model"] = str(bundle.path)
    config, prepared = ready(raw, tmp_path / "log")
    made = build_tree(config, prepared)
    model = fit(config, prepared, made, CPU, tmp_path, resume=False)
    before = bundle.weights()
    assert before.keys() == {name for name, _ in model.named_parameters()} - {"node_rows"}
    for name, array in before.items():
        assert_allclose(weights(model)[name], array, atol=1e-6, err_msg=name)
    recall_rows, _ = search_pairs(config, Topology(made, CPU), model, validation_pairs(config, prepared, 50), 0.5, "logit", 10, 5)
    assert (recall_rows >= 0).all()


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ({"kind": "sequence", "length": 12, "node_dim": 16, "layers": 1}, "scorer.length: got 12, expected 10, as in earlier_model"),
        ({"kind": "product"}, "scorer.kind: got 'product', expected 'sequence', as in earlier_model"),
    ],
)
def test_an_earlier_model_of_another_scorer_is_refused(
    log: Path, bundle: Bundle, tmp_path: Path, scorer: dict[str, Any], message: str
) -> None:
    raw = settings(log, tree={"kind": "earlier", "branching": 3}) | {
        "scorer": scorer | {"init": "earlier"},
        "earlier_model": str(bundle.path),
    }
    if scorer["kind"] == "product":
        raw |= {"kind": "otm-robust", "objective": {}, "optimiser": {}}
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        ready(raw, tmp_path / "log")


@pytest.mark.parametrize(("users", "items"), [(20, 1), (3, 5)])
def test_a_log_in_which_users_have_nothing_in_common_is_refused(tmp_path: Path, users: int, items: int) -> None:
    """Of three users one trains; with one item there is nothing to choose from."""
    file = tmp_path / "log.csv"
    file.write_text("user,item\n" + "".join(f"u{user},i{place % items}\n" for user in range(users) for place in range(6)))
    split = {"kind": "users", "test_share": 0.34, "validation_share": 0.34}
    config = deep_config(settings(file, data={"format": {"min_user_events": 1}, "split": split}))
    prepared = prepare(config, None, tmp_path)
    with pytest.raises(InvalidData, match=rf"'\d+ training users and {items} items', expected at least 2 of each"):
        build_tree(config, prepared)


def test_a_steps_targets_are_drawn_as_the_configuration_says(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, prepared = ready(settings(log, instances={"targets": 3, "nearness": 2.5, "cold_share": 0.1}), tmp_path / "log")
    assert isinstance(config, SequenceConfig)
    tree = build_tree(config, prepared)
    topology = Topology(tree, CPU)
    asked: list[tuple[Any, ...]] = []

    def recorded(lists: Interactions, batch: SequenceBatch, *options: Any) -> Places:
        asked.append(options[:3])
        return trained_places(lists, batch, *options)

    monkeypatch.setattr("training.deep.sequence.steps.trained_places", recorded)
    SequenceSteps(config, build_model(config, tree, prepared), topology, prepared, bfloat16=False).make(0)
    assert asked == [(3, 2.5, 0.1)]
