"""`sharded`: searches a bundle that is cut into shards, by asking these.

Queries are encoded once, here; every shard searches its subtrees with the full beam; the best m of all are the answer. A shard that does
not answer in time is left out, and the result says so (`Coverage`). A search without a deadline is the service's own (golden queries, where
live items go) and needs all shards. Any number of threads may search.

Legend: B queries, L levels, S state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from espalier.engines.compiled.encoder import QueryEncoder
from espalier.engines.given_states import check_queries
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.bundle_files import sha256_of
from espalier.errors import InvalidMessage, InvalidQuery, UnsupportedGraph
from espalier.manifest import LinearScorer
from espalier.masks.eligibility import NO_NODE, eligible_nodes, unrestricted_mask
from espalier.memory_lists import MemoryLists
from espalier.queries import PADDING, FeaturesKind, HistoryKind, QueryBatch, TextKind
from espalier.search import NO_ITEM, Coverage, Frontier, SearchParams, SearchResult
from espalier.shards.messages import MaskBits, ShardAnswer, ShardQuery, encode_query
from espalier.shards.results import answer_bytes, check_result
from service.batching.parts import joined, split
from service.errors import ShardsMissing
from service.router.asking import Asking, Question
from service.router.fleet import Fleet
from service.router.masks import Layout, Masks
from service.router.merge import merged
from service.router.replicas import Whole
from service.router.transport import ReplicaFailed

NAME = "sharded"
BLOCK = 64
"""Queries of one message: golden queries come all at once."""
MARGIN_S, MARGIN = 0.05, 0.1
"""A shard is waited for until so long before the deadline, or this share of the time that is left: an answer must still be written."""


def whole_of(bundle: Bundle) -> Whole:
    """What shards of a bundle say that they are of."""
    return Whole(bundle.manifest.name, bundle.manifest.version, sha256_of(bundle.path / "manifest.json"))


class ShardedEngine:
    """See the module.

    bundle  whole, and without stacking
    count   into how many shards it is cut
    Raises ShardsMissing where the fleet has not all shards of the bundle.
    """

    name = NAME
    rounding = 1e-3
    """Of the engines of shards on CPUs."""

    def __init__(self, bundle: Bundle, fleet: Fleet) -> None:
        self.bundle, self.fleet, self._whole = bundle, fleet, whole_of(bundle)
        count = fleet.count_of(self._whole)
        if count is None:
            raise ShardsMissing(fleet.missing(self._whole))
        self.count = count
        self._searched = fleet.searches(self._whole, count)
        self._trees = [alone.tree for alone in bundle.alone]
        self._layout = Layout(self._trees, count)
        self._pins = [self._whole.pin(index, count) for index in range(count)]
        self._is_linear = isinstance(bundle.manifest.scorer, LinearScorer)
        self._encoder = None if self._is_linear else _opened_encoder(bundle)
        self._unrestricted = unrestricted_mask(self._trees[0])
        self._gamma = bundle.manifest.ranking.gamma
        kind = bundle.manifest.query
        self._wire_kind = FeaturesKind(width=kind.width) if isinstance(kind, FeaturesKind | TextKind) else kind

    def warm_up(self) -> None:
        """Nothing to build: the golden queries have compiled and connected everything."""

    def prepare(self, params: SearchParams) -> None:
        """Shards prepare by themselves."""

    def close(self) -> None:
        """The fleet serves other versions."""

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters are not the bundle's."""
        if len(queries) > BLOCK and not params.trace:
            return joined([self.search(*part) for part in split(queries, params, BLOCK)])
        return self.search_with(queries, params, [_masks(params, b, len(self._trees)) for b in range(len(queries))], params.exclude_BE)

    def search_with(
        self, queries: QueryBatch, params: SearchParams, masks_B: Sequence[Masks], exclude_BE: NDArray[np.int64] | None
    ) -> SearchResult:
        """The search with each query's masks and exclusions instead of those of `params`."""
        began = time.perf_counter()
        tree, batch = self._trees[0], len(queries)
        if queries.kind != self.bundle.manifest.query:
            raise InvalidQuery("queries", queries.kind, str(self.bundle.manifest.query))
        params.check(batch, tree.item_count)
        if not batch:
            return replace(self._nothing(0, params), coverage=Coverage(self._layout.sizes_S, np.empty((0, self.count), np.bool_)))
        known = tree.item_count if params.memory is None else params.memory.item_count
        check_queries(self.bundle, queries, params, known if self.bundle.manifest.memory is not None else None)
        states_BLS = self._states(queries, params)
        bodies = self._bodies(queries, params, states_BLS, masks_B, exclude_BE)
        deadline = began + self.fleet.config.patience_s if params.deadline is None else params.deadline
        left_s = deadline - began
        asked = self._ask(bodies, deadline - min(MARGIN_S, MARGIN * left_s), params)
        answers, slowest_s = self.fleet.submit(asked).result()
        answered = [answer.result for answer in answers if answer is not None]
        answered_S = np.array([answer is not None for answer in answers], np.bool_)
        coverage = Coverage(self._layout.sizes_S, np.broadcast_to(answered_S, (batch, self.count)))
        result = merged(answered, params.m_B, self._trees) if answered else self._nothing(batch, params)
        if not answered_S.all():
            if params.deadline is None:
                missing = ", ".join(map(str, np.flatnonzero(~answered_S)))
                raise ShardsMissing(f"no answer of shard {missing} of {self.count} of {self._whole.of} version {self._whole.version}")
            result = replace(result, complete_B=result.count_B >= params.m_B)
        if states_BLS is not None:
            result = replace(result, frontiers=tuple(replace(beam, states_BS=states_BLS[:, -1]) for beam in result.frontiers))
        self.fleet.metrics.searched(self._whole.of, time.perf_counter() - began - slowest_s, float(coverage.items_B[0]))
        return replace(result, coverage=coverage)

    def _states(self, queries: QueryBatch, params: SearchParams) -> NDArray[np.float32] | None:
        """float32[B, L, S]: the query states of a bundle of graphs."""
        if self._encoder is None or params.states_BLS is not None:
            return params.states_BLS
        first_B = [1] * len(queries)
        if self._gamma == 0 and not params.trace:
            first_B = [self._trees[0].start_level(size) for size in params.beam_size_B.tolist()]
        return self._encoder.states(queries.array, first_B)

    # -- messages -------------------------------------------------------------------------------------------------------

    def _bodies(
        self,
        queries: QueryBatch,
        params: SearchParams,
        states_BLS: NDArray[np.float32] | None,
        masks_B: Sequence[Masks],
        exclude_BE: NDArray[np.int64] | None,
    ) -> list[partial[bytes]]:
        """For each shard what makes its body, of the digests that it wants, the seconds that are left and a number."""
        bits_B = [self._layout.bits(masks) for masks in masks_B]
        excluded = self._layout.exclusions(exclude_BE)
        memory = self._memory(queries, params)
        rows = queries.rows
        if isinstance(queries.kind, HistoryKind) and (memory is not None or self.bundle.manifest.memory is None):
            rows = np.full(queries.array.shape, PADDING, np.int64)  # nobody reads them
        wire = QueryBatch(self._wire_kind, rows)
        bodies = []
        for shard, pin in enumerate(self._pins):
            sent = [None if bits is None else bits[shard] for bits in bits_B]
            has_masks = any(bits is not None for bits in sent)
            query = ShardQuery(
                pin,
                wire,
                params.beam_size_B,
                params.m_B,
                excluded[shard],
                states_BLS,
                params.frontier,
                params.trace,
                tuple(None if bits is None else bits.digest for bits in sent) if has_masks else None,
                memory=memory,
            )
            bodies.append(partial(_body, query, {bits.digest: bits for bits in sent if bits is not None}))
        return bodies

    def _memory(self, queries: QueryBatch, params: SearchParams) -> MemoryLists | None:
        """What the memory that a search brings gives for its histories, from the level above the leaves on."""
        if params.memory is None or self.bundle.manifest.memory is None:
            return None
        tree = self._trees[0]
        eligible = eligible_nodes(tree, params, len(queries), self._unrestricted)
        lists: MemoryLists = params.memory.lists(queries.array, eligible)
        low = lists.nodes >= tree.level(tree.height - 1).start
        if low.all():
            return lists
        before = np.append(0, np.cumsum(low))
        return MemoryLists(before[lists.offset_B].astype(np.int64), lists.nodes[low], lists.values[low])

    # -- in the fleet's loop --------------------------------------------------------------------------------------------

    async def _ask(self, bodies: Sequence[partial[bytes]], deadline: float, params: SearchParams) -> tuple[list[ShardAnswer | None], float]:
        """Every shard's answer, None of those that gave none, and the seconds of the slowest."""
        check, most, headers = partial(self._check, params), answer_bytes(params, len(self._trees)), dict(params.origin)
        questions = [Question(pin, body, most, check, headers) for pin, body in zip(self._pins, bodies, strict=True)]
        asking = [Asking(self.fleet, question, deadline, patient=params.deadline is None) for question in questions]
        try:
            found = await asyncio.gather(*(asked.answer for asked in asking), return_exceptions=True)
        finally:
            for asked in asking:
                asked.answer.cancel()
        slowest_s = max(asked.ended - asked.began for asked in asking)
        for index, answer in enumerate(found):
            if isinstance(answer, ReplicaFailed):
                self.fleet.metrics.unanswered(index)
            elif isinstance(answer, BaseException):
                raise answer
        return [answer if isinstance(answer, ShardAnswer) else None for answer in found], slowest_s

    def _check(self, params: SearchParams, answer: ShardAnswer) -> None:
        """Raise InvalidMessage unless this may be a shard's answer: of its own items, each once, and with all that was asked for."""
        result, trees = answer.result, len(self._trees)
        levels = [tree.level_offset for tree in self._trees]
        check_result(result, len(params.m_B), int(params.m_B.max()), len(self._layout.shard_I), levels, self._wire_kind)
        for name, found, wanted in (("traces", result.traces, params.trace), ("frontiers", result.frontiers, params.frontier)):
            if len(found) != (trees if wanted else 0):
                raise InvalidMessage(name, len(found), f"{trees if wanted else 0}, as asked for")
        rows_BM = result.item_rows_BM
        strange_BM = (self._layout.shard_I[rows_BM] != answer.pin.index) & (rows_BM != NO_ITEM)
        if strange_BM.any():
            raise InvalidMessage("item_rows", int(rows_BM[strange_BM][0]), f"items of shard {answer.pin.index}")
        ordered_BM = np.sort(rows_BM, axis=1)
        twice_BM = (ordered_BM[:, 1:] == ordered_BM[:, :-1]) & (ordered_BM[:, 1:] != NO_ITEM)
        if twice_BM.any():
            raise InvalidMessage("item_rows", int(ordered_BM[:, 1:][twice_BM][0]), "every item once")

    def _nothing(self, batch: int, params: SearchParams) -> SearchResult:
        """The result where no shard answered."""
        shape = batch, int(params.m_B.max(initial=0))
        none = np.full(shape, -np.inf, np.float32)
        count_B = np.zeros(batch, np.int64)
        rows_BM = np.full(shape, NO_ITEM, np.int64)
        beam = Frontier(np.full((batch, 1), NO_NODE, np.int64), np.full((batch, 1), -np.inf, np.float32))
        frontiers = (beam,) * len(self._trees) if params.frontier else ()
        return SearchResult(rows_BM, np.zeros(shape, np.float32), none, none, count_B, np.zeros(batch, np.bool_), frontiers=frontiers)


def _body(query: ShardQuery, bits: Mapping[str, MaskBits], wanted: Sequence[str], left_s: float, number: int) -> bytes:
    """A query with the masks that a shard wants, the time that is left, and the number of the question."""
    sent = {digest: bits[digest] for digest in wanted if digest in bits}
    return encode_query(replace(query, sent_masks=sent, timeout_ms=max(left_s * 1e3, 0.0), number=number))


def _masks(params: SearchParams, b: int, trees: int) -> Masks:
    """The masks of query b in every tree."""
    mask = None if params.mask_B is None else params.mask_B[b]
    return (None,) * trees if mask is None else tuple(mask.of_tree(place) for place in range(trees))


def _opened_encoder(bundle: Bundle) -> QueryEncoder:
    """The encoder of a bundle of graphs; over rows widened to float32 where query.onnx does more with them than look rows up."""
    rows_ND = np.require(bundle.node_rows_ND, requirements=["C", "A"])
    try:
        return QueryEncoder(bundle, rows_ND)
    except UnsupportedGraph:
        if rows_ND.dtype == np.float32:
            raise
        return QueryEncoder(bundle, rows_ND.astype(np.float32))
