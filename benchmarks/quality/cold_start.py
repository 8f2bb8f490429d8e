"""Cold starts: items that nothing was learned from, and whether they are found.

    python -m benchmarks.cold_start --set debian-depends --json F
    python -m benchmarks.cold_start --set ml-1m --data DIR --json F
    python -m benchmarks.cold_start --texts DIR --json F

The first two are of histories. The events of a share of the items are left out of the training users' lists (`data.split.unseen_items`);
the items stay in the catalogue. A test query is a test user for whom such an item is relevant, and these items alone are relevant. Each
method ranks all items, and then the unseen items alone (a filter). All methods learn from and choose by the same lists. `content` is
training.baselines.content; `recipe` is the set's configuration without content, `recipe+content` the same with it.

    rows         {"method", "seed", "beam_size", "among", "m", "recall", "recall_se", "queries"}
    fits         what each method chose, and its recall@m of validation users and of all test users
    differences  of recipe+content and the others, paired by query, with 95 % intervals

The third is of texts (benchmarks/papers/product_search/cold_texts.py), with rows of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import real_logs
from benchmarks.papers.product_search import cold_texts
from benchmarks.quality.leaderboard import main_of, without_folders
from benchmarks.quality.live_quality import among
from benchmarks.report_file import write_report
from espalier.errors import InvalidConfig
from espalier.masks.eligibility import node_mask
from training.baselines.content import content
from training.compare.figures import Figures, answered, figures_of, paired
from training.compare.recipe import Recipe, fit_recipe
from training.data.splits import EvaluationPair, without_seen
from training.deep.prepare import Prepared, prepare
from training.retrieval.task import Metric, Rank, Task
from training.specification.deep import DeepConfig
from training.specification.models import deep_config

Row = dict[str, Any]
Int64 = NDArray[np.int64]
Answer = tuple[str, int | None, str]
"""Method, beam, and what is ranked."""
METHODS = ("content", "recipe", "recipe+content")
METRICS = tuple(Metric("recall", m) for m in (10, 50, 200))
BEAMS = (200, 800)
BATCH = 64


def protocol(config: DeepConfig, share: float, columns: str | Sequence[str], steps: int | None, items: Path | None) -> DeepConfig:
    """A set's configuration with a share of unseen items, content and at most so many steps."""
    raw = config.model_dump(mode="json")
    raw["data"]["split"]["unseen_items"] = share
    raw["data"]["items"] = raw["data"]["items"] if items is None else str(items)
    raw["content"]["columns"] = columns
    raw["optimiser"]["steps"] = min(raw["optimiser"]["steps"], steps or raw["optimiser"]["steps"])
    return deep_config(raw)


def of_unseen(prepared: Prepared, exclude_seen: bool) -> list[EvaluationPair]:
    """The test queries with a relevant item that no training user touched, and these alone as relevant."""
    seen_I = prepared.seen_I
    pairs = (EvaluationPair(pair.user, pair.history, pair.relevant[~seen_I[pair.relevant]]) for pair in prepared.split.test)
    return [pair for pair in (without_seen(pairs) if exclude_seen else pairs) if len(pair.relevant)]


def filtered(rank: Rank, eligible_I: NDArray[np.bool_]) -> Rank:
    """A method's ranking of all items, without those that are not eligible."""

    def ranked(histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        parts = [histories[start : start + BATCH] for start in range(0, len(histories), BATCH)]
        return np.concatenate([among(rank(part, len(eligible_I), exclude_seen), ~eligible_I, m) for part in parts])

    return ranked


def ranks_of(method: str, prepared: Prepared, config: DeepConfig, folder: Path) -> tuple[dict[tuple[int | None, str], Rank], Row]:
    """How a method answers, by beam and by what is ranked, and how it was fitted."""
    begin, unseen_I = time.perf_counter(), ~prepared.seen_I
    if method == "content":
        metric, exclude_seen = Metric("recall", config.search.m), config.search.exclude_seen
        fitted = content(Task(prepared.split, prepared.items, metric, exclude_seen, config.windowed_instances, config.seed))
        about = {"options": fitted.options, "validation": max(trial.figure for trial in fitted.trials), "seconds": fitted.seconds}
        return {(None, "all"): fitted.rank, (None, "unseen"): filtered(fitted.rank, unseen_I)}, about
    recipe: Recipe = fit_recipe(config, prepared, folder, torch.device("cpu"))
    mask = node_mask(recipe.bundle.tree, unseen_I)
    ranks: dict[tuple[int | None, str], Rank] = {
        (beam, name): recipe.at(beam, of).rank for beam in BEAMS for name, of in (("all", None), ("unseen", mask))
    }
    figure = max(trial.figure for trial in recipe.trials)
    return ranks, {"options": recipe.options, "validation": figure, "seconds": time.perf_counter() - begin}


def run_seed(config: DeepConfig, log: Path, methods: Sequence[str], folder: Path) -> dict[str, list[Row]]:
    """Rows, fits and differences of one seed."""
    rows: list[Row] = []
    fits: list[Row] = []
    figures: dict[Answer, Figures] = {}
    exclude_seen = config.search.exclude_seen
    for method in methods:
        without = config.content.model_copy(update={"columns": ()})
        own = config if method == "recipe+content" else config.model_copy(update={"content": without})
        prepared = prepare(own, log, folder / method / "log")
        pairs, test = of_unseen(prepared, exclude_seen), list(prepared.split.test)
        ranks, fit = ranks_of(method, prepared, own, folder / method)
        for (beam, name), rank in ranks.items():
            found = figures[method, beam, name] = figures_of(answered(rank, pairs, METRICS[-1].m, exclude_seen), pairs, METRICS)
            for metric in METRICS:
                about = {"method": method, "seed": config.seed, "beam_size": beam, "among": name, "m": metric.m}
                mean, error = found.mean(metric), found.standard_error(metric)
                rows.append(about | {"recall": mean, "recall_se": error, "queries": len(pairs)})
                print(f"{method:15s} {beam or '-':>4} {name:6s} {metric} {mean:.4f} ± {error:.4f}", flush=True)
        test = without_seen(test) if exclude_seen else test
        answers = answered(next(iter(ranks.values())), test, config.search.m, exclude_seen)
        recall = float(Metric("recall", config.search.m).of(answers, test).mean())
        fit |= {"method": method, "seed": config.seed, "test": recall, "test_queries": len(test)}
        fits.append(fit | {"unseen_items": int((~prepared.seen_I).sum()), "items": len(prepared.seen_I)})
        print(fits[-1], flush=True)
    return {"rows": rows, "fits": fits, "differences": list(differences(figures))}


def differences(figures: Mapping[Answer, Figures]) -> Iterator[Row]:
    """Of recipe+content less the others, paired by query."""
    for (method, beam, name), first in figures.items():
        for (other, other_beam, other_name), second in figures.items():
            if method == "recipe+content" != other and name == other_name and other_beam in (beam, None):
                for metric in METRICS:
                    about = {"beam_size": beam, "among": name, "m": metric.m, "second": other}
                    yield about | asdict(paired([first], [second], metric))


def of_histories(options: argparse.Namespace, folder: Path) -> Row:
    """The report of a log."""
    real, methods = real_logs.load(options), options.methods.split(",")
    if not set(methods) <= set(METHODS):
        raise InvalidConfig("--methods", options.methods, f"some of {', '.join(METHODS)}")
    torch.set_num_threads(options.threads)
    items = real_logs.movies(real.log.parent, folder / "movies.parquet") if real.name == "ml-1m" else None
    config = protocol(real.config, options.share, "auto", options.steps, items)
    report: Row = {
        "set": real.name,
        "threads": options.threads,
        "config": without_folders(config.model_copy(update={"data": config.data.model_copy(update={"items": None})})),
    }
    for seed in range(1, options.seeds + 1):
        for part, rows in run_seed(config.model_copy(update={"seed": seed}), real.log, methods, folder / str(seed)).items():
            report[part] = [*report.get(part, []), *rows]
    for row in report["differences"]:
        print("recipe+content − {second}, {among}, beam {beam_size}, recall@{m}: {mean:+.4f} ({low:+.4f} to {high:+.4f})".format(**row))
    return report


def benchmark(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = of_histories(options, folder) if options.texts is None else cold_texts.report(options.texts, folder)
    write_report(options.json, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real_logs.add_arguments(parser)
    parser.add_argument("--texts", type=Path, metavar="DIR", help=f"instead of a log: the folder that holds {cold_texts.FILE}")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--share", type=float, default=0.1, help="of the items that nothing is learned from")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 1 … N")
    parser.add_argument("--steps", type=int, help="at most so many training steps, for a quick look")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the report here")
    main_of(benchmark, parser)


if __name__ == "__main__":
    main()
