"""What a load test plans: rates, mixes and shapes of load; what it refuses to plan, and what it complains of."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import EspalierError, InvalidConfig
from loadtest.frontier import MAX_FAILED_SHARE, Point, propose
from loadtest.plan import SHAPES, SPIKE, answer_problem, complaints, conditions, mix, plan_of, user_count, users, versions
from tests.loadtest.stub import made_up, results

USUAL: dict[str, object] = dict.fromkeys(("model", "key", "admin_key", "write_key", "versions", "queries", "filter"), "")
USUAL |= {"rate": 20.0, "seconds": 1.0, "reload_every": 1.0, "filter_share": 0.0, "write_rate": 0.0, "exclude_seen": False}
USUAL |= {"beam_mix": "8", "m_mix": "8", "shape": "steady", "seed": 0}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"rate": 0.0}, "--rate: got 0.0, expected a number above 0"),
        ({"seconds": float("inf")}, "--seconds: got inf, expected a number above 0"),
        ({"filter_share": 1.5}, "--filter-share: got 1.5, expected 0 to 1"),
        ({"filter_share": 0.5}, "--filter: got '', expected a filter"),
        ({"beam_mix": "8,65:0"}, "--beam-mix: got 65, expected 1 to 64, the limit of model books"),
        ({"m_mix": "65"}, "--m-mix: got 65, expected 1 to 64, the limit of model books"),
        ({"shape": "reload"}, "--admin-key is missing; expected a key of the role admin"),
        ({"shape": "reload", "admin_key": "a-key"}, "--versions: got [1], expected two versions or more"),
        ({"write_rate": -1.0}, "--write-rate: got -1.0, expected a number of at least 0"),
        ({"write_rate": 5.0}, "--write-key is missing; expected a key of the role write"),
        ({}, "models/books/1/manifest.json"),
    ],
)
def test_a_test_that_cannot_be_done_says_why(tmp_path: Path, options: dict[str, object], wanted: str) -> None:
    given = Namespace(**USUAL | {"models": tmp_path / "models"} | options)
    with made_up(lambda body: (200, {})) as url, pytest.raises(EspalierError, match=re.escape(wanted)):
        plan_of(url, given)
    with pytest.raises(InvalidConfig, match="--host is missing; expected http"):
        plan_of(None, given)


def test_mixes_filters_versions_and_shapes_are_read_and_what_was_not_good_enough_is_told() -> None:
    assert mix("50:1,100:8.5,400") == ([50, 100, 400], [1.0, 8.5, 1.0])
    assert conditions("") == {}
    assert conditions('{"section": ["libs"]}') == {"section": ["libs"]}
    assert (versions(""), versions("1,2")) == ([], [1, 2])
    assert [user_count("ramp", 10, passed) for passed in (0, 0.25, 0.5, 1)] == [1, 3, 5, 10]
    assert [user_count("spike", 10, passed) for passed in (0, 0.32, 0.34, 0.6, 0.67, 1)] == [10, 10, 30, 30, 10, 10]
    assert {user_count("steady", 10, passed) for passed in (0, 0.5, 1)} == {10}
    assert complaints(1000, 10, 10, 0, 0.01, 0.01) == []
    assert len(complaints(1000, 11, 11, 1, 0.01, 0.01)) == 3
    assert complaints(0, 0, 0, 0, 1, 1) == ["no request was sent"]


@pytest.mark.parametrize("text", ["", "x", "0", "5:-1", "5:0", "5:nan", "5:1:1"])
def test_a_wrong_mix_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="expected VALUE:WEIGHT"):
        mix(text)


@given(st.sampled_from(SHAPES), st.floats(0.1, 2000), st.floats(0, 1))
def test_there_are_never_no_users_and_never_more_than_a_spike_has(shape: str, rate: float, passed: float) -> None:
    most = users(rate)
    assert rate / most <= 5
    assert 1 <= user_count(shape, most, passed) <= (SPIKE if shape == "spike" else 1) * most


@pytest.mark.parametrize(
    ("found", "complete", "eligible", "wrong"),
    [(5, True, 100, False), (4, True, 100, True), (4, False, 100, False), (4, True, 4, False), (4, True, 0, False), (6, True, 0, True)],
)
def test_an_answer_has_as_many_items_as_there_can_be(found: int, complete: bool, eligible: int, wrong: bool) -> None:
    assert (answer_problem(results(found, complete), 5, eligible) is not None) == wrong
    assert answer_problem({}, 5, eligible) == "0 results to one query"


# -- the beam that a latency budget buys ----------------------------------------------------------------------------------


POINTS = st.lists(
    st.builds(
        Point,
        beam_size=st.integers(1, 1000),
        m=st.sampled_from([10, 50]),
        loop=st.sampled_from(["closed", "open"]),
        recall=st.none() | st.floats(0, 1),
        p99_ms=st.just(float("nan")) | st.floats(0.01, 100),
        requests_per_s=st.just(100.0),
        samples=st.integers(0, 1000),
        failed_share=st.sampled_from([0.0, 0.005, 0.5]),
    ),
    max_size=20,
)


@given(POINTS, st.floats(0.01, 120))
def test_the_proposed_beam_is_the_best_within_the_budget(points: list[Point], budget_ms: float) -> None:
    proposals = propose(points, budget_ms)
    assert {(proposal.m, proposal.loop) for proposal in proposals} == {(point.m, point.loop) for point in points}
    assert [proposal.loop for proposal in proposals if proposal.m == 10] in ([], ["open"], ["closed"], ["open", "closed"])
    for proposal in proposals:
        mine = [point for point in points if (point.m, point.loop) == (proposal.m, proposal.loop)]
        answered = [point for point in mine if point.failed_share <= MAX_FAILED_SHARE and point.p99_ms > 0]
        measured = [point for point in answered if point.recall is not None] or answered
        within = [point for point in measured if point.p99_ms <= budget_ms]
        if proposal.best is None:
            assert not within
            assert (proposal.fastest is None) == (not answered)
        else:
            assert proposal.best in within
            assert all((point.recall or 0) <= (proposal.best.recall or 0) for point in within)
            assert proposal.best.recall is not None or proposal.best.beam_size == max(point.beam_size for point in within)
