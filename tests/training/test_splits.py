"""What is learned from and what is held out under each protocol, by `fit`, `evaluate --data` and rankers alike; training instances are
slices of users' lists, by (seed, step) alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData
from tests.training.commands import command
from tests.training.logs import log_of
from training.data import cut_lists, grouping, splits
from training.data.cut_lists import moment_of
from training.data.interactions import Interactions, read_interactions
from training.data.splits import EvaluationPair, Split, halves, split_log, without_seen
from training.deep.instances import Instances, InstanceSource
from training.deep.run import fit_and_export
from training.evaluate import held_out_pairs
from training.held_out import held_out_log
from training.rankers.log_queries import from_log
from training.specification.deep import DeepConfig, InstanceConfig
from training.specification.log_format import CsvFormat, ListsFormat, Order
from training.specification.models import config_of, deep_config
from training.specification.splits import DateSplit, FileSplit, LastSplit, UserSplit
from training.versions import work_folder


def by_user(log: Interactions, work: Path, *, seed: int, test_share: float = 0.1, validation_share: float = 0.1) -> Split:
    shares = UserSplit(test_share=test_share, validation_share=validation_share)
    return split_log(log, shares, CsvFormat(), work, seed=seed)


def test_every_user_is_in_exactly_one_part_of_the_stated_size_by_the_seed(tmp_path: Path) -> None:
    log = log_of([[0, 1]] * 57)
    split, same, other = (by_user(log, tmp_path, seed=seed, test_share=0.2, validation_share=0.1) for seed in (3, 3, 4))
    assert (len(split.test), len(split.validation), len(split.train)) == (11, 5, 41)
    held = [pair.user for pair in (*split.validation, *split.test)]
    assert_array_equal(np.sort(np.concatenate([split.train, held])), np.arange(57))
    assert held == [pair.user for pair in (*same.validation, *same.test)] != [pair.user for pair in (*other.validation, *other.test)]
    with pytest.raises(InvalidData, match="validation"):
        by_user(log_of([[0, 1]] * 9), tmp_path, seed=0, validation_share=0.1)


@pytest.mark.parametrize(("longest", "least"), [(12, 10), (7, 5), (4, 3), (2, 2)])
def test_users_with_few_events_are_learned_from_but_not_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int, least: int
) -> None:
    monkeypatch.setattr(splits, "HELD_OUT_USERS", 20)
    log = log_of([[*range(longest)]] * 20 + [[*range(least - 1)]] * 10)
    shares = UserSplit(test_share=0.5, validation_share=0.4)
    for config in (shares, LastSplit())[: 2 if longest > 2 else 1]:
        split = split_log(log, config, CsvFormat(), tmp_path, seed=1)
        held_out = {pair.user for pair in (*split.validation, *split.test)}
        assert held_out <= {*range(20)}
        assert len(held_out) == (18 if config == shares else 20)
        assert {*range(20, 30)} <= {*split.train.tolist()}
        assert all(split.lists.of(user).tolist() == [*range(least - 1)] for user in range(20, 30)), "learned from as a whole"
    if least > 2:
        split = split_log(log, shares, CsvFormat(min_user_events=1), tmp_path, seed=1)
        assert len({pair.user for pair in (*split.validation, *split.test)} & {*range(20, 30)}) > 5, "a number in the configuration"
        monkeypatch.setattr(splits, "HELD_OUT_USERS", 21)
        split = split_log(log, shares, CsvFormat(), tmp_path, seed=1)
        assert len({pair.user for pair in (*split.validation, *split.test)} & {*range(20, 30)}) > 5, "too few users with long lists"


def test_after_a_date_too_only_users_with_long_lists_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "HELD_OUT_USERS", 3)
    dates, short = {"kind": "date", "validation_from": 20, "test_from": 30}, ["e p 3", "e q 21", "f p 4", "f q 32"]
    every, auto = (dated(tmp_path, dates, short, least) for least in (1, "auto"))
    assert [name for name, *_ in named(every, every.validation)] == ["a", "e"]
    assert [name for name, *_ in named(every, every.test)] == ["a", "b", "f"]
    assert [name for name, *_ in named(auto, auto.validation)] == ["a"]
    assert [name for name, *_ in named(auto, auto.test)] == ["a", "b"]
    assert lists(auto) == lists(every), "what comes later is learned from under neither"
    assert lists(auto)["e"] == ["p"]


def test_leave_one_out_learns_from_all_but_the_last_two_and_asks_for_the_next(tmp_path: Path) -> None:
    log = log_of([[4, 3, 2, 1], [5, 6], [0, 1, 2]])
    split = split_log(log, LastSplit(), CsvFormat(), tmp_path, seed=1)
    assert [split.lists.of(user).tolist() for user in split.train] == [[4, 3], [5, 6], [0]]
    assert shown(split.validation) == [(0, [4, 3], [2]), (2, [0], [1])]
    assert shown(split.test) == [(0, [4, 3, 2], [1]), (2, [0, 1], [2])]
    assert (split.lists.item_count, split.lists.user_count) == (7, 3)
    final = split.whole()
    assert [final.lists.of(user).tolist() for user in final.train] == [[4, 3, 2], [5, 6], [0, 1]]
    assert (final.validation, final.final, shown(final.test)) == ([], None, shown(split.test))


def test_a_date_parts_what_is_known_from_what_comes(tmp_path: Path) -> None:
    split = dated(tmp_path, {"kind": "date", "validation_from": 20, "test_from": 30})
    assert lists(split) == {"a": ["p", "q"], "b": ["p"], "d": ["r", "s", "p"]}
    assert split.lists.time_of_event_E is None, "times of events that are no longer there"
    assert named(split, split.validation) == [("a", ["p", "q"], ["r"])]
    assert named(split, split.test) == [("a", ["p", "q", "r"], ["s"]), ("b", ["p"], ["q", "r"])]  # c came after the date
    assert lists(split.whole()) == {"a": ["p", "q", "r"], "b": ["p"], "d": ["r", "s", "p"]}
    later = dated(tmp_path, {"kind": "date", "validation_from": 30, "test_from": 50})
    assert lists(later) == {"a": ["p", "q", "r"], "b": ["p"], "d": ["r", "s", "p"]}
    assert lists(later.whole()) == {"a": ["p", "q", "r", "s"], "b": ["p", "q", "r"], "d": ["r", "s", "p"]}
    newer = dated(tmp_path, {"kind": "date", "validation_from": 2, "test_from": 7})
    assert (lists(newer), lists(newer.whole())) == ({"a": ["p"]}, {"a": ["p", "q"], "b": ["p"], "d": ["r", "s"]}), "b and d came in between"


@pytest.mark.parametrize(("users", "is_few"), [(29, True), (30, False)])
def test_few_queries_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, users: int, is_few: bool) -> None:
    split_log(log_of([[0, 1, 2]] * users), LastSplit(), CsvFormat(), tmp_path, seed=1)
    assert (f"{users} validation queries, {users} test queries: figures of fewer than 30 say little" in caplog.text) == is_few


def test_without_dates_a_tenth_of_the_events_is_tested_on_and_the_tenth_before_chooses(tmp_path: Path) -> None:
    split = dated(tmp_path, {"kind": "date"})
    assert isinstance(split.config, DateSplit)
    assert (split.config.validation_from, split.config.test_from) == (31, 40)


@pytest.mark.parametrize("zone", ["", "Z"])
def test_dates_are_written_as_the_log_writes_them(tmp_path: Path, zone: str) -> None:
    rows = [f"u{n % 5},i{n},2024-05-{n + 1:02d}T12:00:00{zone}" for n in range(30)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time", *rows]) + "\n")
    form = CsvFormat(timestamp="time", timestamp_type="datetime", order="timestamp", min_user_events=1)
    log = read_interactions(tmp_path / "log.csv", form, tmp_path)
    chosen = split_log(log, DateSplit(), form, tmp_path, seed=1)
    assert isinstance(chosen.config, DateSplit)
    assert str(chosen.config.test_from) == "2024-05-28T12:00:00+00:00"
    written = split_log(log, DateSplit(validation_from="2024-05-25T12:00:00", test_from="2024-05-28T12:00:00Z"), form, tmp_path, seed=1)
    assert (shown(written.test), shown(written.validation)) == (shown(chosen.test), shown(chosen.validation))
    by_day = split_log(log, DateSplit(validation_from="2024-05-20", test_from="2024-05-28"), form, tmp_path, seed=1)
    assert shown(by_day.test) == shown(chosen.test)


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_the_moment_before_which_a_share_lies_is_one_of_the_events_own(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    times: Any = np.random.default_rng(0).permutation(100).astype(dtype)
    assert [moment_of(None, times, share) for share in (0, 0.8, 0.805, 1)] == [0, 80, 80, 99]
    assert isinstance(moment_of(None, times, 0.8), int if dtype is np.int64 else float)
    monkeypatch.setattr(cut_lists, "MOST_TIMES", 30)
    sample = np.sort(times[::4])
    assert moment_of(None, times, 0.8) == sample[20], "of many events, evenly spaced ones"


@pytest.mark.parametrize("config", [LastSplit(), DateSplit(), LastSplit(unseen_items=0.4), DateSplit(unseen_items=0.4)])
def test_lists_are_cut_alike_in_chunks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: LastSplit | DateSplit) -> None:
    rng = np.random.default_rng(4)
    rows = [f"u{user},{item},{time}" for user, item, time in rng.integers([0, 0, 0], [9, 12, 90], (120, 3)).tolist()]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time", *rows]))
    form = CsvFormat(timestamp="time", order="timestamp", min_user_events=1)
    log = read_interactions(tmp_path / "log.csv", form, tmp_path / "log")
    whole, *pieces = [
        (monkeypatch.setattr(grouping, "CHUNK", chunk), split_log(log, config, form, tmp_path / "log", seed=2))[1] for chunk in (1000, 1, 7)
    ]
    for piece in pieces:
        assert lists(piece) == lists(whole)
        assert named(piece, piece.test) == named(whole, whole.test)
        assert named(piece, piece.validation) == named(whole, whole.validation)


def test_dates_in_the_wrong_order_or_that_leave_nothing_to_learn_from_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"log: .*11 events, all held out.*to learn from"):
        dated(tmp_path, {"kind": "date", "validation_from": 1, "test_from": 2})
    with pytest.raises(InvalidData, match="test_from"):
        dated(tmp_path, {"kind": "date", "validation_from": 30, "test_from": 30})
    with pytest.raises(
        InvalidData, match=r"^data\.split\.validation_from: got 99, expected a time before \d+, from which on the last tenth"
    ):
        dated(tmp_path, {"kind": "date", "validation_from": 99})


@pytest.mark.parametrize("order", ["file", "none"])
def test_a_second_file_says_what_is_relevant_and_validation_hides_as_much(tmp_path: Path, order: Literal["file", "none"]) -> None:
    (tmp_path / "train.txt").write_text("".join(f"u{user} {' '.join(f'i{user + item}' for item in range(8))}\n" for user in range(20)))
    (tmp_path / "test.txt").write_text("u3 i1 i2\nu1 i9 i0\nnobody i1\nu4 never\nu2 i5 never i6 i7\n" + "u5 i1 i2 i3 i4\n" * 8)
    form = ListsFormat(format="lists", separator=" ", order=order, min_user_events=1)
    log = read_interactions(tmp_path / "train.txt", form, tmp_path)
    split = split_log(log, FileSplit(kind="file", test=tmp_path / "test.txt", validation_share=0.25), form, tmp_path, seed=1)
    everything = {user: [f"i{user + item}" for item in range(8)] for user in range(20)}
    found = {user: (sorted(history), relevant) for user, history, relevant in named(split, split.test)}
    assert found["u1"] == (sorted(everything[1]), ["i9", "i0"])
    assert found["u2"] == (sorted(everything[2]), ["i5", "i6", "i7"])
    assert sorted(found) == ["u1", "u2", "u3", "u5"]
    assert [pair.user for pair in split.test] == sorted(pair.user for pair in split.test), "by user, not as the file has them"
    hidden = {user: (history, relevant) for user, history, relevant in named(split, split.validation)}
    assert len(hidden) == 5
    for name, items in lists(split).items():
        history, relevant = hidden.get(name, (items, []))
        assert history == items
        assert sorted(items + relevant) == sorted(everything[int(name[1:])])
        if name in hidden:
            assert len(relevant) == round(8 * 41 / (41 + 160))
            assert order == "none" or relevant == everything[int(name[1:])][-2:]
    with pytest.raises(InvalidConfig, match=r"data\.split\.test: .*absent"):
        split_log(log, FileSplit(kind="file", test=tmp_path / "absent.txt"), form, tmp_path, seed=1)
    assert order == "file" or any(relevant != everything[int(name[1:])][-2:] for name, (_, relevant) in hidden.items())


def test_users_of_a_second_file_may_have_few_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "train.txt").write_text("".join(f"u{user} a b c d\n" for user in range(5)) + "u5 a\n")
    (tmp_path / "test.txt").write_text("u1 d\nu5 b\n")
    form = ListsFormat(format="lists", separator=" ", min_user_events=4, min_item_events=2)
    log = read_interactions(tmp_path / "train.txt", form, tmp_path)
    split = split_log(log, FileSplit(kind="file", test=tmp_path / "test.txt"), form, tmp_path, seed=1)
    assert named(split, split.test) == [("u1", ["a", "b", "c", "d"], ["d"])]
    assert "test.txt: 1 users and 0 items of other users are not in the log, or have fewer events there than" in caplog.text
    assert "test.txt: 1 of 1 relevant items are in the log for the same user, too" in caplog.text


def test_of_very_many_queries_some_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "MAX_QUERIES", 7)
    log = log_of([[0, 1, 2]] * 30)
    one, same, other = ([pair.user for pair in split_log(log, LastSplit(), CsvFormat(), tmp_path, seed=s).test] for s in (1, 1, 2))
    assert len(one) == 7
    assert one == sorted(one) == same != other


def dated(folder: Path, raw: dict[str, Any], more: Sequence[str] = (), least: Any = 1) -> Split:
    events = ["a p 1", "a q 2", "a r 20", "a s 40", "b p 3", "b q 30", "b r 31", "c p 50", "d r 5", "d s 6", "d p 7", *more]
    (folder / "log.csv").write_text("\n".join(["user,item,time", *(event.replace(" ", ",") for event in events)]) + "\n")
    form = CsvFormat(timestamp="time", order="timestamp", min_user_events=least)
    return split_log(read_interactions(folder / "log.csv", form, folder), DateSplit.model_validate(raw), form, folder, seed=1)


def lists(split: Split) -> dict[str, list[str]]:
    users, items = split.lists.user_ids.to_pylist(), split.lists.item_ids.to_pylist()
    return {users[user]: [items[row] for row in split.lists.of(user)] for user in split.train.tolist()}


def named(split: Split, pairs: Sequence[EvaluationPair]) -> list[tuple[str, list[str], list[str]]]:
    users, items = split.lists.user_ids.to_pylist(), split.lists.item_ids.to_pylist()
    return [(users[pair.user], [items[row] for row in pair.history], [items[row] for row in pair.relevant]) for pair in pairs]


def shown(pairs: Sequence[EvaluationPair]) -> list[tuple[int, list[int], list[int]]]:
    return [(pair.user, pair.history.tolist(), pair.relevant.tolist()) for pair in pairs]


def test_the_first_half_is_the_query_and_the_whole_second_half_is_relevant_of_lists_long_enough() -> None:
    pairs = halves(log_of([[4, 3, 2, 1, 0], [1, 1], [3]]), np.array([1, 0, 2]), seed=0)
    assert shown(pairs) == [(1, [1], [1]), (0, [4, 3], [2, 1, 0])]


def test_a_users_shuffle_depends_on_the_seed_but_not_on_the_other_users() -> None:
    log = log_of([list(range(40))] * 6, "none")
    together, alone = halves(log, np.arange(6), seed=5), halves(log, np.array([4]), seed=5)
    assert sorted([*alone[0].history, *alone[0].relevant]) == list(range(40))
    assert_array_equal(together[4].history, alone[0].history)
    assert not np.array_equal(together[4].history, together[3].history)
    assert not np.array_equal(alone[0].history, halves(log, np.array([4]), seed=6)[0].history)


@pytest.mark.parametrize("order", ["file", "none"])
def test_hardly_anything_changes_for_the_users_of_a_log_that_has_grown(tmp_path: Path, order: Order) -> None:
    """No user that was learned from is a test user of the next version of a model."""
    log_lists = np.random.default_rng(1).integers(0, 50, (600, 6)).tolist()
    before, after = (split_log(log_of(some, order), UserSplit(), CsvFormat(), tmp_path, seed=3) for some in (log_lists[:500], log_lists))
    asked, asked_later = ({user: query for user, *query in named(split, split.test)} for split in (before, after))
    assert (len(asked), len(asked_later)) == (50, 60)
    assert not asked_later.keys() & lists(before).keys()
    assert len(asked.keys() & asked_later.keys()) > 40
    assert all(asked[user] == asked_later[user] for user in asked.keys() & asked_later.keys())


def test_without_seen_takes_the_history_out_of_what_is_relevant() -> None:
    pairs = [EvaluationPair(0, np.array([1, 2]), np.array([2, 3, 3])), EvaluationPair(1, np.array([1]), np.array([1]))]
    assert shown(without_seen(pairs)) == [(0, [1, 2], [3, 3])]


@pytest.mark.parametrize("config", [UserSplit(unseen_items=0.3, test_share=0.2, validation_share=0.2), LastSplit(unseen_items=0.3)])
def test_of_some_items_nothing_is_learned_but_they_are_asked_for(tmp_path: Path, config: UserSplit | LastSplit) -> None:
    log = log_of([*np.random.default_rng(1).integers(0, 20, (60, 8)).tolist(), [19, 19]])
    whole = split_log(log, config.model_copy(update={"unseen_items": 0.0}), CsvFormat(), tmp_path, seed=4)
    split = split_log(log, config, CsvFormat(), tmp_path, seed=4)
    hidden = np.flatnonzero(splits.drawn_items(log.item_ids, 0.3, 4))
    assert len(hidden) == 6
    assert split.lists.item_count == 20
    for shorter, longer in ((split, whole), (split.whole(), whole.whole())):
        for user in longer.train:
            items = longer.lists.of(user)
            assert_array_equal(shorter.lists.of(user), items[~np.isin(items, hidden)])
        assert (np.diff(shorter.lists.offset_U1)[shorter.train] > 0).all()
    assert shown(split.test) == shown(whole.test)
    assert np.isin(np.concatenate([pair.relevant for pair in split.test]), hidden).any()


# -- models under each protocol -----------------------------------------------------------------------------------------


CPU = torch.device("cpu")
USERS, ITEMS, EVENTS = 60, 40, 12
SPLITS: dict[str, dict[str, Any]] = {
    "users": {"test_share": 0.2, "validation_share": 0.2},
    "last": {},
    "date": {},
    "file": {"validation_share": 0.3},
}


def write_timed_log(file: Path) -> Path:
    """User u's event n is at time 3 n + u mod 3."""
    rng = np.random.default_rng(7)
    rows = [(f"u{user}", f"i{item}", 3 * n + user % 3) for user in range(USERS) for n, item in enumerate(rng.permutation(ITEMS)[:EVENTS])]
    file.write_text("user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in rows))
    return file


def config_under(kind: str, folder: Path, log: Path) -> DeepConfig:
    (folder / "test.csv").write_text("user,item,time\n" + "".join(f"u{user},i{user % ITEMS},99\n" for user in range(0, USERS, 4)))
    split = {"kind": kind} | SPLITS[kind] | ({"test": str(folder / "test.csv")} if kind == "file" else {})
    return deep_config(
        {
            "kind": "otm-robust",
            "name": "shop",
            "data": {"log": str(log), "format": {"timestamp": "time", "order": "timestamp", "min_user_events": 1}, "split": split},
            "instances": {"windows": [4, 2]},
            "scorer": {"node_dim": 4, "hidden": []},
            "optimiser": {"steps": 3, "batch": 8},
            "search": {"beam_size": 8, "m": 5, "max_m": 40, "max_beam_size": 64},
        }
    )


Trained = Callable[[str], tuple[DeepConfig, Path, Bundle]]
"""The configuration, the log and the model of a protocol."""


@pytest.fixture(scope="module")
def trained_under(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model of each protocol, trained when it is first asked for."""
    models: dict[str, tuple[DeepConfig, Path, Bundle]] = {}

    def of(kind: str) -> tuple[DeepConfig, Path, Bundle]:
        if kind not in models:
            folder = tmp_path_factory.mktemp(kind)
            log = write_timed_log(folder / "log.csv")
            config = config_under(kind, folder, log)
            bundle = fit_and_export(config, None, folder / "shop/1", CPU, resume=False)
            assert bundle is not None
            models[kind] = config, log, bundle
        return models[kind]

    return of


@pytest.mark.parametrize(("kind", "queries", "relevant"), [("users", 12, 6), ("last", USERS, 1), ("date", USERS, None), ("file", 15, 1)])
def test_a_model_is_measured_on_the_queries_of_its_protocol(trained_under: Trained, kind: str, queries: int, relevant: int | None) -> None:
    _, log, bundle = trained_under(kind)
    held, of_log = held_out_pairs(bundle), held_out_log(bundle, log).pairs
    assert len(held) == len(of_log) == queries
    assert [set(pair.relevant) for pair in held] == [set(pair.relevant) for pair in of_log]
    assert [pair.history.tolist() for pair in held] == [pair.history.tolist() for pair in of_log], "also what the model does not read"
    if relevant is not None:
        assert {len(pair.relevant) for pair in held} == {relevant}
    of_ranker = from_log(bundle, None, "training", exclude_seen=False)
    assert [set(items) for items in of_ranker.test.items] == [set(pair.relevant) for pair in of_log]
    assert len(of_ranker.train) > 0


def test_dates_that_training_chose_hold_for_a_log_that_has_grown(trained_under: Trained, tmp_path: Path) -> None:
    _, written, bundle = trained_under("date")
    log = tmp_path / "log.csv"
    log.write_text(written.read_text())
    split = config_of(bundle.manifest, DeepConfig).data.split
    assert isinstance(split, DateSplit)
    assert split.test_from is not None
    before = held_out_log(bundle, log).pairs
    with log.open("a") as file:
        file.writelines(f"u{user},i{(user + n) % ITEMS},{200 + n}\n" for user in range(USERS) for n in range(20))
    after = held_out_log(bundle, log).pairs
    assert [pair.history.tolist() for pair in before] == [pair.history.tolist() for pair in after]
    assert all(len(late.relevant) > len(early.relevant) for early, late in zip(before, after, strict=True))


def test_what_a_model_lacks_of_a_log_that_has_grown_is_counted(
    trained_under: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, written, bundle = trained_under("date")
    log, report = tmp_path / "log.csv", tmp_path / "rows.json"
    # One user has two items more, which the model lacks, one of them twice; another, who knows nothing else, has three in all.
    events = ["u0,new-1,300", "u0,new-2,301", "u0,new-2,302", "stranger,new-1,1", "stranger,i0,303", "stranger,new-3,304"]
    log.write_text("\n".join([written.read_text().rstrip("\n"), *events, ""]))
    before = held_out_log(bundle, written).pairs
    relevant = sum(len(np.unique(pair.relevant)) for pair in before)
    options = ("evaluate", "--model", bundle.path, "--m", "5,5", "--data")
    assert command(*options, log, "--beam", "8,8", "--json", report).status == 0
    written_report = json.loads(report.read_text())
    counts = {"relevant": 3, "of_relevant": relevant + 4, "queries": 1, "of_queries": len(before) + 1}
    assert written_report["unknown"] == counts | {"share": 3 / (relevant + 4)}
    items = f"3 of {relevant + 4} relevant items ({3 / (relevant + 4):.1%})"
    left_out = f"{items} and 1 of {len(before) + 1} test queries of the log are left out: the model lacks items"
    assert written_report["warnings"] == [left_out]
    assert f"WARNING: {left_out}" in caplog.text
    caplog.clear()
    assert [(row["beam_size"], row["m"]) for row in written_report["rows"]] == [(8, 5)], "a number counts once"
    assert command(*options, written, "--beam", "8").status == 0
    assert "left out" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("last", "training.data.interactions._kept_items"),
        ("last", "training.data.cut_lists.counts_by_user"),
        ("file", "training.data.splits._rows"),
    ],
)
def test_what_a_killed_run_was_writing_goes_when_it_goes_on(tmp_path: Path, kind: str, place: str) -> None:
    config, out = config_under(kind, tmp_path, write_timed_log(tmp_path / "log.csv")), tmp_path / "shop/1"
    work, left = work_folder(out), tmp_path / "left"

    def end_at(name: str, resume: bool) -> set[Path]:
        """What lies in the work folder when the run is killed."""

        def killed(*_: object, **__: object) -> None:
            shutil.rmtree(left, ignore_errors=True)
            shutil.copytree(work, left)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(name, killed)
            with pytest.raises(KeyboardInterrupt):
                fit_and_export(config, None, out, CPU, resume)
        shutil.rmtree(work, ignore_errors=True)  # a run that an error ends deletes its first files itself
        shutil.copytree(left, work)
        return {path.relative_to(left) for path in left.rglob("*")}

    trained = "training.deep.run.train_and_export"
    whole, unfinished = end_at(trained, resume=False), end_at(place, resume=False)
    assert not unfinished <= whole
    assert end_at(trained, resume=True) == whole


# -- training instances ---------------------------------------------------------------------------------------------------


STEPS = 5
SIZE = 40

lists_of_users = st.lists(st.integers(2, 30), min_size=1, max_size=6)


def distinct_lists(lengths: list[int]) -> list[list[int]]:
    """Users without an item in common, items counting up, so that an item says whose it is and where it stood."""
    start = np.concatenate([[0], np.cumsum(lengths)])
    return [list(range(start[user], start[user + 1])) for user in range(len(lengths))]


def source(lists: list[list[int]], seed: int = 3, order: Any = "file", **config: Any) -> InstanceSource:
    settings = InstanceConfig.model_validate({"windows": (4, 2, 1), "cold_share": 0.0} | config)
    return InstanceSource(log_of(lists, order), np.arange(len(lists)), settings, seed)


def instances(drawn: InstanceSource, steps: int = STEPS) -> list[tuple[list[int], list[int]]]:
    """(history, targets) without padding, after checking that padding is where it belongs."""
    found = []
    for step in range(steps):
        batch = drawn.batch(step, SIZE)
        assert batch.query.shape == (SIZE, drawn.length)
        assert batch.query.dtype == batch.target_BP.dtype == np.int64
        for history, targets in zip(batch.query.tolist(), batch.target_BP.tolist(), strict=True):
            known, wanted = [item for item in history if item >= 0], [item for item in targets if item >= 0]
            assert history == [-1] * (len(history) - len(known)) + known
            assert targets == wanted + [-1] * (len(targets) - len(wanted))
            found.append((known, wanted))
    return found


def whose(lists: list[list[int]], targets: list[int]) -> list[int]:
    return next(items for items in lists if targets[0] in items)


@given(lists_of_users, st.integers(0, 2**32))
def test_history_and_targets_are_what_lies_before_and_after_a_cut(lengths: list[int], seed: int) -> None:
    lists = distinct_lists(lengths)
    for history, targets in instances(source(lists, seed, targets=100)):
        items = whose(lists, targets)
        cut = len(items) - len(targets)
        assert cut >= 1
        assert targets == items[cut:]
        assert history == items[max(0, cut - 7) : cut]


@given(lists_of_users)
def test_the_half_split_cuts_in_the_middle(lengths: list[int]) -> None:
    lists = distinct_lists(lengths)
    for history, targets in instances(source(lists, split="half", targets=100)):
        items = whose(lists, targets)
        middle = len(items) // 2
        assert (history, targets) == (items[max(0, middle - 7) : middle], items[middle:])


def test_the_random_split_cuts_everywhere_alike() -> None:
    lists = distinct_lists([11])
    cuts = [11 - len(targets) for _, targets in instances(source(lists, targets=100), steps=50)]
    times = np.bincount(cuts, minlength=12)[1:11]
    assert len(cuts) == times.sum()
    assert_array_equal(np.abs(times - 200) < 5 * np.sqrt(200), True)


@given(lists_of_users, st.integers(1, 12))
def test_a_cap_takes_that_many_targets_in_order_from_after_the_cut(lengths: list[int], cap: int) -> None:
    lists = distinct_lists(lengths)
    for history, targets in instances(source(lists, targets=cap)):
        items = whose(lists, targets)
        rest = items[items.index(history[-1]) + 1 :]
        assert len(targets) == min(cap, len(rest))
        assert targets == sorted(targets)
        assert set(targets) <= set(rest)
        assert targets == rest or len(rest) > cap
        assert cap > 1 or targets == rest[:1], "a single target is the next item"
        assert len(set(targets)) == len(targets)


def test_a_cap_reaches_every_item_after_the_cut() -> None:
    rest = range(5, 10)
    times = np.zeros(10)
    for _, targets in instances(source(distinct_lists([10]), split="half", targets=2), steps=50):
        times += np.bincount(targets, minlength=10)
    assert times[:5].sum() == 0
    expected = times.sum() / len(rest)
    assert_array_equal(np.abs(times[5:] - expected) < 6 * np.sqrt(expected), True)


@given(lists_of_users)
def test_a_list_without_an_order_is_cut_into_disjoint_random_parts(lengths: list[int]) -> None:
    lists = distinct_lists(lengths)
    for history, targets in instances(source(lists, order="none", targets=100)):
        items = whose(lists, targets)
        assert set(history) <= set(items)
        assert set(targets) <= set(items)
        assert not set(history) & set(targets)
        assert len(set(history)) == len(history)
        assert len(history) == min(7, len(items) - len(targets))


def test_without_an_order_every_item_is_as_often_in_the_history() -> None:
    times = np.zeros(8)
    drawn = instances(source(distinct_lists([8]), order="none", split="half", targets=100), steps=50)
    for history, _ in drawn:
        times += np.bincount(history, minlength=8)
    assert_array_equal(np.abs(times - len(drawn) / 2) < 5 * np.sqrt(len(drawn) / 4), True)
    assert len({tuple(history) for history, _ in drawn}) > 100  # not one permutation for all


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_a_share_of_the_instances_is_cold_and_keeps_the_whole_list_as_targets(share: float) -> None:
    lists = distinct_lists([9, 5])
    drawn = instances(source(lists, cold_share=share, targets=100), steps=50)
    cold = [targets for history, targets in drawn if not history]
    assert abs(len(cold) - share * len(drawn)) <= 5 * np.sqrt(share * (1 - share) * len(drawn))
    assert all(targets in lists for targets in cold)


def test_users_are_drawn_alike_whatever_the_length_of_their_lists() -> None:
    lists = distinct_lists([2, 30, 9, 4])
    drawn = instances(source(lists), steps=50)
    times = np.bincount([lists.index(whose(lists, targets)) for _, targets in drawn], minlength=4)
    assert_array_equal(np.abs(times - len(drawn) / 4) < 5 * np.sqrt(len(drawn) / 4), True)


def same(one: Instances, other: Instances) -> bool:
    return np.array_equal(one.query, other.query) and np.array_equal(one.target_BP, other.target_BP)


@pytest.mark.parametrize("order", ["file", "none"])
def test_a_batch_depends_on_the_seed_and_the_step_alone(order: str) -> None:
    lists = distinct_lists([12, 7, 20])
    one, other = source(lists, order=order), source(lists, order=order)
    later = other.batch(4, SIZE)
    assert same(one.batch(4, SIZE), later)  # whatever was drawn before
    assert not same(one.batch(4, SIZE), one.batch(5, SIZE))
    assert not same(one.batch(4, SIZE), source(lists, seed=4, order=order).batch(4, SIZE))


def test_only_the_given_users_with_two_events_or_more_are_drawn() -> None:
    lists = [[0], [1, 2, 3], [4, 5], [6, 7]]
    drawn = InstanceSource(log_of(lists), np.array([0, 1, 3]), InstanceConfig(targets=100), 1)
    seen = {item for history, targets in instances(drawn) for item in history + targets}
    assert seen == {1, 2, 3, 6, 7}
    with pytest.raises(InvalidData, match="log: got '2 training users', expected at least one with two events or more"):
        source([[0], [1]])
