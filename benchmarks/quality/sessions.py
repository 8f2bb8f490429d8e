"""The next item of sessions, as papers on session graphs measure it: HR@20 and MRR@20 after every prefix of a test session.

    python -m benchmarks.sessions --data DIR/diginetica --methods repeats,neighbours,recipe --json F

The folder has `all_train_seq.txt` and `test.txt`, pickles of the repository CCIIPLab/GCE-GNN: sessions of item numbers, and prefixes with
the item that follows each. Items may come again. Validation sessions are a random tenth of the training sessions that are long enough;
options are chosen by their second halves, and nothing by test sessions. `repeats` answers with the items of the session alone, the last one
first.

Rows: {"method", "seed", "beam_size", "hr20", "mrr20", "hr20_se", "mrr20_se", "train_seconds", "bytes"}, with a beam for the recipe alone.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality import leaderboard
from benchmarks.report_file import command_line
from espalier.arrays import Int64
from espalier.errors import InvalidConfig, InvalidData
from espalier.search import NO_ITEM
from training.data.splits import EvaluationPair
from training.deep.prepare import Prepared
from training.retrieval.task import Fitted, Metric, Task
from training.specification.models import deep_config

METRICS = {"hr20": Metric("recall", 20), "mrr20": Metric("mrr", 20)}
Sessions = list[list[int]]
TRAIN, TEST = "all_train_seq.txt", "test.txt"


class _Plain(pickle.Unpickler):
    """Reads lists and numbers only: a pickle could name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        raise InvalidData("--data", f"a pickle with {module}.{name}", "lists of numbers")


def read(file: Path) -> Any:
    """What a pickle holds. Raises InvalidConfig if the file is missing, InvalidData if it cannot be read or names any function."""
    if not file.is_file():
        raise InvalidConfig("--data", str(file.parent), f"a folder with {TRAIN} and {TEST}")
    with file.open("rb") as content:
        try:
            return _Plain(content).load()
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
            raise InvalidData("--data", f"{file.name}: {error}", "a pickle of lists of numbers") from error


def write_lists(sessions: Sessions, file: Path) -> None:
    """The sessions as a log of lists."""
    file.write_text("".join(f"{number} {' '.join(map(str, items))}\n" for number, items in enumerate(sessions)))


def queries(prefixes: Sessions, targets: list[int], prepared: Prepared) -> list[EvaluationPair]:
    """A query for each prefix; a session's prefixes, which follow each other from the longest, are of one user.

    Items that are in no training session are left out of prefixes; as targets they are missed by all.
    """
    unknown = len(prepared.items)
    items = sorted({item for prefix in prefixes for item in prefix} | {*targets})
    row_of = dict(zip(items, prepared.items.rows_of([str(item) for item in items]).tolist(), strict=True))
    pairs: list[EvaluationPair] = []
    session, longer = 0, prefixes[0]
    for prefix, target in zip(prefixes, targets, strict=True):
        session, longer = session + (prefix != longer[: len(prefix)]), prefix
        rows = np.array([row_of[item] for item in prefix], np.int64)
        relevant = row_of[target] if row_of[target] >= 0 else unknown
        pairs.append(EvaluationPair(session, rows[rows >= 0], np.array([relevant], np.int64)))
    return pairs


def repeats(task: Task) -> Fitted:
    """The items of the history, the last one first."""

    def rank(histories: Sequence[Int64], /, m: int, exclude_seen: bool) -> Int64:
        rows_BM = np.full((len(histories), m), NO_ITEM, np.int64)
        for row_M, history in zip(rows_BM, histories, strict=True):
            newest = [] if exclude_seen else list(dict.fromkeys(item for item in reversed(history.tolist()) if item >= 0))[:m]
            row_M[: len(newest)] = newest
        return rows_BM

    return Fitted(rank, {}, 0, 0.0, [])


def published(folder: Path) -> tuple[Sessions, Sessions, list[int]]:
    """Training sessions, prefixes, and the item after each. Raises InvalidConfig or InvalidData if the files are not of this form."""
    sessions, test = read(folder / TRAIN), read(folder / TEST)
    if not _are_sessions(sessions):
        raise InvalidData("--data", TRAIN, "sessions of at least one item, which are whole numbers")
    if not (isinstance(test, (list, tuple)) and len(test) == 2 and _are_sessions(test[0]) and _are_sessions([test[1]])):
        raise InvalidData("--data", TEST, "two lists: prefixes of at least one item, and the item after each")
    prefixes, targets = test
    if len(prefixes) != len(targets):
        raise InvalidData("--data", f"{TEST}: {len(prefixes)} prefixes, {len(targets)} items after them", "as many of both")
    return sessions, prefixes, targets


def _are_sessions(lists: Any) -> bool:
    return isinstance(lists, list) and len(lists) > 0 and all(map(_is_session, lists))


def _is_session(items: Any) -> bool:
    return isinstance(items, list) and len(items) > 0 and all(type(item) is int for item in items)


def benchmark(options: argparse.Namespace) -> None:
    sessions, prefixes, targets = published(options.data)
    protocol = leaderboard.Protocol(METRICS, lambda prepared: queries(prefixes, targets, prepared), {"repeats": repeats})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "sessions.txt"
        write_lists(sessions, log)
        lists, split = {"format": "lists", "separator": " "}, {"kind": "users", "test_share": 0.0}
        data = {"log": str(log), "format": lists, "split": split}
        config = deep_config({"kind": "otm-sequence", "name": "sessions", "data": data, "search": {"m": 20, "exclude_seen": False}})
        leaderboard.run(options, options.data.resolve().name, config, log, protocol)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help=f"folder with {TRAIN} and {TEST}")
    leaderboard.add_arguments(parser)
    leaderboard.main_of(benchmark, parser)


if __name__ == "__main__":
    main()
