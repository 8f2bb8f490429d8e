"""What the probe asks of live items: new ones by what they were put in with, and held-out queries with them and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle
from espalier.arrays import Bool, Int64
from espalier.bundle import Bundle
from espalier.items import ItemTable
from espalier.live.operations import ItemBody, Operation
from espalier.masks.eligibility import bundle_alone
from espalier.queries import QueryBatch
from espalier.search import SearchParams, SearchResult
from espalier.tree import complete_tree
from service.live.live_version import LiveVersion
from service.live.recent_puts import RECENT, RecentPuts
from service.models.live_replay import CANARY_ANSWERS, MAX_TRIES, MIN_CANARY_ANSWERS, MIN_GAINS, LiveReplay

ITEMS, HELD_OUT = 64, 40
NEW = [f"new-{i}" for i in range(20)]


class Catalogue(ItemTable):
    """The bundle's items, and new ones behind them."""

    def __init__(self, trained: ItemTable) -> None:
        self._trained = trained

    def rows_of(self, ids: Sequence[str]) -> Int64:
        rows = self._trained.rows_of(ids)
        return np.array([ITEMS + NEW.index(i) if i in NEW else row for i, row in zip(ids, rows.tolist(), strict=True)], np.int64)


class Live:
    """Live items that a test decides on."""

    def __init__(self, bundle: Bundle) -> None:
        self.items = Catalogue(bundle.items)
        self.recent = RecentPuts(bundle.manifest.query.kind)
        self.is_empty = False
        self.gone: set[int] = set()

    def eligible(self, rows: Int64) -> Bool:
        return ~np.isin(rows, sorted(self.gone))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    rng = np.random.default_rng(3)
    return make_bundle(tmp_path / "books" / "1", rng, complete_tree(rng.permutation(ITEMS), 2), name="books", beam_size=8, m=5)


@pytest.fixture
def live(bundle: Bundle) -> Live:
    return Live(bundle)


@pytest.fixture
def replay(bundle: Bundle, live: Live) -> LiveReplay:
    return LiveReplay(bundle, cast(LiveVersion, live), HELD_OUT)


def put(sequence: int, item_id: str, *events: object, text: str | None = None, like: tuple[str, ...] = ()) -> Operation:
    return Operation(sequence, item_id, "put", ItemBody({"title": "x"}, text, like, tuple(events)))


def result(*rows: int) -> SearchResult:
    row_BM = np.array([rows], np.int64)
    none_BM = np.zeros(row_BM.shape, np.float32)
    return SearchResult(row_BM, none_BM, none_BM, none_BM, np.array([len(rows)]), np.array([True]))


def history(bundle: Bundle, *rows: int) -> QueryBatch:
    kind = bundle.manifest.query
    array = np.full((1, 5), -1, np.int64)
    if rows:
        array[0, -len(rows) :] = rows
    return QueryBatch(kind, array)


def alone(bundle: Bundle) -> SearchParams:
    """Of a query that sees the bundle alone."""
    return SearchParams.uniform(1, 8, 5, mask=bundle_alone([bundle.tree]))


def asked(replay: LiveReplay, bundle: Bundle, wanted: Sequence[int], frozen: SearchResult, answer: SearchResult) -> list[QueryBatch]:
    """One held-out query, and every question that follows it, all answered alike."""
    replay.after(history(bundle, 1, 2), alone(bundle), np.array(wanted), frozen)
    found = []
    while (question := replay.next()) is not None:
        assert question[1].mask_B is None  # it sees the live items
        found.append(question[0])
        replay.take(answer)
    return found


# -- the items put in last ------------------------------------------------------------------------------------------------


def test_recent_puts_are_asked_for_by_their_queries_the_oldest_first() -> None:
    recent = RecentPuts("history")
    recent.note([put(1, "a", ["x"]), put(2, "b", ["y"]), put(3, "c", like=("d",)), put(4, "e", text="no query of such a model")])
    assert len(recent) == 2
    recent.note([Operation(5, "a", "delete"), put(6, "b", like=("d",))])
    assert recent.next() is None
    recent.note([put(7, "b", ["y"]), put(8, "b")])  # a change of fields alone
    assert recent.next() == ("b", (["y"],))
    recent = RecentPuts("text")
    recent.note([put(1, "a", text="a red hat"), put(2, "b", "hats", text="a blue hat")])
    assert [recent.next(), recent.next()] == [("a", ("a red hat",)), ("b", ("hats",))]
    recent = RecentPuts("history")
    recent.note(put(i + 1, f"i{i}", [str(i)]) for i in range(RECENT))
    recent.note([put(100, "i0", ["again"]), put(101, "last", ["l"])])
    ids = [found[0] for _ in range(RECENT) if (found := recent.next()) is not None]
    assert ids == [*(f"i{i}" for i in range(2, RECENT)), "i0", "last"]


# -- the canary -----------------------------------------------------------------------------------------------------------


def test_the_canary_is_the_share_of_new_items_that_come(bundle: Bundle, live: Live, replay: LiveReplay) -> None:
    live.recent.note([put(1, "new-3", ["item-5"])])
    for i in range(MIN_CANARY_ANSWERS - 1):
        asked(replay, bundle, [1], result(1), result(1, ITEMS + 3) if i % 2 else result(1, 2))
        assert replay.canary_recall is None
    asked(replay, bundle, [1], result(1), result(1, ITEMS + 3))
    assert replay.canary_recall == pytest.approx(4 / MIN_CANARY_ANSWERS)
    for _ in range(CANARY_ANSWERS):
        asked(replay, bundle, [1], result(1), result(1, ITEMS + 3))
    assert replay.canary_recall == 1.0


def test_an_item_is_asked_for_by_one_query_after_the_other_until_one_finds_it(bundle: Bundle, live: Live, replay: LiveReplay) -> None:
    live.recent.note([put(1, "new-3", *([f"item-{i}"] for i in range(10, 18)))])
    missed, hit = result(1, 2), result(1, ITEMS + 3)
    for _ in range(MIN_CANARY_ANSWERS):
        histories = [asked(replay, bundle, [1], result(1), missed)[1].array[0, -1] for _ in range(MAX_TRIES)]
        assert histories == [*range(10, 10 + MAX_TRIES)]
    assert replay.canary_recall == 0.0
    for _ in range(MIN_CANARY_ANSWERS):
        asked(replay, bundle, [1], result(1), missed)
        asked(replay, bundle, [1], result(1), hit)
    assert replay.canary_recall == 0.5


def test_an_item_that_is_deleted_between_two_of_its_queries_does_not_count(bundle: Bundle, live: Live, replay: LiveReplay) -> None:
    live.recent.note([put(1, "new-3", ["item-5"], ["item-6"]), put(2, "new-4", ["item-7"])])
    for _ in range(MIN_CANARY_ANSWERS):
        live.gone = set()
        asked(replay, bundle, [1], result(1), result(1, ITEMS + 4))  # one of the two
        live.gone = {ITEMS + 3}
        asked(replay, bundle, [1], result(1), result(1, ITEMS + 4))
    assert set(replay._hits) == {True}


def test_items_that_no_request_may_get_or_whose_queries_are_of_unknown_items_are_not_asked_for(
    bundle: Bundle, live: Live, replay: LiveReplay
) -> None:
    live.recent.note([put(1, "new-3", ["item-5"]), put(2, "new-4", ["gone", "unknown"]), put(3, "never-applied", ["item-5"])])
    live.gone = {ITEMS + 3}
    for _ in range(6):
        assert len(asked(replay, bundle, [1], result(1), result(1))) == 1
    assert replay.canary_recall is None


def test_a_query_of_another_kind_of_model_is_passed_over(bundle: Bundle, live: Live, replay: LiveReplay, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    tree = complete_tree(rng.permutation(ITEMS), 2)
    vectors = make_bundle(tmp_path / "vectors" / "1", rng, tree, kind="vector", name="vectors", beam_size=8, m=5)
    replay = LiveReplay(vectors, cast(LiveVersion, live), HELD_OUT)
    live.recent.note([put(1, "new-3", [0.5, 0.5])])  # two numbers; the model takes four
    replay.after(QueryBatch(vectors.manifest.query, np.zeros((1, 4), np.float32)), alone(vectors), np.array([1]), result(1))
    assert replay.next() is not None
    assert replay.next() is None


# -- displacement ---------------------------------------------------------------------------------------------------------


def test_displacement_is_the_recall_that_live_items_cost(bundle: Bundle, live: Live, replay: LiveReplay) -> None:
    for _ in range(MIN_GAINS - 1):
        asked(replay, bundle, [1, 2], result(1, 2, 3), result(1, ITEMS, ITEMS + 1))
        assert replay.displacement is None
    asked(replay, bundle, [1, 2], result(1, 2, 3), result(1, 2, ITEMS))
    assert replay.displacement == pytest.approx(-0.5 * (MIN_GAINS - 1) / MIN_GAINS)
    for _ in range(HELD_OUT):
        asked(replay, bundle, [1, 2], result(1, 3), result(1, 2))
    assert replay.displacement == pytest.approx(0.5)


def test_deleted_items_and_results_past_the_fiftieth_do_not_count(bundle: Bundle, live: Live, replay: LiveReplay) -> None:
    live.gone = {2}
    for _ in range(MIN_GAINS):
        asked(replay, bundle, [1, 2], result(1, 2), result(1, 3))
    assert replay.displacement == 0.0
    assert asked(replay, bundle, [2], result(1, 2), result(1, 3)) == []  # nothing is left to find
    replay = LiveReplay(bundle, cast(LiveVersion, live), 1)
    places = [*range(3, 53), 1]
    asked(replay, bundle, [1], result(1), result(*places))
    assert replay.displacement == -1.0
    asked(replay, bundle, [1], result(*places), result(*places[1:]))
    assert replay.displacement == 1.0


def test_while_nothing_is_live_nothing_is_asked_and_nothing_is_displaced(bundle: Bundle, live: Live, replay: LiveReplay) -> None:
    live.recent.note([put(1, "new-3", ["item-5"])])
    for _ in range(MIN_GAINS):
        asked(replay, bundle, [1], result(1), result(2))
    assert [replay.canary_recall, replay.displacement] == [0.0, -1.0]
    live.is_empty = True
    assert replay.displacement == 0.0
    assert asked(replay, bundle, [1], result(1), result(2)) == []
    live.is_empty = False
    assert replay.canary_recall is None  # what was found before is forgotten
    assert replay.displacement is None
