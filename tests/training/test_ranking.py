"""How a trained tree ranks: what a memory adds to the search in training, how it is chosen, and what the bundle serves.

The log: users walk around rings of items, so an item is followed by its neighbour on the ring; popularity knows nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import training.deep.validation as validation
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.masks.eligibility import eligible_nodes
from espalier.memory import BUCKETS, Memory
from espalier.memory_lists import MemoryTree
from espalier.metrics import ndcg_at_m
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from tests.training.logs import log_of, split_of
from training.deep import ranking
from training.deep.beam import MemoryScores, OwnScore
from training.deep.calibration import MIN_HITS, calibrate
from training.deep.export import export
from training.deep.first_model import build_model
from training.deep.memory import (
    NEIGHBOUR_COUNTS,
    MemorySource,
    memory_source,
    memory_task,
    recounted,
    unit_of,
    with_sorted_rows,
    with_weight,
)
from training.deep.prepare import Prepared, build_tree, prepare
from training.deep.ranking import ROUNDS, ChosenRanking, ReweighedSearches, choose_ranking
from training.deep.scorers.model import NodeScorer
from training.deep.searches import Searches
from training.deep.topology import Topology
from training.neighbours.cooccurrence import lists_of as lists_of_users
from training.neighbours.fit import NARROW, count, fit_neighbours, neighbours, neighbours_of
from training.neighbours.near_items import near_items
from training.neighbours.neighbour_lists import NeighbourLists
from training.neighbours.slim import slim
from training.retrieval.repeats import Measured
from training.retrieval.task import NO_DEADLINE
from training.retrieval.tuning import Figures
from training.specification.deep import DeepConfig
from training.specification.models import deep_config

CPU = torch.device("cpu")
ITEMS, RING = 48, 12


@dataclasses.dataclass(frozen=True)
class Run:
    """An untrained model of a small log."""

    config: DeepConfig
    prepared: Prepared
    topology: Topology
    model: NodeScorer

    def chosen(self, **memory: Any) -> ChosenRanking:
        config = self.config.model_copy(update={"memory": type(self.config.memory)(**{"repeat": "none"} | memory)})
        return choose_ranking(config, self.prepared, self.topology, self.model)


def run_on(folder: Path, lists: list[list[int]], validation_share: float = 0.4, order: str = "file") -> Run:
    folder.mkdir(exist_ok=True)
    rows = "\n".join(f"u{user},i{item}" for user, items in enumerate(lists) for item in items)
    (folder / "log.csv").write_text(f"user,item\n{rows}\n")
    form = {"user": "user", "item": "item", "order": order, "min_user_events": 2}
    config = deep_config(
        {
            "kind": "otm-robust",
            "name": "rings",
            "data": {"log": str(folder / "log.csv"), "format": form, "split": {"validation_share": validation_share}},
            "instances": {"windows": [6]},
            "scorer": {"node_dim": 4, "hidden": [4], "init": "random"},
            "search": {"beam_size": 8, "m": 10, "max_m": 20, "exclude_seen": False},
        }
    )
    prepared = prepare(config, None, folder / "work")
    tree = build_tree(config, prepared)
    return Run(config, prepared, Topology(tree, CPU), build_model(config, tree, prepared).eval())


def rings(users: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    starts = rng.integers(ITEMS, size=users).tolist()
    return [[start // RING * RING + (start + step) % RING for step in range(8)] for start in starts]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_on(tmp_path_factory.mktemp("rings"), rings(200))


def best_first(row: np.ndarray) -> list[int]:
    return sorted(np.flatnonzero(row).tolist(), key=lambda b: (-float(row[b]), b))


def lists_of(S: np.ndarray) -> NeighbourLists:
    """Sparse rows of a dense matrix, best first."""
    kept = [best_first(row) for row in S]
    offset = np.concatenate([[0], np.cumsum([len(row) for row in kept])]).astype(np.int64)
    item = np.array([b for row in kept for b in row], np.int32)
    score = np.array([S[a, b] for a, row in enumerate(kept) for b in row], np.float32)
    return NeighbourLists(offset, item, score, np.arange(len(S)))


# -- what is made of neighbours -------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(0, 2**16), st.sampled_from([0.05, 0.5, 1.0]), st.integers(1, 9))
def test_a_memory_holds_the_best_neighbours_by_ascending_item(kept: int, seed: int, recency: float, length: int) -> None:
    rng = np.random.default_rng(seed)
    S = np.where(rng.random((6, 6)) < 0.6, rng.integers(1, 50, (6, 6)), 0).astype(np.float32)
    memory = with_sorted_rows(MemorySource(lists_of(S), 1.0, NARROW).memory(kept, recency, length))
    memory.check(6)
    for a, row in enumerate(S):
        best = best_first(row)[:kept]
        part = slice(memory.offset[a], memory.offset[a + 1])
        assert memory.item[part].tolist() == sorted(best)
        assert_array_equal(memory.value[part], (row[sorted(best)] / S.max()).astype(np.float16))
    places = [recency**d for d in range(length) if recency**d >= 0.01]
    assert_allclose(memory.weight, places, rtol=1e-6)


@pytest.mark.parametrize(("limit", "places"), [(12, 4), (11, 3), (1000, 6)])
def test_a_memory_counts_so_many_places_as_a_query_may_add_up(monkeypatch: pytest.MonkeyPatch, limit: int, places: int) -> None:
    monkeypatch.setattr("training.deep.memory.MAX_VISITS", limit)
    S = np.triu(np.ones((4, 4), np.float32), 1)  # the longest row has three neighbours
    assert len(MemorySource(lists_of(S), 1.0, NARROW).memory(5, 1.0, 6).weight) == places


def test_the_unit_is_by_how_much_memory_parts_the_first_of_a_list_from_its_last(run: Run) -> None:
    S = np.zeros((ITEMS, ITEMS), np.float32)
    S[0, 1], S[0, 2], S[3, 2] = 8, 1, 4
    raw = MemorySource(lists_of(S), 1.0, NARROW).memory(5, 1.0, 6)
    history_BT = np.array([[-1, -1, -1, -1, -1, 0], [-1, -1, -1, 7, 3, 0], [-1, -1, -1, -1, 3, 7]])
    leaf_offset = run.topology.tree.leaf_offset

    def lists(memory: Memory) -> Any:
        eligible = eligible_nodes(run.topology.tree, SearchParams.uniform(3, 1, 1), None)
        return MemoryTree(memory, run.topology.tree).lists(history_BT, eligible)

    # Of the largest value, 8. The second is 1, 5 and none; a third there is not.
    assert unit_of([lists(raw)], leaf_offset, 2) == pytest.approx(((8 - 1) + (8 - 5) + 4) / 3 / 8)
    unit = unit_of([lists(raw)], leaf_offset, 3)
    assert unit == pytest.approx((8 + 8 + 4) / 3 / 8)
    memory = with_weight(raw, unit, 2.5)
    assert unit_of([lists(memory)], leaf_offset, 3) == pytest.approx(1)
    assert memory.key_weight == 2.5


def test_what_a_memory_adds_is_found_for_each_query_alone(run: Run) -> None:
    rng = np.random.default_rng(5)
    S = np.where(rng.random((ITEMS, ITEMS)) < 0.1, rng.random((ITEMS, ITEMS)), 0).astype(np.float32)
    memory = MemorySource(lists_of(S), 0.8, NARROW).memory(20, 0.8, 6)
    history_BT = rng.integers(-1, ITEMS, (5, 6))
    history_BT[2] = -1  # nothing to be told of
    nodes, eligible = run.topology.tree.node_count, eligible_nodes(run.topology.tree, SearchParams.uniform(5, 1, 1), None)
    lists = MemoryTree(memory, run.topology.tree).lists(history_BT, eligible)
    nodes_BC = torch.arange(nodes + 1).expand(5, -1)
    found_BC = MemoryScores.of(lists, 3.0, run.topology).of_candidates(run.topology, nodes_BC).numpy()
    for b in range(5):
        expected = np.zeros(nodes + 1, np.float32)
        own, values = lists.of(b)
        expected[own] = values * np.float32(3.0)
        assert_array_equal(found_BC[b], expected)
    assert not found_BC[2].any()
    assert found_BC.any()


def test_neighbours_are_weighed_anew_from_the_same_counts(run: Run) -> None:
    found = neighbours(memory_task(run.config, run.prepared, None))
    source = memory_source(run.config, dataclasses.replace(run.prepared, neighbours=found))
    assert source.with_options(source.options | {"weight": 3.0}) is source
    other = {"near": 0.2, "column": 0.9, "row": -0.3, "power": 2.0, "slim": 0.7}
    interactions, users = run.prepared.interactions, run.prepared.split.train
    lists = lists_of_users(interactions, users)
    near, counts = functools.partial(near_items, interactions, users, run.config.seed), count(lists, found.options)
    expected = neighbours_of(counts, near, functools.partial(slim, counts, 10.0), lists.events_I, found.options | other)
    weighed = source.with_options(other)
    assert weighed.options == source.options | other
    assert_allclose(weighed.lists.score_N, expected.lists.limited(NEIGHBOUR_COUNTS[-1]).score_N, rtol=1e-6)
    assert len(weighed.lists.item_N) > len(source.lists.item_N), "cosines were not among what was chosen"
    searches = Searches(run.config, run.topology, run.model, list(run.prepared.split.validation), "logit", source)
    options = {"weight": 1.0, "kept": 5, "recency": 1.0}
    before, after = searches.memory(options), searches.memory(options | other)
    assert before is not None
    assert after is not None
    assert not np.array_equal(before.value, after.value)
    assert [searches.has_entries(options), searches.has_entries(options | other)] == [False, True]


# -- the choice -----------------------------------------------------------------------------------------------------------


def test_the_figure_is_the_geometric_mean_of_recalls_and_gains_are_paired() -> None:
    worse = Figures(np.array([[0.0, 0.2, 0.1], [0.4, 0.6, 0.8]]))
    better = Figures(worse.figure_CB * 1.5)
    assert worse.figure == pytest.approx(np.sqrt(0.1 * 0.6))
    gain, error = better.gain_over(worse)
    gains_B = 0.5 * (worse.figure_CB / np.array([[0.1], [0.6]])).mean(0)
    assert gain == pytest.approx(0.5)
    assert error == pytest.approx(gains_B.std(ddof=1) / np.sqrt(3))
    assert worse.gain_over(worse) == (0, 0)


def test_an_untrained_tree_is_told_what_follows(run: Run) -> None:
    alone, told = run.chosen(weight=0), run.chosen()
    assert alone.memory is None
    assert told.memory is not None
    told.memory.check(ITEMS)
    best = [max(tried["recall"]["10"] for tried in chosen.trials) for chosen in (alone, told)]
    assert best[1] > best[0] + 0.3
    assert told.ranking.calibration is not None
    assert told.ranking.calibration.knots
    assert {frozenset(tried["options"]) for tried in told.trials} == {
        frozenset({"gamma"}),
        frozenset({"gamma", "weight", "kept", "recency", "near", "column", "row", "power", "slim"}),
    }


def test_the_memory_that_is_chosen_was_the_best_or_the_fewest_neighbours_that_find_as_much(run: Run) -> None:
    chosen = run.chosen(neighbours=3)
    assert chosen.memory is not None
    assert np.diff(chosen.memory.offset).max() <= 3
    tried = [trial for trial in chosen.trials if "weight" in trial["options"]]
    best = max(tried, key=lambda trial: trial["figure"])["options"]
    assert (best["weight"], best["gamma"]) == (chosen.memory.key_weight, chosen.ranking.gamma)
    assert {trial["options"]["kept"] for trial in tried} == {3}


def test_what_a_query_adds_up_is_counted_over_the_places_that_have_a_weight(run: Run) -> None:
    searches = Searches(run.config, run.topology, run.model, list(run.prepared.split.validation)[:3], "logit")
    rows_BT = np.concatenate([block.rows for block in searches.blocks])
    S = np.triu(np.ones((ITEMS, ITEMS), np.float32), 1)
    source = MemorySource(lists_of(S), 0.05, NARROW)  # weights 1 and 0.05: the third is below LEAST_WEIGHT
    for kept in (2, ITEMS):
        length_I = np.minimum((S > 0).sum(1), kept)
        expected = np.mean([length_I[row_T[row_T >= 0][-2:]].sum() for row_T in rows_BT])
        assert searches.visits(source, kept) == pytest.approx(expected)


def test_a_memory_that_takes_long_to_add_up_is_tried_with_fewer_neighbours_only(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def tried() -> set[int]:
        caplog.clear()
        assert run.chosen().memory is not None
        return {int(kept) for kept in re.findall(r"(\d+) neighbours an item", caplog.text)}

    monkeypatch.setattr("training.deep.ranking.NEIGHBOUR_COUNTS", (1, 2, 4096))
    assert tried() == {1, 2}, "all are what the others are compared with"
    monkeypatch.setattr("training.deep.ranking.TRIAL_VISITS", 12)  # two neighbours of the six places of a history
    assert tried() == {1}
    monkeypatch.setattr("training.deep.ranking.TRIAL_VISITS", 0)
    assert tried() == set()


def test_a_memory_without_time_is_the_first_that_was_tried(run: Run) -> None:
    chosen = choose_ranking(run.config, run.prepared, run.topology, run.model, memory_s=0)
    assert chosen.memory is not None
    (tried,) = [trial["options"] for trial in chosen.trials if "weight" in trial["options"]]
    assert (tried["weight"], tried["kept"]) == (ranking.FIRST_WEIGHT, max(np.diff(chosen.memory.offset)))


@pytest.mark.parametrize(("constant", "value"), [("PASSES_SHARE", 0.0), ("FIRST_KEPT", 1)])
def test_fewer_neighbours_are_tried_without_time_for_passes_and_more_with_it(
    run: Run, constant: str, value: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("training.deep.ranking.NEIGHBOUR_COUNTS", (1, 2, 4096))
    monkeypatch.setattr(f"training.deep.ranking.{constant}", value)
    assert run.chosen().memory is not None
    in_passes = [int(kept) for kept in re.findall(r"weight [\d.]+, kept (\d+)", caplog.text)]
    if constant == "FIRST_KEPT":
        assert in_passes[0] == 1
        assert 2 in in_passes
    else:
        assert len(set(in_passes)) == 1
        assert "1 neighbours an item" in caplog.text


@pytest.mark.parametrize(("lost", "kept"), [(0.004, 32), (0.006, 64), (-0.01, 32)])
def test_fewer_neighbours_may_lose_half_a_percent_however_certain_that_is(lost: float, kept: int) -> None:
    figure_of = {32: 0.2 * (1 - lost), 64: 0.2 * 0.999, 128: 0.2}

    class Measured:
        def figure(self, options: dict[str, int]) -> float:
            return figure_of[options["kept"]]

        def measured(self, options: dict[str, int]) -> Figures:
            return Figures(np.full((1, 1000), figure_of[options["kept"]]))

    measured: Any = Measured()
    assert ranking._with_fewest_neighbours(measured, {"kept": 128}, [32, 64, 128], NO_DEADLINE) == {"kept": kept}


@pytest.mark.parametrize("own", ["logit", "log_activation"])
def test_leaves_ordered_anew_are_what_a_search_finds_that_keeps_them_all(run: Run, own: OwnScore) -> None:
    config = run.config.model_copy(update={"search": run.config.search.model_copy(update={"beam_size": ITEMS})})
    searches = Searches(config, run.topology, run.model, list(run.prepared.split.validation), own)
    searches.source = memory_source(config, run.prepared)
    alone = {"gamma": 0.3}
    first = searches.memory(alone | {"weight": 1.0, "kept": 5, "recency": 1.0})
    assert first is not None
    anew = ReweighedSearches(searches, alone, first)
    anew.add(np.tile(np.arange(ITEMS), (len(searches.pairs), 1)))
    for gamma, weight, kept, recency in [(0.0, 1.0, 5, 1.0), (0.5, 2.5, 3, 0.8), (1.0, 40.0, ITEMS, 0.5)]:
        options = {"gamma": gamma, "weight": weight, "kept": kept, "recency": recency}
        assert_allclose(anew.measured(options).figure_CB.mean(1), searches.measured(options).figure_CB.mean(1), atol=2e-3)


def test_a_weight_climbs_without_a_search_for_each_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "FIRST_WEIGHT", 0.1)
    trials = [trial["options"] for trial in run.chosen().trials if "weight" in trial["options"]]
    assert max(trial["weight"] for trial in trials) > 0.1, "an untrained tree leaves it to the memory"
    assert 1 <= len(trials) <= ROUNDS + 1
    assert run.chosen(weight=3.0).trials[-1]["options"]["weight"] == 3.0


@pytest.mark.parametrize(("errors", "kept"), [(-3.0, False), (0.0, False), (0.9, False), (1.1, True)])
def test_a_gain_within_a_standard_error_is_no_reason_for_a_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch, errors: float, kept: bool
) -> None:
    noise_CB = np.random.default_rng(3).normal(scale=0.1, size=(2, 400))
    noise_CB -= noise_CB.mean()
    gain = errors * noise_CB.mean(0).std(ddof=1) / np.sqrt(400)

    def measured(self: Searches, options: dict[str, Any]) -> Figures:
        return Figures(0.5 + noise_CB + gain if "weight" in options else np.full((2, 400), 0.5))

    monkeypatch.setattr(Searches, "measured", measured)
    assert (run.chosen().memory is not None) == kept


@pytest.mark.parametrize("users", [97, 100])
def test_few_validation_users_choose_nothing_about_a_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, users: int
) -> None:
    monkeypatch.setattr(Figures, "gain_over", lambda *_: (0.0, 0.1))
    monkeypatch.setattr(ranking, "NEIGHBOUR_COUNTS", (2, 4, 4096))
    chosen = run_on(tmp_path, rings(users), validation_share=0.3).chosen()
    tried = {(trial["options"]["weight"], trial["options"]["kept"]) for trial in chosen.trials if "weight" in trial["options"]}
    is_small = users < 100
    assert (chosen.memory is not None) == ("too few to choose λ by: 29" in caplog.text) == is_small
    assert (tried == {(4.0, 11)}) == is_small, "λ is the first one, with all neighbours"


def test_lists_without_an_order_weigh_all_places_alike(tmp_path: Path) -> None:
    chosen = run_on(tmp_path, rings(200), order="none").chosen(weight=4.0)
    assert chosen.memory is not None
    assert chosen.memory.key_weight == 4, "a weight of the user's is kept as it is"
    assert {trial["options"]["weight"] for trial in chosen.trials if "weight" in trial["options"]} == {4}
    assert len(set(chosen.memory.weight.tolist())) == 1
    assert len(chosen.memory.weight) == 6


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_regression_that_neighbours_have_may_weigh_otherwise_beside_a_tree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weight: float
) -> None:
    run = run_on(tmp_path, rings(200), order="none")
    found = neighbours(memory_task(run.config, run.prepared, None))
    found = dataclasses.replace(found, options=found.options | {"slim": weight})
    caplog.clear()
    with caplog.at_level(logging.INFO):
        dataclasses.replace(run, prepared=dataclasses.replace(run.prepared, neighbours=found)).chosen()
    tried = set(re.findall(r"kept .* slim ([\d.]+)$", "\n".join(caplog.messages), re.MULTILINE))
    assert str(weight) in tried
    assert (len(tried) > 1) == (weight > 0)


# -- the repeat term ------------------------------------------------------------------------------------------------------


def loops(users: int, again: float) -> list[list[int]]:
    """Three songs of a user's own, again and again, the one before last next; or never again one that was heard."""
    rng = np.random.default_rng(1)
    lists = []
    for _ in range(users):
        a, b, c = rng.choice(ITEMS, 3, replace=False).tolist()
        lists.append([a, b, c] * 3 if rng.random() < again else rng.choice(ITEMS, 9, replace=False).tolist())
    return lists


def test_items_that_come_again_are_lifted(tmp_path: Path) -> None:
    heard = run_on(tmp_path, loops(300, again=1)).chosen(repeat="auto", weight=0).memory
    assert heard is not None
    heard.check(ITEMS)
    assert heard.repeat.max() > 0
    assert not heard.left_out[:2].any()


@pytest.mark.parametrize("shares", [(0.2, 0, 0.6, 0, 0, 0), (0.6, 0.2, 0.2, 0, 0, 0), (0.2, -np.inf, 0.4, 0, 0, 0)])
@pytest.mark.parametrize("weight", [0, 4])
def test_a_trial_of_a_repeat_term_finds_what_a_search_with_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: tuple[float, ...], weight: float
) -> None:
    """Items come several times in the same history."""
    trials: list[Measured] = []

    def choose(values: Any, measured: Any, *, has_order: bool) -> tuple[str, tuple[float, ...]]:
        trials.append(measured("own", shares))
        return "own", shares

    monkeypatch.setattr(ranking, "chosen_by_bucket", choose)
    rng = np.random.default_rng(5)
    lists = [rng.choice(rng.choice(ITEMS, 4, replace=False), 12).tolist() for _ in range(200)]
    run = run_on(tmp_path, lists)
    config = run.config.model_copy(update={"search": run.config.search.model_copy(update={"beam_size": ITEMS})})
    chosen = dataclasses.replace(run, config=config).chosen(repeat="auto", weight=weight)
    assert chosen.memory is not None
    searches = Searches(config, run.topology, run.model, list(run.prepared.split.validation), chosen.ranking.own)
    rows_BM, _ = searches.ranked(chosen.ranking.gamma, chosen.memory, searches.ms[-1])
    assert_array_equal(trials[0].at_cuts.figure_CB, searches.figures_of(rows_BM).figure_CB)
    assert_array_equal(trials[0].ndcg.figure_CB, [ndcg_at_m(rows_BM, searches.relevant, 10)])


@pytest.mark.parametrize("weight", [0, 4])
def test_items_that_never_come_again_are_left_out(tmp_path: Path, weight: float) -> None:
    bought = run_on(tmp_path, loops(300, again=0)).chosen(repeat="auto", weight=weight).memory
    assert bought is not None
    assert bought.left_out[:3].all(), "nobody buys again what is in the history"
    assert not bought.repeat[bought.left_out].any()


@pytest.mark.parametrize("beam", [2, 8])
def test_a_search_that_leaves_out_seen_items_is_one_that_excludes_them(tmp_path: Path, beam: int) -> None:
    """The memory of left-out items must not lead a narrow beam to them."""
    run = run_on(tmp_path, loops(300, again=0))
    chosen = run.chosen(repeat="none", weight=4)
    assert chosen.memory is not None

    def searches(exclude_seen: bool) -> Searches:
        search = run.config.search.model_copy(update={"exclude_seen": exclude_seen, "beam_size": beam})
        config = run.config.model_copy(update={"search": search})
        return Searches(config, run.topology, run.model, list(run.prepared.split.validation), chosen.ranking.own)

    left_out = dataclasses.replace(chosen.memory, left_out=np.ones(BUCKETS, np.bool_))
    found, expected = (
        searches(False).ranked(chosen.ranking.gamma, left_out, 10),
        searches(True).ranked(chosen.ranking.gamma, chosen.memory, 10),
    )
    assert_array_equal(found[0], expected[0])
    assert_array_equal(found[1], expected[1])


def test_lists_without_an_order_have_one_repeat_term_for_all_places(tmp_path: Path) -> None:
    chosen = run_on(tmp_path, loops(300, again=0), order="none").chosen(repeat="auto", weight=0).memory
    assert chosen is not None
    assert chosen.left_out.all()


def test_a_repeat_term_that_adds_nothing_is_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figures, "gain_over", lambda self, other: (0.01, 0.02))
    assert run.chosen(weight=0, repeat="auto").memory is None


# -- the bundle -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(run.config, run.prepared, run.topology.tree, run.model, tmp_path_factory.mktemp("models") / "rings" / "1")


def test_the_engines_find_what_training_chose_by(run: Run, bundle: Bundle) -> None:
    memory = bundle.memory
    assert memory is not None
    trials = bundle.manifest.metrics["validation"]
    assert trials[0]["options"].keys() == {"gamma"}
    assert bundle.manifest.memory is not None
    assert any(trial["options"].get("weight") == bundle.manifest.memory.weight for trial in trials)
    assert all(trial["recall"].keys() == {"10", "20"} for trial in trials)  # 50 and 200 are cut at max_m
    searches = Searches(run.config, run.topology, run.model, list(run.prepared.split.validation), "logit")
    row_BM, key_BM = searches.ranked(bundle.manifest.ranking.gamma, memory, 10)
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    queries = pad_histories(kind, [pair.history for pair in run.prepared.split.validation])
    for engine in (ReferenceEngine(bundle), open_engine(bundle, "cpu")):
        result = engine.search(queries, SearchParams.uniform(len(queries), run.config.search.beam_size, 10))
        assert_allclose(result.keys_BM, key_BM, rtol=1e-4, atol=1e-4)
        assert (result.item_rows_BM == row_BM).mean() > 0.98  # ties of rounding
        engine.close()


# -- validation users ---------------------------------------------------------------------------------------------------


def prepared_small(folder: Path, **sections: Any) -> tuple[DeepConfig, Prepared]:
    """40 users whose second half holds one item of their first and five new ones; half of them are validation users."""
    rng = np.random.default_rng(1)
    lines = ["user,item"]
    for user in range(40):
        items = rng.permutation(30)[:11]
        lines += [f"u{user},i{item}" for item in [*items[:6], items[0], *items[6:]]]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    data = {"log": str(folder / "log.csv"), "split": {"test_share": 0.1, "validation_share": 0.5}}
    base: dict[str, Any] = {"kind": "otm-robust", "name": "x", "data": data}
    config = deep_config(base | {"scorer": {"node_dim": 4, "hidden": [4]}} | sections)
    return config, prepare(config, None, folder / "work")


@pytest.mark.parametrize(("exclude_seen", "relevant"), [(True, 5), (False, 6)])
def test_seen_items_count_as_relevant_only_where_the_search_returns_them(tmp_path: Path, exclude_seen: bool, relevant: int) -> None:
    config, data = prepared_small(tmp_path, search={"exclude_seen": exclude_seen})
    assert {len(pair.relevant) for pair in validation.validation_pairs(config, data, 100)} == {relevant}


@pytest.mark.parametrize("count", [1, 3, 7, 20, 100])
def test_at_most_so_many_users_are_taken_from_all_over(tmp_path: Path, count: int) -> None:
    config, data = prepared_small(tmp_path)
    users = [pair.user for pair in validation.validation_pairs(config, data, count)]
    everybody = [pair.user for pair in data.split.validation]
    assert users == everybody[:: -(-len(everybody) // count)]
    assert 0 < len(users) <= count


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_mean_scores_are_the_share_of_hits_whatever_the_size_of_keys(scale: float) -> None:
    rng = np.random.default_rng(4)
    key_BM = np.sort(rng.lognormal(0, 1, (100, 20)))[:, ::-1].astype(np.float32)
    hit_BM = rng.random(key_BM.shape) < 1 / (1 + np.exp(5 - 0.3 * key_BM))
    assert 5 < hit_BM.sum() < 2 * MIN_HITS, "too few for a piecewise function"
    rows_BM = np.tile(np.arange(20), (100, 1))
    found = calibrate(rows_BM, key_BM * np.float32(scale), [np.flatnonzero(hit_M) for hit_M in hit_BM], heavy_tailed=True)
    scores_BM = 1 / (1 + np.exp(-found.intercept - found.slope * scale * key_BM))
    assert found.slope > 0
    assert scores_BM.mean() == pytest.approx(hit_BM.mean(), rel=0.02)


def test_a_memory_is_counted_anew_in_the_units_that_its_weight_was_chosen_in() -> None:
    split = split_of(log_of([[0, 1, 2, 3], [2, 3, 4, 0]] * 8), 12, 2, 2)
    config = cast(DeepConfig, SimpleNamespace(seed=1, history_length=10))
    source = MemorySource(fit_neighbours(split.lists, split.train, NARROW, 1).lists, 0.5, NARROW)
    chosen = with_sorted_rows(replace(source.memory(3, 0.5, 10), key_weight=2.0, repeat=np.arange(6, dtype=np.float32)))
    options = NARROW | {"kept": 3}
    same, half = (recounted(chosen, unit * source.largest, options, config, split) for unit in (1, 2))
    for name in ("offset", "item", "value", "weight", "repeat"):
        assert_array_equal(getattr(same, name), getattr(chosen, name), err_msg=name)
    assert_array_equal(half.value, chosen.value)
    assert_allclose(half.weight, chosen.weight / 2)
    assert (half.key_weight, len(half.weight)) == (2.0, len(chosen.weight))
    fewer = recounted(chosen, source.largest, options, config, replace(split, train=split.train[:1]))
    assert len(fewer.item) < len(chosen.item)
