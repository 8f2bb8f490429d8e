"""What may be learned from, and the queries that models are chosen by and measured on: the protocols of the field.

Knows interactions, configurations and seeds. Does not know models or metrics. By hand: the cuts are a few lines, and
scikit-learn's splitters would give other users for the same seed.

Legend: U users, E events.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.errors import InvalidConfig, InvalidData

from ..data.cut_lists import events_before, first_events, iso, moment_of, with_events
from ..data.interactions import Interactions, read_interactions
from ..specification.log_format import DATED, LogFormat, TableFormat
from ..specification.splits import DateSplit, FileSplit, LastSplit, SplitConfig, UserSplit

log = logging.getLogger(__name__)

Int64 = NDArray[np.int64]

FINAL = "final"
"""Folder of the lists that are learned from once all is chosen, inside the work folder."""
LEARNED_VALIDATION = "learned_validation"
"""In a manifest's `data`: whether the model has learned from what validation asked for."""
MAX_QUERIES = 100_000
"""Of more validation or test queries so many are drawn, by the seed."""


@dataclass(frozen=True)
class EvaluationPair:
    """One held-out query: int64 item rows of the history (oldest first) and of what is relevant for it; neither is empty.

    vector  float32[F]: the query where the log is of vectors; then the history is empty
    """

    user: int
    history: Int64
    relevant: Int64
    vector: NDArray[np.float32] | None = None

    @property
    def query(self) -> NDArray[Any]:
        return self.history if self.vector is None else self.vector


@dataclass(frozen=True)
class Split:
    """What is learned from, and what is held out.

    lists             the users' lists without the events that are held out; users and items are the log's
    train             int64 rows of the users whose lists are learned from, ascending
    validation, test  queries, by user
    config            what was configured, with the dates that were chosen
    final             lists and users to learn from once all is chosen: with the later events of users that validation asked for; None: no
                      others. An eighth more users taught nothing that could be measured
    """

    lists: Interactions
    train: Int64
    validation: Sequence[EvaluationPair]
    test: Sequence[EvaluationPair]
    config: SplitConfig
    final: tuple[Interactions, Int64] | None = None

    def whole(self) -> Split:
        """What is learned from once all is chosen, without validation queries."""
        lists, train = self.final or (self.lists, self.train)
        return replace(self, lists=lists, train=train, validation=[], final=None)


def split_log(interactions: Interactions, config: SplitConfig, log_format: LogFormat, work: Path, *, seed: int) -> Split:
    """The split that a configuration asks for. Files of cut lists, and a second file's events, lie in `work`.

    Raises InvalidData where no user is left to learn from or to choose by, InvalidConfig where a second file is not there.
    """
    if isinstance(config, LastSplit):
        split = _last(interactions, config, work, seed)
    elif isinstance(config, DateSplit):
        split = _by_date(interactions, config, log_format, work, seed)
    elif isinstance(config, FileSplit):
        by_file = _by_file if interactions.vectors_UF is None else _vectors_by_file
        split = by_file(interactions, config, log_format, work, seed)
    else:
        split = _by_user(interactions, config, seed)
    if config.unseen_items:
        split = _without_events(split, drawn_items(interactions.item_count, config.unseen_items, seed), work)
    for name, part, expected in (
        ("training", split.train, "a user whose list is learned from"),
        ("validation", split.validation, "a user with a history and something relevant after it; validation chooses weights and options"),
    ):
        if not len(part):
            raise InvalidData("log", f"{interactions.user_count} users, none for {name} under split.kind {config.kind}", expected)
    validation, test = (
        [pairs[place] for place in _places(len(pairs), name, (seed, number)).tolist()]
        for pairs, name, number in ((split.validation, "validation", 2), (split.test, "test", 3))
    )
    return replace(split, validation=validation, test=test)


def drawn_items(items: int, share: float, seed: int) -> NDArray[np.bool_]:
    """bool[I]: ⌊share · I⌋ items at random, at least one."""
    drawn_I = np.zeros(items, np.bool_)
    drawn_I[np.random.default_rng([seed, 5]).permutation(items)[: max(1, int(share * items))]] = True
    return drawn_I


def _without_events(split: Split, hidden_I: NDArray[np.bool_], work: Path) -> Split:
    """The split with lists that hold none of the hidden items; queries stay as they are, and users left without an event drop out."""

    def left(lists: Interactions, users: Int64, folder: Path) -> tuple[Interactions, Int64]:
        folder.mkdir(exist_ok=True)
        shorter = with_events(lists, lambda events: ~hidden_I[lists.item_of_event_E[events]], folder)
        return shorter, users[np.diff(shorter.offset_U1)[users] > 0]

    lists, train = left(split.lists, split.train, work)
    final = None if split.final is None else left(*split.final, work / FINAL)
    return replace(split, lists=lists, train=train, final=final)


def _by_user(interactions: Interactions, config: UserSplit, seed: int) -> Split:
    """Users at random: the first ⌊share · U⌋ of one seeded permutation are test users, the next validation users, the rest train."""
    users = interactions.user_count
    shuffled = np.random.default_rng(seed).permutation(users).astype(np.int64)
    test, validation = int(config.test_share * users), int(config.validation_share * users)
    parts = [np.sort(part) for part in np.split(shuffled, [test, test + validation])]
    of_vectors = interactions.vectors_UF is not None
    queries = []
    for number, name, part in ((3, "test", parts[0]), (2, "validation", parts[1])):
        able = part[np.diff(interactions.offset_U1)[part] >= (1 if of_vectors else 2)]
        drawn = _drawn(able, name, (seed, number))
        queries.append(whole_lists(interactions, drawn) if of_vectors else halves(interactions, drawn, seed=seed))
    return Split(interactions, parts[2], validation=queries[1], test=queries[0], config=config)


def _last(interactions: Interactions, config: LastSplit, work: Path, seed: int) -> Split:
    """Lists of fewer than three events are learned from whole."""
    length_U = np.diff(interactions.offset_U1)
    hidden_U = (length_U >= 3).astype(np.int64)
    return _cut(interactions, length_U - 2 * hidden_U, length_U - hidden_U, config, work, seed)


def _by_date(interactions: Interactions, config: DateSplit, log_format: LogFormat, work: Path, seed: int) -> Split:
    """A query is a user with events before a date and from it on; who has none before is a new user, without a history."""
    time_E = interactions.time_of_event_E
    if time_E is None:
        raise InvalidData("log", "no timestamps", "timestamps, since data.split.kind is date")
    dated = isinstance(log_format, TableFormat) and log_format.timestamp_type in DATED
    moments = [moment_of(value, time_E, share) for value, share in ((config.validation_from, 0.8), (config.test_from, 0.9))]
    written = [iso(int(moment)) if dated else moment for moment in moments]
    if not moments[0] < moments[1]:
        if config.test_from is None:
            expected = f"a time before {written[1]}, from which on the last tenth of the log is tested on, or data.split.test_from too"
            raise InvalidData("data.split.validation_from", written[0], expected)
        raise InvalidData("data.split.test_from", written[1], f"a time after data.split.validation_from, {written[0]}")
    first_U, second_U = (events_before(interactions, time_E, moment) for moment in moments)
    config = config.model_copy(update={"validation_from": written[0], "test_from": written[1]})
    split = _cut(interactions, first_U, second_U, config, work, seed)
    log.info(
        "validation from %s: %d queries; test from %s: %d queries; %d users have no event before it and are not asked for",
        *(written[0], len(split.validation), written[1], len(split.test), np.count_nonzero(second_U == 0)),
    )
    return split


def _cut(interactions: Interactions, first_U: Int64, second_U: Int64, config: SplitConfig, work: Path, seed: int) -> Split:
    """Validation asks for the events between both cuts, the test for those after the second, of users who have some before."""

    def queries(begin_U: Int64, end_U: Int64, name: str, number: int) -> list[EvaluationPair]:
        users, of = _drawn(np.flatnonzero((begin_U > 0) & (begin_U < end_U)), name, (seed, number)), interactions.of
        return [EvaluationPair(user, of(user)[: begin_U[user]], of(user)[begin_U[user] : end_U[user]]) for user in users.tolist()]

    validation = queries(first_U, second_U, "validation", 2)
    test = queries(second_U, np.diff(interactions.offset_U1), "test", 3)
    lists, final = _first(interactions, first_U, work), _first(interactions, second_U, work / FINAL)
    return Split(*lists, validation, test, config, final)


def _first(interactions: Interactions, count_U: Int64, folder: Path) -> tuple[Interactions, Int64]:
    """Lists of the first so many events of each user, in files of a folder, and the users that have any."""
    folder.mkdir(exist_ok=True)
    return with_events(interactions, first_events(interactions, count_U), folder), np.flatnonzero(count_U)


def _by_file(interactions: Interactions, config: FileSplit, log_format: LogFormat, work: Path, seed: int) -> Split:
    """A test query is a user's whole list. Validation hides from some users' lists the share that the file hides from all."""
    with tempfile.TemporaryDirectory(dir=work, prefix=".test-") as folder:
        held = _second_log(config, log_format, Path(folder))
        user_of, item_of = _rows(interactions.user_ids, held.user_ids), _rows(interactions.item_ids, held.item_ids)
        test, unknown, unfound = [], 0, 0
        for other, user in enumerate(user_of.tolist()):
            relevant = item_of[held.of(other)]
            unknown += user < 0
            unfound += 0 if user < 0 else int(np.count_nonzero(relevant < 0))
            if user >= 0 and (relevant >= 0).any():
                test.append(EvaluationPair(user, interactions.of(user), relevant[relevant >= 0]))
        share = held.event_count / (held.event_count + interactions.event_count)
    if unknown or unfound:
        log.warning("%s: %d users and %d items of other users are not in the log; they are left out", config.test, unknown, unfound)
    validation, kept_E = _hidden(interactions, share, config.validation_share, seed)
    lists = with_events(interactions, lambda events: kept_E[events], work)
    return Split(lists, np.flatnonzero(np.diff(lists.offset_U1)), validation, test, config)


def _vectors_by_file(interactions: Interactions, config: FileSplit, log_format: LogFormat, work: Path, seed: int) -> Split:
    """Test queries are those of the file; some of the log's are held out whole, for validation."""
    held = _second_log(config, log_format, work / "test")
    widths = [0 if log.vectors_UF is None else log.vectors_UF.shape[1] for log in (interactions, held)]
    if widths[0] != widths[1]:
        raise InvalidData(f"{config.test.name}: column vector", f"{widths[1]} numbers", f"{widths[0]}, as in the log")
    item_of, test = _rows(interactions.item_ids, held.item_ids), []
    for pair in whole_lists(held, np.arange(held.user_count)):
        relevant = item_of[pair.relevant]
        if (relevant >= 0).any():
            test.append(replace(pair, user=interactions.user_count + pair.user, relevant=relevant[relevant >= 0]))
    missing, learned = int(np.count_nonzero(item_of < 0)), int(np.count_nonzero(_rows(interactions.user_ids, held.user_ids) >= 0))
    if missing or learned:
        log.warning("%s: %d items are not in the log and are left out; %d queries are in the log, too", config.test, missing, learned)
    shuffled = np.random.default_rng([seed, 4]).permutation(interactions.user_count).astype(np.int64)
    chosen = max(1, int(config.validation_share * interactions.user_count))
    validation = whole_lists(interactions, np.sort(shuffled[:chosen]))
    return Split(interactions, np.sort(shuffled[chosen:]), validation, test, config)


def _second_log(config: FileSplit, log_format: LogFormat, work: Path) -> Interactions:
    if not config.test.exists():
        raise InvalidConfig("data.split.test", str(config.test), "a file that exists")
    return read_interactions(config.test, log_format.model_copy(update={"min_user_events": 1, "min_item_events": 1}), work)


def _hidden(interactions: Interactions, share: float, users: float, seed: int) -> tuple[list[EvaluationPair], NDArray[np.bool_]]:
    """Validation queries, and bool[E]: what is left to learn from. At least one event of a drawn user is hidden, and one stays."""
    rng, offset_U1 = np.random.default_rng([seed, 4]), interactions.offset_U1
    kept_E = np.ones(interactions.event_count, np.bool_)
    able = np.flatnonzero(np.diff(offset_U1) >= 2)
    drawn = np.sort(rng.permutation(able)[: max(1, int(users * interactions.user_count))])
    pairs = []
    for user in drawn.tolist():
        items = interactions.of(user)
        hidden = min(max(1, round(share * len(items))), len(items) - 1)
        places = np.arange(len(items))[-hidden:] if interactions.order != "none" else np.sort(rng.choice(len(items), hidden, replace=False))
        kept_E[offset_U1[user] + places] = False
        pairs.append(EvaluationPair(user, np.delete(items, places), items[places]))
    return pairs, kept_E


def _rows(ids: pa.Array, names: pa.Array) -> Int64:
    """int64[len(names)]: the place of each name among the ids, −1 for none."""
    return np.asarray(pc.fill_null(pc.index_in(names, value_set=ids), -1), np.int64)


def _drawn(users: Int64, name: str, seed: tuple[int, int]) -> Int64:
    """The users, or MAX_QUERIES of them."""
    return users[_places(len(users), name, seed)]


def _places(count: int, name: str, seed: tuple[int, int]) -> Int64:
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
    for user in users.tolist():
        items = interactions.of(user)
        if interactions.order == "none":
            items = np.random.default_rng([seed, user]).permutation(items)
        middle = len(items) // 2
        if middle:
            pairs.append(EvaluationPair(user, items[:middle], items[middle:]))
    return pairs


def whole_lists(interactions: Interactions, users: Int64) -> list[EvaluationPair]:
    """Queries of vectors: all of a query's items are relevant."""
    if interactions.vectors_UF is None:
        raise InvalidData("log", "histories", "vectors")
    vectors_UF, nothing = np.asarray(interactions.vectors_UF), np.zeros(0, np.int64)
    return [EvaluationPair(user, nothing, items, vectors_UF[user]) for user in users.tolist() if len(items := interactions.of(user))]


def without_seen(pairs: Iterable[EvaluationPair]) -> list[EvaluationPair]:
    """The same pairs with the history's items taken out of `relevant`; a pair with nothing left is dropped.

    For models that never return what the history holds (`exclude_seen`): without this they could not reach full recall. TDM's filtered
    rows are measured so; its unfiltered rows, JTM and OTM are measured on the pairs as they are.
    """
    unseen = (replace(pair, relevant=pair.relevant[~np.isin(pair.relevant, pair.history)]) for pair in pairs)
    return [pair for pair in unseen if len(pair.relevant)]
