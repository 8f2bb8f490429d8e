"""A trained model on disk: models/<name>/<version>/.

    manifest.json       what it is, with the size and SHA-256 of every other file
    tree.safetensors    level_offset, first_child, leaf_item
    items.arrow         ids, titles, attributes, uncompressed
    golden.parquet      queries with the results that every engine must give
    heldout.parquet     held-out queries with their relevant ids

and the node scorers, either as graphs

    nodes.safetensors   node_rows, float32[N, D], float16[N, D] or int8[N, D + 1] (espalier.node_rows)
    query.onnx          query arrays, node_rows → query_state[B, L, S]
    scorer.onnx         query_state[B, S], node_rows[B, C, D] → logits[B, C]
    weights.safetensors the network's weights by their names in training, for training on; engines do not need it, a bundle may lack it

or as weights of sparse features

    chunks.safetensors  the arrays of espalier.chunks, or with weights in float16 of espalier.packed_chunks
    tree-2.safetensors, chunks-2.safetensors … the same of a forest's other trees, which hold the same items
    tail.safetensors    item rows for the scores of a forest (espalier.tail), if the manifest names a tail
    stacking.safetensors  the stacker, which reorders the best candidates (espalier.stacking), if the manifest names one
    text.safetensors    arrays of the vectoriser, if queries are texts
    label-counts.safetensors  training points, or events, of each item; a bundle may lack it

and, if the bundle has a re-ranker,

    ranker.onnx         features[N, F] of candidates → scores[N]
    ranker-texts.safetensors  the words of items' texts (espalier.ranker_texts), if the ranker compares them with the query's

and, if the bundle has a memory of items that go together,

    memory.safetensors  the arrays of espalier.memory

and, if it is one shard of a bundle,

    shard.safetensors   the items and nodes of that bundle that the shard holds (espalier.shard_parts)

and, if the rows of items are computed from their fields,

    content.onnx        features[I, X] of items and their values → leaf rows[I, D]
    content.safetensors arrays that turn an item's fields into features (espalier.content.features)

A bundle is written to a temporary folder, which is then renamed. Every user can read it. It is opened by mmap, never overwritten, and
contains no pickle. This module knows files, not searches; `bundle_writer.py` writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from espalier.arrays import Array
from espalier.bundle_files import map_safetensors, read_parquet, read_safetensors, sha256_of
from espalier.chunks import ARRAYS as CHUNK_ARRAYS
from espalier.chunks import Chunks, TreeChunks
from espalier.errors import BundleCorrupt, BundleNotFound, InvalidInput, InvalidTree, UnsupportedSchema, first_of, spelled
from espalier.items import ItemTable
from espalier.label_counts import LabelCounts
from espalier.manifest import FORMAT, MAX_TREES, NAME, SCHEMA_VERSION, GraphScorer, LinearScorer, Manifest, TreeInfo
from espalier.memory import Memory
from espalier.node_rows import HIGHEST, LOWEST, NodeRows, has_known_exponents, rows_of
from espalier.packed_chunks import unpacked
from espalier.queries import HistoryKind, TextKind, VectorKind
from espalier.rank_features import compared_columns
from espalier.ranker_texts import RankerTexts
from espalier.shard_parts import ShardParts
from espalier.stacking import Stacking
from espalier.stored_arrays import check_arrays
from espalier.tail import Tail
from espalier.text.vectoriser import Vectoriser
from espalier.tree import Tree

T = TypeVar("T")
TREE = "tree.safetensors"
COMMON_PARTS = (TREE, "items.arrow", "golden.parquet", "heldout.parquet")
GRAPH_PARTS = (*COMMON_PARTS, "nodes.safetensors", "query.onnx", "scorer.onnx")
WEIGHTS, RANKER, MEMORY = "weights.safetensors", "ranker.onnx", "memory.safetensors"
CONTENT, CONTENT_ARRAYS = "content.onnx", "content.safetensors"
CHUNKS, TEXT, TAIL, STACKING = "chunks.safetensors", "text.safetensors", "tail.safetensors", "stacking.safetensors"
LABEL_COUNTS, SHARD, RANKER_TEXTS = "label-counts.safetensors", "shard.safetensors", "ranker-texts.safetensors"
LINEAR_PARTS = (*COMMON_PARTS, CHUNKS)
FOREST_PARTS = tuple((f"tree-{number}.safetensors", f"chunks-{number}.safetensors") for number in range(2, MAX_TREES + 1))
"""The files of a forest's trees after the first."""
ALL_PARTS = (
    *GRAPH_PARTS, CHUNKS, TEXT, RANKER, RANKER_TEXTS, MEMORY, TAIL, STACKING, CONTENT, CONTENT_ARRAYS, SHARD,
    *chain.from_iterable(FOREST_PARTS),
)  # fmt: skip
"""All files that a bundle may need besides its manifest; `parts_of` says which of them a given bundle needs."""
OPTIONAL_PARTS = frozenset({WEIGHTS, LABEL_COUNTS})
"""Files that a bundle has where its manifest lists them. No engine reads them."""
MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True)
class Bundle:
    """An opened bundle.

    Node rows and items are mapped, not read. Trees are copied, and so are other small tables (`read_safetensors`): then a file that is
    overwritten in place cannot make a search read outside its arrays.

    tree_index  the tree of a forest that `tree` and `chunks` belong to, from 0. Only bundles from `alone` have an index above 0
    """

    path: Path
    manifest: Manifest
    tree_index: int = 0

    @staticmethod
    def open(path: Path | str, verify: bool = True) -> Bundle:
        """Open models/<name>/<version>/.

        verify  compare every file with its SHA-256 (sizes are always compared)
        Raises BundleNotFound, UnsupportedSchema or BundleCorrupt, each saying which file and why.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        for name in (*parts_of(manifest), *(OPTIONAL_PARTS & manifest.files.keys())):
            info = manifest.files.get(name)
            if info is None:
                raise BundleCorrupt(f"{path}: manifest.json does not list {name}")
            file = path / name
            if not file.is_file():
                raise BundleNotFound(f"{file}: missing")
            if file.stat().st_size != info.size:
                raise BundleCorrupt(f"{file}: {file.stat().st_size} bytes, the manifest says {info.size}")
            if verify and sha256_of(file) != info.sha256:
                raise BundleCorrupt(f"{file}: its SHA-256 is not the manifest's; the file was changed or damaged")
        return Bundle(path, manifest)

    def check_whole(self) -> None:
        """Raise InvalidInput if it is a shard, which has a part of the catalogue and no held-out queries."""
        if (shard := self.manifest.shard) is not None:
            expected = f"the whole bundle, {shard.of} version {shard.version}; shards answer behind a router"
            raise InvalidInput("model", f"{self.path}, shard {shard.index} of {shard.count}", expected)

    @cached_property
    def trees(self) -> tuple[TreeChunks, ...]:
        """All trees of a bundle of linear scorers, each with its weights."""
        return tuple(TreeChunks(bundle.tree, bundle.chunks) for bundle in self.alone)

    @property
    def alone(self) -> tuple[Bundle, ...]:
        """One bundle for each tree of a forest, with that tree alone. A bundle of one tree gives itself."""
        return self._of_each_tree if self.manifest.trees else (self,)  # which it does not hold: a cycle would keep its files

    @cached_property
    def _of_each_tree(self) -> tuple[Bundle, ...]:
        first = self.manifest.model_copy(update={"trees": (), "tail": None, "stacking": None, "shard": None})
        others = (first.model_copy(update={"tree": other.tree, "scorer": other.scorer}) for other in self.manifest.trees)
        return tuple(Bundle(self.path, manifest, tree_index) for tree_index, manifest in enumerate((first, *others)))

    @cached_property
    def tree(self) -> Tree:
        """The tree; in a forest, the first one."""
        if self.manifest.trees:
            return self.alone[0].tree
        return self.load_part(FOREST_PARTS[self.tree_index - 1][0] if self.tree_index else TREE, self._tree_of)

    def _tree_of(self, arrays: dict[str, Array]) -> Tree:
        tree = Tree(**{name: np.array(arrays[name]) for name in ("level_offset", "first_child", "leaf_item")})
        if TreeInfo.of(tree) != self.manifest.tree:
            raise BundleCorrupt("the tree is not the one that the manifest describes")
        return tree

    @property
    def graph_scorer(self) -> GraphScorer:
        """Shapes of the node rows and query states. Raises BundleCorrupt for a bundle of linear scorers, which has none."""
        if not isinstance(self.manifest.scorer, GraphScorer):
            raise BundleCorrupt(f"{self.path}: {self.manifest.scorer.kind} scorers, expected graphs over node rows")
        return self.manifest.scorer

    @property
    def linear_scorer(self) -> LinearScorer:
        """Sizes of the weights. Raises BundleCorrupt for a bundle of graphs, which has none."""
        if not isinstance(self.manifest.scorer, LinearScorer):
            raise BundleCorrupt(f"{self.path}: {self.manifest.scorer.kind} scorers, expected linear ones")
        return self.manifest.scorer

    @property
    def graph_kind(self) -> HistoryKind | VectorKind:
        """The query kind of a bundle of graphs. Raises BundleCorrupt for other bundles."""
        kind = self.manifest.query
        if not isinstance(kind, HistoryKind | VectorKind):
            raise BundleCorrupt(f"{self.path}: {kind.kind} queries, expected histories or vectors")
        return kind

    @cached_property
    def node_rows_ND(self) -> NodeRows:
        """float32[N, D] or float16[N, D], mapped; int8 rows are read as float16 (`PackedRows`)."""
        return rows_of(self.stored_rows)

    @cached_property
    def stored_rows(self) -> Array:
        """The node rows as they are stored (espalier.node_rows), mapped."""
        scorer = self.graph_scorer
        file = self.path / "nodes.safetensors"
        rows = map_safetensors(file).get("node_rows")
        shape = self.manifest.tree.nodes, scorer.node_dim + (scorer.dtype == "int8")
        if rows is None or rows.dtype != scorer.dtype or rows.shape != shape:
            actual = "nothing" if rows is None else f"{rows.dtype}{list(rows.shape)}"
            raise BundleCorrupt(f"{file}: expected node_rows {scorer.dtype}{list(shape)}, got {actual}")
        if rows.dtype == np.int8 and not has_known_exponents(rows):
            raise BundleCorrupt(f"{file}: node_rows: expected exponents from {LOWEST} to {HIGHEST} in the last column")
        return np.asarray(rows)  # a plain view, which is faster to index

    @cached_property
    def chunks(self) -> Chunks:
        """The weights of a bundle of linear scorers, read and checked; in a forest, those of the first tree."""
        if self.manifest.trees:
            return self.alone[0].chunks
        return self.load_part(FOREST_PARTS[self.tree_index - 1][1] if self.tree_index else CHUNKS, self._chunks_of)

    def _chunks_of(self, arrays: dict[str, Array]) -> Chunks:
        scorer = self.linear_scorer
        if scorer.dtype == "float16":
            chunks = unpacked(arrays, scorer.features)
        else:
            check_arrays(arrays, CHUNK_ARRAYS)
            chunks = Chunks(**arrays, width=scorer.features)
        chunks.check(self.tree)
        return chunks

    @cached_property
    def memory(self) -> Memory | None:
        """The memory, read and checked; None if the bundle has none."""
        info, items, sources = self.manifest.memory, self.manifest.tree.items, self.manifest.history_items
        return None if info is None else self.load_part(MEMORY, lambda arrays: Memory.of_arrays(arrays, info, items, sources))

    @cached_property
    def shard(self) -> ShardParts | None:
        """The items and nodes of the whole bundle that this shard holds, read and checked; None if this bundle is whole."""
        info, trees = self.manifest.shard, [alone.manifest.tree for alone in self.alone]
        return None if info is None else self.load_part(SHARD, lambda arrays: ShardParts.of_arrays(arrays, info, trees))

    @cached_property
    def tail(self) -> Tail | None:
        """The tail of a forest's scores, read and checked; None if the bundle has none."""
        info, items = self.manifest.tail, self.manifest.tree.items
        if info is None:
            return None
        return self.load_part(TAIL, lambda arrays: Tail.of_arrays(arrays, info, items, self.linear_scorer.features))

    @cached_property
    def stacking(self) -> Stacking | None:
        """The stacker, which reorders the best candidates, read and checked; None if the bundle has none."""
        info, items = self.manifest.stacking, self.manifest.tree.items
        if info is None:
            return None
        return self.load_part(STACKING, lambda arrays: Stacking.of_arrays(arrays, info, items, self.linear_scorer.features))

    @cached_property
    def ranker_texts(self) -> RankerTexts | None:
        """The texts that the ranker compares with a query's, read and checked; None if it compares none."""
        columns = compared_columns(self.manifest.ranker.features) if self.manifest.ranker else ()
        if not columns:
            return None
        rows, width = self.manifest.tree.items * len(columns), self.vectoriser.width
        return self.load_part(RANKER_TEXTS, lambda arrays: RankerTexts.of_arrays(arrays, rows, width))

    @cached_property
    def vectoriser(self) -> Vectoriser:
        """Turns texts into features. Raises BundleCorrupt if queries are not texts."""
        kind = self.manifest.query
        if not isinstance(kind, TextKind):
            raise BundleCorrupt(f"{self.path}: {kind.kind} queries, expected texts")
        vectoriser = self.load_part(TEXT, lambda arrays: Vectoriser.from_arrays(kind.blocks, arrays))
        if vectoriser.width != kind.width:
            raise BundleCorrupt(f"{self.path / TEXT}: {vectoriser.width} features, the manifest says {kind.width}")
        return vectoriser

    @cached_property
    def items(self) -> ItemTable:
        table = ItemTable.open(self.path / "items.arrow")
        if len(table) != self.manifest.tree.items:
            raise BundleCorrupt(f"{self.path / 'items.arrow'}: {len(table)} items, the tree holds {self.manifest.tree.items}")
        return table

    def weights(self) -> dict[str, Array]:
        """The network's weights by name, mapped. Raises BundleNotFound when the bundle was written without them."""
        if WEIGHTS not in self.manifest.files:
            raise BundleNotFound(f"{self.path / WEIGHTS}: missing; the bundle was written without its network's weights")
        return map_safetensors(self.path / WEIGHTS)

    def label_counts(self) -> LabelCounts | None:
        """The number of training points with each item, read and checked; None if the bundle lacks the file."""
        if LABEL_COUNTS not in self.manifest.files:
            return None
        return self.load_part(LABEL_COUNTS, lambda arrays: LabelCounts.of_arrays(arrays, self.manifest.tree.items))

    def graph(self, name: str) -> bytes:
        """The bytes of query.onnx, scorer.onnx or ranker.onnx."""
        return (self.path / name).read_bytes()

    def golden(self) -> pa.Table:
        return read_parquet(self.path / "golden.parquet")

    def heldout(self) -> pa.Table:
        return read_parquet(self.path / "heldout.parquet")

    def check(self) -> None:
        """Read and check every array and the items. Raises BundleCorrupt, which names the file."""
        _ = self.tree, self.items, self.memory, self.shard, self.tail, self.stacking, self.ranker_texts, self.label_counts()
        _ = self.stored_rows if isinstance(self.manifest.scorer, GraphScorer) else self.trees

    def load_part(self, name: str, make: Callable[[dict[str, Array]], T]) -> T:
        """Read a file's arrays and return `make` of them. Errors name the file. Raises BundleCorrupt."""
        file = self.path / name
        arrays = read_safetensors(file)
        try:
            return make(arrays)
        except (BundleCorrupt, InvalidTree, KeyError) as error:
            raise BundleCorrupt(f"{file}: {error}") from error


def parts_of(manifest: Manifest) -> tuple[str, ...]:
    """The files that a bundle must have besides its manifest."""
    others: dict[str, object] = {
        RANKER: manifest.ranker,
        RANKER_TEXTS: compared_columns(manifest.ranker.features) if manifest.ranker else None,
        MEMORY: manifest.memory,
        CONTENT: manifest.content,
        CONTENT_ARRAYS: manifest.content,
        TAIL: manifest.tail,
        STACKING: manifest.stacking,
        SHARD: manifest.shard,
    }
    kind = GRAPH_PARTS if isinstance(manifest.scorer, GraphScorer) else LINEAR_PARTS
    text = (TEXT,) if isinstance(manifest.query, TextKind) else ()
    named = (name for name, info in others.items() if info)
    return (*kind, *text, *named, *chain.from_iterable(FOREST_PARTS[: len(manifest.trees)]))


def find_versions(root: Path) -> dict[str, tuple[int, ...]]:
    """The versions of every model under a models folder, ascending. Names that are not model names are ignored."""
    versions_of_model: dict[str, tuple[int, ...]] = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and is_model_name(folder.name):
            versions = versions_in(folder)
            if versions:
                versions_of_model[folder.name] = versions
    return versions_of_model


def versions_in(folder: Path) -> tuple[int, ...]:
    """The versions in the folder of a model, ascending."""
    names = (child.name for child in folder.iterdir())
    numbers = [int(name) for name in names if name.isdecimal() and int(name) >= 1 and str(int(name)) == name]
    return tuple(sorted(number for number in numbers if (folder / str(number) / "manifest.json").is_file()))


def is_model_name(name: str) -> bool:
    return re.fullmatch(NAME, name) is not None


def _read_manifest(path: Path) -> Manifest:
    file = path / "manifest.json"
    if not file.is_file():
        raise BundleNotFound(f"{file}: missing; a bundle is a folder models/<name>/<version>/ with a manifest.json")
    if file.stat().st_size > MAX_MANIFEST_BYTES:
        raise BundleCorrupt(f"{file}: {file.stat().st_size} bytes, at most {MAX_MANIFEST_BYTES} expected")
    return parse_manifest(file.read_bytes(), str(file))


def parse_manifest(content: bytes, file: str) -> Manifest:
    """The manifest in these bytes. file: its name in error messages. Raises UnsupportedSchema or BundleCorrupt."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BundleCorrupt(f"{file}: not JSON ({error})") from error
    written, schema = (raw.get("format"), raw.get("schema_version")) if isinstance(raw, dict) else (None, None)
    if written != FORMAT or type(schema) is not int or schema != SCHEMA_VERSION:
        raise UnsupportedSchema(
            f"{file}: format {spelled(written)} with schema_version {spelled(schema)}; "
            f"expected format {spelled(FORMAT)} with schema_version {SCHEMA_VERSION}. "
            "Another generation of this software wrote it: train or import the model again with this one"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        raise BundleCorrupt(f"{file}: {first_of(error)}; if an earlier state of this software wrote it, train the model again") from error
