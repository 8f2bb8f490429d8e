"""Next item, leave one out, as in SASRec and BERT4Rec: the rank of a user's last item among all that are not in the history.

    python -m benchmarks.next_item --data DIR --set ml-1m-sasrec --methods recipe,neighbours,sasrec --seeds 3 --json F
    python -m benchmarks.next_item --log FILE --config FILE --methods recipe,neighbours --json F

A user's last item is the test item, the one before it the validation item; earlier items are training data. A test query's history is all
but the last item, so it has the validation item. All items but those of the history are ranked; users whose last item is in the history are
left out. `hr10` and `ndcg10` are means over the other users. Everything is chosen by validation users' recall@10, which is HR@10. Seeds
differ in training, not in the queries.

Rows: {"method", "seed", "beam_size", "hr10", "ndcg10", "hr10_se", "ndcg10_se", "train_seconds", "bytes"}, with a beam for the recipe alone.
"""

from __future__ import annotations

import argparse

from benchmarks import real_logs
from benchmarks.quality import leaderboard
from benchmarks.report_file import command_line
from training.retrieval.task import Metric
from training.specification.deep import DeepConfig
from training.specification.models import deep_config

METRICS = {"hr10": Metric("recall", 10), "ndcg10": Metric("ndcg", 10)}


def protocol(config: DeepConfig, name: str) -> DeepConfig:
    """A set's configuration with leave-one-out instead of its own split."""
    raw = config.model_dump(mode="json") | {"name": name}
    raw["data"] |= {"split": {"kind": "last"}}
    raw["search"] |= {"m": 10, "exclude_seen": True}
    return deep_config(raw)


def benchmark(options: argparse.Namespace) -> None:
    real = real_logs.load(options)
    leaderboard.run(options, real.name, protocol(real.config, real.name), real.log, leaderboard.Protocol(METRICS))


def main() -> None:
    parser = command_line(__doc__)
    real_logs.add_arguments(parser)
    leaderboard.add_arguments(parser)
    leaderboard.main_of(benchmark, parser)


if __name__ == "__main__":
    main()
