"""`fit` takes the live items of an earlier model along: new ones are trained, start from their rows and are found; gone ones leave."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.manifest import LiveInfo
from espalier.queries import FeaturesKind, HistoryKind, TextKind, encode_features, encode_histories, encode_texts
from espalier.search import SearchParams
from tests.training.commands import command, written_toml
from tests.training.live.journals import JournalOf
from tests.training.shop import write_shop
from tests.training.test_earlier import CLUSTERS, ITEMS, settings, trained, write_log
from training.deep.prepare import leaf_rows, prepare
from training.rankers.log_queries import from_log
from training.specification.models import deep_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`planted` in version 1, with a journal: two new items of cluster 0, one without events, item-8 deleted, item-9 renamed."""
    folder = tmp_path_factory.mktemp("live")
    log = write_log(folder / "log.csv")
    bundle = trained(log, folder, optimiser={"steps": 30})
    writer = JournalOf(bundle)
    events = tuple([f"item-{CLUSTERS * i}" for i in range(start, start + 6)] for start in range(5))
    writer.put("new-a", events=events)
    writer.put("new-b", events=events)
    writer.put("quiet", like=("item-0",))
    writer.delete("item-8")
    return folder


def fitted(models: Path, version: int, raw: dict[str, Any], *more: object) -> Bundle:
    config, out = written_toml(models / f"{version}.toml", raw), models / "planted" / str(version)
    assert command("fit", "--config", config, "--out", out, "--device", "cpu", *more).status == 0
    return Bundle.open(out)


def found(bundle: Bundle, history: list[str], m: int = 20) -> list[str]:
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    queries = encode_histories(kind, bundle.items, [history])[0]
    rows = open_engine(bundle, "cpu").search(queries, SearchParams.uniform(1, 32, m)).item_rows_BM[0]
    return bundle.items.ids_of(rows[rows >= 0])


def going_on(models: Path, **sections: Any) -> dict[str, Any]:
    start = {"earlier_model": str(models / "planted" / "1"), "tree": {"kind": "earlier"}, "scorer": {"init": "earlier"}}
    return settings(models / "log.csv", **(start | sections))


def test_a_model_that_goes_on_from_an_earlier_one_has_its_live_items(models: Path) -> None:
    bundle = fitted(models, 2, going_on(models, optimiser={"steps": 10}))
    ids = bundle.items.column("id").to_pylist()
    assert {"new-a", "new-b", "quiet"} <= {*ids}
    assert "item-8" not in ids
    assert len(ids) == ITEMS + 2
    live = bundle.manifest.live
    assert live is not None
    assert (live.through, live.folded_from) == (4, None)


def test_live_items_start_from_their_places_and_rows_and_a_run_that_goes_on_trains_with_what_it_read_first(
    models: Path, tmp_path: Path
) -> None:
    planted = shutil.copytree(models / "planted", tmp_path / "planted")
    config = deep_config(going_on(models) | {"earlier_model": str(planted / "1")})
    prepared = prepare(config, None, tmp_path)
    assert prepared.earlier is not None
    writer = JournalOf(Bundle.open(planted / "1"))
    (stored,) = writer.journal.placements(1, [1])[1]
    row = prepared.items.rows_of(["new-a"])[0]
    leaf = prepared.earlier.tree.leaf_of_item[row]
    assert_array_equal(prepared.earlier.model.node_rows.detach().numpy()[leaf], stored.row.values)

    writer.put("late", placed=False, like=("item-0",))
    again = prepare(config, None, tmp_path)
    assert again.items.column("id").to_pylist() == prepared.items.column("id").to_pylist()


def test_k_means_over_rows_knows_those_of_live_items(models: Path, tmp_path: Path) -> None:
    raw = settings(models / "log.csv", earlier_model=str(models / "planted" / "1"), tree={"kind": "kmeans"})
    prepared = prepare(deep_config(raw), None, tmp_path)
    assert prepared.start is not None
    rows_ID = leaf_rows(Bundle.open(prepared.start), prepared.items)
    assert rows_ID[prepared.items.rows_of(["quiet"])[0]].any()


# -- linear models -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A forest over texts of coloured things, with new and deleted ones in its journal, trained with them, and folded."""
    folder = tmp_path_factory.mktemp("shop")
    config, out = write_shop(folder, tree={"count": 2}), folder / "models" / "shop"
    assert command("fit", "--config", config, "--out", out / "1").status == 0
    writer = JournalOf(Bundle.open(out / "1"))
    writer.put("purple-teapot", events=("purple teapot", "a purple teapot please"), fields={"title": "purple teapot"})
    writer.put("golden-spoon", placed=False, text="a golden spoon")
    writer.put("red-goblet", fields={"title": "red goblet"})
    writer.put("blue-thing", like=("blue-lamp",))
    writer.put("red-lamp", placed=False, fields={"title": "crimson lamp"})
    writer.delete("black-chair")
    assert command("fit", "--config", config, "--out", out / "2", "--earlier", out / "1").status == 0
    assert command("fold", "--model", out / "1", "--out", out / "3").status == 0
    return out


def test_a_linear_model_is_trained_with_live_items(shop: Path) -> None:
    bundle = Bundle.open(shop / "2")
    ids = bundle.items.column("id").to_pylist()
    assert ids[-4:] == ["purple-teapot", "golden-spoon", "red-goblet", "blue-thing"]
    assert "black-chair" not in ids
    titles = dict(zip(ids, bundle.items.column("title").to_pylist(), strict=True))
    assert (titles["purple-teapot"], titles["golden-spoon"], titles["red-lamp"]) == ("purple teapot", None, "crimson lamp")
    live = bundle.manifest.live
    assert live is not None
    assert live.through == 6


def found_by(bundle: Bundle, text: str) -> list[str]:
    kind = bundle.manifest.query
    assert isinstance(kind, TextKind)
    queries = encode_texts(kind, bundle.vectoriser, [text])
    results = [open_engine(bundle, "cpu", engine).search(queries, SearchParams.uniform(1, 10, 4)) for engine in (None, "reference")]
    assert_array_equal(results[0].item_rows_BM, results[1].item_rows_BM)
    rows = results[0].item_rows_BM[0]
    return bundle.items.ids_of(rows[rows >= 0])


def test_live_items_of_a_linear_model_are_found_by_what_trained_them(shop: Path) -> None:
    wanted = {"purple teapot": "purple-teapot", "golden spoon": "golden-spoon", "red goblet": "red-goblet", "blue lamp": "blue-thing"}
    for text, item in wanted.items():
        assert item in found_by(Bundle.open(shop / "2"), text)


def test_a_fold_of_a_linear_model_holds_its_live_items_and_is_measured_as_it_was(shop: Path) -> None:
    before, after = Bundle.open(shop / "1"), Bundle.open(shop / "3")
    assert after.manifest.live == LiveInfo(through=6, folded_from=1)
    assert (after.manifest.training, after.manifest.data["sha256"]) == (before.manifest.training, before.manifest.data["sha256"])
    assert "golden-spoon" in found_by(after, "golden spoon"), "it had no place"
    assert after.golden().column("text").equals(before.golden().column("text"))
    recall = np.mean(after.heldout().column("recall@10").to_pylist())
    assert after.manifest.metrics["test"]["raw"][0]["recall"] == pytest.approx(recall)
    assert recall > np.mean(before.heldout().column("recall@10").to_pylist()) - 0.1


def test_queries_of_a_ranker_have_the_rows_of_the_new_version(shop: Path) -> None:
    bundle = Bundle.open(shop / "2")
    kind = bundle.manifest.query
    assert isinstance(kind, TextKind)
    (white,) = bundle.items.rows_of(["white-spoon"])  # behind the item that is gone, so its row is another one now
    wanted = encode_texts(kind, bundle.vectoriser, ["buy a white spoon"]).features
    split = from_log(bundle, None, "training", False)
    parts = [(part.queries.features, part.items) for part in (split.train, split.valid, split.test)]
    rows = np.concatenate([items for _, own in parts for items in own])
    assert rows.min() >= 0
    found = [
        own[b].tolist()
        for features, own in parts
        for b in range(len(own))
        if features.take(np.array([b])).indices.tolist() == wanted.indices.tolist()
    ]
    assert [white] in found


def test_features_train_labels_that_the_points_lack(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["40 6 3"]
    for point in range(40):
        label = point % 3
        others = sorted({int(f) for f in rng.integers(3, 5, 2)})
        lines.append(f"{label} " + " ".join(f"{f}:1" for f in [label, *others]))
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    data = {"format": "xmc", "train": str(tmp_path / "train.txt")}
    written_toml(tmp_path / "points.toml", {"kind": "xr-linear", "name": "points", "data": data})
    out = tmp_path / "models" / "points"
    assert command("fit", "--config", tmp_path / "points.toml", "--out", out / "1").status == 0
    writer = JournalOf(Bundle.open(out / "1"))
    writer.put("new", events=({"indices": [5], "values": [1.0]},) * 4)
    writer.delete("1")
    assert command("fit", "--config", tmp_path / "points.toml", "--out", out / "2", "--earlier", out / "1").status == 0
    bundle = Bundle.open(out / "2")
    assert bundle.items.column("id").to_pylist() == ["0", "2", "new"]
    reference = open_engine(bundle, "cpu", "reference")
    kind = bundle.manifest.query
    assert isinstance(kind, FeaturesKind)
    rows = reference.search(encode_features(kind, [([5], [1.0])]), SearchParams.uniform(1, 10, 1)).item_rows_BM[0]
    assert bundle.items.ids_of(rows) == ["new"]
