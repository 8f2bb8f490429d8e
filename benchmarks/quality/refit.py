"""The gain of `refit`, training on the validation items once all is chosen: next items, leave one out, on test users.

    python -m benchmarks.refit --data DIR --set sasrec-amazon-games --json F
    python -m benchmarks.refit --log FILE --config FILE --json F

The recipe is trained twice, on the same lists and with the same seed: without `refit`, and as `fit` trains it. The protocol is that of
`benchmarks.next_item`. Rows: {"refit", "hr10", "ndcg10", "hr10_se", "ndcg10_se", "train_seconds"}, and in `gain` the difference of each
figure, with its standard error, paired by user.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import real_logs
from benchmarks.quality import leaderboard
from benchmarks.quality.next_item import METRICS, protocol
from benchmarks.report_file import command_line, print_row, write_report
from training.compare.figures import standard_error
from training.compare.recipe import fit_recipe
from training.compare.report import queries_of
from training.deep.prepare import prepare


def benchmark(options: argparse.Namespace) -> None:
    real = real_logs.load(options)
    config = protocol(real.config, real.name).model_copy(update={"seed": options.seed})
    rows: list[dict[str, Any]] = []
    figures_by_refit = {}
    for refit in (False, True):
        with tempfile.TemporaryDirectory() as name:
            prepared = prepare(config, real.log, Path(name) / "log")
            fitted = fit_recipe(config, prepared, Path(name), torch.device("cpu"), refit=refit).at(config.search.beam_size)
            pairs = queries_of(prepared.split.test, True)
            rows_BM = fitted.rank([pair.query for pair in pairs], 10, True)
        figures_by_refit[refit] = {name: metric.of(rows_BM, pairs) for name, metric in METRICS.items()}
        row: dict[str, Any] = {"refit": refit}
        for name, values_B in figures_by_refit[refit].items():
            row |= {name: float(values_B.mean()), f"{name}_se": standard_error(values_B)}
        rows.append(row | {"train_seconds": round(fitted.seconds, 1), "queries": len(pairs)})
        print_row(rows[-1])
    gain: dict[str, float] = {}
    for name in METRICS:
        difference_B = figures_by_refit[True][name] - figures_by_refit[False][name]
        gain |= {name: float(difference_B.mean()), f"{name}_se": standard_error(difference_B)}
    print_row(gain)
    header = {"set": real.name, "seed": options.seed, "threads": options.threads}
    write_report(options.json, header | {"rows": rows, "gain": gain})


def main() -> None:
    parser = command_line(__doc__)
    real_logs.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=1)
    leaderboard.main_of(benchmark, parser)


if __name__ == "__main__":
    main()
