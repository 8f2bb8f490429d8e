"""`sharded`: the search of a bundle that is cut into shards. It sends each query to all shards.

Every shard searches its subtrees with the full beam; the best m items of all shards are the answer. A shard that does not answer in time
is left out, and the result says so (`Coverage`). A search without a deadline needs all shards: golden queries and the placement of live
items. Any number of threads may search.

Legend: B queries, S shards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from espalier.bundle import Bundle
from espalier.bundle_files import sha256_of
from espalier.engines.stages import Leaves, TreeQuery
from espalier.errors import InvalidMessage
from espalier.memory_lists import MemoryLists
from espalier.queries import PADDING, FeaturesKind, HistoryKind, QueryBatch, TextKind, VectorKind
from espalier.search import NO_ITEM, Coverage
from espalier.shards.messages import MaskBits, ShardAnswer, ShardQuery, encode_query
from espalier.shards.results import answer_bytes, check_result

from ..errors import ShardsMissing
from ..router.fleet import Fleet
from ..router.masks import Layout
from ..router.merge import joined_leaves, merge_results
from ..router.replicas import Whole
from ..router.shard_call import ShardCall, ShardRequest
from ..router.transport import ReplicaFailed

MARGIN_S, MARGIN = 0.05, 0.1
"""Time for writing the answer: waiting for shards ends so long before the deadline, or this share of the total time if that is less."""


def whole_of(bundle: Bundle) -> Whole:
    """The identity that shards of a bundle give as their origin."""
    return Whole(bundle.manifest.name, bundle.manifest.version, sha256_of(bundle.path / "manifest.json"))


class ShardSearch:
    """A `TreeSearch` of all trees; see the module.

    bundle  the whole one
    count   into how many shards it is cut
    Raises ShardsMissing if the fleet does not have all shards of the bundle.
    """

    name = "sharded"
    rounding = 1e-3
    """That of the shards' engines on CPUs."""
    encodes, merges = False, True

    def __init__(self, bundle: Bundle, fleet: Fleet) -> None:
        self.fleet, self._whole = fleet, whole_of(bundle)
        count = fleet.count_of(self._whole)
        if count is None:
            raise ShardsMissing(fleet.missing(self._whole))
        self.count = count
        self._searched_layout = fleet.register_search(self._whole, count)
        self._trees = [alone.tree for alone in bundle.alone]
        self._layout = Layout(self._trees, count)
        self._pins = [self._whole.pin(index, count) for index in range(count)]
        self._has_memory = bundle.manifest.memory is not None
        kind = bundle.manifest.query
        self._wire_kind = FeaturesKind(width=kind.width) if isinstance(kind, FeaturesKind | TextKind) else kind

    def warm_up(self) -> None:
        """Nothing to do: the golden queries have opened the connections."""

    def close(self) -> None:
        """Nothing to do: the fleet serves other versions too."""

    def search(self, query: TreeQuery) -> Leaves:
        """The best leaves of all shards. Raises ShardsMissing if a shard did not answer a search without a deadline.

        A batch that a shard refuses is searched in halves: several requests may together have more queries, masks or results than it takes.
        Shards refuse infinite states of vectors. Such a query is sent with states of zero, and its result says that scores are not finite.
        """
        if isinstance(self._wire_kind, VectorKind) and query.states_BLS is not None:
            is_finite_B = np.asarray(np.isfinite(query.states_BLS).all(axis=(1, 2)), np.bool_)
            if not is_finite_B.all():
                leaves = self.search(replace(query, states_BLS=np.where(is_finite_B[:, None, None], query.states_BLS, np.float32(0))))
                return leaves._replace(finite_B=is_finite_B if leaves.finite_B is None else is_finite_B & leaves.finite_B)
        began, batch = time.perf_counter(), len(query)
        if not batch:
            no_coverage = Coverage(self._layout.sizes_S, np.empty((0, self.count), np.bool_))
            return merge_results([], query, self._trees)._replace(coverage=no_coverage)
        bodies = self._bodies(query)
        deadline = query.context.deadline
        needs_all = deadline is None
        if deadline is None:
            deadline = began + (self.fleet.config.placing_s if query.context.for_write else self.fleet.config.patience_s)
        calls = self._call(bodies, deadline - min(MARGIN_S, MARGIN * (deadline - began)), query)
        answers, slowest_s = self.fleet.submit(calls).result()
        failures = {index: answer for index, answer in enumerate(answers) if isinstance(answer, ReplicaFailed)}
        if batch > 1 and any(failure.reason == "refused" for failure in failures.values()):
            return joined_leaves([self.search(query.take(half)) for half in np.array_split(np.arange(batch), 2)])
        for index in failures:
            self.fleet.metrics.count("espalier_router_unanswered_total", index)
        answered_S = np.array([index not in failures for index in range(self.count)], np.bool_)
        if needs_all and not answered_S.all():
            missing = ", ".join(map(str, np.flatnonzero(~answered_S)))
            raise ShardsMissing(f"no answer of shard {missing} of {self.count} of {self._whole.of} version {self._whole.version}")
        coverage = Coverage(self._layout.sizes_S, np.broadcast_to(answered_S, (batch, self.count)))
        leaves = merge_results([answer.result for answer in answers if isinstance(answer, ShardAnswer)], query, self._trees)
        self.fleet.metrics.observe("espalier_router_own_seconds", time.perf_counter() - began - slowest_s, self._whole.of)
        self.fleet.metrics.observe("espalier_router_coverage", float(coverage.items_B[0]), self._whole.of)
        return leaves._replace(coverage=coverage)

    # -- messages -------------------------------------------------------------------------------------------------------

    def _bodies(self, query: TreeQuery) -> list[partial[bytes]]:
        """For each shard, a function that makes the request's body from the wanted digests, the seconds left and a request number."""
        bits_B, excluded_S = self._layout.restrictions(query.eligible_T)
        memory = self._live_memory(query)
        rows = query.queries.rows
        if isinstance(self._wire_kind, HistoryKind) and (memory is not None or not self._has_memory):
            rows = np.full(query.queries.array.shape, PADDING, np.int64)  # shards do not read them
        wire = QueryBatch(self._wire_kind, rows)
        bodies = []
        for shard, pin in enumerate(self._pins):
            shard_bits = [None if bits is None else bits[shard] for bits in bits_B]
            has_masks = any(bits is not None for bits in shard_bits)
            message = ShardQuery(
                pin,
                wire,
                query.beam_size_B,
                query.m_B,
                excluded_S[shard],
                query.states_BLS,
                query.frontier,
                query.trace,
                tuple(None if bits is None else bits.digest for bits in shard_bits) if has_masks else None,
                memory=memory,
            )
            bodies.append(partial(_body, message, {bits.digest: bits for bits in shard_bits if bits is not None}))
        return bodies

    def _live_memory(self, query: TreeQuery) -> MemoryLists | None:
        """The queries' memory of leaves and of the level above, which counts live items too.

        None without live items: shards then compute the same memory from the histories, which are shorter to send.
        """
        if query.memory is None or not query.eligible_T[0].live_BR:
            return None
        return query.memory.select(query.memory.nodes >= self._trees[0].level(self._trees[0].height - 1).start)

    # -- in the fleet's loop --------------------------------------------------------------------------------------------

    async def _call(
        self, bodies: Sequence[partial[bytes]], deadline: float, query: TreeQuery
    ) -> tuple[list[ShardAnswer | ReplicaFailed], float]:
        """Every shard's answer, or why it gave none, and the seconds of the slowest."""
        check, max_bytes, headers = partial(self._check, query), answer_bytes(query), dict(query.context.origin)
        requests = [ShardRequest(pin, body, max_bytes, check, headers) for pin, body in zip(self._pins, bodies, strict=True)]
        calls = [ShardCall(self.fleet, request, deadline, patient=query.context.deadline is None) for request in requests]
        try:
            answers = await asyncio.gather(*(call.answer for call in calls), return_exceptions=True)
        finally:
            for call in calls:
                call.answer.cancel()
        slowest_s = max(call.ended - call.began for call in calls)
        outcomes: list[ShardAnswer | ReplicaFailed] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaFailed):
                raise answer
            outcomes.append(answer)
        return outcomes, slowest_s

    def _check(self, query: TreeQuery, answer: ShardAnswer) -> None:
        """Raise InvalidMessage unless an answer has only items of its shard, each once, and the traces and frontiers of the request."""
        result, trees = answer.result, len(self._trees)
        levels = [tree.level_offset for tree in self._trees]
        check_result(result, len(query), int(query.m_B.max()), len(self._layout.shard_I), levels, self._wire_kind)
        for name, per_tree, requested in (("traces", result.traces, query.trace), ("frontiers", result.frontiers, query.frontier)):
            if len(per_tree) != (trees if requested else 0):
                raise InvalidMessage(name, len(per_tree), f"{trees if requested else 0}, as asked for")
        rows_BM = result.item_rows_BM
        foreign_BM = (self._layout.shard_I[rows_BM] != answer.pin.index) & (rows_BM != NO_ITEM)
        if foreign_BM.any():
            raise InvalidMessage("item_rows", int(rows_BM[foreign_BM][0]), f"items of shard {answer.pin.index}")
        ordered_BM = np.sort(rows_BM, axis=1)
        repeated_BM = (ordered_BM[:, 1:] == ordered_BM[:, :-1]) & (ordered_BM[:, 1:] != NO_ITEM)
        if repeated_BM.any():
            raise InvalidMessage("item_rows", int(ordered_BM[:, 1:][repeated_BM][0]), "every item once")


def _body(query: ShardQuery, bits: Mapping[str, MaskBits], wanted: Sequence[str], left_s: float, number: int) -> bytes:
    """The message of a query, with the bits of the wanted masks, the seconds left and the number of the request."""
    sent_masks = {digest: bits[digest] for digest in wanted if digest in bits}
    return encode_query(replace(query, sent_masks=sent_masks, timeout_ms=max(left_s * 1e3, 0.0), number=number))
