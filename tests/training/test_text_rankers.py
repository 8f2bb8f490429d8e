"""Rankers that compare a query's text with the texts of its candidates: the features `text.…`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from espalier.bundle import RANKER_TEXTS, Bundle
from espalier.engines import open_engine
from espalier.errors import BundleCorrupt, BundleNotFound
from espalier.queries import TextKind, encode_texts
from espalier.rank_features import TEXT
from espalier.ranker_texts import STEP
from espalier.rerank.features import RankFeatures
from espalier.rerank.live_candidates import LiveCandidates
from tests.espalier.bundle.parts import reseal
from tests.service.running import run
from tests.training.commands import command, written_toml
from tests.training.live.test_fold import JournalOf

WORDS = [f"{first}{last}" for first in ("kar", "mol", "ten", "vis", "dop", "lug") for last in ("ina", "ebu", "oty", "ufe", "ago", "iwe")]
NAMES = tuple(prefix + column for column in ("title", "note") for prefix in TEXT)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 2 of a model has a ranker. A query is a word; the item with this word in its note is right, and three with it in their title
    are not.
    """
    folder = tmp_path_factory.mktemp("shop")
    rows: list[tuple[str, str, str | None]] = []
    for i, word in enumerate(WORDS):
        other = WORDS[(i + 7) % len(WORDS)]
        rows += [(f"right-{word}", f"{other} thing", f"made of {word} and more"), (f"bare-{word}", word, None)]
        rows += [(f"wrong-{word}-{number}", f"{word} {number}", f"{other} inside") for number in range(2)]
    pl.DataFrame(rows, schema=["id", "title", "note"], orient="row").write_parquet(folder / "items.parquet")
    judged = [(word, word, f"right-{word}", 1.0) for word in WORDS]
    pl.DataFrame(judged, schema=["query_id", "text", "item", "grade"], orient="row").write_parquet(folder / "judged.parquet")
    data = {"format": "log", "items": str(folder / "items.parquet"), "own_texts": ["title", "note"]}
    raw = {"kind": "xr-linear", "name": "shop", "data": data, "tree": {"branching": 4, "max_leaf": 8}, "search": {"max_m": 20}}
    out = folder / "models" / "shop"
    assert command("fit", "--config", written_toml(folder / "shop.toml", raw), "--out", out / "1").status == 0
    learned = fit_ranker(out, 1, 2, folder / "judged.parquet")
    assert learned.status == 0, learned.err
    return out


def fit_ranker(out: Path, old: int, new: int, judged: Path, *options: str) -> Any:
    return command("fit-ranker", "--model", out / str(old), "--out", out / str(new), "--judgements", judged, "--depth", 20, *options)


def features(bundle: Bundle, names: tuple[str, ...], text: str, rows: list[int], live: LiveCandidates | None = None) -> Any:
    """float32[N, F]."""
    kind = bundle.manifest.query
    assert isinstance(kind, TextKind)
    queries = encode_texts(kind, bundle.vectoriser, ["nothing", text])
    zeros_N = np.zeros(len(rows), np.float32)
    return RankFeatures(bundle, names).of(queries, 1, np.array(rows, np.int64), zeros_N, zeros_N, live=live)


def test_a_ranker_learns_in_which_column_a_word_counts(shop: Path) -> None:
    ranker = Bundle.open(shop / "2").manifest.ranker
    assert ranker is not None
    assert set(NAMES) < set(ranker.features)
    figures = ranker.training["metrics"]["test"]
    assert figures["retrieved"]["ndcg"] < 0.7
    assert figures["reranked"]["ndcg"] > 0.8


@pytest.mark.parametrize("text", ["karina", "karina thing molina", "made of karinaa", "7", "zzzzz", ""])
def test_features_are_products_by_kind_of_ngram(shop: Path, text: str) -> None:
    bundle = Bundle.open(shop / "2")
    rows = [0, 1, 2, 5, 30, len(bundle.items) - 1]
    found = features(bundle, NAMES, text, rows)
    names = bundle.vectoriser.features_of(np.arange(bundle.vectoriser.width))
    kinds = ["letters" if "_" in name or "…" in name else "pairs" if " " in name else "words" for name in names]
    query = dict(zip(*(array.tolist() for array in bundle.vectoriser.transform([text]).row(0)), strict=True))
    asked = sum(value for f, value in query.items() if kinds[f] == "words")
    for n, row in enumerate(rows):
        for c, column in enumerate(("title", "note")):
            text_of_item = bundle.items.values(column, np.array([row]))[0]
            own = found[n, c * len(TEXT) : (c + 1) * len(TEXT)]
            if text_of_item is None:
                assert np.isnan(own).all()
                continue
            document = dict(zip(*(array.tolist() for array in bundle.vectoriser.documents([text_of_item]).row(0)), strict=True))
            shared = query.keys() & document.keys()
            for prefix, number in zip(("words", "pairs", "letters"), own, strict=False):
                exact = sum(query[f] * document[f] for f in shared if kinds[f] == prefix)
                assert number == pytest.approx(exact, abs=STEP / 2 * sum(query.values()) + 1e-6)
            coverage = sum(query[f] for f in shared if kinds[f] == "words") / asked if asked else np.nan
            length = np.log1p(sum(kinds[f] == "words" for f in document))
            assert own[3:] == pytest.approx([coverage, length], nan_ok=True)


def test_live_and_changed_items_have_the_features_that_a_fold_gives_them(shop: Path, tmp_path: Path) -> None:
    models = tmp_path / "shop"
    shutil.copytree(shop, models)
    before = Bundle.open(models / "2")
    writer = JournalOf(before)
    fields = {"new": {"title": "karina", "note": "made of molebu"}, "bare": {"note": "of molebu"}, "right-karina": {"title": "molebu"}}
    for item, values in fields.items():
        writer.put(item, fields=values)
    live = LiveCandidates(writer.state.table, writer.state.overlay())
    rows = [*writer.state.table.rows_of([*fields, "wrong-karina-0"]).tolist()]
    assert command("fold", "--model", models / "2", "--out", models / "3").status == 0
    after = Bundle.open(models / "3")
    assert after.manifest.ranker == before.manifest.ranker
    folded = features(after, NAMES, "molebu", after.items.rows_of([*fields, "wrong-karina-0"]).tolist())
    assert np.array_equal(features(before, NAMES, "molebu", rows, live), folded, equal_nan=True)
    assert np.isnan(folded[1, NAMES.index("text.words.title")])
    assert (folded[:3, NAMES.index("text.words.note")] > 0).tolist() == [True, True, False]
    assert folded[2, NAMES.index("text.words.title")] > 0


def test_an_answer_is_reordered_and_explained(shop: Path) -> None:
    body = {"model": "shop", "queries": [{"text": "visoty"}], "m": 3, "explain_items": ["right-visoty"]}
    with run(shop.parent, lambda bundle: open_engine(bundle, "cpu")) as running:
        plain, answer = (running.retrieve(**body, rerank=rerank)["results"][0] for rerank in (False, True))
    assert plain["items"][0]["id"] != "right-visoty"
    assert answer["items"][0]["id"] == "right-visoty"
    (explained,) = answer["explain"]["items"]
    assert explained["rank_features"]["text.coverage.note"] == 1
    assert explained["retrieved_place"] > 1


def test_texts_go_with_the_features_that_need_them(shop: Path) -> None:
    judged = shop.parent.parent / "judged.parquet"
    fitted = fit_ranker(shop, 2, 5, judged, "--features", "retrieval.score,text.words.note")
    assert fitted.status == 0, fitted.err
    assert 0 < (shop / "5" / RANKER_TEXTS).stat().st_size < (shop / "2" / RANKER_TEXTS).stat().st_size
    fitted = fit_ranker(shop, 2, 6, judged, "--features", "retrieval.score")
    assert fitted.status == 0, fitted.err
    assert not (shop / "6" / RANKER_TEXTS).exists()
    assert RANKER_TEXTS not in Bundle.open(shop / "6").manifest.files
    wrong = fit_ranker(shop, 2, 7, judged, "--features", "text.words.colour")
    assert (wrong.status, "text.words.colour" in wrong.err) == (1, True)


def test_damaged_texts_are_refused(shop: Path, tmp_path: Path) -> None:
    other = tmp_path / "shop" / "1"
    shutil.copytree(shop / "2", other)
    shutil.copyfile(shop / "5" / RANKER_TEXTS, other / RANKER_TEXTS)  # of one column
    reseal(other)
    with pytest.raises(BundleCorrupt, match=r"ranker-texts\.safetensors: feature: .* expected"):
        Bundle.open(other).check()
    (other / RANKER_TEXTS).unlink()
    with pytest.raises(BundleNotFound, match=r"ranker-texts\.safetensors: missing"):
        Bundle.open(other)
