"""From a log to a bundle: training learns what was planted, a killed run goes on as if nothing had happened, and the commands say what
is wrong.

The log: 300 users, each with most of the 16 items of one of 8 clusters, in random order. Whoever has seen half of a user's list knows
the rest; popularity knows nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import training.deep.fit as fit_module
import training.deep.ranking as ranking_module
from espalier.bundle import Bundle, find_versions
from espalier.checks.golden import verify_golden
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.errors import BundleCorrupt, BundleExists, InvalidConfig
from espalier.metrics import precision_recall_f
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from espalier.tree import Tree
from tests.espalier.test_signature import replay
from tests.pictures import Pictures
from training.__main__ import main
from training.baselines.popularity import fit_popularity
from training.data.item_tables import item_table
from training.data.splits import without_seen
from training.deep.export import check_parity, export
from training.deep.first_model import build_model
from training.deep.fit import fit
from training.deep.instances import Instances, InstanceSource
from training.deep.prepare import Prepared, build_tree, prepare
from training.deep.scorers.model import NodeScorer, export_graphs
from training.deep.topology import Topology
from training.deep.validation import search_pairs
from training.evaluate import evaluate, held_out_pairs
from training.specification.deep import DeepConfig, TdmObjective, WindowConfig
from training.specification.models import deep_config

CPU = torch.device("cpu")
CLUSTERS, SIZE, USERS = 8, 16, 300


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order, so that "bit for bit" means it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(42)
    lines = ["user,item"]
    for user in range(USERS):
        cluster = user % CLUSTERS
        items = rng.permutation(SIZE)[:14] * CLUSTERS + cluster  # numbered across clusters: neighbours are strangers
        items[rng.integers(14)] = rng.integers(CLUSTERS * SIZE)  # one by accident
        lines += [f"user-{user},item-{item}" for item in items]
    file = tmp_path_factory.mktemp("data") / "log.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def settings(log: Path, kind: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small network and a few hundred steps; `sections` changes single keys."""
    plain: dict[str, Any] = {
        "kind": kind,
        "name": "planted",
        "data": {"log": str(log)},
        "instances": {"windows": [8, 4, 2], "targets": 20},
        "scorer": {"kind": "mlp", "node_dim": 8, "hidden": [32, 16]},
        "objective": {} if kind == "plt" else {"negatives": 40} if kind == "tdm" else {"beam_size": 10, "negatives": 40},
        "optimiser": {"steps": 150, "batch": 60, "learning_rate": 0.01, "average": 1},
        "search": {"beam_size": 20, "m": 10, "max_beam_size": 32, "max_m": 64},
        "memory": {"weight": 0},
    }
    return plain | {name: plain[name] | section for name, section in sections.items()}


RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "tdm": {"search": {"gamma": 0.0}},
    "plt": {},
    "otm": {"objective": {"random_nodes": 10, "gamma": 0.8}, "search": {"gamma": 0.8}},
    "otm-robust": {
        "scorer": {"kind": "product", "init": "random", "dropout": 0.0},
        "objective": {"gamma": 0.5, "random_nodes": 10},
        "search": {"gamma": 0.5},
    },
}


@dataclass(frozen=True)
class Run:
    """A configuration with its data and tree."""

    config: DeepConfig
    prepared: Prepared
    tree: Tree

    def fit(self, work: Path, resume: bool = False) -> NodeScorer:
        work.mkdir(exist_ok=True)
        return fit(self.config, self.prepared, self.tree, CPU, work, resume)

    def recall(self, model: NodeScorer) -> float:
        """recall@10 of test users, seen items excluded."""
        pairs = without_seen(self.prepared.split.test)
        gamma = 1.0 if self.config.kind == "plt" else float(self.config.search.gamma)
        own: Any = "log_activation" if self.config.kind == "plt" else "logit"
        rows_BM, _ = search_pairs(self.config, Topology(self.tree, CPU), model, pairs, gamma, own, 20, 10)
        return float(precision_recall_f(rows_BM, [pair.relevant for pair in pairs], 10)[1].mean())

    def popularity(self) -> float:
        pairs = without_seen(self.prepared.split.test)
        popularity = fit_popularity(self.prepared.interactions, self.prepared.split.train)
        rows_BM = popularity.rank([pair.history for pair in pairs], 10, exclude_seen=True)
        return float(precision_recall_f(rows_BM, [pair.relevant for pair in pairs], 10)[1].mean())


def ready(raw: dict[str, Any], work: Path) -> Run:
    config = deep_config(raw)
    prepared = prepare(config, None, work)
    return Run(config, prepared, build_tree(config, prepared))


@dataclass(frozen=True)
class Trained:
    run: Run
    rows_ND: np.ndarray
    recall: float
    bundle: Bundle


@pytest.fixture(scope="module")
def trained(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """A model of each objective, trained and exported once, when first asked for."""
    models: dict[str, Trained] = {}

    def of(kind: str) -> Trained:
        if kind not in models:
            folder = tmp_path_factory.mktemp(kind)
            run = ready(settings(log, kind, **RECIPES[kind]), folder / "work")
            model = run.fit(folder / "work")
            rows_ND, recall = model.node_rows.detach().numpy().copy(), run.recall(model)
            bundle = export(run.config, run.prepared, run.tree, model, folder / "models" / "planted" / "3")
            models[kind] = Trained(run, rows_ND, recall, bundle)
        return models[kind]

    return of


# -- learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECIPES)
def test_training_finds_the_planted_clusters(trained: Callable[[str], Trained], kind: str) -> None:
    run = trained(kind).run
    assert run.popularity() < 0.2
    assert trained(kind).recall > 0.8


@pytest.mark.parametrize("kind", RECIPES)
def test_targets_of_other_users_teach_no_more_than_popularity(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """So the margin above measures the objective, not the tree, the initial rows or the search."""
    batch = InstanceSource.batch

    def shuffled(self: InstanceSource, step: int, size: int) -> Instances:
        instances = batch(self, step, size)
        return dataclasses.replace(instances, target_BP=np.random.default_rng(step).permutation(instances.target_BP))

    monkeypatch.setattr(InstanceSource, "batch", shuffled)
    run = ready(settings(log, kind, **RECIPES[kind]), tmp_path / "work")
    assert run.recall(run.fit(tmp_path / "work")) < 0.3


def test_ties_between_gammas_go_to_the_trained_one_and_a_softmaxs_logits_are_always_calibrated(log: Path, tmp_path: Path) -> None:
    run = ready(settings(log, "otm-robust", objective={"gamma": 0.3}), tmp_path / "work")
    model, topology = build_model(run.config, run.tree, run.prepared), Topology(run.tree, CPU)

    def always(*_: object) -> tuple[Any, Any]:
        return np.tile(np.arange(10), (30, 1)), np.tile(-np.arange(10.0, dtype=np.float32), (30, 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking_module, "search_encoded", always)
        patch.setattr(ranking_module, "VALIDATION_QUERIES", 30)
        auto = run.config.model_copy(update={"search": run.config.search.model_copy(update={"gamma": "auto"})})
        chosen = ranking_module.choose_ranking(auto, run.prepared, topology, model)
        assert len({tried["figure"] for tried in chosen.trials}) == 1
        assert {tried["options"]["gamma"] for tried in chosen.trials} == {*ranking_module.GAMMAS, 0.3}
        assert chosen.ranking.gamma == 0.3
        assert chosen.memory is None  # which would find no more
        fixed = run.config.model_copy(update={"search": run.config.search.model_copy(update={"gamma": 0.0})})
        assert ranking_module.choose_ranking(fixed, run.prepared, topology, model).ranking.calibration is not None
        tdm = fixed.model_copy(update={"kind": "tdm", "objective": TdmObjective()})
        assert ranking_module.choose_ranking(tdm, run.prepared, topology, model).ranking.calibration is None
        patch.setattr(ranking_module, "validation_pairs", lambda *_: [])
        assert ranking_module.choose_ranking(auto, run.prepared, topology, model).ranking.gamma == 0.3


# -- a run is a function of its configuration ---------------------------------------------------------------------------

SHORT: dict[str, dict[str, Any]] = {
    "objective": {"warm_start": 0.5, "random_nodes": 5},
    "optimiser": {"steps": 24, "validate_every": 7, "average": 20},
}


@pytest.fixture
def short(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """24 steps, of which the first 12 are TDM's, with a checkpoint after every 5."""
    monkeypatch.setattr(fit_module, "CHECKPOINT_EVERY", 5)
    return ready(settings(log, "otm", **SHORT), tmp_path / "data")


def changed(run: Run, **top: Any) -> Run:
    return dataclasses.replace(run, config=deep_config(run.config.model_dump(mode="json") | top))


def weights(model: NodeScorer) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the steps that are made from here on."""
    steps: list[int] = []
    step_of = fit_module.train_step

    def noted(*arguments: Any) -> torch.Tensor:
        steps.append(arguments[5])
        return step_of(*arguments)

    monkeypatch.setattr(fit_module, "train_step", noted)
    return steps


def die_at(monkeypatch: pytest.MonkeyPatch, fatal: int) -> None:
    step_of = fit_module.train_step

    def dying(*arguments: Any) -> torch.Tensor:
        if arguments[5] == fatal:
            raise KeyboardInterrupt
        return step_of(*arguments)

    monkeypatch.setattr(fit_module, "train_step", dying)


def killed(run: Run, work: Path, fatal: int = 8) -> None:
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, fatal)
        with pytest.raises(KeyboardInterrupt):
            run.fit(work)


@pytest.mark.parametrize("fatal", [3, 8, 10, 23])
def test_a_killed_and_resumed_run_ends_as_an_uninterrupted_one(short: Run, tmp_path: Path, fatal: int) -> None:
    whole = weights(short.fit(tmp_path / "whole"))
    killed(short, tmp_path / "killed", fatal)
    assert (tmp_path / "killed" / "checkpoint.pt").exists() == (fatal >= 5)
    with pytest.MonkeyPatch.context() as patch:
        steps = watched(patch)
        resumed = weights(short.fit(tmp_path / "killed", resume=True))
    assert steps == list(range(fatal // 5 * 5, 24))
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert_array_equal(resumed[name], tensor, err_msg=name)


def test_the_weights_of_the_best_validation_are_kept_and_patience_ends_the_run(
    short: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recalls = iter([0.2, 0.5, 0.4, 0.5, 0.3, 0.9])
    seen: list[dict[str, Any]] = []

    def scripted(config: DeepConfig, topology: Topology, model: NodeScorer, pairs: object) -> float:
        seen.append({name: tensor.numpy().copy() for name, tensor in model.state_dict().items()})
        return next(recalls)

    monkeypatch.setattr(fit_module, "validation_recall", scripted)
    steps = watched(monkeypatch)
    optimiser = short.config.optimiser.model_dump() | {"validate_every": 4, "patience": 3}
    kept = weights(changed(short, optimiser=optimiser).fit(tmp_path / "work"))
    assert steps[-1] == 19  # five measurements, the last three no better than the second
    for name, array in kept.items():
        assert_array_equal(array, seen[3][name], err_msg=name)  # as good as the second, and trained for longer
    assert not np.array_equal(seen[1]["node_rows"], seen[3]["node_rows"])


def test_validated_weights_are_averages_over_steps(short: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every five steps, from those of step 5 on: m ← d · m + (1 − d) · w, d = 1 − 5 / average, or less at first: (1 + i) / (10 + i)."""
    path: list[Any] = []
    step_of = fit_module.train_step

    def noted(config: WindowConfig, model: NodeScorer, *rest: Any) -> torch.Tensor:
        loss = step_of(config, model, *rest)
        path.append(model.node_rows.detach().numpy().astype(np.float64))
        return loss

    monkeypatch.setattr(fit_module, "train_step", noted)
    optimiser = short.config.optimiser.model_dump() | {"steps": 25, "validate_every": 25, "average": 7}
    kept = weights(changed(short, optimiser=optimiser).fit(tmp_path / "work"))
    expected = path[4]
    for decay, step in ((2 / 11, 9), (3 / 12, 14), (2 / 7, 19), (2 / 7, 24)):
        expected = decay * expected + (1 - decay) * path[step]
    assert_allclose(kept["node_rows"], expected, atol=1e-5)


def test_a_run_that_patience_ended_is_not_trained_again(short: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recalls = iter([0.5, 0.4, 0.3])
    monkeypatch.setattr(fit_module, "validation_recall", lambda *_: next(recalls))
    optimiser = short.config.optimiser.model_dump() | {"validate_every": 3, "patience": 2}
    run = changed(short, optimiser=optimiser)
    whole = weights(run.fit(tmp_path / "work"))
    steps = watched(monkeypatch)
    assert_array_equal(weights(run.fit(tmp_path / "work", resume=True))["node_rows"], whole["node_rows"])
    assert steps == []


def test_a_checkpoint_of_another_tree_is_refused(short: Run, tmp_path: Path) -> None:
    killed(short, tmp_path / "work")
    swapped = short.tree.leaf_item.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    other = dataclasses.replace(short, tree=Tree(short.tree.level_offset, short.tree.first_child, swapped))
    with pytest.raises(InvalidConfig, match=r"--resume: .*the same configuration, log and tree"):
        other.fit(tmp_path / "work", resume=True)


def test_few_validation_users_do_not_choose_weights(short: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> float:
        raise AssertionError("asked")

    monkeypatch.setattr(fit_module, "MIN_VALIDATION_QUERIES", 1000)
    monkeypatch.setattr(fit_module, "validation_recall", never)
    short.fit(tmp_path / "work")


def test_a_warm_start_trains_tdm_first() -> None:
    objective = {"beam_size": 40, "warm_start": 0.25, "negatives": 30}
    config = deep_config({"kind": "otm", "name": "x", "data": {"log": "x"}, "optimiser": {"steps": 100}, "objective": objective})
    stages = [fit_module.stage(config, step) for step in range(100)]
    assert stages[:25] == [("tdm", TdmObjective(negatives=30))] * 25
    assert stages[25:] == [("otm", config.objective)] * 75


def test_a_checkpoint_that_was_cut_off_while_written_is_not_taken(short: Run, tmp_path: Path) -> None:
    whole = weights(short.fit(tmp_path / "whole"))
    save = torch.save

    def torn(state: dict[str, Any], stream: BinaryIO) -> None:
        save(state, stream)
        if state["progress"]["step"] == 10:
            stream.truncate(100)
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", torn)
        with pytest.raises(KeyboardInterrupt):
            short.fit(tmp_path / "killed")
    resumed = weights(short.fit(tmp_path / "killed", resume=True))
    assert_array_equal(resumed["node_rows"], whole["node_rows"])


def test_the_same_seed_gives_the_same_model_and_another_seed_another(short: Run, tmp_path: Path) -> None:
    one, same = weights(short.fit(tmp_path / "a")), weights(short.fit(tmp_path / "b"))
    other = weights(changed(short, seed=2).fit(tmp_path / "c"))
    for name, tensor in one.items():
        assert_array_equal(same[name], tensor, err_msg=name)
        assert not np.array_equal(other[name], tensor), name


def test_a_checkpoint_of_another_configuration_is_refused(short: Run, tmp_path: Path) -> None:
    killed(short, tmp_path / "work")
    with pytest.raises(InvalidConfig, match=r"--resume: .*checkpoint\.pt.* the same configuration"):
        changed(short, seed=2).fit(tmp_path / "work", resume=True)


def test_a_checkpoint_of_another_log_is_refused(short: Run, tmp_path: Path) -> None:
    killed(short, tmp_path / "work")
    lists = dataclasses.replace(short.prepared.interactions, fingerprint="0" * 64)
    split = dataclasses.replace(short.prepared.split, lists=lists)
    other = dataclasses.replace(short, prepared=dataclasses.replace(short.prepared, split=split))
    with pytest.raises(InvalidConfig, match="--resume"):
        other.fit(tmp_path / "work", resume=True)


def test_without_resume_a_checkpoint_is_not_looked_at(short: Run, tmp_path: Path) -> None:
    whole = weights(short.fit(tmp_path / "whole"))
    killed(changed(short, seed=2), tmp_path / "work")
    assert_array_equal(weights(short.fit(tmp_path / "work"))["node_rows"], whole["node_rows"])


def test_a_batch_that_the_processes_cannot_share_alike_is_refused(short: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "processes", lambda: 7)
    with pytest.raises(InvalidConfig, match=r"optimiser\.batch: .*60.*a multiple of the 7 processes"):
        short.fit(tmp_path / "work")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run(short: Run, tmp_path: Path, value: float) -> None:
    def broken(model: NodeScorer, *_: Any) -> torch.Tensor:
        return model.node_rows.sum() * value

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fit_module.LOSSES, "otm", broken)
        with pytest.raises(FloatingPointError, match=r"step 12: the loss is .*; lower optimiser\.learning_rate"):
            short.fit(tmp_path / "work")


def test_a_model_that_is_not_finite_does_not_pass_the_parity_check(short: Run) -> None:
    model = build_model(short.config, short.tree, short.prepared).eval()
    example = torch.full((2, short.tree.height + 1, 14), -1)
    torch.nn.init.constant_(model.head.out.bias, float("nan"))  # type: ignore[union-attr, arg-type]  # an MlpHead
    query_onnx, scorer_onnx = export_graphs(model, "history_nodes", example)
    with pytest.raises((BundleCorrupt, FloatingPointError)):
        check_parity(model, query_onnx, scorer_onnx, example)


@pytest.mark.parametrize(
    "scorer", [{"kind": "mlp"}, {"kind": "product"}, {"kind": "product", "hidden": [16, 8]}, {"kind": "product", "hidden": []}], ids=str
)
def test_every_kind_of_scorer_can_be_exported(log: Path, tmp_path: Path, scorer: dict[str, Any]) -> None:
    run = ready(settings(log, "tdm", scorer=scorer), tmp_path / "work")
    model = build_model(run.config, run.tree, run.prepared).eval()
    history_BT = torch.from_numpy(np.random.default_rng(2).integers(-1, CLUSTERS * SIZE, (8, 14)))
    example = Topology(run.tree, CPU).history_nodes(history_BT)
    assert check_parity(model, *export_graphs(model, "history_nodes", example), example) < 1e-4


@pytest.mark.parametrize("column", [["7", "3"], [7, 3]])
def test_titles_are_found_by_the_id_however_the_item_table_stores_it(tmp_path: Path, column: list[Any]) -> None:
    """Ids of a log are strings; a Parquet file often has them as numbers, and then all titles are silently null."""
    pq.write_table(pa.table({"id": column, "title": ["seven", "three"]}), tmp_path / "items.parquet")
    table = item_table(tmp_path / "items.parquet", pa.array(["3", "5", "7"], pa.large_string()))
    assert table.values("title", np.arange(3)) == ["three", None, "seven"]


# -- the exported bundle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECIPES)
def test_engines_agree_on_a_trained_and_exported_model(trained: Callable[[str], Trained], kind: str) -> None:
    """The signature test, on graphs that torch exported: the reference rescores the beams that an engine kept."""
    bundle, run = trained(kind).bundle, trained(kind).run
    reference = ReferenceEngine(bundle)
    histories = [pair.history for pair in run.prepared.split.test][:10]
    queries = pad_histories(HistoryKind(length=14), [np.empty(0, np.int64), *histories])
    rng = np.random.default_rng(6)
    batch = len(queries)
    exclude_BE = rng.integers(-1, bundle.tree.item_count, (batch, 30))
    for excluded in (None, exclude_BE):
        params = SearchParams(rng.integers(1, 40, batch), rng.integers(1, 30, batch), excluded, trace=True)
        expected = reference.search(queries, params)
        for engine in (open_engine(bundle, engine=name) for name in ("compiled-cpu", "onnx-cpu")):
            got = engine.search(queries, params)
            assert got.trace is not None
            for b in range(batch):
                kept = {level.level: level.nodes_BK[b][level.nodes_BK[b] >= 0] for level in got.trace}
                start = bundle.tree.start_level(int(params.beam_size_B[b]))
                replay(reference, queries, params, b, {h: nodes for h, nodes in kept.items() if h >= start}, engine.rounding)
            assert (got.item_rows_BM == expected.item_rows_BM).mean() > 0.99
            assert_allclose(got.ranks_BM, expected.ranks_BM, rtol=1e-3, atol=1e-3)
            assert_array_equal(got.complete_B, expected.complete_B)


@pytest.mark.parametrize(("kind", "own", "gamma"), [("tdm", "logit", 0.0), ("plt", "log_activation", 1.0), ("otm", "logit", 0.8)])
def test_the_manifest_says_how_the_model_ranks_and_what_it_was_made_of(
    trained: Callable[[str], Trained], kind: str, own: str, gamma: float
) -> None:
    bundle, run = trained(kind).bundle, trained(kind).run
    manifest = bundle.manifest
    assert (manifest.ranking.own, manifest.ranking.gamma, manifest.algorithm) == (own, gamma, kind)
    assert (manifest.ranking.calibration is not None) == (own == "logit" and gamma > 0)
    assert deep_config(manifest.training) == run.config
    assert manifest.data["sha256"] == run.prepared.interactions.fingerprint
    assert (manifest.version, manifest.name) == (3, "planted")
    assert_array_equal(bundle.node_rows_ND, trained(kind).rows_ND)
    assert verify_golden(bundle, open_engine(bundle, "cpu")) == 1.0
    assert bundle.golden().num_rows > 20
    assert bundle.golden().column("history")[0].as_py() == []  # a cold user is among them


def test_the_manifest_holds_the_recall_of_test_users(trained: Callable[[str], Trained]) -> None:
    made = trained("tdm")
    excluded = made.bundle.manifest.metrics["test"]["seen_excluded"]
    assert [row["m"] for row in excluded] == [10, 50, 64]  # 200 is over the model's limit
    assert excluded[0]["recall"] == pytest.approx(made.recall, abs=0.02)


def test_held_out_queries_say_the_recall_that_they_had_at_export(trained: Callable[[str], Trained]) -> None:
    made = trained("otm")
    engine, limits = open_engine(made.bundle, "cpu"), made.bundle.manifest.search
    ms = sorted(read_heldout(made.bundle).recall_by_m)
    assert ms[0] == 10
    measured = evaluate(made.bundle, engine, held_out_pairs(made.bundle), [limits.beam_size], ms)
    said = [float(recall_B.mean()) for _, recall_B in sorted(read_heldout(made.bundle).recall_by_m.items())]
    assert said == pytest.approx([row["recall"] for row in measured], abs=1e-12)
    assert 0 < said[0] < 1


def test_scores_are_probabilities_in_the_order_of_the_ranks(trained: Callable[[str], Trained]) -> None:
    for kind in RECIPES:
        bundle = trained(kind).bundle
        result = open_engine(bundle, "cpu").search(pad_histories(HistoryKind(length=14), [np.arange(5)]), SearchParams.uniform(1, 20, 20))
        scores = result.scores_BM[0]
        assert scores.min() >= 0
        assert scores.max() <= 1
        assert np.all(np.diff(scores) <= 0)


# -- commands -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """`python -m training …` inside this process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["training", *map(str, arguments)])
        monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return Outcome(int(left.value.code or 0), printed.out, printed.err)

    return run


def as_toml(raw: dict[str, Any]) -> str:
    sections = {name: value for name, value in raw.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in raw.items() if name not in sections]
    for name, section in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def test_fit_evaluate_and_inspect_from_the_command_line(
    log: Path, tmp_path: Path, command: Callable[..., Outcome], pictures: Pictures
) -> None:
    config, out = tmp_path / "planted.toml", tmp_path / "models" / "shop" / "2"
    config.write_text(as_toml(settings(log, "tdm", optimiser={"steps": 40})))
    fitted = command("fit", "--config", config, "--out", out, "--device", "cpu")
    assert (fitted.status, fitted.err.count("error")) == (0, 0)
    assert find_versions(tmp_path / "models") == {"shop": (2,)}
    assert [file.name for file in out.parent.iterdir()] == ["2"]  # nothing left of the work
    assert Bundle.open(out).manifest.name == "shop"

    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    options = ("--beam", "4,16", "--m", "5,10", "--batch", 8, "--exclude-seen", "--json", report, "--plot", plot)
    assert command("evaluate", "--model", out, *options).status == 0
    written = json.loads(report.read_text())
    assert written.keys() - {"version"} == {"model", "engine", "arithmetic", "queries", "rows", "warnings"}
    assert (written["model"], written["engine"], written["queries"]) == ("shop", "onnx-cpu", 30)
    assert [(row["beam_size"], row["m"], row["batch"]) for row in written["rows"]] == [(4, 5, 8), (4, 10, 8), (16, 5, 8), (16, 10, 8)]
    for row in written["rows"]:
        against = {"recall_against"} if row["beam_size"] == 16 else set()
        assert row.keys() - against == {"beam_size", "m", "batch", "precision", "recall", "f", "ndcg", "ms_per_query"}
        assert 0 < row["recall"] <= 1
        assert 0 < row["precision"] <= 1
        assert row["ms_per_query"] > 0
    assert pictures.lines(plot) == {
        f"recall@{m}": [(row["ms_per_query"], row["recall"]) for row in written["rows"] if row["m"] == m] for m in (5, 10)
    }

    again = command("evaluate", "--model", out, "--data", log, "--beam", "16", "--m", "10", "--exclude-seen", "--engine", "reference")
    assert again.status == 0
    assert "shop version 2 on reference, 30 queries, seen items excluded" in again.out
    recall = next(row["recall"] for row in written["rows"] if (row["beam_size"], row["m"]) == (16, 10))
    assert f"{recall:.4f}" in again.out  # the held-out queries are all 30 test users

    shown = command("inspect", "--model", out)
    assert shown.status == 0
    assert "shop version 2: tdm" in shown.out
    assert f"tree: {CLUSTERS * SIZE} items, 255 nodes, 8 levels" in shown.out
    assert shown.out.count("item-") > 10

    before = out.stat().st_mtime_ns
    refused = command("fit", "--config", config, "--out", out)
    assert refused.status == 1
    assert "never overwritten" in refused.err
    assert out.stat().st_mtime_ns == before


def test_a_killed_command_goes_on_with_resume(
    log: Path, tmp_path: Path, command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = tmp_path / "planted.toml", tmp_path / "models" / "planted" / "1"
    config.write_text(as_toml(settings(log, "tdm", optimiser={"steps": 12})))
    monkeypatch.setattr(fit_module, "CHECKPOINT_EVERY", 5)
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 8)
        assert command("fit", "--config", config, "--out", out).status != 0
    assert not out.exists()

    def enough(*_: Any) -> Bundle:
        raise BundleExists("enough")

    with pytest.MonkeyPatch.context() as patch:
        steps = watched(patch)
        patch.setattr("training.deep.run.export", enough)
        assert "error: enough" in command("fit", "--config", config, "--out", out, "--resume").err
    assert steps == list(range(5, 12))


def test_a_bad_option_or_key_is_named(
    log: Path, tmp_path: Path, command: Callable[..., Outcome], trained: Callable[[str], Trained]
) -> None:
    config, model = tmp_path / "planted.toml", trained("tdm").bundle.path
    good = settings(log, "tdm")
    bad_fits: list[tuple[dict[str, Any], dict[str, object], str]] = [
        (good | {"optimiser": {"steps": 0}}, {}, "optimiser.steps: got 0, expected"),
        (good | {"data": {"log": "nowhere.csv"}}, {}, "log: got 'nowhere.csv', expected a file that exists"),
        (good, {"--out": tmp_path / "planted" / "one"}, "--out: got"),
        (good, {"--out": tmp_path / "planted" / "0"}, "--out: got"),
        (good, {"--out": tmp_path / "planted" / "01"}, "--out: got"),
        (good, {"--out": tmp_path / "Bad Name" / "1"}, "--out: got 'Bad Name', expected a model name"),
        (good, {"--config": tmp_path / "none.toml"}, "--config: got"),
    ]
    for raw, options, message in bad_fits:
        config.write_text(as_toml(raw))
        outcome = command("fit", *flat({"--config": config, "--out": tmp_path / "planted" / "9", "--device": "cpu"} | options))
        assert outcome.status == 1
        assert f"error: {message}" in outcome.err
    bad_evaluations: list[tuple[str, object, str]] = [
        ("--beam", "four", "--beam: got 'four', expected whole numbers"),
        ("--m", "0", "--m: got 0, expected 1 to 64"),
        ("--m", "65", "--m: got 65, expected 1 to 64"),
        ("--beam", "33", "--beam: got 33, expected 1 to 32"),
        ("--engine", "abacus", "engine 'abacus': expected one of"),
        ("--model", tmp_path / "nowhere", f"{tmp_path / 'nowhere' / 'manifest.json'}: missing"),
        ("--data", tmp_path / "nowhere.csv", "log: got"),
    ]
    for option, value, message in bad_evaluations:
        outcome = command("evaluate", *flat({"--model": model, "--beam": "4", "--m": "5"} | {option: value}))
        assert outcome.status == 1
        assert f"error: {message}" in outcome.err


def flat(options: dict[str, Any]) -> list[object]:
    return [part for pair in options.items() for part in pair]


def test_every_command_has_help() -> None:
    """In a process of its own, as it is typed."""
    shown = subprocess.run([sys.executable, "-m", "training", "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert all(name in shown.stdout for name in ("fit", "evaluate", "inspect"))
