"""A published split: a file to train on and a file of relevant items, a user a line; recall@20 and nDCG@20 over all other items.

    python -m benchmarks.fixed_split --data DIR --set amazon-book-kgat --methods recipe,neighbours,ease --json F
    python -m benchmarks.fixed_split --train FILE --test FILE --methods recipe,neighbours,ease --json F

A line is a user's id and then items, separated by blanks; the files may be gzipped. A test query is a user's line of the first file; the
items of the user's line in the second are relevant, and items of the query do not come back. Items have no order. Everything is chosen by
recall@20 of validation users. Of their lists in the first file, the same share is hidden as by the second file.

Rows: {"method", "seed", "beam_size", "recall20", "ndcg20", "recall20_se", "ndcg20_se", "train_seconds", "bytes"}, with a beam for the
recipe alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import real_logs
from benchmarks.quality import leaderboard
from benchmarks.report_file import command_line
from espalier.errors import InvalidConfig
from training.retrieval.task import Metric
from training.specification.deep import DeepConfig
from training.specification.models import deep_config, read_deep_config

METRICS = {"recall20": Metric("recall", 20), "ndcg20": Metric("ndcg", 20)}
SETS = {"amazon-book-kgat": ("amazon-book-kgat.toml", "train.txt.gz", "test.txt.gz")}
"""Name → its file in training/configs, and the two files inside DIR/NAME."""


def protocol(config: DeepConfig, name: str, train: Path, test: Path) -> DeepConfig:
    """The configuration with two files of unordered lists instead of its own log and split."""
    raw = config.model_dump(mode="json") | {"name": name}
    lists = {"format": "lists", "separator": " ", "order": "none", "min_user_events": 1}
    raw["data"] |= {"log": str(train), "format": lists, "split": {"kind": "file", "test": str(test)}}
    raw["search"] |= {"m": 20, "exclude_seen": True}
    return deep_config(raw)


def files_of(options: argparse.Namespace) -> tuple[str, Path, Path, Path]:
    """Name, configuration, training file and test file. Raises InvalidConfig if one is not named or missing."""
    if (options.set is None) == (options.train is None) or options.set not in (None, *SETS):
        raise InvalidConfig("--set", options.set, f"one of {', '.join(SETS)} with --data DIR, or --train FILE and --test FILE instead")
    recipe, *names = SETS[options.set or "amazon-book-kgat"]
    if options.set is None:
        if options.test is None:
            raise InvalidConfig("--test", None, "a file beside --train")
        name, train, test = options.train.name.split(".")[0], options.train, options.test
    else:
        if options.data is None:
            raise InvalidConfig("--data", None, f"a folder that holds {options.set}")
        name, (train, test) = options.set, [options.data / options.set / file for file in names]
    for option, file in (("--train", train), ("--test", test)):
        if not file.is_file():
            raise InvalidConfig(option, str(file), "a file that exists")
    return name, options.config or real_logs.CONFIGS / recipe, train, test


def benchmark(options: argparse.Namespace) -> None:
    name, config, train, test = files_of(options)
    leaderboard.run(options, name, protocol(read_deep_config(config), name, train, test), train, leaderboard.Protocol(METRICS))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder in which DIR/NAME holds a set")
    parser.add_argument("--set", metavar="NAME", help=", ".join(SETS))
    parser.add_argument("--train", type=Path, metavar="FILE", help="instead of a set: the training file")
    parser.add_argument("--test", type=Path, metavar="FILE", help="the file of relevant items")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="another configuration of the recipe; log, format and split are the above"
    )
    leaderboard.add_arguments(parser)
    leaderboard.main_of(benchmark, parser)


if __name__ == "__main__":
    main()
