"""Writes bundles: into a temporary folder, which is renamed when it is complete. No version is ever overwritten."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from espalier.arrays import Array, Float32
from espalier.bundle import (
    CHUNKS,
    CONTENT,
    CONTENT_ARRAYS,
    FOREST_PARTS,
    LABEL_COUNTS,
    MEMORY,
    OPTIONAL_PARTS,
    RANKER,
    RANKER_TEXTS,
    SHARD,
    STACKING,
    TAIL,
    TEXT,
    TREE,
    WEIGHTS,
    Bundle,
    parts_of,
)
from espalier.bundle_files import Gathered, write_safetensors
from espalier.chunks import Chunks, TreeChunks
from espalier.content_info import ContentInfo
from espalier.durable import flush
from espalier.errors import BundleCorrupt, BundleExists, InvalidTree
from espalier.items import ItemTable
from espalier.label_counts import LabelCounts
from espalier.manifest import (
    MAX_TREES,
    FileInfo,
    ForestTree,
    GraphScorer,
    LinearScorer,
    Manifest,
    ManifestDraft,
    RankerInfo,
    ScorerForm,
    TreeInfo,
)
from espalier.memory import Memory
from espalier.node_rows import width_of
from espalier.packed_chunks import packed
from espalier.ranker_texts import RankerTexts
from espalier.shard_parts import ShardParts
from espalier.stacking import Stacking
from espalier.tail import Tail
from espalier.text.vectoriser import Vectoriser
from espalier.tree import Tree

FILE_MODE, FOLDER_MODE = 0o644, 0o755
"""Permissions of written files and folders, whatever the umask: often another user reads the bundle."""


class Table(Protocol):
    """An object that is stored as a file of arrays."""

    def arrays(self) -> dict[str, Array]: ...


@dataclass(frozen=True)
class ContentParts:
    """Computes rows from items' fields: content.onnx and the arrays of `espalier.content.features`."""

    info: ContentInfo
    arrays: Mapping[str, Array]
    content_onnx: bytes


class Graphs(NamedTuple):
    """The graphs of the encoder and the scorer.

    state_dim  width of query states
    form       the formula of the scorer; None: not declared
    """

    query_onnx: bytes
    scorer_onnx: bytes
    state_dim: int
    form: ScorerForm | None = None


@dataclass(frozen=True)
class GraphContent:
    """Everything that goes into a bundle of graphs besides the manifest.

    stored_rows   float32[N, D], float16[N, D] or int8[N, D + 1] (espalier.node_rows)
    golden        table with the query column (named as the query kind), `beam_size`, `m`, `item_rows`, `ranks`, `margin`, `keys`
                  if there is a memory, and `candidate_rows` and `candidate_ranks` if there is stacking
    heldout       table with the query column and `relevant` (item ids)
    weights       float32 arrays of the network, without the node rows; empty: no such file
    memory        item pairs that raise keys in a search; None: no memory
    encoder       the form in which the encoder takes a history, see `GraphScorer`
    content       computes rows from items' fields; None: rows do not depend on fields
    shard         the items and nodes of the whole bundle that these are; None: the bundle is whole
    counts        training events of each item; None: not known
    """

    tree: Tree
    stored_rows: Array | Gathered
    state_levels: int
    graphs: Graphs
    items: ItemTable
    golden: pa.Table
    heldout: pa.Table
    weights: Mapping[str, Float32] = field(default_factory=dict)
    memory: Memory | None = None
    encoder: Literal["levels", "sequence"] = "levels"
    content: ContentParts | None = None
    shard: ShardParts | None = None
    counts: LabelCounts | None = None


@dataclass(frozen=True)
class LinearContent:
    """Everything that goes into a bundle of linear scorers besides the manifest; the vectoriser where queries are texts.

    counts  training points of each item; None: not known
    others  the trees of a forest after the first, over the same items
    tail    item rows for the scores of a forest
    stacking  the stacker, which reorders the best candidates
    shard   as in `GraphContent`
    """

    tree: Tree
    chunks: Chunks
    items: ItemTable
    golden: pa.Table
    heldout: pa.Table
    vectoriser: Vectoriser | None = None
    counts: LabelCounts | None = None
    others: Sequence[TreeChunks] = ()
    tail: Tail | None = None
    stacking: Stacking | None = None
    shard: ShardParts | None = None


def write_bundle(path: Path, draft: ManifestDraft, content: GraphContent | LinearContent, check_padding: bool = True) -> Bundle:
    """Write models/<name>/<version>/ as one atomic step.

    check_padding  False: a tree of graphs may have nodes with far more children than others
    Raises BundleExists when `path` exists, InvalidTree when padding every node to its level's largest child count
    would more than double a level's candidates, BundleCorrupt when the parts do not fit each other.
    """
    tree = content.tree
    if isinstance(content, GraphContent) and check_padding:
        _check_padding(tree)
    if isinstance(content, LinearContent) and len(content.others) >= MAX_TREES:
        raise BundleCorrupt(f"a forest of {1 + len(content.others)} trees: at most {MAX_TREES}")
    if (draft.shard is None) != (content.shard is None):
        raise BundleCorrupt("shard: expected both an entry of the manifest and the items and nodes, or neither")
    with _new_version(path) as folder:
        scorer_fields = _write_graphs(folder, content) if isinstance(content, GraphContent) else _write_linear(folder, content)
        _write_tree(folder / TREE, tree)
        _write_tables(folder, {SHARD: content.shard, LABEL_COUNTS: content.counts})
        content.items.write(folder / "items.arrow")
        pq.write_table(content.golden, folder / "golden.parquet")
        pq.write_table(content.heldout, folder / "heldout.parquet")
        _write_manifest(folder, draft.model_dump() | {"tree": TreeInfo.of(tree)} | scorer_fields)
        Bundle.open(folder, verify=False).check()
    return Bundle.open(path, verify=False)


def with_parts(bundle: Bundle, path: Path, fields: Mapping[str, Any], parts: Mapping[str, bytes | pa.Table | Table]) -> Bundle:
    """Write a bundle with other manifest fields and some files replaced or added. Atomic, as `write_bundle`.

    fields  of the manifest; name, version and creation time follow from `path` and now
    parts   file name → its bytes, the table of a Parquet file, or an object of arrays
    """
    manifest = bundle.manifest
    with _new_version(path) as folder:
        for name in {*parts_of(manifest), *OPTIONAL_PARTS} & manifest.files.keys() - parts.keys():
            shutil.copyfile(bundle.path / name, folder / name)
        for name, part in parts.items():
            if isinstance(part, bytes):
                (folder / name).write_bytes(part)
            elif isinstance(part, pa.Table):
                pq.write_table(part, folder / name)
            else:
                write_safetensors(folder / name, part.arrays())
        named = {"name": path.absolute().parent.name, "version": int(path.name), "created": datetime.now(UTC)}
        _write_manifest(folder, manifest.model_dump() | named | dict(fields))
    return Bundle.open(path, verify=False)


def with_ranker(bundle: Bundle, path: Path, info: RankerInfo, ranker_onnx: bytes, texts: RankerTexts | None) -> Bundle:
    """`with_parts`, with a ranker in place of the bundle's.

    texts  of all items, if the ranker compares them with queries
    """
    tables = {} if texts is None else {RANKER_TEXTS: texts}
    return with_parts(bundle, path, {"ranker": info}, {RANKER: ranker_onnx, **tables})


@contextmanager
def _new_version(path: Path) -> Iterator[Path]:
    """A folder to write a bundle into; it becomes `path` in one step when the block ends well. Raises BundleExists."""
    path = path.absolute()
    if path.exists():
        raise BundleExists(f"{path}: a bundle is never overwritten; choose another version")
    make_folder(path.parent)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        for file in temporary.iterdir():
            file.chmod(FILE_MODE)
            flush(file)
        temporary.chmod(FOLDER_MODE)
        flush(temporary)
        try:
            temporary.rename(path)
        except OSError as error:
            raise BundleExists(f"{path}: appeared while the bundle was being written") from error
        flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make the folder of a model and all missing parent folders, readable by everybody. Folders that exist keep their mode."""
    for missing in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        try:
            missing.mkdir()
        except FileExistsError:  # another writer was quicker
            continue
        missing.chmod(FOLDER_MODE)


def _write_manifest(folder: Path, fields: Mapping[str, Any]) -> None:
    files = {file.name: FileInfo.of(file) for file in sorted(folder.iterdir())}
    manifest = Manifest(**{**fields, "files": files})
    (folder / "manifest.json").write_text(manifest.model_dump_json(indent=2) + "\n")


def _write_graphs(folder: Path, content: GraphContent) -> dict[str, Any]:
    """Write the files of the scorer. Returns fields of the manifest."""
    rows, memory, parts, graphs = content.stored_rows, content.memory, content.content, content.graphs
    write_safetensors(folder / "nodes.safetensors", {"node_rows": rows})
    (folder / "query.onnx").write_bytes(graphs.query_onnx)
    (folder / "scorer.onnx").write_bytes(graphs.scorer_onnx)
    if parts is not None:
        (folder / CONTENT).write_bytes(parts.content_onnx)
        write_safetensors(folder / CONTENT_ARRAYS, parts.arrays)
    if content.weights:
        write_safetensors(folder / WEIGHTS, content.weights)
    _write_tables(folder, {MEMORY: memory})
    scorer = GraphScorer(
        dtype=str(rows.dtype),  # type: ignore[arg-type]  # pydantic checks it
        node_dim=width_of(rows),
        state_levels=content.state_levels,
        state_dim=graphs.state_dim,
        form=graphs.form,
        encoder=content.encoder,
    )
    infos = {"memory": None if memory is None else memory.info, "content": None if parts is None else parts.info}
    return {"scorer": scorer} | infos


def _write_tables(folder: Path, tables: Mapping[str, Table | None]) -> None:
    for name, table in tables.items():
        if table is not None:
            write_safetensors(folder / name, table.arrays())


def _write_tree(file: Path, tree: Tree) -> None:
    write_safetensors(file, {"level_offset": tree.level_offset, "first_child": tree.first_child, "leaf_item": tree.leaf_item})


def _write_linear(folder: Path, linear: LinearContent) -> dict[str, Any]:
    """Write the files of the scorer. Returns fields of the manifest."""
    tail, stacking, others = linear.tail, linear.stacking, []
    _write_tables(folder, {TEXT: linear.vectoriser, TAIL: tail, STACKING: stacking})
    for (tree_file, chunks_file), (tree, chunks) in zip(FOREST_PARTS, linear.others, strict=False):
        _write_tree(folder / tree_file, tree)
        others.append(ForestTree(tree=TreeInfo.of(tree), scorer=_write_chunks(folder / chunks_file, chunks)))
    scorer = _write_chunks(folder / CHUNKS, linear.chunks)
    infos = {"tail": None if tail is None else tail.info, "stacking": None if stacking is None else stacking.info}
    return {"scorer": scorer, "trees": tuple(others)} | infos


def _write_chunks(file: Path, chunks: Chunks) -> LinearScorer:
    narrow = chunks.entry_weight.dtype == np.float16
    write_safetensors(file, packed(chunks) if narrow else chunks.arrays())
    dtype: Literal["float32", "float16"] = "float16" if narrow else "float32"
    return LinearScorer(features=chunks.width, rows=len(chunks.row_feature), weights=len(chunks.entry_weight), dtype=dtype)


def _check_padding(tree: Tree) -> None:
    for h, most in enumerate(tree.max_children):
        padded, nodes = tree.level_size(h) * most, tree.level_size(h + 1)
        if padded > 2 * nodes:
            raise InvalidTree(
                f"level {h}: its largest node has {most} children, so beams would be padded to {padded} candidates for {nodes} nodes; "
                "more than twice is refused. Split the largest nodes or balance the tree"
            )
