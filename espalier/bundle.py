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
    tail.safetensors    what else enters the scores of a forest (espalier.tail); few have it
    stacking.safetensors  what orders the best candidates anew (espalier.stacking), where the manifest says so
    text.safetensors    the vectoriser's, where queries are texts
    label-counts.safetensors  training points, or events, of each item; a bundle may lack it

and, where the search has a second stage,

    ranker.onnx         features[N, F] of candidates → scores[N]

and, where past items speak for others,

    memory.safetensors  the arrays of espalier.memory

and, where it is one of the shards of a bundle,

    shard.safetensors   which of that bundle's items and nodes it holds (espalier.shard_parts)

and, where the content of items enters their rows,

    content.onnx        features[I, X] of items and their values → leaf rows[I, D]
    content.safetensors what makes features of an item's fields (espalier.content.features)

Written to a temporary folder and renamed; readable by every user; opened by mmap; never overwritten; no pickle. Knows files, not
searches; `bundle_writer.py` writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from espalier.bundle_files import map_safetensors, read_parquet, read_safetensors, sha256_of
from espalier.chunks import ARRAYS as CHUNK_ARRAYS
from espalier.chunks import Chunks, TreeChunks
from espalier.errors import BundleCorrupt, BundleNotFound, InvalidTree, UnsupportedSchema, first_of
from espalier.items import ItemTable
from espalier.label_counts import LabelCounts
from espalier.manifest import (
    FORMAT,
    MAX_TREES,
    NAME,
    SCHEMA_VERSION,
    GraphScorer,
    LinearScorer,
    Manifest,
    TreeInfo,
)
from espalier.memory import Memory
from espalier.node_rows import HIGHEST, LOWEST, NodeRows, has_known_exponents, rows_of
from espalier.packed_chunks import unpacked
from espalier.queries import HistoryKind, TextKind, VectorKind
from espalier.shard_parts import ShardParts
from espalier.stacking import Stacking
from espalier.stored_arrays import check_arrays
from espalier.tail import Tail
from espalier.tree import Tree

if TYPE_CHECKING:  # numba takes a while to import, and only models of texts need it
    from espalier.text.vectoriser import Vectoriser

T = TypeVar("T")
TREE = "tree.safetensors"
COMMON_PARTS = (TREE, "items.arrow", "golden.parquet", "heldout.parquet")
GRAPH_PARTS = (*COMMON_PARTS, "nodes.safetensors", "query.onnx", "scorer.onnx")
WEIGHTS, RANKER, MEMORY = "weights.safetensors", "ranker.onnx", "memory.safetensors"
CONTENT, CONTENT_ARRAYS = "content.onnx", "content.safetensors"
CHUNKS, TEXT, TAIL, STACKING = "chunks.safetensors", "text.safetensors", "tail.safetensors", "stacking.safetensors"
LABEL_COUNTS, SHARD = "label-counts.safetensors", "shard.safetensors"
LINEAR_PARTS = (*COMMON_PARTS, CHUNKS)
FOREST_PARTS = tuple((f"tree-{number}.safetensors", f"chunks-{number}.safetensors") for number in range(2, MAX_TREES + 1))
"""The files of a forest's trees after the first."""
ALL_PARTS = (
    *GRAPH_PARTS, CHUNKS, TEXT, RANKER, MEMORY, TAIL, STACKING, CONTENT, CONTENT_ARRAYS, SHARD, *chain.from_iterable(FOREST_PARTS)
)  # fmt: skip
"""All files that a bundle may need besides its manifest; `parts_of` says which of them a given bundle needs."""
OPTIONAL_PARTS = frozenset({WEIGHTS, LABEL_COUNTS})
"""Files that a bundle has where its manifest lists them. No engine reads them."""
MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Node rows and items are mapped, not read; trees are copied, as are other tables where they are small
    (`read_safetensors`): a file that is overwritten in place cannot send a search out of its arrays.

    place  which tree of a forest `tree` and `chunks` are, from 0; above 0 in what `alone` gives
    """

    path: Path
    manifest: Manifest
    place: int = 0

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

    @cached_property
    def trees(self) -> tuple[TreeChunks, ...]:
        """All trees of a bundle of linear scorers, each with its weights."""
        return tuple(TreeChunks(bundle.tree, bundle.chunks) for bundle in self.alone)

    @cached_property
    def alone(self) -> tuple[Bundle, ...]:
        """A bundle for each tree of a forest, as if it were the only one; this bundle itself where it has one tree."""
        if not self.manifest.trees:
            return (self,)
        first = self.manifest.model_copy(update={"trees": (), "tail": None, "stacking": None, "shard": None})
        others = (first.model_copy(update={"tree": other.tree, "scorer": other.scorer}) for other in self.manifest.trees)
        return tuple(Bundle(self.path, manifest, place) for place, manifest in enumerate((first, *others)))

    @cached_property
    def tree(self) -> Tree:
        """The tree, of a forest the first one."""
        if self.manifest.trees:
            return self.alone[0].tree
        return self.made(FOREST_PARTS[self.place - 1][0] if self.place else TREE, self._tree_of)

    def _tree_of(self, arrays: dict[str, NDArray[Any]]) -> Tree:
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
        """float32[N, D] or float16[N, D], mapped, or what is read as the latter."""
        return rows_of(self.stored_rows)

    @cached_property
    def stored_rows(self) -> NDArray[Any]:
        """The node rows as they are stored (espalier.node_rows), mapped."""
        scorer = self.graph_scorer
        file = self.path / "nodes.safetensors"
        rows = map_safetensors(file).get("node_rows")
        shape = self.manifest.tree.nodes, scorer.node_dim + (scorer.dtype == "int8")
        if rows is None or rows.dtype != scorer.dtype or rows.shape != shape:
            found = "nothing" if rows is None else f"{rows.dtype}{list(rows.shape)}"
            raise BundleCorrupt(f"{file}: expected node_rows {scorer.dtype}{list(shape)}, got {found}")
        if rows.dtype == np.int8 and not has_known_exponents(rows):
            raise BundleCorrupt(f"{file}: node_rows: expected exponents from {LOWEST} to {HIGHEST} in the last column")
        return np.asarray(rows)  # a plain view, which is faster to index

    @cached_property
    def chunks(self) -> Chunks:
        """The weights of a bundle of linear scorers, of a forest those of the first tree, read and checked."""
        if self.manifest.trees:
            return self.alone[0].chunks
        return self.made(FOREST_PARTS[self.place - 1][1] if self.place else CHUNKS, self._chunks_of)

    def _chunks_of(self, arrays: dict[str, NDArray[Any]]) -> Chunks:
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
        """The memory, read and checked; None where the bundle has none."""
        info, items, sources = self.manifest.memory, self.manifest.tree.items, self.manifest.history_items
        return None if info is None else self.made(MEMORY, lambda arrays: Memory.of_arrays(arrays, info, items, sources))

    @cached_property
    def shard(self) -> ShardParts | None:
        """Which items and nodes of the bundle that was cut this one holds, read and checked; None where this one is whole."""
        info, trees = self.manifest.shard, [alone.manifest.tree for alone in self.alone]
        return None if info is None else self.made(SHARD, lambda arrays: ShardParts.of_arrays(arrays, info, trees))

    @cached_property
    def tail(self) -> Tail | None:
        """What else enters the scores of a forest, read and checked; None where the bundle has no such part."""
        info, items = self.manifest.tail, self.manifest.tree.items
        return None if info is None else self.made(TAIL, lambda arrays: Tail.of_arrays(arrays, info, items, self.linear_scorer.features))

    @cached_property
    def stacking(self) -> Stacking | None:
        """What orders the best candidates anew, read and checked; None where the bundle has no such part."""
        info, items = self.manifest.stacking, self.manifest.tree.items
        if info is None:
            return None
        return self.made(STACKING, lambda arrays: Stacking.of_arrays(arrays, info, items, self.linear_scorer.features))

    @cached_property
    def vectoriser(self) -> Vectoriser:
        """What makes features of texts. Raises BundleCorrupt where queries are no texts."""
        from espalier.text.vectoriser import Vectoriser

        kind = self.manifest.query
        if not isinstance(kind, TextKind):
            raise BundleCorrupt(f"{self.path}: {kind.kind} queries, expected texts")
        vectoriser = self.made(TEXT, lambda arrays: Vectoriser.from_arrays(kind.blocks, arrays))
        if vectoriser.width != kind.width:
            raise BundleCorrupt(f"{self.path / TEXT}: {vectoriser.width} features, the manifest says {kind.width}")
        return vectoriser

    @cached_property
    def items(self) -> ItemTable:
        table = ItemTable.open(self.path / "items.arrow")
        if len(table) != self.manifest.tree.items:
            raise BundleCorrupt(f"{self.path / 'items.arrow'}: {len(table)} items, the tree holds {self.manifest.tree.items}")
        return table

    def weights(self) -> dict[str, NDArray[Any]]:
        """The network's weights by name, mapped. Raises BundleNotFound when the bundle was written without them."""
        if WEIGHTS not in self.manifest.files:
            raise BundleNotFound(f"{self.path / WEIGHTS}: missing; the bundle was written without its network's weights")
        return map_safetensors(self.path / WEIGHTS)

    def label_counts(self) -> LabelCounts | None:
        """How often training points had each item, read and checked; None where the bundle does not say."""
        if LABEL_COUNTS not in self.manifest.files:
            return None
        return self.made(LABEL_COUNTS, lambda arrays: LabelCounts.of_arrays(arrays, self.manifest.tree.items))

    def graph(self, name: str) -> bytes:
        """The bytes of query.onnx, scorer.onnx or ranker.onnx."""
        return (self.path / name).read_bytes()

    def golden(self) -> pa.Table:
        return read_parquet(self.path / "golden.parquet")

    def heldout(self) -> pa.Table:
        return read_parquet(self.path / "heldout.parquet")

    def check(self) -> None:
        """Read and check every array and the items. Raises BundleCorrupt, which names the file."""
        _ = self.tree, self.items, self.memory, self.shard, self.tail, self.stacking, self.label_counts()
        _ = self.stored_rows if isinstance(self.manifest.scorer, GraphScorer) else self.trees

    def made(self, name: str, make: Callable[[dict[str, NDArray[Any]]], T]) -> T:
        """What is made of a file's arrays. What is wrong with them is said with the file's name."""
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
        MEMORY: manifest.memory,
        CONTENT: manifest.content,
        CONTENT_ARRAYS: manifest.content,
    }
    others |= {TAIL: manifest.tail, STACKING: manifest.stacking, SHARD: manifest.shard}
    kind = GRAPH_PARTS if isinstance(manifest.scorer, GraphScorer) else LINEAR_PARTS
    text = (TEXT,) if isinstance(manifest.query, TextKind) else ()
    named = (name for name, info in others.items() if info is not None)
    return (*kind, *text, *named, *chain.from_iterable(FOREST_PARTS[: len(manifest.trees)]))


def find_versions(root: Path) -> dict[str, tuple[int, ...]]:
    """The versions of every model under a models folder, ascending. Names that are not model names are ignored."""
    found: dict[str, tuple[int, ...]] = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and is_model_name(folder.name):
            versions = versions_in(folder)
            if versions:
                found[folder.name] = versions
    return found


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
    """The manifest in these bytes. file: what errors call it. Raises UnsupportedSchema or BundleCorrupt."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BundleCorrupt(f"{file}: not JSON ({error})") from error
    written, schema = (raw.get("format"), raw.get("schema_version")) if isinstance(raw, dict) else (None, None)
    if written != FORMAT or type(schema) is not int or schema != SCHEMA_VERSION:
        raise UnsupportedSchema(
            f"{file}: format {written!r} with schema_version {schema!r}; expected format {FORMAT!r} with schema_version {SCHEMA_VERSION}. "
            "Another generation of this software wrote it: train or import the model again with this one"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        raise BundleCorrupt(f"{file}: {first_of(error)}") from error
