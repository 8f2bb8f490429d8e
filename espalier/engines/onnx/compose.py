"""Composes the query encoder, the node scorer and the unrolled beam search into one ONNX graph.

Knows graphs, not sessions: what comes out is a model that ONNX Runtime can run anywhere. Node rows and the tree's arrays are inputs,
so that graphs for different beam sizes share them.

Inputs of the composed graph (those that the tree and the plan need):
    history int64[B, T] or vector float32[B, F]     item rows, −1 = padding; or, in a plan for them,
    states float32[B, L, S]                          what query.onnx gives
    beam_size int64[B]                               each query's beam, unless the plan is for a single one
    excluded_leaves, excluded_inner int64[B, X]      nodes that a query must not visit, −1 = padding
    eligible bool[N], mask_of int64[B]                  nodes with an eligible item below; unless the plan is for a single query, F masks
                                                     end to end, bool[F · N], and which of them is each query's
    kept, wanted int64[1]                            largest beam and largest m of the call (constants of a static plan)
    memory float32[N]                                λ · mem of each node, in a plan for a single query with a memory; in others
    memory_nodes int64[B, X], memory_values float32[B, X]   the nodes that have one, 0 (the root) with 0 as padding, and
    no_memory float32[1, N]                          zeros, as an input so that nobody folds B rows of them into a constant
    node_rows float32[N, D] · parent int64[N+1] and leaf_of_item int64[I+1] (last entry −1, so that −1 maps to −1)
    first_child int64[N+1] · leaf_item int64[#leaves]
Outputs: item_rows int64[B, M], ranks float32[B, M]; the beam above the leaves, frontier_nodes int64[B, K] and frontier_ranks float32[B, K]
(where the leaves are the start level, the level above them as it is; none where it is not scored), and leaf_states float32[B, S], which a
run need not bind; with a trace candidates_h int64[B, C] and candidate_ranks_h float32[B, C] of each
level, nodes_h int64[B, K] and ranks_h float32[B, K] of each level but the last (ranks are −inf where a slot is empty or its node has no
eligible item below; item rows and nodes are undefined there). With a memory also keys, candidate_keys_h and keys_h, as the
ranks. A careful plan, for vectors, also has finite float32[B]: 1 where the logits of all nodes that were scored are finite, else 0. In a
plan that is not careful, where a rank or key may have overflowed float32, all `ranks` are NaN and the other outputs are undefined.

Legend: B queries, T history, L levels, K beam, C candidates, M results, X excluded nodes, N nodes, F masks, I items, D node row, S state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import helper, numpy_helper

from espalier.engines.onnx.graphs import fuse_state, load_graph, opset_of
from espalier.errors import BundleCorrupt
from espalier.manifest import GraphScorer, Ranking
from espalier.queries import HistoryKind, VectorKind
from espalier.tree import Tree

MINUS_INF = np.float32(-np.inf)
LARGEST = np.float32(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Plan:
    """What one composed graph is specialised for.

    beam_low, beam_high   the beam sizes it serves; it starts where beam_low starts
    single                one query a call (B = 1), which saves work; otherwise any number, of different beams
    careful               a node whose logit or rank is not finite is no candidate: on each level it gets rank −inf, as one that is not
                          eligible, and so do the nodes below it. Without, such nodes are merely noticed
    excluded              which nodes queries may exclude
    masked                whether queries bring node masks; without, every node must have an item below
    trace                 whether each level's candidates and beam are outputs
    states                whether query states are an input; else they are made of the queries
    largest_part          with a memory: no λ · mem exceeds this. None: without one
    wanted                m as a constant, with the beam fixed to beam_high: all shapes but B and X are known, the outputs' too (for
                          CUDA graphs)
    """

    beam_low: int
    beam_high: int
    single: bool = False
    careful: bool = True
    excluded: Literal["none", "leaves", "leaves and inner"] = "none"
    masked: bool = False
    trace: bool = False
    states: bool = False
    largest_part: float | None = None
    wanted: int | None = None


class _Candidates(NamedTuple):
    """Names of nodes int64[B, C], their ranks and keys float32[B, C], and C int64[1]. Without a memory keys are the ranks."""

    nodes: str
    ranks: str
    keys: str
    width: str


def compose(
    query_onnx: bytes, scorer_onnx: bytes, tree: Tree, ranking: Ranking, kind: HistoryKind | VectorKind, info: GraphScorer, plan: Plan
) -> bytes:
    """The composed model's bytes. Raises BundleCorrupt when a graph is not one that can be composed."""
    query, scorer = load_graph("query.onnx", query_onnx), load_graph("scorer.onnx", scorer_onnx)
    opset = opset_of(query)
    if opset_of(scorer) != opset:
        raise BundleCorrupt(f"query.onnx has opset {opset}, scorer.onnx {opset_of(scorer)}; expected the same")
    return _Composer(query, scorer, tree, ranking, kind, info, plan).model(opset)


class _Composer:
    def __init__(
        self,
        query: onnx.ModelProto,
        scorer: onnx.ModelProto,
        tree: Tree,
        ranking: Ranking,
        kind: HistoryKind | VectorKind,
        info: GraphScorer,
        plan: Plan,
    ) -> None:
        self.query, self.scorer, self.tree, self.ranking, self.kind, self.plan = query, scorer, tree, ranking, kind, plan
        if plan.single:
            fuse_state(scorer)
        self.info = info
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, onnx.ValueInfoProto] = {}
        self.outputs: list[onnx.ValueInfoProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.names = 0
        self.products: dict[tuple[str, int], str] = {}
        self.wide: set[str] = set()  # widths that are at least `kept`
        self.filled: dict[tuple[int, str], str] = {}
        self.mask_start = self.memory = ""
        self.logits: list[str] = []  # float[B, C] of each scored level
        self.start = tree.start_level(plan.beam_low)
        self.first = 1 if ranking.gamma > 0 else self.start  # the first level whose nodes are scored

    # -- the search ---------------------------------------------------------------------------------------------------

    def model(self, opset: int) -> bytes:
        states = self.query_states()
        candidates = self.whole_levels(states)
        for level in range(self.start, self.tree.height):
            kept, kept_ranks, width = self.keep(candidates, level)
            if level == self.tree.height - 1:
                self.frontier(kept, kept_ranks, width)
            candidates = self.expand(kept, kept_ranks, level, width, states[level + 1])
        self.results(candidates)
        self.output(states[self.tree.height], "leaf_states", np.float32, ["B", self.info.state_dim])
        graph = helper.make_graph(
            self.nodes, "beam_search", list(self.inputs.values()), self.outputs, initializer=list(self.initializers.values())
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        serialised: bytes = model.SerializeToString()
        return serialised

    def query_states(self) -> dict[int, str]:
        """The name of the state float[B, S] of each scored level."""
        numbers = range(self.first, self.tree.height + 1)
        if self.plan.states:
            given = self.input("states", np.float32, ["B", self.tree.height + 1 if self.info.state_levels > 1 else 1, self.info.state_dim])
            if self.info.state_levels == 1:
                return dict.fromkeys(numbers, self.op("Squeeze", given, self.const([1])))
            return {level: self.op("Gather", given, self.const(level), axis=1) for level in numbers}
        if isinstance(self.kind, HistoryKind):
            history = self.input("history", np.int64, ["B", self.kind.length])
            leaves = self.op("Gather", self.table("leaf_of_item", np.int64, self.tree.item_count + 1), history)
            sequence = self.info.encoder == "sequence"
            feeds = {"history_leaves": leaves} if sequence else {"history_nodes": self.ancestors(leaves)}
        else:
            feeds = {"vector": self.input("vector", np.float32, ["B", self.kind.width])}
        feeds["node_rows"] = self.node_rows()
        missing = sorted({entry.name for entry in self.query.graph.input} - feeds.keys())
        if missing:
            raise BundleCorrupt(f"query.onnx: inputs {missing}, which {self.kind.kind} queries of this manifest do not have")
        state = self.inline(self.query, feeds, "query")
        if self.info.encoder == "sequence":
            return {level: self.op("Gather", state, self.const(level), axis=1) for level in numbers}
        if self.info.state_levels == 1:
            shared = self.op("Squeeze", state, self.const([1]))
            return dict.fromkeys(numbers, shared)
        if len(numbers) == 1:
            return {self.first: self.op("Squeeze", state, self.const([1]))}
        parts = self.ops("Split", len(numbers), state, axis=1, num_outputs=len(numbers))
        return {level: self.op("Squeeze", part, self.const([1])) for level, part in zip(numbers, parts, strict=True)}

    def ancestors(self, leaves: str) -> str:
        """int64[B, L, T]: the ancestors of leaves on each scored level."""
        path = {self.tree.height: leaves}
        for level in range(self.tree.height - 1, self.first - 1, -1):
            path[level] = self.op("Gather", self.table("parent", np.int64, self.tree.node_count + 1), path[level + 1])
        levels = [self.op("Unsqueeze", path[level], self.const([1])) for level in range(self.first, self.tree.height + 1)]
        return levels[0] if len(levels) == 1 else self.op("Concat", *levels, axis=1)

    def whole_levels(self, states: dict[int, str]) -> _Candidates:
        """All nodes of the start level with their ranks; with γ > 0 the levels above are scored too, for their ranks."""
        ranks = ""
        for level in range(self.first, self.start + 1):
            span = self.tree.level(level)
            rows = self.op("Slice", self.node_rows(), self.const([span.start]), self.const([span.stop]), self.const([0]))
            batch = self.op("Shape", states[level], start=0, end=1)
            shape = self.op("Concat", batch, self.op("Shape", rows), axis=0)
            own = self.own(self.op("Expand", rows, shape), states[level])
            if ranks:
                above = self.tree.parent[span.start : span.stop] - self.tree.level(level - 1).start
                inherited = self.op("Gather", ranks, self.const(above), axis=1)
                ranks = self.op("Add", own, self.op("Mul", inherited, self.const(np.float32(self.ranking.gamma))))
            else:
                ranks = own
            if level < self.start and self.plan.careful and self.plan.largest_part is not None:
                ranks, _ = self.with_memory(self.whole_level(level, ranks), ranks)
            if level == self.tree.height - 1 < self.start:
                self.frontier(self.whole_level(level, ranks), ranks, self.const([self.tree.level_size(level)]))
        nodes = self.whole_level(self.start, ranks)
        return self.candidates(nodes, ranks, self.start, self.const([self.tree.level_size(self.start)]))

    def whole_level(self, level: int, ranks: str) -> str:
        """All nodes of a level for each query, int64[B, nodes of the level]."""
        span = self.tree.level(level)
        shape = self.op("Concat", self.op("Shape", ranks, start=0, end=1), self.const([1]), axis=0)
        return self.op("Expand", self.const(np.arange(span.start, span.stop)[None]), shape)

    def keep(self, candidates: _Candidates, level: int) -> tuple[str, str, str]:
        """The beam: each query's best `beam_size` candidates, in ascending node order; slots beyond it have rank −inf."""
        nodes, ranks, keys, width = candidates
        self.traced(level, "candidates", nodes, "candidate_", ranks, keys)
        size = self.at_most(self.beam(), width)
        single = self.plan.single
        _, order = self.ops("TopK", 2, keys, size, axis=1, largest=1, sorted=int(not single))
        if single:  # marking and listing the chosen slots is cheaper than sorting them
            marked = self.op("ScatterElements", self.bytes_of(0, width), order, self.bytes_of(1, size), axis=1)
            order = self.op("Slice", self.op("NonZero", marked), self.const([1]), self.const([2]), self.const([0]))
        else:
            fixed = self.value(size)
            if fixed is None:
                slots = self.op("Range", self.const(0), self.op("Squeeze", size), self.const(1))
            else:
                slots = self.const(np.arange(fixed))
            beam_size = self.op("Unsqueeze", self.input("beam_size", np.int64, ["B"]), self.const([1]))
            order = self.op("Where", self.op("GreaterOrEqual", slots, beam_size), width, order)
            order, _ = self.ops("TopK", 2, order, size, axis=1, largest=0, sorted=1)
            empty = self.op("Equal", order, width)
            order = self.op("Min", order, self.op("Sub", width, self.const([1])))
        kept = self.op("GatherElements", nodes, order, axis=1)
        kept_ranks = self.op("GatherElements", ranks, order, axis=1)
        if not single:
            kept_ranks = self.op("Where", empty, self.const(MINUS_INF), kept_ranks)
        kept_keys = kept_ranks
        if self.plan.trace and keys != ranks:
            kept_keys = self.op("GatherElements", keys, order, axis=1)
            kept_keys = kept_keys if single else self.op("Where", empty, self.const(MINUS_INF), kept_keys)
        self.traced(level, "nodes", kept, "", kept_ranks, kept_keys)
        return kept, kept_ranks, size

    def frontier(self, nodes: str, ranks: str, width: str) -> None:
        size = self.value(width) or "frontier_K"
        self.output(nodes, "frontier_nodes", np.int64, ["B", size])
        self.output(ranks, "frontier_ranks", np.float32, ["B", size])

    def expand(self, kept: str, kept_ranks: str, level: int, width: str, state: str) -> _Candidates:
        """The children of the beam on the next level, and their ranks."""
        tree, most = self.tree, self.tree.max_children[level]
        column = self.op("Unsqueeze", kept, self.const([2]))
        if tree.is_uniform(level):
            shift = tree.level(level + 1).start - tree.level(level).start * most
            first = self.op("Mul", column, self.const(most)) if most > 1 else column
            children = self.op("Add", first, self.const(shift + np.arange(most)))
            missing = None
        else:
            table = self.table("first_child", np.int64, tree.node_count + 1)
            first = self.op("Gather", table, column)
            end = self.op("Gather", table, self.op("Add", column, self.const(1)))
            children = self.op("Add", first, self.const(np.arange(most)))
            missing = self.op("GreaterOrEqual", children, end)
            children = self.op("Min", children, self.op("Sub", end, self.const(1)))
        flat = self.const([0, -1])
        nodes = self.op("Reshape", children, flat)
        own = self.own(self.op("Gather", self.node_rows(), nodes), state)
        if self.ranking.gamma > 0:
            inherited = self.op("Mul", kept_ranks, self.const(np.float32(self.ranking.gamma)))
        elif self.passes_nothing_down(level):
            inherited = ""
        else:  # 0 · −inf would be NaN
            inherited = self.op(
                "Where", self.op("Equal", kept_ranks, self.const(MINUS_INF)), self.const(MINUS_INF), self.const(np.float32(0))
            )
        ranks = own
        if inherited or missing is not None:
            ranks = self.op("Reshape", own, self.op("Shape", children))
            ranks = self.op("Add", ranks, self.op("Unsqueeze", inherited, self.const([2]))) if inherited else ranks
            ranks = self.op("Where", missing, self.const(MINUS_INF), ranks) if missing is not None else ranks
            ranks = self.op("Reshape", ranks, flat)
        return self.candidates(nodes, ranks, level + 1, self.times(width, most))

    def results(self, candidates: _Candidates) -> None:
        """The best m leaves, best first, as item rows."""
        nodes, ranks, keys, width = candidates
        self.traced(self.tree.height, "candidates", nodes, "candidate_", ranks, keys)
        wanted = self.input("wanted", np.int64, [1]) if self.plan.wanted is None else self.const([self.plan.wanted])
        size = self.at_most(wanted, width)
        best_keys, order = self.ops("TopK", 2, keys, size, axis=1, largest=1, sorted=1)
        best = best_keys if keys == ranks else self.op("GatherElements", ranks, order, axis=1)
        leaves = self.op("Sub", self.op("GatherElements", nodes, order, axis=1), self.const(self.tree.leaf_offset))
        items = self.op("Gather", self.table("leaf_item", np.int64, self.tree.leaf_count), leaves)
        if not self.plan.careful:  # no rank exceeds the sum of all logits, whose sizes times 0 are NaN where it is not finite
            sizes = self.op("ReduceL1", self.all_logits(), self.const([1]), keepdims=1)
            if self.plan.largest_part is not None:
                sizes = self.op("Add", sizes, self.const(np.float32(self.plan.largest_part)))
            best = self.op("Add", best, self.op("Mul", sizes, self.const(np.float32(0))))
        elif isinstance(self.kind, VectorKind):
            finite = self.op("LessOrEqual", self.op("Abs", self.all_logits()), self.const(LARGEST))  # not true of NaN
            least = self.op("ReduceMin", self.op("Cast", finite, to=onnx.TensorProto.FLOAT), self.const([1]), keepdims=0)
            self.output(least, "finite", np.float32, ["B"])
        results = self.value(size) or "M"
        self.output(items, "item_rows", np.int64, ["B", results])
        self.output(best, "ranks", np.float32, ["B", results])
        if keys != ranks:
            self.output(best_keys, "keys", np.float32, ["B", results])

    # -- parts of a level ---------------------------------------------------------------------------------------------

    def own(self, rows: str, state: str) -> str:
        """own(n): the logit of candidates, or the log of their activation."""
        logits = self.inline(self.scorer, {"query_state": state, "node_rows": rows}, "scorer")
        self.logits.append(logits)
        if self.ranking.own == "logit":
            return logits
        activated = self.op("Neg", self.op("Softplus", self.op("Neg", logits)))
        return self.without_infinities(logits, activated) if self.plan.careful else activated

    def without_infinities(self, values: str, ranks: str) -> str:
        """Ranks with −inf where values are NaN or ∞."""
        return self.op("Where", self.op("LessOrEqual", values, self.const(LARGEST)), ranks, self.const(MINUS_INF))

    def all_logits(self) -> str:
        return self.logits[0] if len(self.logits) == 1 else self.op("Concat", *self.logits, axis=1)

    def candidates(self, nodes: str, ranks: str, level: int, width: str) -> _Candidates:
        """Nodes of a level with their ranks and keys, both −inf where a node is no candidate."""
        ranks = self.without_ineligible(nodes, ranks, level)
        return _Candidates(nodes, *self.with_memory(nodes, ranks), width)

    def with_memory(self, nodes: str, ranks: str) -> tuple[str, str]:
        """Ranks, and keys = ranks + λ · mem; in a careful plan both −inf where a key is not finite."""
        if self.plan.largest_part is None:
            return ranks, ranks
        if self.plan.single:
            parts = self.op("Gather", self.table("memory", np.float32, self.tree.node_count), nodes)
        else:
            parts = self.op("GatherElements", self.dense_memory(), nodes, axis=1)
        keys = self.op("Add", ranks, parts)
        if not self.plan.careful:
            return ranks, keys
        finite = self.op("LessOrEqual", keys, self.const(LARGEST))
        return self.op("Where", finite, ranks, self.const(MINUS_INF)), self.op("Where", finite, keys, self.const(MINUS_INF))

    def dense_memory(self) -> str:
        """float32[B, N]: λ · mem of every node."""
        if not self.memory:
            nodes = self.input("memory_nodes", np.int64, ["B", "memory_X"])
            values = self.input("memory_values", np.float32, ["B", "memory_X"])
            shape = self.op("Concat", self.op("Shape", nodes, start=0, end=1), self.const([1]), axis=0)
            nothing = self.op("Expand", self.input("no_memory", np.float32, [1, self.tree.node_count]), shape)
            self.memory = self.op("ScatterElements", nothing, nodes, values, axis=1)
        return self.memory

    def without_ineligible(self, nodes: str, ranks: str, level: int) -> str:
        """Ranks with −inf for nodes without an eligible item below, and in a careful plan for those whose ranks are not finite."""
        if self.plan.careful and self.ranking.own == "logit":  # a sum of logs of activations is finite or −inf: `own` has seen to it
            ranks = self.without_infinities(ranks, ranks)
        if self.plan.masked:
            is_eligible = self.op("Gather", *self.masks(nodes))
            ranks = self.op("Where", is_eligible, ranks, self.const(MINUS_INF))
        if self.plan.excluded == "leaves and inner" or (self.plan.excluded == "leaves" and level == self.tree.height):
            name = "excluded_leaves" if level == self.tree.height else "excluded_inner"
            excluded = self.op("Unsqueeze", self.input(name, np.int64, ["B", f"{name}_X"]), self.const([1]))
            same = self.op("Equal", self.op("Unsqueeze", nodes, self.const([2])), excluded)
            hit = self.op("ReduceMax", self.op("Cast", same, to=onnx.TensorProto.FLOAT), self.const([2]), keepdims=0)
            ranks = self.op("Where", self.op("Cast", hit, to=onnx.TensorProto.BOOL), self.const(MINUS_INF), ranks)
        return ranks

    def masks(self, nodes: str) -> tuple[str, str]:
        """The masks and where in them the queries' nodes are."""
        if self.plan.single:
            return self.table("eligible", np.bool_, self.tree.node_count), nodes
        if not self.mask_start:
            mask_of = self.op("Unsqueeze", self.input("mask_of", np.int64, ["B"]), self.const([1]))
            self.mask_start = self.op("Mul", mask_of, self.const(self.tree.node_count))
        return self.input("eligible", np.bool_, ["F_N"]), self.op("Add", nodes, self.mask_start)

    def passes_nothing_down(self, level: int) -> bool:
        """True when all slots of rank −inf on a level are nodes that are not eligible: their children are not eligible either.

        In a careful plan some have a rank that is not finite, whatever their children have.
        Otherwise some are padding, of ragged levels or of smaller beams in the call: copies of nodes whose children are candidates already.
        """
        return self.plan.single and not self.plan.careful and all(self.tree.is_uniform(h) for h in range(self.start, level))

    def traced(self, level: int, name: str, nodes: str, prefix: str, ranks: str, keys: str) -> None:
        if self.plan.trace:
            width = f"{name}_{level}_width"
            self.output(nodes, f"{name}_{level}", np.int64, ["B", width])
            self.output(ranks, f"{prefix}ranks_{level}", np.float32, ["B", width])
            if self.plan.largest_part is not None:
                self.output(keys, f"{prefix}keys_{level}", np.float32, ["B", width])

    def beam(self) -> str:
        return self.input("kept", np.int64, [1]) if self.plan.wanted is None else self.const([self.plan.beam_high])

    def at_most(self, size: str, width: str) -> str:
        """int64[1]: size, or the number of candidates where there are fewer."""
        fixed, limit = self.value(size), self.value(width)
        if fixed is not None and limit is not None:
            return self.const([min(fixed, limit)])
        if size == "kept" and (width in self.wide or (limit is not None and limit >= self.plan.beam_high)):
            return size
        return self.op("Min", size, width)

    def times(self, width: str, most: int) -> str:
        """int64[1]: width · most, one name for one product."""
        if most == 1:
            return width
        fixed = self.value(width)
        if fixed is not None:
            return self.const([fixed * most])
        if (width, most) not in self.products:
            self.products[width, most] = self.op("Mul", width, self.const([most]))
        product = self.products[width, most]
        if width == "kept" or width in self.wide:
            self.wide.add(product)
        return product

    def bytes_of(self, value: int, width: str) -> str:
        """uint8[1, width] filled with one value, one name for one width."""
        if (value, width) not in self.filled:
            shape = self.op("Concat", self.const([1]), width, axis=0)
            fill = helper.make_tensor("fill", onnx.TensorProto.UINT8, [1], [value])
            self.filled[value, width] = self.op("ConstantOfShape", shape, value=fill)
        return self.filled[value, width]

    # -- graph building -----------------------------------------------------------------------------------------------

    def inline(self, model: onnx.ModelProto, feeds: dict[str, str], prefix: str) -> str:
        """Copy a model's nodes, with its inputs replaced by `feeds`; initializers are shared between copies."""
        renamed = dict(feeds)
        for tensor in model.graph.initializer:
            renamed[tensor.name] = f"{prefix}/{tensor.name}"
            if renamed[tensor.name] not in self.initializers:
                copy = onnx.TensorProto()
                copy.CopyFrom(tensor)
                copy.name = renamed[tensor.name]
                self.initializers[copy.name] = copy
        for node in model.graph.node:
            copy_node = onnx.NodeProto()
            copy_node.CopyFrom(node)
            del copy_node.input[:], copy_node.output[:]
            copy_node.name = self.fresh(node.op_type)
            copy_node.input.extend(renamed[name] if name else "" for name in node.input)
            for name in node.output:
                renamed[name] = self.fresh(prefix) if name else ""
                copy_node.output.append(renamed[name])
            self.nodes.append(copy_node)
        return renamed[model.graph.output[0].name]

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        names = [self.fresh(kind) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, self.fresh(kind), **attributes))
        return names

    def const(self, value: ArrayLike) -> str:
        array = np.asarray(value)
        array = array if array.dtype == np.float32 else array.astype(np.int64)
        key = f"const/{array.dtype}{list(array.shape)}/{array.tobytes().hex() if array.size <= 8 else self.fresh('array')}"
        if key not in self.initializers:
            self.initializers[key] = numpy_helper.from_array(array, key)
        return key

    def value(self, name: str) -> int | None:
        """The number that a constant int64[1] holds."""
        tensor = self.initializers.get(name)
        return None if tensor is None else int(numpy_helper.to_array(tensor).flat[0])

    def node_rows(self) -> str:
        return self.input("node_rows", np.float32, [self.tree.node_count, self.info.node_dim])

    def table(self, name: str, dtype: type[np.generic], length: int) -> str:
        return self.input(name, dtype, [length])

    def input(self, name: str, dtype: type[np.generic], shape: list[int | str]) -> str:
        if name not in self.inputs:
            self.inputs[name] = helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
        return name

    def output(self, value: str, name: str, dtype: type[np.generic], shape: list[int | str]) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape))

    def fresh(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}#{self.names}"
