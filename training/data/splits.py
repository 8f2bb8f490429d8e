"""Splits a log into training lists, validation queries and test queries, by the protocols of the field.

Knows interactions, configurations and seeds. Does not know models or metrics. Written by hand: the cuts are a few lines, and
scikit-learn's splitters would draw other users for the same seed.

Legend: U users, E events.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.arrays import Array, Bool, Float32, Int64
from espalier.errors import InvalidConfig, InvalidData
from espalier.logs.log_values import DATED
from espalier.wording import either

from ..data.cut_lists import events_before, first_events, iso, moment_of, with_events
from ..data.draws import drawing_order, numbers_of
from ..data.interactions import Interactions, read_interactions
from ..data.outlying_vectors import without_outliers
from ..specification.log_format import LogFormat, TableFormat
from ..specification.splits import DateSplit, FileSplit, LastSplit, SplitConfig, UserSplit

log = logging.getLogger(__name__)


FINAL = "final"
"""Folder of the final training lists, inside the work folder."""
LEARNED_VALIDATION = "learned_validation"
"""Key in a manifest's `data`: whether the model has also learned from validation events."""
HELD_OUT_EVENTS, HELD_OUT_USERS = (10, 5, 3, 2), 1000
"""With `min_user_events = "auto"`, only users with a least number of events are held out: the first of these with which they have half of
all events, and are so many users or all."""
FEW_QUERIES = 30
"""With fewer validation or test queries, a warning says so."""
MAX_QUERIES = 100_000
"""Most validation or test queries; of more, the seed draws so many."""


@dataclass(frozen=True)
class EvaluationPair:
    """One held-out query: int64 item rows of the history (oldest first) and of the relevant items; neither is empty.

    vector  float32[F]: the query in a log of vectors, whose history is empty
    """

    user: int
    history: Int64
    relevant: Int64
    vector: Float32 | None = None

    @property
    def query(self) -> Array:
        return self.history if self.vector is None else self.vector


@dataclass(frozen=True)
class Split:
    """Training lists, and held-out queries.

    lists             the users' lists without held-out events; users and items are the log's
    train             int64 rows of the training users, ascending; without outlying vectors
    validation, test  queries, by user
    config            the configuration, with the chosen dates
    final             (lists, users) of the last training, once all is chosen: with validation events, if these are later events of the same
                      users; None: `lists` and `train`. An eighth more users, those of validation, gained nothing measurable
    """

    lists: Interactions
    train: Int64
    validation: Sequence[EvaluationPair]
    test: Sequence[EvaluationPair]
    config: SplitConfig
    final: tuple[Interactions, Int64] | None = None

    def whole(self) -> Split:
        """The split for the last training, once all is chosen, without validation queries."""
        lists, train = self.final or (self.lists, self.train)
        return replace(self, lists=lists, train=train, validation=[], final=None)


def split_log(interactions: Interactions, config: SplitConfig, log_format: LogFormat, work: Path, *, seed: int) -> Split:
    """The configured split. Files of cut lists, and the events of a second file, are in `work`.

    Raises InvalidData if no training user or no validation query is left, InvalidConfig if a second file is missing.
    """
    if isinstance(config, LastSplit):
        split = _last(interactions, _long_lists(interactions, log_format), config, work, seed)
    elif isinstance(config, DateSplit):
        split = _by_date(interactions, _long_lists(interactions, log_format), config, log_format, work, seed)
    elif isinstance(config, FileSplit):
        by_file = _by_file if interactions.vectors_UF is None else _vectors_by_file
        split = by_file(interactions, config, log_format, work, seed)
    else:
        split = _by_user(interactions, _long_lists(interactions, log_format), config, seed)
    if interactions.vectors_UF is not None and len(split.train):
        split = replace(split, train=without_outliers(interactions.vectors_UF, split.train))
    if config.unseen_items:
        split = _without_events(split, drawn_items(interactions.item_ids, config.unseen_items, seed), work)
    for name, queries, needed in (
        ("training", split.train, "a user whose list is learned from"),
        ("validation", split.validation, "a user with a history and something relevant after it; validation chooses weights and options"),
    ):
        if not len(queries):
            rule = either(f" under split.kind {config.kind}", "")
            raise InvalidData("log", f"{interactions.user_count} users, none for {name}{rule}", needed)
    validation, test = (
        [pairs[position] for position in _drawn_positions(len(pairs), name, (seed, number)).tolist()]
        for pairs, name, number in ((split.validation, "validation", 2), (split.test, "test", 3))
    )
    if any(0 < len(pairs) < FEW_QUERIES for pairs in (validation, test)):
        log.warning("%d validation queries, %d test queries: figures of fewer than %d say little", len(validation), len(test), FEW_QUERIES)
    return replace(split, validation=validation, test=test)


def _long_lists(interactions: Interactions, log_format: LogFormat) -> Bool:
    """bool[U]: the users that may be held out. The others are learned from."""
    length_U = np.diff(interactions.offset_U1)
    if log_format.min_user_events != "auto":
        return np.ones(interactions.user_count, np.bool_)
    fewest_users, half = min(HELD_OUT_USERS, interactions.user_count), length_U.sum() / 2
    for least in HELD_OUT_EVENTS:
        long_U: Bool = length_U >= least
        if np.count_nonzero(long_U) >= fewest_users and length_U[long_U].sum() >= half:
            break
    if not long_U.all():
        short = np.count_nonzero(~long_U)
        log.info("%d of %d users have fewer than %d events: they are learned from, and not held out", short, len(long_U), least)
    return long_U


def drawn_items(item_ids: pa.Array, share: float, seed: int) -> Bool:
    """bool[I]: ⌊share · I⌋ items at random, at least one."""
    drawn_I = np.zeros(len(item_ids), np.bool_)
    drawn_I[drawing_order(item_ids.to_pylist(), seed, "items")[: max(1, int(share * len(item_ids)))]] = True
    return drawn_I


def _without_events(split: Split, hidden_I: Bool, work: Path) -> Split:
    """The split without the hidden items in its lists. Queries stay as they are; users without an event drop out."""

    def remaining(lists: Interactions, users: Int64, folder: Path) -> tuple[Interactions, Int64]:
        folder.mkdir(exist_ok=True)
        shorter = with_events(lists, lambda events: ~hidden_I[lists.item_of_event_E[events]], folder)
        return shorter, users[np.diff(shorter.offset_U1)[users] > 0]

    lists, train = remaining(split.lists, split.train, work)
    final = None if split.final is None else remaining(*split.final, work / FINAL)
    return replace(split, lists=lists, train=train, final=final)


def _by_user(interactions: Interactions, long_U: Bool, config: UserSplit, seed: int) -> Split:
    """Random users: of those with long lists in the drawing order of their ids, the first ⌊share · users⌋ are test users, the next are
    validation users; all others train. So, as a log grows, hardly a training user becomes a test user.
    """
    shuffled = _shuffled(interactions, np.flatnonzero(long_U), seed)
    test, validation = int(config.test_share * len(shuffled)), int(config.validation_share * len(shuffled))
    held_out = np.split(shuffled[: test + validation], [test])
    user_groups = [*(np.sort(users) for users in held_out), np.setdiff1d(np.arange(interactions.user_count), shuffled[: test + validation])]
    of_vectors = interactions.vectors_UF is not None
    queries = []
    for number, name, users in ((3, "test", user_groups[0]), (2, "validation", user_groups[1])):
        eligible = users[np.diff(interactions.offset_U1)[users] >= (1 if of_vectors else 2)]
        drawn = _drawn(eligible, name, (seed, number))
        queries.append(whole_lists(interactions, drawn) if of_vectors else halves(interactions, drawn, seed=seed))
    return Split(interactions, user_groups[2], validation=queries[1], test=queries[0], config=config)


def _last(interactions: Interactions, long_U: Bool, config: LastSplit, work: Path, seed: int) -> Split:
    """Leave one out. Short lists, and those of fewer than three events, are training lists as a whole."""
    length_U = np.diff(interactions.offset_U1)
    hidden_U = (long_U & (length_U >= 3)).astype(np.int64)
    return _cut(interactions, long_U, (length_U - 2 * hidden_U, length_U - hidden_U), config, work, seed)


def _by_date(interactions: Interactions, long_U: Bool, config: DateSplit, log_format: LogFormat, work: Path, seed: int) -> Split:
    """Queries are users with events before a date and from it on. Users without earlier events have no history and are no queries."""
    time_E = interactions.time_of_event_E
    if time_E is None:
        raise InvalidData("log", "no timestamps", "timestamps, since data.split.kind is date")
    is_dated = isinstance(log_format, TableFormat) and log_format.timestamp_type in DATED
    moments = [moment_of(value, time_E, share) for value, share in ((config.validation_from, 0.8), (config.test_from, 0.9))]
    dates = [iso(int(moment)) if is_dated else moment for moment in moments]
    if not moments[0] < moments[1]:
        if config.test_from is None:
            expected = f"a time before {dates[1]}, from which on the last tenth of the log is tested on, or data.split.test_from too"
            raise InvalidData("data.split.validation_from", dates[0], expected)
        raise InvalidData("data.split.test_from", dates[1], f"a time after data.split.validation_from, {dates[0]}")
    first_U, second_U = (events_before(interactions, time_E, moment) for moment in moments)
    config = config.model_copy(update={"validation_from": dates[0], "test_from": dates[1]})
    split = _cut(interactions, long_U, (first_U, second_U), config, work, seed)
    log.info(
        "validation from %s: %d queries; test from %s: %d queries; %d users have no event before it and are not asked for",
        *(dates[0], len(split.validation), dates[1], len(split.test), np.count_nonzero(second_U == 0)),
    )
    return split


def _cut(interactions: Interactions, long_U: Bool, cuts: tuple[Int64, Int64], config: SplitConfig, work: Path, seed: int) -> Split:
    """Relevant are, for validation, the events between both cuts, for the test, those after the second. Users need earlier events.

    cuts  for each user, how many events lie before the first cut, and before the second
    """
    first_U, second_U = cuts

    def queries(begin_U: Int64, end_U: Int64, name: str, number: int) -> list[EvaluationPair]:
        users, of = _drawn(np.flatnonzero(long_U & (begin_U > 0) & (begin_U < end_U)), name, (seed, number)), interactions.of
        return [EvaluationPair(user, of(user)[: begin_U[user]], of(user)[begin_U[user] : end_U[user]]) for user in users.tolist()]

    validation = queries(first_U, second_U, "validation", 2)
    test = queries(second_U, np.diff(interactions.offset_U1), "test", 3)
    lists, final = _first(interactions, first_U, work), _first(interactions, second_U, work / FINAL)
    return Split(*lists, validation, test, config, final)


def _first(interactions: Interactions, count_U: Int64, folder: Path) -> tuple[Interactions, Int64]:
    """Lists of each user's first `count_U` events, in files of a folder, and the users that have any."""
    folder.mkdir(exist_ok=True)
    return with_events(interactions, first_events(interactions, count_U), folder), np.flatnonzero(count_U)


def _by_file(interactions: Interactions, config: FileSplit, log_format: LogFormat, work: Path, seed: int) -> Split:
    """A test query is a user's whole list. Validation hides from some users' lists the share that the file hides from all lists."""
    with tempfile.TemporaryDirectory(dir=work, prefix=".test-") as folder:
        test_log = _second_log(config, log_format, Path(folder))
        user_of, item_of = _rows(interactions.user_ids, test_log.user_ids), _rows(interactions.item_ids, test_log.item_ids)
        test, lost_users, lost_items = [], 0, 0
        for test_user, user in enumerate(user_of.tolist()):
            relevant = item_of[test_log.of(test_user)]
            lost_users += user < 0
            lost_items += 0 if user < 0 else int(np.count_nonzero(relevant < 0))
            if user >= 0 and (relevant >= 0).any():
                test.append(EvaluationPair(user, interactions.of(user), relevant[relevant >= 0]))
        share = test_log.event_count / (test_log.event_count + interactions.event_count)
    if lost_users or lost_items:
        reason = "are not in the log, or have fewer events there than data.format asks for; they are left out"
        log.warning("%s: %d users and %d items of other users %s", config.test, lost_users, lost_items, reason)
    if learned := sum(int(np.isin(pair.relevant, pair.history).sum()) for pair in test):
        log.warning(
            "%s: %d of %d relevant items are in the log for the same user, too. If these are the same events, leave them out of the log",
            *(config.test, learned, sum(len(pair.relevant) for pair in test)),
        )
    validation, kept_E = _hidden(interactions, share, config.validation_share, seed)
    lists = with_events(interactions, lambda events: kept_E[events], work)
    return Split(lists, np.flatnonzero(np.diff(lists.offset_U1)), validation, test, config)


def _vectors_by_file(interactions: Interactions, config: FileSplit, log_format: LogFormat, work: Path, seed: int) -> Split:
    """Test queries are those of the file. Validation queries are some of the log's, which are held out whole."""
    test_log = _second_log(config, log_format, work / "test")
    widths = [0 if log.vectors_UF is None else log.vectors_UF.shape[1] for log in (interactions, test_log)]
    if widths[0] != widths[1]:
        raise InvalidData(f"{config.test.name}: column vector", f"{widths[1]} numbers", f"{widths[0]}, as in the log")
    item_of, test = _rows(interactions.item_ids, test_log.item_ids), []
    for pair in whole_lists(test_log, np.arange(test_log.user_count)):
        relevant = item_of[pair.relevant]
        if (relevant >= 0).any():
            test.append(replace(pair, user=interactions.user_count + pair.user, relevant=relevant[relevant >= 0]))
    missing, repeated = int(np.count_nonzero(item_of < 0)), int(np.count_nonzero(_rows(interactions.user_ids, test_log.user_ids) >= 0))
    if missing or repeated:
        log.warning("%s: %d items are not in the log and are left out; %d queries are in the log, too", config.test, missing, repeated)
    shuffled = _shuffled(interactions, np.arange(interactions.user_count), seed)
    validation_count = max(1, int(config.validation_share * interactions.user_count))
    validation = whole_lists(interactions, np.sort(shuffled[:validation_count]))
    return Split(interactions, np.sort(shuffled[validation_count:]), validation, test, config)


def _second_log(config: FileSplit, log_format: LogFormat, work: Path) -> Interactions:
    if not config.test.exists():
        raise InvalidConfig("data.split.test", str(config.test), "a file that exists")
    return read_interactions(config.test, log_format.model_copy(update={"min_user_events": 1, "min_item_events": 1}), work)


def _hidden(interactions: Interactions, share: float, users: float, seed: int) -> tuple[list[EvaluationPair], Bool]:
    """Validation queries, and bool[E]: the training events. Of a drawn user at least one event is hidden, and at least one stays."""
    offset_U1, kept_E = interactions.offset_U1, np.ones(interactions.event_count, np.bool_)
    eligible = np.flatnonzero(np.diff(offset_U1) >= 2)
    drawn = np.sort(_shuffled(interactions, eligible, seed)[: max(1, int(users * interactions.user_count))])
    pairs = []
    for user, rng in zip(drawn.tolist(), _generators(interactions, drawn, seed), strict=True):
        items = interactions.of(user)
        count = min(max(1, round(share * len(items))), len(items) - 1)
        has_order = interactions.order != "none"
        positions = np.arange(len(items))[-count:] if has_order else np.sort(rng.choice(len(items), count, replace=False))
        kept_E[offset_U1[user] + positions] = False
        pairs.append(EvaluationPair(user, np.delete(items, positions), items[positions]))
    return pairs, kept_E


def _shuffled(interactions: Interactions, users: Int64, seed: int) -> Int64:
    """The users in the drawing order of their ids."""
    return users[drawing_order(interactions.user_ids.take(pa.array(users)).to_pylist(), seed, "users")]


def _generators(interactions: Interactions, users: Int64, seed: int) -> Iterable[np.random.Generator]:
    """A generator for each user, which depends on the seed and the user's id alone."""
    numbers = numbers_of(interactions.user_ids.take(pa.array(users)).to_pylist(), seed, "lists")
    return (np.random.default_rng(number) for number in numbers.tolist())


def _rows(ids: pa.Array, names: pa.Array) -> Int64:
    """int64[len(names)]: the position of each name among the ids, −1 for none."""
    return np.asarray(pc.fill_null(pc.index_in(names, value_set=ids), -1), np.int64)


def _drawn(users: Int64, name: str, seed: tuple[int, int]) -> Int64:
    """The users, or MAX_QUERIES of them."""
    return users[_drawn_positions(len(users), name, seed)]


def _drawn_positions(count: int, name: str, seed: tuple[int, int]) -> Int64:
    if count <= MAX_QUERIES:
        return np.arange(count)
    log.info("%d of %d %s queries are drawn", MAX_QUERIES, count, name)
    return np.sort(np.random.default_rng(seed).choice(count, MAX_QUERIES, replace=False))


def halves(interactions: Interactions, users: Int64, *, seed: int) -> list[EvaluationPair]:
    """Each user's list cut in the middle (mid = ⌊length / 2⌋): the first half is the query, the whole second half is relevant.

    Repeats stay, as in the published preparation; the metrics decide whether they count. Lists without an order are shuffled first,
    by a permutation that depends on the seed and the user only. Users whose list is too short for two halves are skipped.
    """
    pairs = []
    for user, rng in zip(users.tolist(), _generators(interactions, users, seed), strict=True):
        items = interactions.of(user)
        if interactions.order == "none":
            items = rng.permutation(items)
        middle = len(items) // 2
        if middle:
            pairs.append(EvaluationPair(user, items[:middle], items[middle:]))
    return pairs


def whole_lists(interactions: Interactions, users: Int64) -> list[EvaluationPair]:
    """Queries of vectors: all of a query's items are relevant."""
    if interactions.vectors_UF is None:
        raise InvalidData("log", "histories", "vectors")
    vectors_UF, no_items = np.asarray(interactions.vectors_UF), np.zeros(0, np.int64)
    return [EvaluationPair(user, no_items, items, vectors_UF[user]) for user in users.tolist() if len(items := interactions.of(user))]


def without_seen(pairs: Iterable[EvaluationPair]) -> list[EvaluationPair]:
    """The pairs without the history's items in `relevant`. Pairs with nothing relevant left are dropped.

    For models that never return items of the history (`exclude_seen`), which could not reach full recall otherwise. TDM's filtered rows are
    measured so; its unfiltered rows, JTM and OTM are measured on the pairs as they are.
    """
    unseen = (replace(pair, relevant=pair.relevant[~np.isin(pair.relevant, pair.history)]) for pair in pairs)
    return [pair for pair in unseen if len(pair.relevant)]
