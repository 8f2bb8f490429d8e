"""`compare` for texts: BM25 and BM25F against their formula, what chooses and what measures, and what a table and a log are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_array_equal

from espalier.errors import InvalidConfig, InvalidData
from tests.training.commands import command, written_toml
from training.baselines.texts import METHODS, WordIndex, best_of, fields_of
from training.compare import report as report_module
from training.compare import texts
from training.compare.report import queries_file, read_figures
from training.compare.texts import compare_texts, questions_of, task_of
from training.linear.prepare import OF_ITEMS, OF_LOG, prepare
from training.specification.linear import LinearConfig, LinearOptions

ADJECTIVES, NOUNS = ("red", "blue", "small", "large", "round"), ("lamp", "chair", "table", "shelf", "clock", "mirror", "sofa", "desk")
TITLES = [f"{adjective} {noun}" for noun in NOUNS for adjective in ADJECTIVES]


def shop(folder: Path, log: bool = False, **data: Any) -> LinearConfig:
    """Forty products whose notes are noise; with a log of four hundred and fifty queries that call a lamp a light, and so on."""
    rng = np.random.default_rng(1)
    noise = [" ".join(rng.choice([*ADJECTIVES, *NOUNS, "fine", "new", "oak"], 12)) for _ in TITLES]
    ids = [f"p{row:02d}" for row in range(len(TITLES))]
    pl.DataFrame({"id": ids, "title": TITLES, "notes": noise}).write_parquet(folder / "items.parquet")
    given = {"format": "log", "items": folder / "items.parquet", "own_texts": ["title", "notes"], **data}
    if log:
        called = {noun: f"{noun[::-1]}o" for noun in NOUNS}
        rows = [
            (f"{TITLES[row].split()[0]} {called[TITLES[row].split()[1]]} {word}", ids[row])
            for row in range(len(TITLES))
            for word in ("", "cheap", "for home", "sale", "best", "nice", "oak", "gift", "set", "now", "here", "a")
        ]
        pl.DataFrame(rows, schema=["query", "item"], orient="row").write_parquet(folder / "log.parquet")
        given["train"] = folder / "log.parquet"
    return LinearConfig.model_validate({"kind": "xr-linear", "name": "shop", "data": given})


def test_bm25_and_bm25f_are_their_formulas_and_equals_come_in_the_order_of_the_items() -> None:
    fields = [["red lamp", "lamp", "lamp"], ["lamp of red glass", "", ""]]
    words = WordIndex(fields)
    weights, k1, b = (1.0, 0.5), 1.2, 0.75
    counts = {"red": ([1, 0, 0], [1, 0, 0]), "lamp": ([1, 1, 1], [1, 0, 0])}
    length, mean = ([2, 1, 1], [4, 0, 0]), (4 / 3, 4)
    expected = np.zeros(3)
    for in_titles, in_notes in counts.values():
        parts = zip(weights, (in_titles, in_notes), length, mean, strict=True)
        f = sum(weight * np.array(own) / (1 - b + b * np.array(long) / usual) for weight, own, long, usual in parts)
        having = np.count_nonzero(f)
        expected += np.log1p((3 - having + 0.5) / (having + 0.5)) * f * (k1 + 1) / (f + k1)
    find = words.scorer(weights, k1, b)
    rows, scores = find("Red LAMP unknown")
    assert_array_equal(rows, [0, 1, 2])
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    filler = np.array([2, 0, 1])
    assert_array_equal(best_of(find, filler)(["lamp", "unknown", "glass"], 2, False), [[1, 2], [2, 0], [0, 2]])
    assert_array_equal(best_of(find, filler)(["glass"], 4, False), [[0, 2, 1, -1]])
    assert words.joined().scorer((1.0,), k1, b)("glass")[0].tolist() == [0]


def test_what_chooses_is_neither_learned_from_nor_measured(tmp_path: Path) -> None:
    config = shop(tmp_path, log=True)
    prepared = prepare(config)
    assert prepared.test_source == OF_LOG
    task, tests = task_of(config, prepared), questions_of(prepared)
    chosen_by, learned = {pair.query for pair in task.validation}, set(task.part.queries.texts)
    assert len(chosen_by) == round(0.1 * len(task.whole.queries))
    assert learned | chosen_by == set(task.whole.queries.texts)
    assert not learned & chosen_by
    assert not {pair.query for pair in tests} & set(task.whole.queries.texts)
    assert abs(task.part.centroids - task.whole.centroids).sum() > 0
    asked = fields_of(task.columns, task.part.queries)[-1]
    assert sum(len(text.split()) for text in asked) == sum(len(query.split()) for query in learned)


def test_a_query_without_a_known_word_is_answered_with_the_most_frequent_items(tmp_path: Path) -> None:
    """The tree's answers are full, too."""
    config = shop(tmp_path, log=True)
    popular = pl.DataFrame({"query": [f"{word} thing" for word in ("some", "other", "any")], "item": ["p31"] * 3})
    pl.concat([pl.read_parquet(tmp_path / "log.parquet"), popular]).write_parquet(tmp_path / "log.parquet")
    task = task_of(config, prepare(config))
    for name, method in METHODS.items():
        answer = method(task).rank(["???"], 50, False)[0]
        assert answer[0] == task.whole.most_frequent()[0] == 31, name
        assert sorted(answer[:40]) == [*range(40)], name


def test_without_a_log_made_queries_choose_and_others_measure(tmp_path: Path) -> None:
    config = shop(tmp_path, test_share=0.5)
    prepared = prepare(config)
    assert prepared.test_source == OF_ITEMS
    task = task_of(config, prepared)
    assert task.part is task.whole
    assert not len(task.whole.queries)
    assert {pair.query for pair in task.validation} != {pair.query for pair in questions_of(prepared)}
    fitted = METHODS["bm25f"](task)
    assert 0 < max(trial.figure for trial in fitted.trials) <= 1
    assert fitted.options.keys() == {"weight 1", "weight 2", "k1", "b"}
    with pytest.raises(InvalidConfig, match="query-neighbours"):
        METHODS["query-neighbours"](task)


def test_titles_weigh_more_than_notes_of_noise(tmp_path: Path) -> None:
    config = shop(tmp_path)
    pl.DataFrame({"query": TITLES, "item": [f"p{row:02d}" for row in range(len(TITLES))]}).write_parquet(tmp_path / "test.parquet")
    report = compare_texts(shop(tmp_path, test=tmp_path / "test.parquet"), ["bm25", "bm25f", "recipe"], None, [10], tmp_path / "F.json")
    found = {row["method"]: row["figures"]["recall@10"]["mean"] for row in report["rows"]}
    assert found["recipe"] == 1
    assert found.keys() == {"bm25", "bm25f", "recipe"}
    assert json.loads((tmp_path / "F.json").read_text())["verdict"] == report["verdict"]
    assert report["tested"] == "of data.test"
    assert config.data.test is None


def flat(config: LinearConfig) -> LinearConfig:
    """With a tree of more than one node."""
    return config.model_copy(update={"tree": config.tree.model_copy(update={"branching": 4, "max_leaf": 8})})


def test_a_log_whose_words_are_other_ones_is_found_by_what_learns_from_it(tmp_path: Path) -> None:
    report = compare_texts(flat(shop(tmp_path, log=True)), None, None, [10], None)
    rows = {row["method"]: row for row in report["rows"] if row["chosen"]}
    assert rows.keys() == {*texts.NAMES}
    assert not report["not_judged"]
    assert rows["one-versus-all"]["beam_size"] is None
    assert rows["recipe"]["figures"]["ndcg@10"]["mean"] > 0.9 < rows["query-neighbours"]["figures"]["ndcg@10"]["mean"]
    assert {fit["method"] for fit in report["fits"]} == rows.keys()
    pairs = {(one["first"], one["second"]) for one in report["differences"]}
    assert len(pairs) == len(rows) * (len(rows) - 1) / 2
    assert (report["chosen_by"], "validation queries" in report["verdict"][0]) == (OF_LOG, True)
    assert "one-versus-all" not in " ".join(report["verdict"])
    regression = compare_texts(
        shop(tmp_path, log=True).model_copy(update={"linear": LinearOptions(loss="relevance")}), ["bm25", "recipe"], None, [10], None
    )
    assert regression["verdict"][1] == texts.RELEVANCE


def test_made_queries_decide_nothing_and_what_takes_too_long_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = shop(tmp_path, test_share=0.5)
    report = compare_texts(config, None, None, [10], None)
    assert [row["method"] for row in report["rows"]] == ["bm25", "bm25f", "centroids", "recipe"]
    assert (report["verdict"][1], report["chosen_by"]) == (texts.MADE, OF_ITEMS)
    assert "on queries made of items' words" in report["verdict"][0]
    late = compare_texts(config, ["one-versus-all", "centroids", "recipe"], 0.0, [10], None)
    assert [left["method"] for left in late["not_judged"]] == ["one-versus-all", "centroids"]
    assert late["not_judged"][0]["reason"] == "--minutes: got '0', expected more: no time was left"
    one_node = compare_texts(config, ["one-versus-all"], None, [10], None)
    assert one_node["not_judged"][0]["reason"].startswith("items: got 40, expected more: the recipe's tree is one node")
    assert one_node["verdict"] == ["No tree was measured, since it was not run.", texts.MADE]
    unasked = compare_texts(flat(config), ["one-versus-all"], None, [10], None)
    assert unasked["not_judged"][0]["reason"].startswith("queries: got 0, expected some")
    monkeypatch.setattr(texts, "MOST_WORK", 10)
    large = compare_texts(flat(shop(tmp_path, log=True)), ["one-versus-all"], None, [10], None)
    assert large["not_judged"][0]["reason"].startswith("items: got 40, expected fewer")


def test_an_interrupt_leaves_whole_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def stopped(*_: object) -> float:
        measured.append(1)
        if len(measured) == 3:  # in the middle of the tree's beams
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(report_module, "ms_per_query", stopped)
    report = compare_texts(flat(shop(tmp_path, test_share=0.5)), ["bm25", "recipe"], None, [2, 4], tmp_path / "F.json")
    assert report["interrupted"]
    assert [row["method"] for row in report["rows"]] == [fit["method"] for fit in report["fits"]] == ["bm25"]
    assert json.loads((tmp_path / "F.json").read_text())["verdict"] == report["verdict"]


def test_made_queries_do_not_choose_what_people_find_less_with(tmp_path: Path) -> None:
    shop(tmp_path)
    pl.DataFrame({"query": TITLES, "item": [f"p{row:02d}" for row in range(len(TITLES))]}).write_parquet(tmp_path / "test.parquet")
    report = compare_texts(shop(tmp_path, test=tmp_path / "test.parquet"), ["bm25", "centroids", "recipe"], None, [10], None)
    for row in report["rows"]:  # as if they had liked centroids least, which find most
        row["validation"] = {"bm25": 0.9, "centroids": 0.1}.get(row["method"], 0)
    for one in report["differences"]:  # and as if the tree had found least of all
        one |= {"mean": 0.1, "low": 0.05, "high": 0.2} if one["second"] == "recipe" else {"mean": -0.1, "low": -0.2, "high": -0.05}
    said = texts._verdict(shop(tmp_path), report)
    assert said[1] == "Undecided: centroids, which made queries did not choose, found more than bm25."


def test_queries_without_an_item_choose_nothing_and_few_of_a_log_are_halved(tmp_path: Path) -> None:
    rows = [(f"word{place} thing", f"p{place % 9}", 10, place % 3) for place in range(90)]
    pl.DataFrame(rows, schema=["query", "item", "views", "clicks"], orient="row").write_parquet(tmp_path / "log.parquet")
    data = {"format": "log", "train": tmp_path / "log.parquet", "views": "views", "clicks": "clicks"}
    config = LinearConfig.model_validate({"kind": "xr-linear", "name": "x", "data": data})
    task = task_of(config, prepare(config))
    assert not task.has_made_queries
    assert 0 < len(task.validation) < 30  # of thirty, a third has no click
    assert all(len(pair.relevant) for pair in task.validation)
    assert all(0 <= trial.figure <= 1 for trial in METHODS["bm25"](task).trials)


def test_each_chinese_character_is_a_word_and_an_empty_field_weighs_nothing() -> None:
    find = WordIndex([["红色台灯", "蓝色台灯"], ["", ""]]).scorer((1.0, 1.0), 1.2, 1.0)
    assert find("红灯")[0].tolist() == [0, 1]
    assert find("红")[0].tolist() == [0]


def test_what_is_no_text_or_has_no_query_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="test queries: got 0"):
        compare_texts(shop(tmp_path, test_share=0.0), None, None, [10], None)
    (tmp_path / "points.txt").write_text("1 1 1\n0 0:1\n")
    config = LinearConfig.model_validate({"kind": "xr-linear", "name": "x", "data": {"format": "xmc", "train": tmp_path / "points.txt"}})
    with pytest.raises(InvalidConfig, match=r"data\.format: got 'xmc', expected log: compare judges histories, vectors and texts"):
        compare_texts(config, None, None, [10], None)
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    for other in (tmp_path / "mine.json", tmp_path):
        with pytest.raises(InvalidConfig, match=r"--json: got .*, expected a report of texts, which is replaced, or no file"):
            compare_texts(shop(tmp_path), None, None, [10], other)
    assert json.loads((tmp_path / "mine.json").read_text()) == {"mine": 1}


def test_the_command_prints_rows_and_a_verdict_and_draws(tmp_path: Path) -> None:
    shop(tmp_path)
    data = {"format": "log", "items": str(tmp_path / "items.parquet"), "own_texts": ["title", "notes"], "test_share": 0.5}
    file = written_toml(tmp_path / "shop.toml", {"kind": "xr-linear", "name": "shop", "data": data})
    said = command("compare", "--config", file, "--methods", "bm25,recipe", "--plot", tmp_path / "F.png", "--json", tmp_path / "F.json")
    assert "40 items, 0 queries to learn from; 20 test queries, made of words of the items" in said.out
    assert all(part in said.out for part in ("bm25 ", "recipe ", texts.MADE))
    assert (tmp_path / "F.png").stat().st_size > 1000
    figures = read_figures(queries_file(tmp_path / "F.json"))
    report = json.loads((tmp_path / "F.json").read_text())
    assert report["config"]["search"]["beam_size"] == 100, "the one that the tree had"
    rows = report["rows"]
    assert len(rows) > 1
    for row in rows:
        of_queries = figures[row["method"], row["seed"], row["beam_size"]]
        means = {str(metric): of_queries.mean(metric) for metric in of_queries.values}
        assert means == pytest.approx({metric: figure["mean"] for metric, figure in row["figures"].items()})
    refused = command("compare", "--config", file, "--methods", "fusion:bm25:recipe")
    assert (refused.status, "--methods: got 'fusion:bm25:recipe'" in refused.err) == (1, True)
