"""Training with a sequence encoder: it learns the order, is exported, served and trained on; with content; of lists without an order."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from espalier.bundle import Bundle
from espalier.bundle_writer import with_parts
from espalier.engines import open_engine
from espalier.errors import InvalidConfig, InvalidData
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from tests.training.content_logs import KINDS, SIZE, write_log
from tests.training.logs import log_of
from tests.training.runs import Begun, begun, exported, weights
from training.data.csr import as_matrix
from training.data.interactions import Interactions
from training.data.splits import LEARNED_VALIDATION
from training.data.user_item_matrix import events_of_items
from training.deep.directed_start import followers
from training.deep.export import FinalModel
from training.deep.first_model import INVERSE_TEMPERATURE, popularity_biases, rows_from_embeddings
from training.deep.prepare import item_embeddings, prepare
from training.deep.run import train_and_export, wants_refit
from training.deep.scorers.row_table import lookup
from training.deep.scorers.sequence import SequenceQuery
from training.deep.scorers.window_states import WindowStates
from training.deep.sequence.batches import SequenceBatch, TrainedPositions, trained_positions
from training.deep.sequence.rules import with_rules
from training.deep.sequence.steps import SequenceSteps
from training.deep.validation import search_pairs, validation_pairs
from training.held_out import held_out_log
from training.specification.deep import DeepConfig, SequenceConfig
from training.specification.models import config_of, deep_config

CPU = torch.device("cpu")
ITEMS, USERS = 40, 240


def successors() -> dict[int, int]:
    """Each item's successor: one circle through all items."""
    circle = np.random.default_rng(7).permutation(ITEMS).tolist()
    return dict(zip(circle, circle[1:] + circle[:1], strict=True))


def circle_log(file: Path, seed: int, lengths: range, ends: bool = False) -> Path:
    """Lists of such lengths that follow the circle. ends: the last but one item, which validation asks for, comes nowhere else."""
    rng, after = np.random.default_rng(seed), successors()
    lines = ["user,item"]
    for user in range(USERS):
        item = int(rng.integers(ITEMS))
        for _ in range(int(rng.integers(lengths.start, lengths.stop))):
            lines.append(f"u{user},i{item}")
            item = after[item]
        if ends:
            lines += [f"u{user},new{item}", f"u{user},i{after[item]}"]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What comes next is known from the last item alone, and no item is more popular by much."""
    return circle_log(tmp_path_factory.mktemp("log") / "log.csv", 3, range(4, 14))


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
        "refit": False,
    }
    return plain | {name: plain.get(name, {}) | section for name, section in sections.items()}


@pytest.fixture(scope="module")
def bundle(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return exported(settings(log), tmp_path_factory.mktemp("models") / "planted" / "1")


# -- what is learned and served -------------------------------------------------------------------------------------------


def test_a_trained_bundle_answers_with_the_successor_and_says_what_it_reads(bundle: Bundle) -> None:
    """Histories longer than the encoder reads, shorter ones, and repeated items: the last item alone says what follows."""
    after, kind = successors(), HistoryKind(length=10)
    rng = np.random.default_rng(1)
    histories = [rng.integers(ITEMS, size=size) for size in (1, 2, 5, 10, 30, 30) * 10]
    row_of = bundle.items.rows_of([f"i{item}" for item in range(ITEMS)])
    queries = pad_histories(kind, [row_of[history] for history in histories])
    found = open_engine(bundle).search(queries, SearchParams.uniform(len(histories), ITEMS, 5))
    expected = row_of[[after[int(history[-1])] for history in histories]]
    assert (found.item_rows_BM[:, 0] == expected).mean() > 0.6
    assert np.isfinite(found.ranks_BM).all()
    one = open_engine(bundle).search(pad_histories(kind, [np.zeros(0, np.int64)]), SearchParams.uniform(1, 10, 5))
    assert np.isfinite(one.ranks_BM).all(), "without a history, too"
    assert bundle.graph_scorer.encoder == "sequence"
    assert bundle.graph_scorer.state_levels == bundle.tree.height + 1
    config = config_of(bundle.manifest, DeepConfig)
    assert (config.kind, config.history_length, bundle.graph_kind) == ("otm-sequence", 10, kind)
    assert bundle.manifest.metrics["test"]["raw"][0]["recall"] > 0.5


def test_windows_start_from_who_took_what_a_transformer_from_what_follows_what_and_both_from_popularity(log: Path, tmp_path: Path) -> None:
    run = begun(settings(log, scorer={"init": "embeddings", "node_dim": 16}), tmp_path / "log")
    assert isinstance(run.model.encoder, SequenceQuery)
    first, second = (run.model.node_rows.detach()[:, part.columns] for part in run.model.encoder.typed_parts)
    assert first.shape[1] == second.shape[1] == 8
    learned, seed = (run.prepared.interactions, run.prepared.split.train), run.config.seed
    for part, found in ((first, item_embeddings(run.prepared, 7, seed)), (second, followers(*learned, 7, seed))):
        assert_allclose(part[:, :-1], rows_from_embeddings(run.tree, found, run.config.scorer.init_std), rtol=1e-5)
        assert_allclose(part[:, -1], popularity_biases(run.tree, events_of_items(*learned), run.config.objective.gamma), rtol=1e-6)


def test_items_that_follow_the_same_item_start_alike_though_no_list_has_both() -> None:
    log = log_of([[0, 1], [0, 2]] * 20 + [[3, 4], [4, 5]] * 20 + [[6]])
    found = followers(log, np.arange(log.user_count), 4, seed=1)
    length = np.linalg.norm(found, axis=1)
    cosine = found @ found.T / np.maximum(np.outer(length, length), 1e-9)
    assert cosine[1, 2] > 0.99
    assert max(abs(cosine[1, 4]), abs(cosine[1, 5]), abs(cosine[4, 5])) < 0.01
    assert not length[[0, 3, 6]].any(), "they follow nothing"
    assert not followers(log, np.array([80]), 4, seed=1).any()


# -- a run is a function of its configuration -----------------------------------------------------------------------------


def test_length_and_places_come_from_the_log_unless_they_are_configured(log: Path, tmp_path: Path) -> None:
    config = begun(settings(log, scorer={"length": "auto", "dropout": "auto"}, optimiser={"places": "auto"}), tmp_path / "log").config
    assert (config.history_length, config.optimiser.model_dump()["places"]) == (50, 1024)
    assert config.scorer.model_dump()["dropout"] == 0.5, "some 40 events an item"
    with pytest.raises(InvalidConfig, match=r"scorer\.length"):
        _ = deep_config(settings(log, scorer={"length": "auto"})).history_length


# -- rules and earlier models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimiser", "told"), [({"steps": 100_000}, True), ({"steps": 900}, False), ({}, False)])
def test_fewer_steps_than_configured_are_told_once(
    log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, optimiser: dict[str, int], told: bool
) -> None:
    caplog.set_level(logging.INFO)
    raw = settings(log)
    run = begun(raw | {"optimiser": {"places": 20, "epochs": 0.5} | optimiser}, tmp_path)
    assert with_rules(run.config, run.prepared) == run.config
    events = np.diff(run.prepared.interactions.offset_U1)[run.prepared.split.train].sum()
    line = f"1,000 steps: {1000 * 20 / events:.1f} passes over the lists (optimiser.epochs); optimiser.steps allows 100,000"
    assert [record.message for record in caplog.records if "optimiser.steps" in record.message] == [line] * told


@pytest.mark.parametrize(("tree", "shape"), [("earlier", {}), ("jtm", {}), ("earlier", {"node_dim": "auto", "length": "auto"})])
def test_training_goes_on_from_a_bundle(log: Path, bundle: Bundle, tmp_path: Path, tree: str, shape: dict[str, str]) -> None:
    scorer = {"init": "earlier"} | shape
    raw = settings(log, tree={"kind": tree, "branching": 3}, scorer=scorer, optimiser={"steps": 1, "learning_rate": 1e-9})
    raw["earlier_model"] = str(bundle.path)
    run = begun(raw, tmp_path / "log")
    model = run.fit(tmp_path)
    before = bundle.weights()
    assert before.keys() == {name for name, _ in model.named_parameters()} - {"node_rows"}
    for name, array in before.items():
        assert_allclose(weights(model)[name], array, atol=1e-6, err_msg=name)
    pairs = validation_pairs(run.config, run.prepared, 50)
    recall_rows, _ = search_pairs(run.config, run.topology, model, pairs, 0.5, "logit", 10, 5)
    assert (recall_rows >= 0).all()


@pytest.mark.parametrize(("users", "items"), [(20, 1), (3, 5)])
def test_a_log_in_which_users_have_nothing_in_common_is_refused(tmp_path: Path, users: int, items: int) -> None:
    """Of three users one trains; with one item there is nothing to choose from."""
    file = tmp_path / "log.csv"
    file.write_text("user,item\n" + "".join(f"u{user},i{place % items}\n" for user in range(users) for place in range(6)))
    split = {"kind": "users", "test_share": 0.34, "validation_share": 0.34}
    run = begun(settings(file, data={"format": {"min_user_events": 1}, "split": split}), tmp_path)
    with pytest.raises(InvalidData, match=rf"'\d+ training users and {items} items', expected at least 2 of each"):
        _ = run.tree


def test_a_steps_targets_are_drawn_as_the_configuration_says(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(settings(log, instances={"targets": 3, "nearness": 2.5, "cold_share": 0.1}), tmp_path / "log")
    asked: list[tuple[Any, ...]] = []

    def recorded(lists: Interactions, batch: SequenceBatch, *options: Any) -> TrainedPositions:
        asked.append(options[:3])
        return trained_positions(lists, batch, *options)

    monkeypatch.setattr("training.deep.sequence.steps.trained_positions", recorded)
    run.steps.make(0)
    assert asked == [(3, 2.5, 0.1)]


# -- content ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content_raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log, items = write_log(tmp_path_factory.mktemp("sequences"))
    return {
        "kind": "otm-sequence",
        "name": "with",
        "data": {"log": str(log), "items": str(items), "format": {"order": "file"}, "split": {"kind": "users", "unseen_items": 0.2}},
        "instances": {"targets": 5},
        "scorer": {"kind": "sequence", "node_dim": 16, "window_hidden": 16, "layers": 1, "length": 16, "dropout": 0.1},
        "objective": {"negatives": 60, "whole": 100},
        "optimiser": {"steps": 120, "places": 300, "learning_rate": 1e-2, "warm_steps": 10, "average": 20, "validate_every": 40},
        "search": {"beam_size": 20, "m": 10, "max_m": 120, "max_beam_size": 128, "gamma": 0.5},
        "content": {"columns": "auto"},
        "memory": {"weight": 0},
    }


def content_rows_of(run: Begun) -> np.ndarray:
    """float64[I, D]: c · W."""
    assert run.model.content_table is not None
    assert run.prepared.content is not None
    return np.asarray(as_matrix(run.prepared.content.rows).toarray() @ run.model.content_table.detach().numpy())


def rows_of_items_in(run: Begun) -> np.ndarray:
    """float32[I, D]: what lookups in training find."""
    with torch.no_grad():
        return lookup(torch.from_numpy(run.tree.leaf_of_item), run.model.table).numpy()


# -- the first rows -------------------------------------------------------------------------------------------------------


def test_an_untouched_item_starts_at_its_contents_row_with_a_bias_in_the_range_of_items_like_it(
    content_raw: dict[str, Any], tmp_path: Path
) -> None:
    run = begun(content_raw, tmp_path / "log")
    rows_ID = rows_of_items_in(run)
    unseen_I = ~run.prepared.seen_I
    assert_allclose(rows_ID[unseen_I], content_rows_of(run)[unseen_I], rtol=1e-4, atol=1e-5)
    assert isinstance(run.model.encoder, SequenceQuery)
    for part in run.model.encoder.typed_parts:
        bias_I = rows_ID[:, part.columns.stop - 1]
        low, high = bias_I[~unseen_I].min(), bias_I[~unseen_I].max()
        assert low <= bias_I[unseen_I].min() <= bias_I[unseen_I].max() <= high


# -- training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_rows_of_untouched_items_follow_their_content_at_every_update(
    content_raw: dict[str, Any], tmp_path: Path, decay: float
) -> None:
    run = begun(content_raw, tmp_path / "log", optimiser={"weight_decay": decay})
    unseen = np.flatnonzero(~run.prepared.seen_I)
    assert run.steps.optimiser._adam.defaults["weight_decay"] == decay
    before_ID = content_rows_of(run)
    for step in range(12):
        run.steps.make(step)
        rows_ID = rows_of_items_in(run)
        assert_allclose(rows_ID[unseen], content_rows_of(run)[unseen], rtol=1e-4, atol=1e-5)
    assert np.abs(content_rows_of(run) - before_ID)[unseen].max(1).min() > 1e-3


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("whole", [1, 1000])
def test_untouched_items_are_negatives_only_of_models_without_content(
    content_raw: dict[str, Any], tmp_path: Path, content: bool, whole: int
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "objective": {"whole": whole, "negatives": 4000},
        "content": {"columns": "auto" if content else []},
    }
    run = begun(content_raw, tmp_path / "log", **sections)
    assert isinstance(run.steps, SequenceSteps)
    target = int(np.flatnonzero(run.prepared.seen_I)[0])
    leaves = run.steps.columns.levels(torch.tensor([[target]]), torch.Generator().manual_seed(1))[-1]
    column_S = leaves.nodes_M if leaves.column_S is None else leaves.nodes_M[leaves.column_S]
    counted = set(run.tree.leaf_item[column_S[torch.isfinite(leaves.offset_S)].numpy() - run.tree.leaf_offset].tolist())
    assert counted == set(np.flatnonzero(run.prepared.seen_I).tolist() if content else range(KINDS * SIZE))


def test_a_step_counts_the_gradient_of_the_content_table_in_its_norm(
    content_raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(content_raw, tmp_path / "log")
    run.model.node_rows.data *= 20  # so that the gradient is large
    of_rows: list[torch.Tensor] = []

    def noted(places_R: torch.Tensor, gradient_RD: torch.Tensor, rate: float) -> None:
        of_rows.append(gradient_RD)

    monkeypatch.setattr(run.steps.optimiser._rows, "step", noted)
    run.steps.make(0)
    assert run.model.content_table is not None
    assert run.model.content_table.grad is not None
    gradients = [*of_rows, *(parameter.grad for parameter in run.model.parameters() if parameter.grad is not None)]
    assert float(torch.stack([gradient.norm() for gradient in gradients]).norm()) == pytest.approx(1, rel=1e-3)


def test_training_goes_on_from_a_bundle_with_content(content_raw: dict[str, Any], tmp_path: Path) -> None:
    """Its rows are where it starts; a new W is fitted to those of touched items."""
    with_content = exported(content_raw | {"optimiser": content_raw["optimiser"] | {"steps": 20}}, tmp_path / "models" / "with" / "1")
    earlier = content_raw | {"earlier_model": str(with_content.path)}
    run = begun(earlier, tmp_path / "log", tree={"kind": "earlier"}, scorer={"init": "earlier"})
    rows_ID = run.model.node_rows.detach().numpy()[run.tree.leaf_of_item]
    before_ID = with_content.node_rows_ND[
        with_content.tree.leaf_of_item[with_content.items.rows_of(run.prepared.items.column("id").to_pylist())]
    ]
    seen_I = run.prepared.seen_I
    assert_allclose(rows_ID[seen_I], before_ID[seen_I], atol=1e-6)
    error, size = (np.square(part[~seen_I]).mean() for part in (rows_ID - before_ID, before_ID))
    assert error < 0.5 * size


# -- lists without an order: shuffled, read as one window, found from the first step on -----------------------------------


GROUPS, GROUP_SIZE = 6, 8


@pytest.fixture(scope="module")
def sets_raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Users who touch most items of one group, in ascending order."""
    rng, lines = np.random.default_rng(2), ["user,item"]
    for user in range(180):
        items = np.sort(rng.choice(GROUP_SIZE, 6, replace=False)) + GROUP_SIZE * (user % GROUPS)
        lines += [f"u{user},i{item:02d}" for item in items]
    file = tmp_path_factory.mktemp("log") / "log.csv"
    file.write_text("\n".join(lines) + "\n")
    return {
        "kind": "otm-sequence",
        "name": "sets",
        "data": {"log": str(file), "format": {"order": "none", "min_user_events": 4}},
        "scorer": {"node_dim": 16, "dropout": 0.0},
        "optimiser": {"steps": 30, "places": 200, "validate_every": 10},
        "search": {"beam_size": 20, "m": 5, "max_beam_size": 64, "max_m": 20},
    }


@pytest.fixture(scope="module")
def sets(sets_raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return exported(sets_raw, tmp_path_factory.mktemp("models") / "sets" / "1")


def test_the_history_of_a_set_is_one_window_and_its_targets_are_all_alike(sets_raw: dict[str, Any], tmp_path: Path) -> None:
    run = begun(sets_raw, tmp_path)
    assert isinstance(run.config, SequenceConfig)
    assert run.config.instances.nearness == 0
    assert isinstance(run.model.encoder, SequenceQuery)
    (part,) = run.model.encoder.typed_parts
    assert isinstance(part.reader, WindowStates)
    assert part.reader.windows == (run.config.history_length,)


def test_a_model_begins_as_the_search_for_items_near_the_mean_of_a_history(sets_raw: dict[str, Any], tmp_path: Path) -> None:
    run = begun(sets_raw, tmp_path)
    tree, model = run.tree, run.model
    group_I = np.array([int(item[1:]) // GROUP_SIZE for item in run.prepared.interactions.item_ids.to_pylist()])
    for group in range(GROUPS):
        items = np.flatnonzero(group_I == group)
        leaves = torch.from_numpy(tree.leaf_of_item[items[:3]])
        with torch.no_grad():
            state_D = model.state(leaves[None])[0, -1, :-1]
            rows_nD = model.node_rows[tree.leaf_offset :, :-1]
            mean_D = model.node_rows[leaves, :-1].mean(0)
            torch.testing.assert_close(state_D, mean_D * INVERSE_TEMPERATURE / (run.config.scorer.init_std**2 * 15), rtol=1e-4, atol=1e-4)
            nearest = torch.argsort(rows_nD @ state_D, descending=True)[:GROUP_SIZE].numpy()
        assert set(tree.leaf_item[nearest].tolist()) == set(items.tolist())


def test_a_bundle_of_sets_answers_with_the_rest_of_the_set_whatever_the_order(sets: Bundle) -> None:
    opened, kind = open_engine(sets, "cpu"), sets.manifest.query
    assert isinstance(kind, HistoryKind)
    id_of = sets.items.ids_of(np.arange(len(sets.items)))
    row = {item: place for place, item in enumerate(id_of)}
    for group in range(GROUPS):
        history = np.array([row[f"i{GROUP_SIZE * group + k:02d}"] for k in range(5)])
        queries = pad_histories(kind, [history, history[::-1].copy()])
        found = opened.search(queries, SearchParams.uniform(2, 20, 3, np.stack([history, history])))
        assert {id_of[item][:1] + str(int(id_of[item][1:]) // GROUP_SIZE) for item in found.item_rows_BM[0]} == {f"i{group}"}
        assert_array_equal(found.item_rows_BM[0], found.item_rows_BM[1])
    opened.close()


@pytest.mark.parametrize(("items", "children"), [(10, 2), (1 << 15, 2), (89_578, 10), (100_001, 11), (340_000, 9), (10**6, 10)])
def test_nodes_of_large_trees_have_more_children_unless_a_number_is_said(sets_raw: dict[str, Any], items: int, children: int) -> None:
    assert deep_config(sets_raw).tree.children(items) == children
    assert deep_config(sets_raw | {"tree": {"branching": 5}}).tree.children(items) == 5


# -- training again -------------------------------------------------------------------------------------------------------


def turned(folder: Path) -> Path:
    return circle_log(folder / "turned.csv", 5, range(8, 12), ends=True)


def knows_new_items(bundle: Bundle) -> bool:
    """Whether the item that stands between two others is found before most of the rest."""
    before = {follower: item for item, follower in successors().items()}
    rows = {item: bundle.items.rows_of([f"i{before[item]}", f"new{item}"]) for item in range(ITEMS)}
    histories = [row[:1] for row in rows.values()]
    assert isinstance(bundle.graph_kind, HistoryKind)
    queries, params = pad_histories(bundle.graph_kind, histories), SearchParams.uniform(ITEMS, 2 * ITEMS, 20)
    found = open_engine(bundle).search(queries, params).item_rows_BM
    return bool(np.mean([row[1] in own for row, own in zip(rows.values(), found, strict=True)]) > 0.5)


def test_what_validation_asked_for_is_learned_once_all_is_chosen(tmp_path: Path) -> None:
    plain = settings(turned(tmp_path))
    raw = {name: plain[name] for name in ("name", "data", "search")} | {"kind": "neighbours"}
    bundles = {refit: exported(raw | {"refit": refit}, tmp_path / f"{refit}" / "planted" / "1") for refit in (True, False)}
    assert [bundles[refit].manifest.data["learned_validation"] for refit in (True, False)] == [True, False]
    assert [knows_new_items(bundles[refit]) for refit in (True, False)] == [True, False]
    unseen = {refit: int(held_out_log(bundles[refit]).unseen_I.sum()) for refit in (True, False)}
    assert unseen[True] == 0 < ITEMS / 2 < unseen[False], "of evaluate --unseen"
    counts = {refit: found.points for refit in (True, False) if (found := bundles[refit].label_counts()) is not None}
    assert counts[True] > counts[False] > 0, "and counted"
    memories = [bundle.memory for bundle in bundles.values()]
    assert all(memory is not None and len(memory.item) and memory.formula is not None for memory in memories)
    chosen = [bundle.manifest.metrics["validation"] for bundle in bundles.values()]
    assert chosen[0] == chosen[1]
    assert bundles[True].manifest.ranking == bundles[False].manifest.ranking


def test_who_goes_on_from_a_model_that_knows_the_answers_is_told(
    log: Path, bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    knowing = with_parts(bundle, tmp_path / "knowing" / "1", {"data": bundle.manifest.data | {LEARNED_VALIDATION: True}}, {})
    for earlier, told in ((bundle, False), (knowing, True)):
        caplog.clear()
        raw = settings(log, tree={"kind": "earlier", "branching": 3}, scorer={"init": "earlier"}) | {"earlier_model": str(earlier.path)}
        (tmp_path / f"log-{told}").mkdir()
        prepare(deep_config(raw), None, tmp_path / f"log-{told}")
        assert ("has learned from validation queries" in caplog.text) == told


def test_a_run_that_was_killed_while_it_trained_again_ends_as_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = settings(turned(tmp_path), scorer={"init": "embeddings"}, optimiser={"steps": 12, "validate_every": 4}) | {"refit": True}
    config, killed, make, finals = deep_config(raw), list[int](), SequenceSteps.make, list[FinalModel]()
    monkeypatch.setattr("training.deep.fit.CHECKPOINT_EVERY", 2)
    monkeypatch.setattr("training.deep.run.export", lambda *given: finals.append(given[-1]))

    def train(name: str, resume: bool) -> None:
        work = tmp_path / name
        work.mkdir(exist_ok=True)
        train_and_export(config, prepare(config, None, work), tmp_path / "planted" / "1", CPU, work, resume)

    def dying(self: SequenceSteps, step: int) -> Any:
        killed.append(step)
        if killed.count(3) == 2:
            raise KeyboardInterrupt
        return make(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(SequenceSteps, "make", dying)
        with pytest.raises(KeyboardInterrupt):
            train("killed", resume=False)
    train("killed", resume=True)
    train("whole", resume=False)
    resumed, whole = (weights(final.model) for final in finals)
    assert_array_equal(resumed["node_rows"], whole["node_rows"])


def test_lists_that_hardly_grow_are_not_trained_on_again(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = deep_config(settings(log) | {"refit": True})
    prepared = prepare(config, None, tmp_path)
    assert wants_refit(config, prepared.split)
    assert not wants_refit(config.model_copy(update={"refit": False}), prepared.split)
    monkeypatch.setattr("training.deep.run.LEAST_MORE", 0.5)
    assert not wants_refit(config, prepared.split)
    assert not wants_refit(config, replace(prepared.split, final=None))


def test_the_second_training_makes_the_steps_that_validation_chose_and_keeps_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = deep_config(settings(turned(tmp_path), optimiser={"steps": 30, "validate_every": 10}) | {"refit": True})
    made: list[tuple[int, int]] = []
    make, recalls = SequenceSteps.make, iter([0.5, 0.4, 0.3])

    def counted(self: SequenceSteps, step: int) -> Any:
        made.append((step, self.lists.event_count))
        return make(self, step)

    monkeypatch.setattr(SequenceSteps, "make", counted)
    monkeypatch.setattr("training.deep.fit.CHECKPOINT_EVERY", 10)
    monkeypatch.setattr("training.deep.fit.validation_recall", lambda *_: next(recalls))
    finals: list[FinalModel] = []

    def exported(*given: Any) -> None:
        finals.append(given[-1])

    monkeypatch.setattr("training.deep.run.export", exported)
    (tmp_path / "work").mkdir()
    prepared = prepare(config, None, tmp_path)
    events = [split.lists.event_count for split in (prepared.split, prepared.split.whole())]
    train_and_export(config, prepared, tmp_path / "planted" / "1", CPU, tmp_path / "work", resume=False)
    assert made == [(step, events[again]) for again, steps in enumerate((30, 10)) for step in range(steps)]
    last = torch.load(tmp_path / "work" / "again" / "checkpoint.pt", weights_only=True)["model"]["node_rows"]
    apart = (finals[0].model.node_rows.detach() - last).abs().max()
    assert 0 < float(apart) < float(last.abs().max()), "a mean, which follows the weights"
