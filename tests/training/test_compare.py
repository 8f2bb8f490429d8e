"""The comparison: figures and intervals, the division of time, what is left out, what is resumed, and the whole on a small log."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from espalier.errors import InvalidConfig, InvalidData
from espalier.search import NO_ITEM
from tests.pictures import Pictures
from tests.training.logs import Clock
from training.compare import command, contest, figures, recipe
from training.compare.command import check_options, show
from training.compare.compare import CompareOptions, compare
from training.compare.figures import Figures, figures_of, paired
from training.compare.plan import USED
from training.compare.plot import plot_rows
from training.compare.report import Key, continued, queries_file, queries_of, read_figures, save_figures
from training.data.splits import EvaluationPair
from training.deep.prepare import prepare
from training.neighbours.fit import neighbours
from training.retrieval.needs import Estimate, Needs
from training.retrieval.task import Fitted, Method, Metric, Task, Trial
from training.specification.deep import DeepConfig
from training.specification.models import deep_config
from training.specification.splits import FileSplit

CPU = torch.device("cpu")
RECALL_2, NDCG_2 = Metric("recall", 2), Metric("ndcg", 2)


# -- figures --------------------------------------------------------------------------------------------------------------


def pair(user: int, relevant: list[int]) -> EvaluationPair:
    return EvaluationPair(user, np.array([9]), np.array(relevant))


def test_figures_are_means_over_queries_with_standard_errors() -> None:
    found_BM = np.array([[1, 2], [3, 4], [5, NO_ITEM]])
    measured = figures_of(found_BM, [pair(0, [2]), pair(1, [3, 4]), pair(2, [6])], [RECALL_2, NDCG_2])
    assert measured.values[RECALL_2].tolist() == [1, 1, 0]
    assert measured.mean(RECALL_2) == pytest.approx(2 / 3)
    assert measured.standard_error(RECALL_2) == pytest.approx(np.std([1, 1, 0], ddof=1) / np.sqrt(3))
    assert measured.values[NDCG_2][0] == pytest.approx(1 / np.log2(3))


def of(users: list[int], values: list[float]) -> Figures:
    return Figures(np.array(users), {RECALL_2: np.array(values)})


def test_differences_are_paired_query_by_query() -> None:
    found = paired([of([0, 1, 2, 3], [1, 1, 0.5, 1])], [of([0, 1, 2, 3], [0.5, 1, 0.5, 0.5])], RECALL_2)
    error = np.std([0.5, 0, 0, 0.5], ddof=1) / 2
    assert (found.mean, found.low, found.high, found.queries) == pytest.approx((0.25, 0.25 - 1.96 * error, 0.25 + 1.96 * error, 4))


def test_seeds_of_one_user_are_averaged_before_the_interval() -> None:
    """Three seeds over the same users are no more queries than one."""
    rng = np.random.default_rng(1)
    first, second = rng.random(50), rng.random(50)
    one = paired([of([*range(50)], list(first))], [of([*range(50)], list(second))], RECALL_2)
    three = paired([of([*range(50)], list(first))] * 3, [of([*range(50)], list(second))] * 3, RECALL_2)
    assert_allclose([three.mean, three.low, three.high], [one.mean, one.low, one.high])
    for others in ([of([0, 2], [1, 0])], [of([0, 1], [1, 0])] * 2):
        with pytest.raises(InvalidData):  # methods of other queries
            paired([of([0, 1], [1, 0])], others, RECALL_2)
    other_users = paired([of([0, 1], [1, 0]), of([1, 2], [1, 1])], [of([0, 1], [0, 0]), of([1, 2], [0, 0])], RECALL_2)
    assert other_users.queries == 3
    assert other_users.mean == pytest.approx((1 + 0.5 + 1) / 3)


def test_test_queries_are_thinned_evenly_and_without_what_was_seen() -> None:
    pairs = [EvaluationPair(user, np.array([user]), np.array([user % 2, user])) for user in range(10)]
    assert [pair.user for pair in queries_of(pairs, False, 4)] == [0, 3, 6, 9]
    assert [pair.user for pair in queries_of(pairs, True)] == [*range(2, 10)]
    with pytest.raises(InvalidData, match=r"data\.split"):
        queries_of(pairs[:2], True)


# -- time -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf")])
def test_minutes_that_are_no_time_are_refused(minutes: float) -> None:
    with pytest.raises(InvalidConfig, match="--minutes"):
        command.run(Path("c.toml"), None, None, minutes, [50], None, None, "cpu")


def test_a_query_is_timed_alone_and_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    time_ = Clock()
    monkeypatch.setattr(figures, "time", time_)
    asked: list[int] = []

    def rank(histories: Sequence[Any], m: int, exclude_seen: bool) -> Any:
        asked.append(len(histories))
        time_.now_s += 0.3 if len(asked) == 1 else 0.002  # compiles at first
        return np.zeros((1, m), np.int64)

    threads = torch.get_num_threads()
    assert figures.ms_per_query(rank, [np.array([1])] * 5, 10, True) == pytest.approx(2)
    assert set(asked) == {1}
    assert torch.get_num_threads() == threads


# -- a whole comparison ---------------------------------------------------------------------------------------------------


CLUSTERS, SIZE, USERS = 6, 8, 240


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who each have six of the eight items of one cluster: who knows half of a list knows the rest."""
    rng = np.random.default_rng(3)
    lines = ["user,item"]
    for user in range(USERS):
        lines += [f"u{user},i{item * CLUSTERS + user % CLUSTERS}" for item in rng.permutation(SIZE)[:6]]
    file = tmp_path_factory.mktemp("log") / "log.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def settings(log: Path, steps: int = 60) -> DeepConfig:
    raw: dict[str, Any] = {
        "kind": "otm-robust",
        "name": "planted",
        "data": {"log": str(log), "format": {"min_user_events": 4, "order": "none"}, "split": {"test_share": 0.3, "validation_share": 0.3}},
        "instances": {"windows": [8], "targets": 4},
        "scorer": {"kind": "product", "node_dim": 8, "hidden": [16], "dropout": 0.0},
        "optimiser": {"steps": steps, "batch": 30, "learning_rate": 0.02, "average": 10, "validate_every": 20},
        "search": {"beam_size": 8, "m": 5},
    }
    return deep_config(raw)


def the_cluster(task: Task) -> Fitted:
    """Knows the truth: the items of the first history item's cluster."""

    def rank(histories: Sequence[Any], m: int, exclude_seen: bool) -> Any:
        rows_BM = np.full((len(histories), m), NO_ITEM, np.int64)
        cluster_I = np.array([int(name[1:]) % CLUSTERS for name in task.items.column("id").to_pylist()])
        for row, history in zip(rows_BM, histories, strict=True):
            items = np.flatnonzero(cluster_I == cluster_I[history[0]])
            items = items[~np.isin(items, history)][:m] if exclude_seen else items[:m]
            row[: len(items)] = items
        return rows_BM

    return Fitted(rank, {"depth": 1}, 10, 0.5, [Trial({"depth": 1}, 1.0)])


def the_first(task: Task) -> Fitted:
    """Knows nothing: every query gets the first items."""

    def rank(histories: Sequence[Any], m: int, exclude_seen: bool) -> Any:
        items = np.arange(len(task.items))
        left = [items[~np.isin(items, history)] if exclude_seen else items for history in histories]
        return np.array([rows[:m] for rows in left])

    return Fitted(rank, {}, 10, 0.1, ended="it gave up")


def refused(task: Task) -> Fitted:
    raise InvalidConfig("memory", "7 GB", "at most 1 GB")


def not_installed(task: Task) -> Fitted:
    raise ModuleNotFoundError("No module named 'faraway'")


def interrupted(task: Task) -> Fitted:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def fusions_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "fuse", fuse)


def fuse(first: Fitted, second: Fitted, task: Task) -> Fitted:
    """All of the first."""
    return Fitted(first.rank, {"weight": 1.0}, first.bytes + second.bytes, first.seconds + second.seconds)


BASELINES = {"truth": the_cluster, "popularity": the_first, "ease": refused, "ials": not_installed, "slow": interrupted}


def asked(log: Path, *methods: str, **other: Any) -> CompareOptions:
    plain: dict[str, Any] = {"config": settings(log), "seconds": None, "beams": [2, 8], "device": torch.device("cpu")}
    estimates = {name: lambda task: Needs(1, 2) for name in BASELINES}
    return CompareOptions(data=None, methods=methods, baselines=BASELINES, estimates=estimates, **plain | other)


def test_a_log_is_compared_from_end_to_end(log: Path, tmp_path: Path, pictures: Pictures, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    report = compare(asked(log, "popularity", "truth", "ease", "ials", "recipe", "fusion:recipe:truth"), file)
    assert json.loads(file.read_text()) == json.loads(json.dumps(report))
    rows = {(row["method"], row["beam_size"]): row for row in report["rows"]}
    chosen = next(beam for (name, beam), row in rows.items() if name == "recipe" and row["chosen"])
    assert list(rows) == [("popularity", None), ("truth", None), ("recipe", 2), ("recipe", 8), ("fusion:recipe:truth", chosen)]
    assert rows["truth", None]["figures"]["recall@5"] == {"mean": 1.0, "se": 0.0}
    assert rows["recipe", 8]["figures"]["recall@5"]["mean"] > 0.9 > rows["popularity", None]["figures"]["recall@5"]["mean"] + 0.5
    assert rows["fusion:recipe:truth", chosen]["figures"] == rows["recipe", chosen]["figures"]
    assert all(row["ms_per_query"] > 0 for row in report["rows"])
    assert {left["method"]: left["reason"] for left in report["not_judged"]} == {
        "ease": "memory: got '7 GB', expected at most 1 GB",
        "ials": "No module named 'faraway'",
    }
    fits = {fit["method"]: fit for fit in report["fits"]}
    assert fits["recipe"]["options"]["steps"] <= 60
    assert fits["recipe"]["bytes"] > 1000
    assert fits["truth"]["trials"] == [{"options": {"depth": 1}, "figure": 1.0}]
    assert {(row["first"], row["second"]) for row in report["differences"]} >= {("truth", "recipe"), ("popularity", "truth")}
    ahead = next(
        row for row in report["differences"] if (row["first"], row["second"], row["metric"]) == ("popularity", "truth", "recall@5")
    )
    assert ahead["mean"] == pytest.approx(rows["popularity", None]["figures"]["recall@5"]["mean"] - 1)
    assert len(report["verdict"]) == 2
    assert report["log"]["users"] == USERS

    truth = rows["truth", None]["segments"]
    assert {part["mean"] for part in (*truth["users"], *truth["items"])} == {1.0}
    assert "segments" not in rows["recipe", next(beam for beam in (2, 8) if beam != chosen)]
    command.show_segments(report)
    shares = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines() if "% of the catalogue" in line]
    assert shares == ["popularity", "truth", "recipe", "fusion:recipe:truth"]

    show(report)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[2:8]] == ["method", "popularity", "truth", "recipe,", "recipe,", "fusion:recipe:truth,"]
    assert "* popularity ended early: it gave up" in printed
    assert "not judged: ials: No module named 'faraway'" in printed
    assert printed[-2:] == report["verdict"]
    plot_rows(report["rows"], {"popularity"}, "recall@5", "planted", tmp_path / "rows.png")
    drawn = pictures.lines(tmp_path / "rows.png")
    assert drawn["recipe"] == [
        (rows["recipe", beam]["ms_per_query"], rows["recipe", beam]["figures"]["recall@5"]["mean"]) for beam in (2, 8)
    ]


def test_the_table_has_the_metrics_that_were_asked_for_and_the_one_that_chooses(log: Path, tmp_path: Path) -> None:
    file, wanted = tmp_path / "rows.json", [Metric("hr", 3), Metric("mrr", 20)]
    report = compare(asked(log, "truth", metrics=wanted), file)
    assert list(report["rows"][0]["figures"]) == report["metrics"] == ["hr@3", "mrr@20", "recall@5"]
    assert compare(asked(log, "truth", metrics=wanted), file)["rows"] == report["rows"]
    with pytest.raises(InvalidConfig, match="its metrics is"):
        compare(asked(log, "truth"), file)


def test_methods_of_an_interrupted_run_are_not_run_again(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    first = compare(asked(log, "truth", "slow", "popularity"), file)
    assert first["interrupted"] is True
    assert {row["method"] for row in json.loads(file.read_text())["rows"]} == {"truth", "popularity"}, "quick methods come first"
    again = compare(asked(log, "truth", "popularity"), file)
    assert [row["method"] for row in again["rows"]] == ["truth", "popularity"]
    assert [row for row in again["rows"] if row["method"] == "truth"] == [row for row in first["rows"] if row["method"] == "truth"]
    assert again["interrupted"] is False
    assert again["seconds"] > first["seconds"], "of both runs"
    assert {(row["first"], row["second"]) for row in again["differences"]} == {("truth", "popularity")}, "kept figures are compared too"
    with pytest.raises(InvalidConfig, match=r"--json: .* its config is"):
        compare(asked(log, "truth", config=settings(log, steps=7)), file)
    queries_file(file).unlink()
    lost = compare(asked(log, "truth", "popularity"), file)
    assert len(lost["differences"]) == len(again["differences"]), "run again, since nothing could be compared with them"


def test_reports_with_any_ending_have_figures_of_their_own() -> None:
    names = ["run.json", "run.1", "run.2", "run", "run.json.json"]
    assert queries_file(Path("a/run.json")) == Path("a/run.queries.npz")
    assert len({queries_file(Path("a", name)) for name in names[1:]}) == 4


def test_a_comparison_is_not_continued_on_another_test_file_or_item_table(log: Path, tmp_path: Path) -> None:
    test, items, file = tmp_path / "test.csv", tmp_path / "items.csv", tmp_path / "rows.json"
    items.write_text("id,title\ni0,one\n")
    config = settings(log)
    split = FileSplit(kind="file", test=test)
    asked_ = asked(log, "truth", config=config.model_copy(update={"data": config.data.model_copy(update={"split": split, "items": items})}))
    unseen = [f"u{user},i{item * CLUSTERS + user % CLUSTERS}" for user in range(40) for item in range(SIZE)]
    test.write_text("\n".join(["user,item", *unseen]) + "\n")
    compare(asked_, file)
    compare(asked_, file)
    for changed, text in ((items, "id,title\ni0,another\n"), (test, "\n".join(["user,item", *unseen[::-1]]) + "\n")):
        content = changed.read_text()
        changed.write_text(text)
        with pytest.raises(InvalidConfig, match=r"--json: .* its log is"):
            compare(asked_, file)
        changed.write_text(content)


def test_figures_of_queries_survive_their_file(tmp_path: Path) -> None:
    kept: dict[Key, Figures] = {("recipe", 1, 50): Figures(np.array([3, 5]), {RECALL_2: np.array([0.5, 1]), NDCG_2: np.array([0.25, 0])})}
    kept["a|b", 2, None] = Figures(np.array([1]), {RECALL_2: np.array([0.0])})
    save_figures(kept, tmp_path / "f.npz")
    found = read_figures(tmp_path / "f.npz")
    assert found.keys() == kept.keys()
    for key, known in kept.items():
        assert found[key].user_B.tolist() == known.user_B.tolist()
        assert {metric: values.tolist() for metric, values in found[key].values.items()} == {
            metric: values.tolist() for metric, values in known.values.items()
        }
    assert read_figures(tmp_path / "none.npz") == {}
    whole = (tmp_path / "f.npz").read_bytes()
    for damaged in (b"", b"garbage", whole[: len(whole) // 2]):
        (tmp_path / "f.npz").write_bytes(damaged)
        with pytest.raises(InvalidConfig, match=r"--json: got '.*f\.npz'"):
            read_figures(tmp_path / "f.npz")


@pytest.mark.parametrize("damaged", [b'{"rows": [', b"[]", b'{"rows": 7}', b"\xff\xfe{"])
def test_a_damaged_report_is_refused(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "rows.json").write_bytes(damaged)
    with pytest.raises(InvalidConfig, match="--json"):
        continued({"rows": []}, tmp_path / "rows.json", (), ("rows",))


def test_a_device_or_a_pipe_is_neither_read_nor_replaced_by_a_report(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InvalidConfig, match=r"^--json: got .*, expected a file, not a folder, a device or a pipe"):
            check_options(None, None, None, None, file)
    assert (tmp_path / "pipe").is_fifo()
    assert check_options(None, None, None, None, tmp_path / "new.json") == []


def test_methods_that_ended_early_are_run_again_with_more_time(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    runs: list[str] = []

    def counted(name: str) -> Method:
        def method(task: Task) -> Fitted:
            runs.append(name)
            return BASELINES[name](task)

        return method

    def run(seconds: float | None) -> list[str]:
        runs.clear()
        baselines = {name: counted(name) for name in ("popularity", "truth")}  # popularity ends early, always
        report = compare(replace(asked(log, *baselines, seconds=seconds), baselines=baselines), file)
        assert sorted(row["method"] for row in report["rows"]) == sorted(fit["method"] for fit in report["fits"]) == sorted(baselines)
        assert report["minutes"] == (None if seconds is None else seconds / 60)
        return list(runs)

    assert run(60) == ["popularity", "truth"]
    assert run(60) == run(30) == []
    assert run(90) == ["popularity"]
    assert run(None) == ["popularity"]
    assert run(None) == run(90) == []


def test_a_tree_that_cannot_be_trained_is_tried_once_and_its_fusions_are_not_judged(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[None] = []

    def broken(*_: Any, **__: Any) -> None:
        tries.append(None)
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(recipe, "train_and_export", broken)
    report = compare(asked(log, "truth", "recipe", "fusion:recipe:truth"), None)
    assert (len(tries), [row["method"] for row in report["rows"]]) == (1, ["truth"])
    reasons = {entry["method"]: entry["reason"] for entry in report["not_judged"]}
    assert reasons["fusion:recipe:truth"] == "recipe is not judged: the loss is nan"


# -- the plan, and what is not judged ---------------------------------------------------------------------------------------


def test_the_recipe_plans_as_many_steps_as_training_makes_in_its_time(log: Path, tmp_path: Path) -> None:
    config = settings(log, steps=1000)
    prepared = prepare(config, None, tmp_path)
    costs = recipe.Costs(start_s=2.0, step_s=0.1, search_s=0.001)
    short = recipe.shortened(config, prepared, costs, 50.0).optimiser
    rounds_s = short.steps // short.validate_every * 0.001 * len(prepared.split.validation)
    assert short.steps * 0.1 * recipe.SLOWER + rounds_s == pytest.approx(50, abs=0.3)
    assert short.learning_rate_at(short.steps) == 0, "the schedule ends with the last step"
    assert recipe.shortened(config, prepared, costs, 1e6) is config
    assert recipe.shortened(config, prepared, costs, 0).optimiser.steps == 1


@pytest.mark.parametrize("kind", ["otm-robust", "otm-sequence", "content"])
def test_a_recipe_that_begins_with_what_was_measured_trains_the_same_model(log: Path, tmp_path: Path, kind: str) -> None:
    raw = settings(log, steps=4).model_dump(mode="json")
    if kind == "otm-sequence":
        raw = {name: raw[name] for name in ("name", "data", "search")} | {"kind": kind, "optimiser": {"steps": 4, "places": 200}}
    if kind == "content":
        items = "".join(f"i{item},{'even' if item % 2 == 0 else 'odd'}\n" for item in range(CLUSTERS * SIZE))
        (tmp_path / "items.csv").write_text("id,parity\n" + items)
        raw["data"]["items"], raw["content"] = str(tmp_path / "items.csv"), {"columns": ["parity"]}
    config = deep_config(raw)
    prepared = prepare(config, None, tmp_path)
    costs = recipe.costs_of(config, prepared, tmp_path, CPU, time.monotonic)
    assert costs.shared_start is not None

    def rows(name: str, costs: recipe.Costs | None) -> Any:
        (tmp_path / name).mkdir()
        return recipe.fit_recipe(config, prepared, tmp_path / name, CPU, None, costs).bundle.node_rows_ND

    assert np.array_equal(rows("begun", costs), rows("anew", None))


def test_a_memory_is_made_of_the_neighbours_that_are_judged(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(log, steps=2)
    prepared = prepare(config, None, tmp_path)

    def slow(task: Task) -> Fitted:
        return replace(neighbours(task), seconds=1e6)

    contests = [
        contest.Contest(config, prepared, tmp_path / name, [8], {"neighbours": slow}, estimates={"neighbours": lambda task: Needs(1, 2)})
        for name in ("first", "alone")
    ]
    for own in contests:
        own.folder.mkdir()
    contests[0].entry("neighbours", config.search.exclude_seen)
    with monkeypatch.context() as patch:
        patch.setattr("training.deep.memory.neighbours", interrupted)
        told = contests[0].entry("recipe", True)
    alone = contests[1].entry("recipe", True)
    assert told.fitted.options["memory_entries"] > 0
    assert told.fitted.options == alone.fitted.options
    assert told.fitted.seconds > 1e6 > alone.fitted.seconds


def test_what_the_recipe_needs_is_enough_for_what_it_plans(log: Path, tmp_path: Path) -> None:
    config = settings(log, steps=1000)
    prepared = prepare(config, None, tmp_path)
    costs = recipe.Costs(start_s=2.0, step_s=0.1, search_s=0.001, memory_s=3.0)
    needs = recipe.needs_of(config, prepared, costs)
    for seconds, share in ((needs.least_s, 0.5), (needs.full_s, 1.0)):
        training_s = seconds - recipe.export_seconds(config, prepared, costs)
        training_s -= recipe.memory_seconds(config, prepared, costs, recipe.MEMORY_SHARE * seconds)
        assert share * 1000 <= recipe.shortened(config, prepared, costs, training_s).optimiser.steps <= 1.1 * share * 1000


@pytest.fixture
def passing() -> Clock:
    return Clock()


def lasting(clock: Clock, seconds: float, share: float = 1.0) -> Method:
    """A method that takes so long, or what it is given, and says how much it saw."""

    def method(task: Task) -> Fitted:
        clock.now_s += seconds if task.seconds is None else min(seconds, task.seconds)
        return replace(the_cluster(task), ended=None if share == 1 else f"{share * 100:.0f} of 100 steps", share=share)

    return method


def stated(needs: Needs) -> Estimate:
    return lambda task: needs


def timed(
    log: Path, clock: Clock, methods: dict[str, tuple[Method, Needs]], seconds: float, said: list[str] | None = None
) -> CompareOptions:
    return replace(
        asked(log, *methods, seconds=seconds),
        baselines={name: method for name, (method, _) in methods.items()},
        estimates={name: stated(needs) for name, (_, needs) in methods.items()},
        clock=clock.monotonic,
        show_plan=(said if said is not None else []).append,
    )


def test_a_method_that_saw_less_than_half_of_its_steps_has_no_figure(log: Path, passing: Clock) -> None:
    quick = Needs(1, 2)
    methods = {name: (lasting(passing, 1.0, share), quick) for name, share in (("whole", 1.0), ("half", 0.5), ("less", 0.49))}
    report = compare(timed(log, passing, methods, 60), None)
    assert [row["method"] for row in report["rows"]] == [fit["method"] for fit in report["fits"]] == ["whole", "half"]
    assert report["not_judged"] == [{"method": "less", "reason": "49 of 100 steps"}]
    assert not any("less" in (row["first"], row["second"]) for row in report["differences"])


def test_a_method_without_enough_time_is_not_begun(log: Path, passing: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    methods = {"short": (lasting(passing, 5.0), Needs(5, 10)), "long": (interrupted, Needs(600, 1200, steps=2000))}
    report = compare(timed(log, passing, methods, 120, said), None)
    assert not report["interrupted"], "it would have been"
    assert [row["method"] for row in report["rows"]] == ["short"]
    alone_s = USED * 120 - contest.TIMING_S
    reason = f"{int(alone_s / 600 * 1000)} of 2,000 steps in {alone_s:.0f} s; half of them take 10.0 min"
    assert [left["method"] for left in report["not_judged"]] == ["long"]
    assert report["not_judged"][0]["reason"].startswith(reason.split(" in ")[0])
    assert "--minutes 11 would do" in said[0]
    plan = {row["method"]: row for row in report["plan"]}
    assert (plan["short"]["seconds"], plan["short"]["share"]) == (10, 1)
    assert (plan["long"]["seconds"], plan["long"]["share"], plan["long"]["steps"]) == (0, 0, 2000)
    assert report["verdict"][1] == "Whether one pays here is open (--minutes 11 would do)."


def test_no_minutes_would_do_for_a_method_that_fails_and_others_go_on(log: Path, passing: Clock) -> None:
    def failing(task: Task) -> Fitted:
        raise InvalidConfig("--own", "mine:Own", "a method that does not raise KeyError: 'a'")

    def failing_late(task: Task) -> Fitted:
        def rank(queries: Sequence[Any], m: int, exclude_seen: bool) -> Any:
            if m > task.metric.m:  # as only test queries ask
                raise InvalidConfig("--own", "mine:Own", "a method that does not raise KeyError: 'b'")
            return the_first(task).rank(queries, m, exclude_seen)

        return replace(the_first(task), rank=rank)

    methods = {
        name: (method, Needs(1, 2)) for name, method in (("late", failing_late), ("fails", failing), ("whole", lasting(passing, 1.0)))
    }
    report = compare(timed(log, passing, methods, 60), None)
    assert [row["method"] for row in report["rows"]] == ["whole"]
    reasons = {entry["method"]: entry["reason"].rpartition(" ")[2] for entry in report["not_judged"]}
    assert reasons == {"late": "'b'", "fails": "'a'"}
    assert report["verdict"][1] == "Whether one pays here is open."


def test_a_method_that_does_not_fit_in_memory_is_not_judged_and_says_what_it_needs(log: Path, passing: Clock) -> None:
    def too_large(task: Task) -> Needs:
        raise InvalidData("items", "90000 items", "at most 40000: two matrices would take 60.3 GiB")

    asked_ = timed(log, passing, {"short": (lasting(passing, 5.0), Needs(5, 10)), "large": (interrupted, Needs(1, 1))}, 120)
    report = compare(replace(asked_, estimates=dict(asked_.estimates) | {"large": too_large}), None)
    assert report["not_judged"] == [
        {"method": "large", "reason": "items: got '90000 items', expected at most 40000: two matrices would take 60.3 GiB"}
    ]
    assert report["minutes_needed"] is None, "no time is enough"


def test_what_nobody_needs_is_for_those_that_take_longer(log: Path, passing: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, float] = {}

    def attempted(of: contest.Contest, name: str, exclude_seen: bool, seconds: float) -> str:
        given[name] = seconds
        return "not in this test"

    monkeypatch.setattr("training.compare.compare.attempted", attempted)
    monkeypatch.setattr(contest.Contest, "needs", lambda *args, **kwargs: Needs(10, 20, 100))
    compare(timed(log, passing, {"short": (interrupted, Needs(10, 20)), "recipe": (interrupted, Needs(10, 20))}, 600), None)
    assert 120 < given["short"] < 170, "a method that still improves is not cut short while time is left"
    assert 400 < given["recipe"] < 600, "its steps may take longer than when they were measured"


def test_a_comparison_of_methods_that_take_all_their_time_ends_in_time(log: Path, passing: Clock) -> None:
    methods = {f"method-{n}": (lasting(passing, 1e6), Needs(10.0 + n, 1e6)) for n in range(5)}
    begin = passing.now_s
    report = compare(timed(log, passing, methods, 600), None)
    assert len(report["rows"]) == 5
    assert 0.9 * 600 <= passing.now_s - begin <= 1.1 * 600
    assert report["seconds"] == pytest.approx(passing.now_s - begin)
