"""Seen items in the answers of baselines: where they are put, and how validation queries choose that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from espalier.arrays import Array, Int64
from espalier.memory import BUCKETS
from espalier.search import NO_ITEM
from tests.training.logs import log_of, task_of
from training.baselines.methods import METHODS
from training.data.splits import EvaluationPair
from training.retrieval import repeats
from training.retrieval.task import Metric
from training.retrieval.tuning import CUTS, Figures


def rank_rows(queries: Sequence[Array], m: int, exclude_seen: bool) -> Int64:
    """Items by their row."""
    return np.array([[item for item in range(60) if not exclude_seen or item not in query][:m] for query in queries])


@pytest.mark.parametrize(
    ("places", "order", "found"),
    [
        ((repeats.OWN,) * 6, "newest", [0, 1, 2, 3, 4, 5]),
        ((repeats.LEFT_OUT,) * 6, "most frequent", [0, 2, 4, 5, 6, 7]),
        ((0, repeats.OWN, repeats.LEFT_OUT, 0, 0, 0), "newest", [3, 0, 2, 4, 5, 6]),
        ((0, 0, 2, 0, 0, 0), "newest", [3, 9, 0, 2, 1, 4]),
        ((0, 0, 0, 0, 0, 0), "newest", [3, 9, 1, 0, 2, 4]),
        ((0, 0, 0, 0, 0, 0), "most frequent", [1, 3, 9, 0, 2, 4]),
        ((2, 2, 0, 0, 0, 0), "most frequent", [1, 0, 2, 3, 9, 4]),
        ((100, 5, 5, 0, 0, 0), "newest", [0, 2, 4, 5, 6, 9]),
    ],
)
def test_seen_items_stand_where_their_buckets_say(places: tuple[int, ...], order: repeats.Order, found: list[int]) -> None:
    """Item 3 came last now, 9 one place ago and 1 two; 3 came once more, 1 twice."""
    history = np.array([-1, 1, 3, 1, 1, 9, 3])
    rank = partial(repeats.rank_placed, rank_rows, places, order)
    assert rank([history], 6, exclude_seen=False).tolist() == [found]
    assert rank([history], 6, exclude_seen=True).tolist() == [[0, 2, 4, 5, 6, 7]]


@pytest.mark.parametrize(("order", "found"), [("newest", [9, 50, 1]), ("most frequent", [50, 1, 9]), ("own", [1, 9, 50])])
def test_items_at_the_same_place_have_an_order(order: repeats.Order, found: list[int]) -> None:
    """Item 50 is not in the method's answer of 9 + 6 items. Of equally frequent ones the newest is first, and nothing comes twice."""
    history = np.array([1, 50, 1, 50, 50, 9])
    assert repeats.rank_placed(rank_rows, (0,) * 6, order, [history], 9, False).tolist() == [[*found, 0, 2, 3, 4, 5, 6]]
    history = np.array([50, 9, 1])
    assert repeats.rank_placed(rank_rows, (0,) * 6, "most frequent", [history], 3, False).tolist() == [[1, 9, 50]]


def test_short_answers_end_in_no_item() -> None:
    """The method knows one item that is not in the history; an item that stays where the method put it, that is nowhere, is not found."""

    def rank(queries: Sequence[Array], /, m: int, exclude_seen: bool) -> Int64:
        return np.array([[7, *[NO_ITEM] * (m - 1)]] * len(queries))

    histories = [np.array([3, 4]), np.array([], np.int64), np.array([7])]
    places = (0, *[repeats.OWN] * 5)
    found = repeats.rank_placed(rank, places, "newest", histories, 4, False)
    assert found.tolist() == [[4, 7, NO_ITEM, NO_ITEM], [7, *[NO_ITEM] * 3], [7, *[NO_ITEM] * 3]]
    assert repeats.rank_placed(rank, places, "newest", [], 4, False).shape == (0, 4)


def test_the_first_ranks_decide_between_choices_that_recall_finds_level() -> None:
    """The item that came last comes again. Recall@10 would put it third: one history has so many items that they displace the answer."""
    rng = np.random.default_rng(5)
    pairs = [EvaluationPair(0, history, history[1:]) for history in (rng.choice(np.arange(20, 60), 2, replace=False) for _ in range(80))]
    pairs.append(EvaluationPair(0, np.arange(20, 31), np.array([0])))
    order, places = repeats.best_places(rank_rows, pairs, Metric("recall", 50), has_order=False)
    assert set(places) == {0}
    assert order == "newest"


def test_items_that_come_again_may_keep_the_methods_order() -> None:
    """Of a long history the item that the method ranks first is relevant, though neither the newest nor the most frequent one."""
    rng, pairs = np.random.default_rng(7), []
    for _ in range(60):
        history = rng.permutation(np.arange(20, 50)).repeat(rng.integers(1, 3, 30))
        pairs.append(EvaluationPair(0, history, np.array([20])))
    order, places = repeats.best_places(rank_rows, pairs, Metric("recall", 1), has_order=True)
    found = repeats.rank_placed(rank_rows, places, order, [pair.query for pair in pairs], 1, False)
    assert order == "own"
    assert (found == 20).all()


def test_places_count_the_items_that_stay() -> None:
    """A method that ranks a long history first: its items may still come after the first new ones, which are mostly the answers."""
    rng, pairs = np.random.default_rng(8), []

    def rank(queries: Sequence[Array], /, m: int, exclude_seen: bool) -> Int64:
        rows = [np.unique(query) for query in queries]
        return np.array([[*row, *np.setdiff1d(np.arange(400), row)][:m] for row in rows])

    for number in range(80):
        history = rng.choice(np.arange(20, 200), 120, replace=False)
        pairs.append(EvaluationPair(0, history, np.sort(history)[-1:] if number % 4 == 0 else np.array([number % 5])))
    order, places = repeats.best_places(rank, pairs, Metric("recall", 50), has_order=False)
    found = repeats.rank_placed(rank, places, order, [pair.query for pair in pairs], 200, False)
    assert Metric("recall", 10).of(found, pairs).mean() >= 0.75
    assert Metric("recall", 200).of(found, pairs).mean() == 1


def test_a_gain_in_the_first_ten_does_not_make_up_for_a_loss_in_fifty() -> None:
    """A favourite comes again now and then; otherwise one of the first 50 items is relevant, which the history would displace."""
    rng, pairs = np.random.default_rng(9), []
    for number in range(400):
        history = rng.permutation(np.append(np.arange(60, 110), [60] * 4) + 50 * rng.integers(0, 3))
        pairs.append(EvaluationPair(0, history, np.array([history.min() if number % 4 == 0 else int(rng.integers(50))])))

    def rank(queries: Sequence[Array], /, m: int, exclude_seen: bool) -> Int64:
        return np.tile(np.arange(m), (len(queries), 1))

    order, places = repeats.best_places(rank, pairs, Metric("recall", 50), has_order=False)
    found = repeats.rank_placed(rank, places, order, [pair.query for pair in pairs], 50, False)
    assert Metric("recall", 50).of(found, pairs).mean() > 0.7


def test_a_better_order_of_the_first_ranks_does_not_cost_recall() -> None:
    """The item that came last is the answer to some, and would stand first; with it left out, the tenth place has the others' answer."""
    rng, pairs = np.random.default_rng(6), []
    for number in range(90):
        history = rng.choice(np.arange(20, 60), 1)
        pairs.append(EvaluationPair(0, history, history if number % 3 == 0 else np.array([9])))
    _, places = repeats.best_places(rank_rows, pairs, Metric("recall", 50), has_order=True)
    assert places[0] not in (0, 2, 5)


@pytest.mark.parametrize("again", [False, True])
def test_a_method_places_seen_items_as_validation_queries_say(again: bool) -> None:
    rng = np.random.default_rng(2)
    pairs = []
    for _ in range(60):
        history = rng.choice(np.arange(4, 60), 5, replace=False)
        pairs.append(EvaluationPair(0, history, history[-2:-1] if again else np.array([3])))
    _, places = repeats.best_places(rank_rows, pairs, Metric("recall", 1), has_order=True)
    if again:
        assert places[1] in (0, 2, 5), "within the least of the cuts"
    else:
        assert places == (repeats.OWN,) * 6, "a place that changes nothing is not taken"
    assert repeats.best_places(rank_rows, pairs[:29], Metric("recall", 1), has_order=True) == ("newest", (repeats.OWN,) * 6)


def test_places_are_chosen_by_the_top_of_a_list_and_by_its_length() -> None:
    """By recall@50 alone all places above it are as good; the last item, which never comes again, would push another one out of the top."""
    rng, pairs = np.random.default_rng(3), []
    for number in range(60):
        history = rng.choice(np.arange(12, 60), 2, replace=False)
        pairs.append(EvaluationPair(0, history, history[:1] if number % 2 else np.array([8])))
    _, places = repeats.best_places(rank_rows, pairs, Metric("recall", 50), has_order=True)
    assert places[1] in (0, 2, 5)
    assert places[0] not in (0, 2, 5)


@pytest.mark.parametrize("others", [4, 11])
@pytest.mark.parametrize("favourite", [False, True])
def test_the_most_frequent_item_stands_first_if_it_comes_again(favourite: bool, others: int) -> None:
    """Else the last one does. The least of the cuts is 10, so with 4 other items nDCG decides."""
    rng, pairs = np.random.default_rng(4), []
    for _ in range(60):
        often, *once = rng.choice(np.arange(12, 60), 1 + others, replace=False).tolist()
        pairs.append(EvaluationPair(0, np.array([often, often, *once]), np.array([often if favourite else once[-1]])))
    order, places = repeats.best_places(rank_rows, pairs, Metric("recall", 1), has_order=False)
    assert set(places) == {0}
    assert (order == "most frequent") == favourite


def test_every_baseline_places_seen_items_where_they_count() -> None:
    """In this log each list is one item again and again, or two in turns."""
    lists = [[item, item + 10] * 4 for item in range(10)] * 12
    task = task_of(log_of(lists, items=20), list(range(60)), list(range(60, 120)))
    fitted = METHODS["popularity"](replace(task, exclude_seen=False))
    assert fitted.options["seen"][:2] == [0, 0]
    limited = replace(task, exclude_seen=True, seconds=60.0)
    assert "seen" not in METHODS["popularity"](limited).options, "time is not spent on what does not count"


@pytest.mark.parametrize(("share", "chosen"), [(0.5, 0), (1.0, 1)])
def test_a_gain_in_ndcg_that_could_be_chance_changes_nothing(share: float, chosen: int) -> None:
    """Recall is level. The other value has a higher nDCG for `share` of the queries, and a slightly less lower one for the rest."""
    recall = Figures(np.full((len(CUTS), 40), 0.5))
    gain_B = np.where(np.arange(40) < 40 * share, 0.11, -0.1)

    def measured(order: repeats.Order, choice: repeats.Choice) -> repeats.Measured:
        return repeats.Measured(recall, Figures((0.5 + gain_B * (choice == (1,) * BUCKETS))[None]))

    assert repeats.chosen_by_bucket((0, 1), measured, has_order=False) == ("own", (chosen,) * BUCKETS)


@pytest.mark.parametrize(("has_order", "chosen"), [(True, (1, 1, 0, 0, 0, 0)), (False, (0, 0, 0, 0, 0, 0))])
def test_the_newest_places_may_have_a_value_of_their_own(has_order: bool, chosen: tuple[int, ...]) -> None:
    """Recall is level, and neither of the two newest places alone has a higher nDCG."""
    recall = Figures(np.full((len(CUTS), 40), 0.5))

    def measured(order: repeats.Order, choice: repeats.Choice) -> repeats.Measured:
        return repeats.Measured(recall, Figures(np.full((1, 40), 0.6 if choice == (1, 1, 0, 0, 0, 0) else 0.5)))

    assert repeats.chosen_by_bucket((0, 1), measured, has_order=has_order) == ("own", chosen)
