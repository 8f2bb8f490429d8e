"""Tables 3–4 of OTM's protocol on real logs: every method on the same users, tree and metrics; recall over the serving beam.

    python -m benchmarks.otm_real --data DIR --set sasrec-amazon-games --methods otm-robust,tdm,item-cf --seeds 3 --json F [--plot F.png]
    python -m benchmarks.otm_real --log FILE --config FILE --methods recipe,neighbours,ease,sasrec,fusion --seeds 3 --json F

DIR/NAME holds a set as benchmarks/real_logs.py names it. A test user's first half is the query, the second half is relevant. A seed is one
of the split, the tree, the first weights and every draw. Nothing is chosen by test users: every method keeps the weights with the best
recall of validation users and trains until that has stopped rising, or for `--steps`; a row's `best_step` and `steps` say which. With
`--minutes`, every baseline and the recipe end within that.

`recipe` is what `python -m training fit` does with the set's configuration, whatever its kind and the defaults now are; its rows are those
of the exported bundle, searched by the engine that serves it. Baselines are those of training.baselines.methods, chosen on the same
validation users by the same recall@`search.m`; the quick ones are chosen anew for rows with seen items left out. `fusion` is the recipe
with `neighbours`, `fusion:A:B` any two. A method that cannot be fitted, for its memory or a package, is left out (`left_out` says why).

`otm-robust` is the robust objective with its defaults on the set's instances. The other tree methods have the papers' scorer (24 numbers
a row, 128–64–24) over the same tree, and, unlike in the papers, the same first rows, averaged weights and the learning rate that served TDM
best. `jtm` and the three `otm` methods go on from the trained `tdm`: the one on a re-learned tree, the others as a warm start, which OTM
wants on real logs. `tdm-same-scorer` is TDM with the scorer, rows and instances of `otm-robust`, at γ = 0: what the objective alone is
worth.
`product-dnn-sampled` and `product-dnn-random-rows` have a sampled softmax; the latter and `tdm-random-rows` start as published.

A tree method may be changed, for an ablation: `otm-robust+objective.gamma=0+scorer.kind="mlp"`.

A tree method has rows at γ = 0 (path products: 1) and at the γ that it trained with, by which its weights were chosen; TDM, chosen at 0,
also at γ = 0.5. Rows are written after every method, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import real_logs
from benchmarks.papers.otm.otm_real_report import MS, Row, markdown, measured, plot_curves, print_rows, recall_change
from benchmarks.papers.otm.otm_real_trees import TREES, Run, is_tree, method_config, tree_rows
from benchmarks.quality import leaderboard
from benchmarks.report_file import command_line
from espalier.errors import InvalidConfig
from training.baselines.methods import METHODS as BASELINES
from training.baselines.product_dnn import ProductDnnConfig, fit_product_dnn
from training.compare.contest import RECIPE, Contest, Entry, attempted, checked_names
from training.compare.figures import Figures, answered, figures_of
from training.compare.report import Key, differences, fit_of, save
from training.data.splits import without_seen
from training.deep.fit import use_bfloat16
from training.deep.prepare import prepare
from training.retrieval.task import Fitted, Method, Metric, Task
from training.specification.deep import DeepConfig

PRODUCT_DNN: dict[str, dict[str, Any]] = {
    "product-dnn-sampled": {"loss": "sampled"},
    "product-dnn-random-rows": {"loss": "sampled", "init": "random"},
}
"""Variants of `product-dnn`, for the papers' tables."""
METHODS = (RECIPE, *BASELINES, *PRODUCT_DNN, *TREES)
METRICS = [Metric("recall", m) for m in MS]
ALL_LEAVES = 1 << 62


def product_dnn(config: DeepConfig, variant: Mapping[str, Any]) -> Method:
    """A variant as a method, with the steps and the patience of the set's configuration."""

    def method(task: Task) -> Fitted:
        begin = time.monotonic()
        settings = ProductDnnConfig(
            instances=task.instances.model_copy(update={"targets": 1}),
            **variant,
            max_steps=config.optimiser.steps,
            round_steps=min(config.optimiser.validate_every, config.optimiser.steps),
            patience=config.optimiser.patience,
            metric=task.metric,
            exclude_seen=task.exclude_seen,
            bfloat16=use_bfloat16(config, torch.device("cpu")),
        )
        model = fit_product_dnn(task.split, settings, seed=task.seed)
        return Fitted(model.rank, dict(variant), model.bytes, time.monotonic() - begin)

    return method


@dataclass
class MethodResult:
    """A method's rows, how it was fitted, and `exclude_seen` → the figures of each query at the serving beam that validation chose."""

    rows: list[Row] = field(default_factory=list)
    fits: list[Row] = field(default_factory=list)
    figures: dict[bool, Figures] = field(default_factory=dict)


def fit_method(contest: Contest, method: str, seconds: float | None) -> MethodResult | str:
    """Fit the recipe, a baseline or a fusion, raw and with seen items left out; or the reason why the method is left out."""
    result = MethodResult()
    for exclude_seen in (False, True):
        entry = attempted(contest, method, exclude_seen, seconds)
        if isinstance(entry, str):
            return entry
        result.rows += _rows_of(entry, contest, exclude_seen, result.figures)
        result.fits.append(fit_of(entry, contest.config.seed) | {"exclude_seen": exclude_seen})
    return result


def _rows_of(entry: Entry, contest: Contest, exclude_seen: bool, figures: dict[bool, Figures]) -> list[Row]:
    test = list(contest.prepared.split.test)
    pairs = without_seen(test) if exclude_seen else test
    rows: list[Row] = []
    best_B = None
    for beam, fitted in entry.by_beam.items():
        columns = {"gamma": fitted.options.get("gamma") if entry.name == RECIPE else None, "beam_size": beam, "exclude_seen": exclude_seen}
        columns |= {"train_seconds": round(fitted.seconds, 1), "bytes": int(fitted.bytes), "ended": fitted.ended}
        columns |= {name: fitted.options[name] for name in ("best_step", "steps") if entry.name == RECIPE}
        found_BM = answered(fitted.rank, pairs, max(MS), exclude_seen)
        beam_rows, recall_B = measured(found_BM, pairs, columns)
        if beam == entry.beam_size:
            figures[exclude_seen] = figures_of(found_BM, pairs, METRICS)
        if best_B is not None and not exclude_seen:
            beam_rows[-1] |= recall_change(recall_B - best_B)
        if best_B is None or np.mean(recall_B) > np.mean(best_B):
            best_B = recall_B
        rows += beam_rows
    return rows


def all_differences(figures: Mapping[Key, Figures]) -> list[Row]:
    """Paired differences of every two methods, raw and without seen items: {"first", "second", "metric", "mean", "low", "high", …}."""
    rows: list[Row] = []
    for seen_items in ("raw", "seen excluded"):
        chosen = [key for key in figures if key[0].endswith(f", {seen_items}")]
        rows += differences([{"method": key[0], "seed": key[1], "beam_size": None, "chosen": True} for key in chosen], figures, METRICS)
    return rows


def _beams(text: str) -> list[int]:
    try:
        return [ALL_LEAVES if beam == "all" else int(beam) for beam in text.split(",")]
    except ValueError as error:
        raise InvalidConfig("--beams", text, "whole numbers and `all`, comma-separated") from error


def command() -> argparse.ArgumentParser:
    parser = command_line(__doc__)
    real_logs.add_arguments(parser)
    parser.add_argument("--methods", default="otm-robust,tdm,item-cf", help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 1 … N")
    parser.add_argument("--beams", default="50,200,800", help="serving beams, comma-separated, ascending; `all` for all leaves")
    parser.add_argument("--steps", type=int, help="at most so many steps, for a quick look")
    parser.add_argument("--minutes", type=float, help="at most so many for choosing and training each method but the papers' trees")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the tree methods' bundles to DIR/SET-METHOD/SEED")
    parser.add_argument("--plot", type=Path, help="recall over the serving beam (PNG or SVG)")
    parser.add_argument(
        "--markdown", type=Path, help="a table, means over seeds; `change` is that of recall@200 against the best smaller beam"
    )
    return parser


def checked_methods(text: str, config: DeepConfig) -> list[str]:
    """The methods of `--methods`. Raises InvalidConfig on an unknown one, or on a change that gives no valid configuration."""
    methods = re.split(r",(?![^\[]*\])", text)  # commas inside [ ] belong to a value
    for method in methods:
        if not is_tree(method):
            checked_names(method, METHODS)
        elif method_config(config, method).rounds > 1:
            raise InvalidConfig("--methods", method, "tree.rounds of 1")
    return methods


def seed_rows(
    config: DeepConfig, log: Path, methods: Sequence[str], beams: Sequence[int], minutes: float | None, bundles: Path | None
) -> Iterator[tuple[str, MethodResult | str]]:
    """Each method with its result for the configuration's seed, or the reason why it is left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, prepare(config, log, Path(folder)), Path(folder))
        baselines = BASELINES | {name: product_dnn(config, variant) for name, variant in PRODUCT_DNN.items()}
        contest = Contest(config, run.prepared, run.folder, beams, baselines)
        for method in methods:
            if is_tree(method):
                result: MethodResult | str = MethodResult(tree_rows(run, method, beams, bundles))
            else:
                result = fit_method(contest, method, None if minutes is None else 60 * minutes)
            if isinstance(result, MethodResult):
                result.rows = [{"method": method, "seed": config.seed} | row for row in result.rows]
            yield method, result


def benchmark(args: argparse.Namespace) -> None:
    beams, real = _beams(args.beams), real_logs.load(args)
    methods = checked_methods(args.methods, real.config)
    for file in (args.plot, args.markdown):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    conditions = {"steps": args.steps, "beams": args.beams, "config": real.config.model_dump(mode="json")}
    report, figures = leaderboard.begun(args, set=real.name, **conditions)
    for seed, missing in leaderboard.missing_methods(report, methods, args.seeds):
        config = real.config.model_copy(update={"seed": seed, "name": real.name})
        if args.steps:
            config = config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"steps": args.steps})})
        for method, result in seed_rows(config, real.log, missing, beams, args.minutes, args.export):
            if isinstance(result, str):
                report["left_out"].append({"method": method, "seed": seed, "reason": result})
            else:
                print_rows(result.rows)
                report["rows"] += result.rows
                report["fits"] += result.fits
                figures |= {
                    (f"{method}, {'seen excluded' if seen else 'raw'}", seed, None): values for seen, values in result.figures.items()
                }
                report["differences"] = all_differences(figures)
            save(report, figures, args.json)
    if args.plot:
        plot_curves(report["rows"], real.name, args.plot)
    if args.markdown:
        args.markdown.write_text(markdown(report["rows"]))


def main() -> None:
    leaderboard.main_of(benchmark, command())


if __name__ == "__main__":
    main()
