"""Product search and kinds of queries: every system on a made-up shop, splits, sweeps, rows, and neighbours against a full scan."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_array_equal
from scipy.sparse import csr_array

from benchmarks.papers.product_search import cold_texts, text_search, xrlinear_peers
from benchmarks.papers.product_search.ann import faiss_is_installed
from benchmarks.papers.product_search.cold_texts import Texts
from benchmarks.papers.product_search.dssm import EF_SEARCH
from benchmarks.papers.product_search.text_linear import BEAMS, TEXTS
from benchmarks.papers.product_search.text_report import Report, Trained
from benchmarks.papers.product_search.text_search import Job, jobs_of, run
from benchmarks.papers.product_search.text_sets import Fold, Task, fold_of, pairs_of, read_set
from benchmarks.papers.xreg.debian_kinds import views_and_clicks, write
from benchmarks.papers.xreg.labelwise import figures
from espalier.errors import InvalidData
from espalier.search import NO_ITEM
from training.data.csr import as_rows
from training.graded_relevance import Relevance

pytestmark = pytest.mark.release
COLOURS = ["red", "green", "blue", "yellow", "black", "white", "purple", "orange"]
THINGS = ["teapot", "kettle", "lamp", "chair", "spoon", "ladder", "bucket", "mirror"]
ITEMS = len(COLOURS) * len(THINGS)


@pytest.fixture(scope="module")
def shop() -> Task:
    """Coloured things; the test queries have words and an order that training queries lack."""
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    pairs = [(f"{pattern} {name}", row) for row, name in enumerate(names) for pattern in ("", "cheap", "buy a good", "for my kitchen a")]
    texts = [f"{thing} in {colour}, please" for colour in COLOURS for thing in THINGS]
    relevant = [np.array([row]) for row in range(ITEMS)]
    return Task("shop", names, [fold_of(pairs_of(pairs), texts, relevant)])


def test_every_system_finds_what_was_asked_for_and_its_rows_are_not_made_again(shop: Task, tmp_path: Path) -> None:
    file, trained = tmp_path / "rows.json", []

    def counted(job: Job) -> Job:
        def train(task: Task, fold: Fold, folder: Path) -> list[Trained]:
            trained.append(job.system)
            return job.train(task, fold, folder)

        return replace(job, train=train)

    jobs = [counted(job) for job in jobs_of(dssm_cpu_s=3) if job.system != "bm25"]
    run(shop, jobs, Report(file, shop), tmp_path)
    before = json.loads(file.read_text())
    rows = before["rows"]
    assert {row["system"] for row in rows} == {"centroid", "neighbours", "xr-linear", "one-versus-all", "dssm"}
    for row in rows:
        named = (row["system"], row["config"])
        assert row["recall10"] > (45 if row["system"] == "dssm" else 95), named  # 15.6 by chance
        assert row["recall10"] <= row["recall50"] <= row["recall100"] <= 100, named
        assert min(row["ms_p50"], row["model_mb"]) > 0, named
    linear = [row["config"] for row in rows if row["system"] == "xr-linear"]
    assert linear == [f"{texts}, beam {beam}" for texts in (*TEXTS, f"{TEXTS[3]}, prior 0") for beam in BEAMS]
    assert len([row for row in rows if row["system"] == "dssm"]) == 1 + faiss_is_installed() * len(EF_SEARCH)

    kept = [row for row in rows if row["system"] != "centroid"]
    file.write_text(json.dumps(before | {"rows": kept}))
    trained.clear()
    run(shop, jobs, Report(file, shop), tmp_path)
    assert trained == ["centroid"] * 2
    after = json.loads(file.read_text())["rows"]
    assert after[: len(kept)] == kept
    recalls = {row["config"]: row["recall10"] for row in rows if row["system"] == "centroid"}
    assert {row["config"]: row["recall10"] for row in after[len(kept) :]} == recalls
    with pytest.raises(Exception, match="shop"):
        Report(file, Task("other", shop.own_texts, shop.folds))


@pytest.mark.parametrize("name", ["debian-describe", "debian-depends"])
def test_no_test_text_is_a_training_text(tmp_path: Path, name: str) -> None:
    """Of packages with 40 words of their own, two of one description, a short one; all depend on `c`."""
    rows = []
    for p in range(60):
        words = [f"p{min(p, 58)}w{k}" for k in range(40 if p else 8)]
        rows.append((f"pack{p}", "games", "", ",".join(["c", f"lib{p % 7}", f"rare{p}"]), " ".join(words)))
    folder = tmp_path / "xmc-debian-bookworm"
    folder.mkdir()
    frame = pl.DataFrame(rows, schema=["package", "section", "debtags", "depends", "description"], orient="row")
    (folder / "packages.tsv.gz").write_bytes(gzip.compress(frame.write_csv(separator="\t", quote_style="never").encode()))
    task = read_set(tmp_path, name)
    fold = task.folds[0]
    assert set(fold.texts).isdisjoint(fold.train.texts)
    assert len(set(fold.texts)) == len(fold.texts) == len(fold.relevant) == len(fold.apart) > 0
    if name == "debian-depends":
        assert task.own_texts == ["c", *(f"lib{k}" for k in range(7))]
        assert all(len(rows) == 2 and rows[0] == 0 for rows in fold.relevant)
    else:
        answers = dict(zip(fold.texts, fold.relevant, strict=True))
        assert_array_equal(answers[" ".join(f"p58w{k}" for k in range(12, 36))], [58, 59])  # every package that has the description
        assert len(answers) == 58  # of 60, one is too short and two are one
        assert {"pack3 games", " ".join(f"p3w{k}" for k in range(12))} <= set(fold.train.texts)


def test_queries_of_a_shop_are_held_out_whole(tmp_path: Path) -> None:
    rows = [(f"query {q}", f"thing {q} number {k}", str(4 - k)) for q in range(20) for k in range(3)]
    frame = pl.DataFrame(rows, schema=["query", "product_title", "median_relevance"], orient="row")
    folder = tmp_path / "psearch-crowdflower"
    folder.mkdir()
    (folder / "crowdflower_train.csv.gz").write_bytes(gzip.compress(frame.write_csv().encode()))
    task = read_set(tmp_path, "psearch")
    assert sorted(text for fold in task.folds for text in fold.texts) == sorted(f"query {q}" for q in range(20))
    for fold in task.folds:
        assert set(fold.texts).isdisjoint(fold.train.texts)
        assert set(task.own_texts) <= set(fold.train.texts)
        for text, relevant in zip(fold.texts, fold.relevant, strict=True):
            number = text.removeprefix("query ")
            assert [task.own_texts[row] for row in relevant] == [f"thing {number} number {k}" for k in range(2)]  # judged 4 and 3, not 2


def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidData, match=r"packages\.tsv\.gz"):
        read_set(tmp_path, "debian-depends")
    monkeypatch.setattr(sys, "argv", ["text_search", "--data", str(tmp_path), "--set", "psearch"])
    with pytest.raises(SystemExit, match=r"psearch-crowdflower/crowdflower_train\.csv\.gz"):
        text_search.main()


PACKAGES = pl.DataFrame(
    [
        ("chess", "Chess", "games", ["uitoolkit::gtk", "role::program", "game::board"]),
        ("go", "Go", "games", ["role::program", "uitoolkit::gtk"]),
        ("solo", "Solo", "games", ["uitoolkit::gtk", "role::program"]),
        ("tetris", "Tetris", "games", ["role::program"]),
        ("mail", "Mail", "net", ["role::program"]),
        ("plain", "No tags of these facets", "games", ["game::board"]),
        ("libgtk", "Toolkit", "libs", []),
        ("libc", "C", "libs", []),
    ],
    schema=["id", "title", "section", "debtags"],
    orient="row",
)
DEPENDS = pl.DataFrame(
    [("chess", "libgtk"), ("chess", "libc"), ("go", "libgtk"), ("tetris", "libc"), ("mail", "libc"), ("plain", "libc")],
    schema=["package", "dependency"],
    orient="row",
)
GTK, GAME, NET = "games role::program uitoolkit::gtk", "games role::program", "net role::program"


def test_a_rate_is_the_share_of_a_kinds_packages_that_depend_on_the_item() -> None:
    """`solo` depends on nothing, so it is no view; `plain` has no kind."""
    expected = [(GAME, "libc", 1, 1), (GTK, "libc", 2, 1), (GTK, "libgtk", 2, 2), (NET, "libc", 1, 1)]
    for packages, depends in ((PACKAGES, DEPENDS), (PACKAGES.reverse(), DEPENDS.reverse())):
        assert views_and_clicks(packages, depends, 1).rows() == expected


def test_items_with_few_clicks_are_left_out_and_files_hold_the_others(tmp_path: Path) -> None:
    for name, frame in (("packages", PACKAGES), ("depends", DEPENDS)):
        frame.write_parquet(tmp_path / f"{name}.parquet")
    write(tmp_path, tmp_path / "kinds", min_clicks=3)
    assert pl.read_csv(tmp_path / "kinds" / "log.csv").rows() == [(GAME, "libc", 1, 1), (GTK, "libc", 2, 1), (NET, "libc", 1, 1)]
    assert pl.read_csv(tmp_path / "kinds" / "kinds.csv")["kind"].to_list() == [GAME, GTK, NET]
    assert pl.read_parquet(tmp_path / "kinds" / "items.parquet").rows() == [("libc", "C", "libs")]


def test_recall_of_a_cold_start_is_counted_by_group() -> None:
    data = Texts(["a"] * 4, np.array([True, False, False, False]), [], [("x", [0, 1]), ("y", [2, 3])])
    row = cold_texts.row_of("some", data, np.array([[0, NO_ITEM], [2, 1]]), 0.0)
    assert (row["hidden@10"], row["old@10"], row["all@10"]) == (100, 25, 50)
    assert row["shown@10"] == 33.3


def test_labelwise_figures_of_perfect_and_of_no_predictions() -> None:
    true = Relevance.of_rows(as_rows(csr_array(np.array([[1, 0.5, 0], [0, 0, 0.25]], np.float32))))
    perfect = figures(true, true)
    assert (perfect["wp1"], perfect["wp5"], perfect["xmad1"], perfect["pairs"]) == (100, 100, 0, 3)
    nothing = figures(true, Relevance(np.zeros(3, np.int64), np.zeros(0, np.int64), np.zeros(0), 3))
    assert (nothing["wp1"], nothing["xmad1"]) == (0, pytest.approx((1 + 0.25) / 2))


def test_our_trees_stand_beside_the_fastest_peer_with_as_many() -> None:
    def row(system: str, trees: int, beam: int | None, ms: float) -> dict[str, Any]:
        return {"system": system, "trees": trees, "beam_size": beam, "ms_p50": ms}

    rows = [row("espalier", 1, 10, 2.0), row("forest", 3, 10, 6.0), row("pecos", 1, 10, 4.0), row("omikuji", 1, 10, 5.0),
            row("omikuji-3", 3, 10, 8.0), row("omikuji-3", 3, 50, 1.0), row("ova", 1, None, 1.0)]  # fmt: skip
    for one in rows:
        xrlinear_peers._beside_the_fastest(one, rows)
    assert [one.get("of_fastest_peer") for one in rows] == [0.5, 0.75, None, None, None, None, None]
