"""The beam that a latency budget buys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.proposal import MAX_FAILED_SHARE, Point, propose

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
