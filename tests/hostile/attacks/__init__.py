"""What hostile clients do to a service over HTTP, for tests/hostile and `python -m benchmarks.hostile`.

An attack is a function of a Target that says whether the service did what it should. How the service was meanwhile, others measure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.hostile.attacks import answers, bodies, connections, heads, live, pipelining, requests
from tests.hostile.attacks.target import Limits, Seen, Target

__all__ = ["ATTACKS", "Attack", "Limits", "Seen", "Target"]


class Attack(NamedTuple):
    """One attack.

    bound_mb       megabytes that the service may take for it beyond what it has when idle; None: half of that
    fills          it may take every connection that the service allows, so that /livez on a new one may be answered 503
    writes         it writes to the live catalogue: the service needs a write key, and a models folder of its own
    """

    run: Callable[[Target], Seen]
    bound_mb: float | None = None
    fills: bool = False
    writes: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", "-")


def nothing(target: Target) -> Seen:
    """No attack: how a quiet service is on this machine, now."""
    target.wait(3)
    return Seen(True, "nothing was done")


MASKS_MB = Limits().mask_cache_bytes / 1e6
"""Masks of filters are kept up to a bound of their own."""

LIVE = (
    live.abandoned_bulks,
    live.unread_bulks,
    live.silent_bulks,
    live.endless_line,
    live.empty_lines,
    live.wrong_lines,
    live.one_item_for_ever,
    live.items_that_have_expired,
    live.items_that_expire_together,
    live.items_that_come_and_go,
    live.waiting_for_what_never_comes,
    live.tags_without_end,
)

ATTACKS = {
    attack.name: attack
    for attack in (
        Attack(nothing),
        Attack(heads.endless_header),
        Attack(heads.endless_chunk_extension),
        Attack(heads.endless_trailers),
        Attack(heads.dripping_heads),
        Attack(pipelining.pipelined_posts),
        Attack(pipelining.pipelined_and_read),
        Attack(answers.too_large_answers),
        Attack(answers.unread_answers),
        Attack(answers.read_answers),
        Attack(answers.sipped_answers),
        Attack(answers.unread_streams),
        Attack(answers.too_large_stream),
        Attack(bodies.oversized_bodies),
        Attack(bodies.endless_bodies),
        Attack(bodies.endless_chunks),
        Attack(bodies.endless_small_chunks),
        Attack(bodies.held_bodies),
        Attack(bodies.slow_bodies),
        Attack(bodies.expected_bodies),
        Attack(bodies.slow_streams),
        Attack(bodies.json_bombs),
        Attack(connections.silent_connections, fills=True),
        Attack(connections.idle_connections, fills=True),
        Attack(connections.half_closed),
        Attack(connections.churned, fills=True),
        Attack(requests.distinct_filters, bound_mb=1.25 * MASKS_MB),
        Attack(requests.unknown_names),
        Attack(requests.heavy_searches),
        Attack(requests.explanations),
        *(Attack(attack, writes=True) for attack in LIVE),
    )
}
