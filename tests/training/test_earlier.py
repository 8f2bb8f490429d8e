"""Training goes on from a bundle: its tree and weights come back, new items find a place, and its tree is learned anew.

The log: 240 users, each with most of the 15 items of one of 8 clusters, in random order. The earlier model has a random tree.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import random_tree
from espalier.bundle import WEIGHTS, Bundle
from espalier.errors import InvalidConfig
from tests.training.runs import exported
from training.data.splits import without_seen
from training.deep.earlier import EarlierModel, as_earlier, grow, likelihood_of, load_scorer
from training.deep.first_model import build_model
from training.deep.jtm import Matching, learn_tree
from training.deep.jtm_samples import draw_samples
from training.deep.prepare import Prepared, build_tree, prepare
from training.deep.run import fit_and_export
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology
from training.deep.validation import search_pairs
from training.specification.deep import DeepConfig, JtmTree
from training.specification.models import config_of, deep_config

CPU = torch.device("cpu")
CLUSTERS, SIZE, USERS = 8, 15, 240
ITEMS = CLUSTERS * SIZE  # 64 nodes above the leaves, so that there is room for 8 more


def write_log(file: Path, missing: Sequence[int] = (), new: int = 0) -> Path:
    """Item i is of cluster i modulo 8; `new` items, the first of which belong to cluster 0, 1, …, in every other list of theirs."""
    rng = np.random.default_rng(42)
    lines = ["user,item"]
    for user in range(USERS):
        items = [item for item in rng.permutation(SIZE)[:12] * CLUSTERS + user % CLUSTERS if item not in missing]
        items += [ITEMS + i for i in range(new) if i % CLUSTERS == user % CLUSTERS and user % 2 == i % 2]
        lines += [f"user-{user},item-{item}" for item in rng.permutation(items)]
    file.write_text("\n".join(lines) + "\n")
    return file


def settings(log: Path, **sections: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "kind": "tdm",
        "name": "planted",
        "data": {"log": str(log)},
        "instances": {"windows": [8, 4, 2], "targets": 20},
        "tree": {"kind": "random"},
        "scorer": {"kind": "mlp", "node_dim": 8, "hidden": [32, 16]},
        "objective": {} if sections.get("kind") == "plt" else {"negatives": 40},
        "optimiser": {"steps": 100, "batch": 60, "learning_rate": 0.015, "average": 1},
        "search": {"beam_size": 20, "m": 10, "max_beam_size": 32, "max_m": 64, "gamma": 0.0},
    }
    changed = {name: plain.get(name, {}) | value if isinstance(value, dict) else value for name, value in sections.items()}
    return plain | changed


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("data") / "log.csv")


def trained(log: Path, folder: Path, **changed: Any) -> Bundle:
    return exported(settings(log, **changed), folder / "planted" / "1")


@pytest.fixture(scope="module")
def bundle(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return trained(log, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def softmax_bundle(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Trained by otm-robust with γ 0.5; its search ranks with 0.9, so that the two cannot be taken for each other."""
    objective = {"beam_size": 10, "random_nodes": 10, "gamma": 0.5}
    return trained(log, tmp_path_factory.mktemp("softmax"), kind="otm-robust", objective=objective, search={"gamma": 0.9})


def going_on(bundle: Bundle, log: Path, **sections: Any) -> DeepConfig:
    start: dict[str, Any] = {"earlier_model": str(bundle.path), "tree": {"kind": "earlier"}, "scorer": {"init": "earlier"}}
    return deep_config(settings(log, **(start | sections)))


def opened(config: DeepConfig, work: Path) -> tuple[Prepared, EarlierModel]:
    prepared = prepare(config, None, work)
    assert prepared.earlier is not None
    return prepared, prepared.earlier


def recall(config: DeepConfig, prepared: Prepared, topology: Topology, model: NodeScorer) -> float:
    """recall@10 of test users, seen items excluded."""
    pairs = without_seen(prepared.split.test)
    rows_BM, _ = search_pairs(config, topology, model, pairs, 0.0, "logit", 20, 10)
    return float(np.mean([np.isin(pair.relevant, rows).mean() for rows, pair in zip(rows_BM, pairs, strict=True)]))


# -- weights and tree come back ---------------------------------------------------------------------------------------------


def test_a_bundle_without_weights_cannot_be_trained_on(bundle: Bundle, log: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(bundle.path, tmp_path / "planted" / "1"))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][WEIGHTS]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidConfig, match=rf"earlier_model: .* a bundle with {WEIGHTS}"):
        prepare(going_on(Bundle.open(path), log), None, tmp_path / "work")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("scorer", "hidden", [32, 12]),
        ("scorer", "node_dim", 9),
        ("scorer", "kind", "product"),
        ("instances", "windows", [8, 4]),
        ("tree", "branching", 3),
    ],
)
def test_a_configuration_unlike_the_earlier_model_is_refused(
    bundle: Bundle, log: Path, tmp_path: Path, section: str, key: str, value: object
) -> None:
    start: dict[str, dict[str, Any]] = {"tree": {"kind": "earlier"}, "scorer": {"init": "earlier"}}
    config = going_on(bundle, log, **(start | {section: start.get(section, {}) | {key: value}}))
    with pytest.raises(InvalidConfig, match=rf"{section}\.{key}: .* as in earlier_model"):
        prepare(config, None, tmp_path)
    if key == "hidden":
        with pytest.raises(InvalidConfig, match=r"weights head\.layers\.0\.bias of shape \[12\], got \[16\]"):
            load_scorer(bundle, config)


def test_another_split_is_warned_of(bundle: Bundle, log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare(going_on(bundle, log), None, tmp_path)
    assert "another split" not in caplog.text
    prepare(going_on(bundle, log, seed=2), None, tmp_path)
    assert "another split" in caplog.text
    caplog.clear()
    config = going_on(bundle, log, seed=2, tree={"kind": "kmeans"}, scorer={"init": "random"})
    build_tree(config, prepare(config, None, tmp_path))
    assert "another split" in caplog.text


def test_the_same_split_by_date_is_no_other_one(log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header, *lines = log.read_text().splitlines()
    dated = tmp_path / "dated.csv"
    dated.write_text("\n".join([f"{header},time", *(f"{line},{number * 7919 % len(lines)}" for number, line in enumerate(lines))]))
    data = {"log": str(dated), "format": {"timestamp": "time"}, "split": {"kind": "date"}}  # the dates are chosen
    bundle = trained(dated, tmp_path, data=data, optimiser={"steps": 5})
    prepare(going_on(bundle, dated, data=data), None, tmp_path)
    assert "another split" not in caplog.text
    with dated.open("a") as stream:
        stream.writelines(f"\nuser-{user},item-{user % ITEMS},{len(lines) + user}" for user in range(USERS))
    prepare(going_on(bundle, dated, data=data), None, tmp_path)
    assert "another split" in caplog.text


# -- another catalogue --------------------------------------------------------------------------------------------------------


def test_new_items_find_their_cluster_and_all_others_stay(bundle: Bundle, tmp_path: Path) -> None:
    config = going_on(bundle, write_log(tmp_path / "log.csv", missing=[3, 17], new=6))
    prepared, earlier = opened(config, tmp_path)
    ids = prepared.items.column("id").to_pylist()
    assert len(ids) == ITEMS - 2 + 6
    rows = bundle.items.rows_of(ids)
    kept, new = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
    assert len(new) == 6
    was, now = bundle.tree.leaf_of_item[rows[kept]], earlier.tree.leaf_of_item[kept]
    assert_array_equal(earlier.tree.parent[now], bundle.tree.parent[was])
    assert_array_equal(earlier.model.node_rows.detach().numpy()[now], bundle.node_rows_ND[was])
    inner = bundle.tree.leaf_offset
    assert_array_equal(earlier.model.node_rows.detach().numpy()[:inner], bundle.node_rows_ND[:inner])
    model = build_model(config, earlier.tree, prepared)
    assert recall(config, prepared, Topology(earlier.tree, CPU), model) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gamma", "likelihood"), [("bundle", 0.0, "sigmoid"), ("softmax_bundle", 0.9, "softmax")])
def test_new_items_are_placed_by_their_events_alone_and_by_the_ranks_of_the_search(
    kind: str, gamma: float, likelihood: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training users have some 2,100 events with a history, some 70 of new items; 1,000 may be drawn."""
    made: list[Matching] = []

    def noted(*arguments: Any) -> Matching:
        made.append(Matching(*arguments))
        return made[-1]

    monkeypatch.setattr("training.deep.earlier.Matching", noted)
    log = write_log(tmp_path / "log.csv", new=6)
    config = going_on(request.getfixturevalue(kind), log, tree={"kind": "earlier", "samples": 1000})
    prepared = prepare(config, None, tmp_path)
    new_ids = [f"item-{ITEMS + i}" for i in range(6)]
    later = [item for user in prepared.split.train for item in prepared.interactions.of(user)[1:]]
    count_I = np.bincount(later, minlength=prepared.interactions.item_count)
    assert [(matching.gamma, matching.likelihood) for matching in made] == [(gamma, likelihood)]
    assert_array_equal(np.bincount(made[0].samples.target_S), count_I[prepared.items.rows_of(new_ids)])


def test_more_new_items_than_the_tree_has_room_for_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", missing=[3], new=10)
    with pytest.raises(InvalidConfig, match=r"tree\.kind: got 'earlier', expected kmeans, .* 10 items .* room for 9"):
        prepare(going_on(bundle, log), None, tmp_path)


def test_a_model_of_other_items_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item\n" + "".join(f"u{user},other-{item}\n" for user in range(20) for item in range(12)))
    with pytest.raises(InvalidConfig, match=r"earlier_model: .* 'other-0'"):
        prepare(going_on(bundle, log), None, tmp_path)
    config = going_on(bundle, log, tree={"kind": "kmeans"}, scorer={"init": "random"})
    with pytest.raises(InvalidConfig, match=r"earlier_model: .* 'other-0'"):
        build_tree(config, prepare(config, None, tmp_path))


@pytest.mark.parametrize("kind", ["earlier", "kmeans"])
def test_a_model_of_another_family_is_refused_by_the_name_of_its_key(kind: str, bundle: Bundle, log: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(bundle.path, tmp_path / "planted" / "1"))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["training"] = {"kind": "xr-linear", "name": "planted", "data": {"format": "log", "train": "log.csv"}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    config = going_on(Bundle.open(path), log, tree={"kind": kind}, scorer={"init": "random"})
    with pytest.raises(InvalidConfig, match=r"^earlier_model: got 'xr-linear', expected a model of kind otm-robust"):
        build_tree(config, prepare(config, None, tmp_path))


def test_k_means_over_earlier_rows_puts_new_items_among_those_of_the_same_users(bundle: Bundle, tmp_path: Path) -> None:
    config = going_on(bundle, write_log(tmp_path / "log.csv", new=16), tree={"kind": "kmeans"}, scorer={"init": "random"})
    prepared = prepare(config, None, tmp_path)
    tree = build_tree(config, prepared)
    cluster_I = np.array([int(item_id.removeprefix("item-")) % CLUSTERS for item_id in prepared.items.column("id").to_pylist()])
    ancestor_I = tree.ancestors(tree.leaf_of_item)[:, 3]  # eight of them
    new = np.flatnonzero(bundle.items.rows_of(prepared.items.column("id").to_pylist()) < 0)
    shares = [np.mean(cluster_I[ancestor_I == ancestor_I[row]] == cluster_I[row]) for row in new]
    assert np.mean(shares) > 0.5


@given(seed=st.integers(0, 1 << 30), height=st.integers(1, 4), gone=st.sampled_from([0.0, 0.3]), wished=st.integers(0, 12))
def test_a_grown_tree_keeps_its_nodes_and_puts_new_items_where_they_were_sent(seed: int, height: int, gone: float, wished: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, height, 4, empty_share=0.2)
    stays = rng.random(tree.item_count) >= gone
    stays[0] = True
    span = tree.level(height - 1)
    node_n = rng.integers(span.start, span.stop, wished)
    leaf_I = rng.permutation(np.concatenate([tree.leaf_of_item[stays], np.full(wished, -1)]))
    new = np.flatnonzero(leaf_I < 0)
    grown, source_N = grow(tree, leaf_I, new, node_n)
    assert_array_equal(grown.parent[grown.leaf_of_item[new]], node_n)
    old = np.flatnonzero(leaf_I >= 0)
    assert_array_equal(source_N[grown.leaf_of_item[old]], leaf_I[old])
    assert_array_equal(source_N[source_N >= 0], np.arange(tree.node_count))
    kept = np.flatnonzero(source_N >= 0)
    assert_array_equal(grown.parent[kept], tree.parent)
    added = np.bincount(node_n, minlength=tree.node_count)[span.start : span.stop]
    empty = np.array([tree.first_child[n + 1] - tree.first_child[n] for n in span])
    empty -= np.bincount(tree.parent[leaf_I[old]], minlength=tree.node_count)[span.start : span.stop]
    assert grown.leaf_count - tree.leaf_count == np.maximum(added - empty, 0).sum()


# -- learning the tree anew ---------------------------------------------------------------------------------------------------


def relearning(bundle: Bundle, tree: dict[str, Any], steps: int | None = None) -> DeepConfig:
    """The configuration of a bundle, changed to learn its tree anew and to train on from its weights."""
    raw = config_of(bundle.manifest, DeepConfig).model_dump(mode="json")
    raw["tree"] = {"kind": "jtm"} | tree
    raw["scorer"]["init"] = "earlier"
    raw["optimiser"]["steps"] = steps or raw["optimiser"]["steps"]
    return deep_config(raw | {"earlier_model": str(bundle.path)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bundle", "softmax_bundle"])
def test_a_tree_that_is_learned_anew_raises_the_likelihood_and_writes_a_model_that_finds_about_as_much(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle: Bundle = request.getfixturevalue(kind)
    out = tmp_path / "models" / "planted" / "2"
    caplog.set_level(logging.INFO, logger="training")
    config = relearning(bundle, {"rounds": 2}, steps=40)

    def fail(*_: Any) -> Bundle:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.deep.run.export", fail)
        with pytest.raises(OSError, match="no space left"):
            fit_and_export(config, None, out, CPU, resume=False)
    fit_and_export(config, None, out, CPU, resume=True)
    learned = re.findall(r"per sample (\S+) → (\S+) over (\d+) samples, (\d+) of (\d+) items moved", caplog.text)
    assert len(learned) == 2, "a resumed run keeps its trees"
    for before, after, samples, moved, items in learned:
        assert float(before) <= float(after)
        assert (int(samples), int(items)) == (USERS * 8 // 10 * 11, ITEMS)
        assert int(moved) > 0 or before == after
    assert float(learned[0][1]) > float(learned[0][0])
    new = Bundle.open(out)
    assert new.manifest.training["tree"]["kind"] == "jtm"
    assert new.manifest.training["optimiser"]["steps"] == 40
    assert not np.array_equal(new.tree.leaf_item, bundle.tree.leaf_item)
    recalls = [b.manifest.metrics["test"]["seen_excluded"][0]["recall"] for b in (bundle, new)]
    assert recalls[1] > recalls[0] - 0.04
    assert len(list(out.parent.iterdir())) == 1


@pytest.mark.parametrize("given", [None, 0.0])
def test_the_tree_of_a_softmax_model_is_learned_from_the_ranks_that_it_was_trained_on(
    softmax_bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture, given: float | None
) -> None:
    caplog.set_level(logging.INFO, logger="training")
    config = relearning(softmax_bundle, {"gamma": given})
    prepared, earlier = opened(config, tmp_path)
    tree = build_tree(config, prepared)
    assert isinstance(config.tree, JtmTree)
    samples = draw_samples(prepared.interactions, prepared.split.train, earlier.length, config.tree.samples, seed=config.seed)
    gamma = 0.5 if given is None else given
    learned = learn_tree(earlier.model, earlier.tree, samples, gap=config.tree.gap, gamma=gamma, likelihood="softmax")
    assert_array_equal(tree.leaf_item, learned.tree.leaf_item)
    again = as_earlier(config, tree, earlier.model)  # what the next round starts from
    assert (again.length, again.gamma, again.likelihood) == (earlier.length, 0.5, "softmax")
    count = len(samples.target_S)
    assert learned.after > learned.before
    assert f"tree: rank per sample {learned.before / count:.4f} → {learned.after / count:.4f} over {count} samples" in caplog.text


@pytest.mark.parametrize(
    ("kind", "likelihood"), [("otm-robust", "softmax"), ("otm", "sigmoid"), ("tdm", "sigmoid"), ("plt", "path"), ("hsm", "path")]
)
def test_the_likelihood_of_a_rank_is_that_of_the_objective(kind: str, likelihood: str) -> None:
    assert likelihood_of(deep_config({"kind": kind, "name": "any", "data": {"log": "log.csv"}})) == likelihood
