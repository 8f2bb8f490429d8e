"""The recall probe: replays held-out and golden queries against every version that serves, at a low rate, while it serves requests.

The metrics therefore show lower recall, or other scores than at export, before customers notice. They also show the quality of a loaded
version that is not the default. Each query's recall is compared with its own at export: recall over a few hundred queries is noisy. These
queries see no live items; live_replay.py has those that do. All go through the version's queue and wait for room; they do not count as
requests. Knows queries and their expected answers.

Legend: M results.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from espalier.arrays import Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.checks.golden import encode_table, golden_ranks
from espalier.checks.heldout import read_heldout
from espalier.masks.eligibility import bundle_alone
from espalier.metrics import precision_recall_f
from espalier.queries import QueryBatch
from espalier.scores import scores_of_ranks
from espalier.search import SearchParams, SearchResult

from ..batching.priority import Priority
from ..errors import DeadlinePassed, NotReady
from ..models.live_replay import LiveReplay
from ..models.loading import LoadedModel
from ..models.registry import Registry
from ..watch.metrics import Metrics

log = logging.getLogger(__name__)

WINDOW = 256
"""Most held-out queries that are replayed; recall is the mean over one round of them."""
MS = (10, 50, 200)
"""m of recall@m, for bundles without the recall that was measured at export."""
PATIENCE_S = 5.0
"""How long a probe query may wait in a queue."""
LOGGED_LOSS = 0.02
"""Smallest loss of recall that is logged."""
MIN_ANSWERS = 32
"""Answers before recall is reported: one query with lower recall is no reason for an alert."""

Key = tuple[str, int]
"""Name and version of a model."""


class Probe:
    """Replays `per_s` queries a second against each version that serves."""

    def __init__(self, registry: Registry, metrics: Metrics, per_s: float) -> None:
        self._registry, self._metrics, self._between_s = registry, metrics, 1 / per_s
        self._replays: WeakKeyDictionary[LoadedModel, tuple[Replay, LiveReplay] | None] = WeakKeyDictionary()  # None: nothing to replay
        self._keys_with_metrics: set[Key] = set()
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Run until cancelled. Versions take turns, so that no two of them are queried at once."""
        try:
            while True:
                keys = self.ready()
                self.forget(keys)
                for key in keys:
                    self.query(key)
                    await asyncio.sleep(self._between_s / len(keys))
                if not keys:
                    await asyncio.sleep(self._between_s)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def ready(self) -> list[Key]:
        """The versions that serve, without shards: a shard does not hold all items that the queries should return."""
        entries = self._registry.entries.values()
        return [(entry.name, version) for entry in entries for version, loaded in entry.ready.items() if loaded.shard is None]

    def query(self, key: Key) -> asyncio.Task[None]:
        """Send one query to a version, unless it has not answered the one before yet."""
        task = self._tasks.get(key)
        if task is None or task.done():
            task = self._tasks[key] = asyncio.create_task(self._replay(*key))
        return task

    async def _replay(self, name: str, version: int) -> None:
        loaded = self._registry.entries[name].ready.get(version)
        if loaded is None:
            return
        try:
            if loaded not in self._replays:
                self._replays[loaded] = None  # if the next line fails, it is not tried again
                replay = await asyncio.to_thread(Replay, loaded.bundle)
                if replay.query_order:
                    self._replays[loaded] = replay, LiveReplay(loaded.bundle, loaded.live, replay.heldout)
        except Exception:  # a bundle may serve well and hold no usable queries
            log.exception("%s version %d: its held-out queries cannot be replayed; its recall is not watched", name, version)
            return
        replays = self._replays[loaded]
        if replays is None:
            return
        replay, live = replays
        self._keys_with_metrics.add((name, version))
        try:
            due = live.next()
            queries, params = replay.next() if due is None else due
            answer = await loaded.batcher.search(queries, params, time.perf_counter() + PATIENCE_S, Priority.PATIENT)
            if answer.degraded:  # searched with a smaller beam than the expected recall was measured with
                self._metrics.count("espalier_probe_queries_total", name, version, "late")
                return
            if due is not None:
                live.take(answer.result)
            else:
                replay.take(answer.result)
                if replay.relevant_rows is not None:
                    live.after(queries, params, replay.relevant_rows, answer.result)
        except NotReady:  # the version is being dropped
            return
        except DeadlinePassed:
            self._metrics.count("espalier_probe_queries_total", name, version, "late")
            return
        except Exception as error:  # a broken model must not end the probe of the others
            self._metrics.count("espalier_probe_queries_total", name, version, "failed")
            log.warning("%s version %d: the probe's query failed: %s", name, version, error)
            return
        self._metrics.count("espalier_probe_queries_total", name, version, "answered")
        self._metrics.probed(name, version, replay.recall, replay.expected if replay.recall else {}, replay.drift)
        replay.log_loss(name, version)
        for figure, value in (("canary_recall", live.canary_recall), ("displacement", live.displacement)):
            if value is not None and not loaded.live.is_empty:  # None: there are too few answers yet
                self._metrics.show(f"espalier_live_{figure}", value, name, version)

    def forget(self, ready: Sequence[Key]) -> None:
        """Drop the metrics of versions that do not serve."""
        self._tasks = {key: task for key, task in self._tasks.items() if key in ready or not task.done()}
        dropped_keys = self._keys_with_metrics - set(ready)
        for name, version in dropped_keys:
            self._metrics.forget_version(name, version)
        self._keys_with_metrics -= dropped_keys - self._tasks.keys()  # a query in flight will count once more, and is forgotten then


class Replay:
    """The queries that the probe repeats against one version, and its measurements from the last round of answers.

    query_order  ("heldout" | "golden", row) of a round: golden queries are spread evenly among the held-out ones
    expected     m → mean recall@m at export of these held-out queries; empty for bundles without it
    heldout      how many held-out queries there are
    """

    def __init__(self, bundle: Bundle) -> None:
        search, ranking, golden = bundle.manifest.search, bundle.manifest.result_ranking, bundle.golden()
        held_out = read_heldout(bundle, WINDOW)
        self._heldout, self._relevant = held_out.queries, held_out.relevant
        self.heldout = len(self._heldout)
        at_export = {m: recall_B for m, recall_B in sorted(held_out.recall_by_m.items()) if m <= search.max_m}
        self.expected = {m: float(recall_B.mean()) for m, recall_B in at_export.items() if len(recall_B)}
        self._ms = list(at_export) or sorted({min(m, search.max_m) for m in MS})
        self._at_export_BM = np.stack(list(at_export.values()), 1) if at_export else np.zeros((len(self._heldout), len(self._ms)))
        trained = bundle_alone([alone.tree for alone in bundle.alone])
        self._heldout_params = SearchParams.uniform(1, search.beam_size, max(self._ms), mask=trained)
        self._golden = encode_table(bundle, golden)
        _, keys = golden_ranks(golden)
        self._golden_scores = [scores_of_ranks(ranking, np.asarray(keys_M, np.float32)) for keys_M in keys]
        # Golden row → the scores of its first answer by several shards. The stored scores are of an unsharded search.
        self._sharded_scores: dict[int, Float32] = {}
        beam_size_B, m_B = (np.asarray(golden.column(name), np.int64) for name in ("beam_size", "m"))
        self._golden_params = SearchParams(beam_size_B, m_B, mask_B=(trained,) * len(m_B))
        positions = [((row + 0.5) / len(self._heldout), "heldout", row) for row in range(len(self._heldout))]
        positions += [((row + 0.5) / len(self._golden), "golden", row) for row in range(len(self._golden))]
        self.query_order = [(kind, row) for _, kind, row in sorted(positions)]
        self._position = -1
        self._gains: deque[Float64] = deque(maxlen=max(len(self._heldout), 1))
        self._drifts: deque[float] = deque(maxlen=max(len(self._golden), 1))
        self._logged = False

    def next(self) -> tuple[QueryBatch, SearchParams]:
        """The next query, and the parameters of its search, which is without live items."""
        self._position = (self._position + 1) % len(self.query_order)
        kind, row = self.query_order[self._position]
        rows = np.array([row])
        if kind == "golden":
            return self._golden.take(rows), self._golden_params.take(rows)
        return self._heldout.take(rows), self._heldout_params

    @property
    def relevant_rows(self) -> Int64 | None:
        """The item rows that the last query should return; None for a golden query."""
        kind, row = self.query_order[self._position]
        return self._relevant[row] if kind == "heldout" else None

    def take(self, result: SearchResult) -> None:
        kind, row = self.query_order[self._position]
        if kind == "golden":
            expected_M, coverage = self._golden_scores[row], result.coverage
            if coverage is not None and len(coverage.items_S) > 1:  # shards together return other items, and so other scores
                if not coverage.answered_BS.all():
                    return
                expected_M = self._sharded_scores.setdefault(row, result.scores_BM[0])
            self._drifts.append(_drift(expected_M, result.scores_BM[0]))
            return
        recall_M = [precision_recall_f(result.item_rows_BM, [self._relevant[row]], m)[1][0] for m in self._ms]
        self._gains.append(np.array(recall_M) - self._at_export_BM[row])

    @property
    def recall(self) -> Mapping[int, float]:
        """m → recall@m; empty until MIN_ANSWERS held-out queries, or all, have been answered.

        The sum of recall at export and the mean gain over the answers of the last round. If no answer has changed, it therefore does not
        depend on which queries have been answered.
        """
        if not self._gains or len(self._gains) < min(MIN_ANSWERS, len(self._heldout)):
            return {}
        gain_M = np.mean(self._gains, axis=0)
        return {m: float(np.clip(self.expected.get(m, 0.0) + gain, 0, 1)) for m, gain in zip(self._ms, gain_M, strict=True)}

    @property
    def drift(self) -> float | None:
        """Mean absolute difference of scores over the golden queries of the last round; None before the first."""
        return float(np.mean(self._drifts)) if self._drifts else None

    def log_loss(self, name: str, version: int) -> None:
        """Log once that recall has fallen below the expected recall, and once that it has recovered."""
        recall = self.recall
        loss = max((value - recall[m] for m, value in self.expected.items() if m in recall), default=0.0)
        low = loss > LOGGED_LOSS
        if recall and low != self._logged:
            write = log.error if low else log.info
            write("%s version %d: recall of the probe is %s, expected %s", name, version, _text(recall), _text(self.expected))
            self._logged = low


def _drift(expected_M: Float32, scores_M: Float32) -> float:
    """Mean absolute difference of the i-th best score from the i-th best expected; a missing item has the score 0."""
    width = max(len(expected_M), len(scores_M))
    padded = [np.pad(scores.astype(np.float64), (0, width - len(scores))) for scores in (expected_M, scores_M)]
    differences_M = np.nan_to_num(np.abs(padded[0] - padded[1]), nan=1.0, posinf=1.0)  # NaN counts as the largest difference
    return float(differences_M.mean()) if width else 0.0


def _text(recall: Mapping[int, float]) -> str:
    return ", ".join(f"{value:.3f}@{m}" for m, value in recall.items())
