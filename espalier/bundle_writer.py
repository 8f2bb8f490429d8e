"""Writes bundles: into a temporary folder, which is renamed when it is complete. No version is ever overwritten."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from espalier.bundle import (
    CHUNKS,
    CONTENT,
    CONTENT_ARRAYS,
    FOREST_PARTS,
    LABEL_COUNTS,
    MEMORY,
    OPTIONAL_PARTS,
    RANKER,
    SHARD,
    STACKING,
    TAIL,
    TEXT,
    TREE,
    WEIGHTS,
    Bundle,
    parts_of,
)
from espalier.bundle_files import Gathered, sha256_of, write_safetensors
from espalier.chunks import ARRAYS as CHUNK_ARRAYS
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
    MemoryInfo,
    RankerInfo,
    ScorerForm,
    ShardInfo,
    TreeInfo,
)
from espalier.memory import Memory
from espalier.node_rows import width_of
from espalier.packed_chunks import packed
from espalier.shard_parts import ShardParts
from espalier.stacking import Stacking
from espalier.tail import Tail
from espalier.tree import Tree

if TYPE_CHECKING:  # numba takes a while to import, and only models of texts need it
    from espalier.text.vectoriser import Vectoriser

FILE_MODE, FOLDER_MODE = 0o644, 0o755
"""Permissions of what is written, whatever the umask: a bundle is often read by another user than the one who made it."""


@dataclass(frozen=True)
class ContentParts:
    """What makes rows of items' fields: content.onnx and the arrays of `espalier.content.features`."""

    info: ContentInfo
    arrays: Mapping[str, NDArray[Any]]
    content_onnx: bytes


@dataclass(frozen=True)
class GraphContent:
    """Everything that goes into a bundle of graphs besides the manifest.

    stored_rows   float32[N, D], float16[N, D] or int8[N, D + 1] (espalier.node_rows)
    golden        table with the query column (named as the query kind), `beam_size`, `m`, `item_rows`, `ranks`, `margin`, `keys`
                  where there is a memory, and `candidate_rows` and `candidate_ranks` where there is stacking
    heldout       table with the query column and `relevant` (item ids)
    weights       float32 arrays of the network, without the node rows; empty: no such file
    form          what scorer_onnx computes; None: not declared
    memory        what past items add to a search; None: nothing
    encoder       what query_onnx takes of a history, see `GraphScorer`
    content       of the items, in their rows; None: there is none
    shard         which items and nodes of another bundle these are; None: the bundle is whole
    counts        events that training saw of each item; None: not known
    """

    tree: Tree
    stored_rows: NDArray[Any] | Gathered
    state_levels: int
    state_dim: int
    query_onnx: bytes
    scorer_onnx: bytes
    items: ItemTable
    golden: pa.Table
    heldout: pa.Table
    weights: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    form: ScorerForm | None = None
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
    tail    what else enters the scores of a forest
    stacking  what orders the best candidates anew
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
    Raises BundleExists when `path` is there already, InvalidTree when padding every node to its level's largest child count
    would more than double a level's candidates, BundleCorrupt when the parts do not fit each other.
    """
    tree = content.tree
    if isinstance(content, GraphContent) and check_padding:
        _check_padding(tree)
    if isinstance(content, LinearContent) and len(content.others) >= MAX_TREES:
        raise BundleCorrupt(f"a forest of {1 + len(content.others)} trees: at most {MAX_TREES}")
    if len(content.items) != tree.item_count:
        raise BundleCorrupt(f"items: {len(content.items)} rows, the tree holds {tree.item_count}")
    with _new_version(path) as folder:
        _write_tree(folder / TREE, tree)
        scorer = _write_graphs(folder, content) if isinstance(content, GraphContent) else _write_linear(folder, content)
        memory = _write_memory(folder, content, draft.shard) if isinstance(content, GraphContent) else None
        content.items.write(folder / "items.arrow")
        pq.write_table(content.golden, folder / "golden.parquet")
        pq.write_table(content.heldout, folder / "heldout.parquet")
        info = content.content.info if isinstance(content, GraphContent) and content.content is not None else None
        made = {"tree": TreeInfo.of(tree), "scorer": scorer, "memory": memory, "content": info}
        trees = () if isinstance(content, GraphContent) else _write_forest(folder, content)
        tail = content.tail.info if isinstance(content, LinearContent) and content.tail is not None else None
        stacking = content.stacking.info if isinstance(content, LinearContent) and content.stacking is not None else None
        _write_shard(folder, draft.shard, content.shard, [TreeInfo.of(tree), *(other.tree for other in trees)])
        _write_manifest(folder, draft.model_dump() | made | {"trees": trees, "tail": tail, "stacking": stacking})
    return Bundle.open(path, verify=False)


def with_parts(bundle: Bundle, path: Path, fields: Mapping[str, Any], parts: Mapping[str, bytes | pa.Table]) -> Bundle:
    """Write a bundle with other manifest fields and some files replaced or added. Atomic, as `write_bundle`.

    fields  of the manifest; name, version and creation time follow from `path` and now
    parts   file name → its bytes, or the table of a Parquet file
    """
    manifest = bundle.manifest
    with _new_version(path) as folder:
        for name in {*parts_of(manifest), *OPTIONAL_PARTS} & manifest.files.keys() - parts.keys():
            shutil.copyfile(bundle.path / name, folder / name)
        for name, part in parts.items():
            if isinstance(part, bytes):
                (folder / name).write_bytes(part)
            else:
                pq.write_table(part, folder / name)
        named = {"name": path.absolute().parent.name, "version": int(path.name), "created": datetime.now(UTC)}
        _write_manifest(folder, manifest.model_dump() | named | dict(fields))
    return Bundle.open(path, verify=False)


def with_ranker(bundle: Bundle, path: Path, info: RankerInfo, ranker_onnx: bytes, golden: pa.Table) -> Bundle:
    """Write another version of a bundle, which has a ranker: in place of its own, if it has one. Atomic, as `write_bundle`.

    golden  the golden queries with the ranker's scores
    """
    return with_parts(bundle, path, {"ranker": info}, {RANKER: ranker_onnx, "golden.parquet": golden})


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
    """Make the folder of a model, and those above it that are missing, readable by everybody. What is there keeps its mode."""
    for missing in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        try:
            missing.mkdir()
        except FileExistsError:  # another writer was quicker
            continue
        missing.chmod(FOLDER_MODE)


def _write_manifest(folder: Path, fields: Mapping[str, Any]) -> None:
    """The manifest of the files in a folder."""
    names = sorted(file.name for file in folder.iterdir())
    files = {name: FileInfo(sha256=sha256_of(folder / name), size=(folder / name).stat().st_size) for name in names}
    manifest = Manifest(**{**fields, "files": files})
    (folder / "manifest.json").write_text(manifest.model_dump_json(indent=2) + "\n")


def _write_graphs(folder: Path, graphs: GraphContent) -> GraphScorer:
    tree, rows = graphs.tree, graphs.stored_rows
    if rows.shape[0] != tree.node_count or rows.dtype not in (np.float32, np.float16, np.int8):
        raise BundleCorrupt(f"node_rows: expected float32, float16 or int8 [{tree.node_count}, D], got {rows.dtype}{list(rows.shape)}")
    write_safetensors(folder / "nodes.safetensors", {"node_rows": rows})
    (folder / "query.onnx").write_bytes(graphs.query_onnx)
    (folder / "scorer.onnx").write_bytes(graphs.scorer_onnx)
    if graphs.content is not None:
        (folder / CONTENT).write_bytes(graphs.content.content_onnx)
        write_safetensors(folder / CONTENT_ARRAYS, graphs.content.arrays)
    if graphs.weights:
        write_safetensors(folder / WEIGHTS, graphs.weights)
    _write_counts(folder, graphs)
    return GraphScorer(
        dtype=str(rows.dtype),  # type: ignore[arg-type]  # checked above
        node_dim=width_of(rows),
        state_levels=graphs.state_levels,
        state_dim=graphs.state_dim,
        form=graphs.form,
        encoder=graphs.encoder,
    )


def _write_shard(folder: Path, info: ShardInfo | None, parts: ShardParts | None, trees: Sequence[TreeInfo]) -> None:
    if (info is None) != (parts is None):
        raise BundleCorrupt("shard: expected both an entry of the manifest and the items and nodes, or neither")
    if info is not None and parts is not None:
        parts.check(info, trees)
        write_safetensors(folder / SHARD, parts.arrays())


def _write_memory(folder: Path, graphs: GraphContent, shard: ShardInfo | None) -> MemoryInfo | None:
    memory = graphs.memory
    if memory is None:
        return None
    memory.check(graphs.tree.item_count, None if shard is None else shard.items)
    write_safetensors(folder / MEMORY, memory.arrays())
    return MemoryInfo(
        weight=memory.key_weight,
        length=len(memory.weight),
        entries=len(memory.item),
        repeat=tuple(memory.repeat.tolist()),
        left_out=tuple(memory.left_out.tolist()),
        formula=memory.formula,
    )


def _write_counts(folder: Path, content: GraphContent | LinearContent) -> None:
    if content.counts is not None:
        content.counts.check(content.tree.item_count)
        write_safetensors(folder / LABEL_COUNTS, content.counts.arrays())


def _write_tree(file: Path, tree: Tree) -> None:
    write_safetensors(file, {"level_offset": tree.level_offset, "first_child": tree.first_child, "leaf_item": tree.leaf_item})


def _write_forest(folder: Path, linear: LinearContent) -> tuple[ForestTree, ...]:
    """The trees after the first. That they hold the same items is checked with the manifest."""
    written = []
    for (tree_file, chunks_file), (tree, chunks) in zip(FOREST_PARTS, linear.others, strict=False):
        _write_tree(folder / tree_file, tree)
        written.append(ForestTree(tree=TreeInfo.of(tree), scorer=_write_chunks(folder / chunks_file, tree, chunks)))
    return tuple(written)


def _write_linear(folder: Path, linear: LinearContent) -> LinearScorer:
    if linear.vectoriser is not None:
        write_safetensors(folder / TEXT, linear.vectoriser.arrays())
    _write_counts(folder, linear)
    if linear.tail is not None:
        linear.tail.check(linear.tree.item_count)
        write_safetensors(folder / TAIL, linear.tail.arrays())
    if linear.stacking is not None:
        linear.stacking.check(linear.tree.item_count, linear.chunks.width)
        write_safetensors(folder / STACKING, linear.stacking.arrays())
    return _write_chunks(folder / CHUNKS, linear.tree, linear.chunks)


def _write_chunks(file: Path, tree: Tree, chunks: Chunks) -> LinearScorer:
    chunks.check(tree)
    narrow = chunks.entry_weight.dtype == np.float16
    arrays = packed(chunks) if narrow else {name: getattr(chunks, name) for name in CHUNK_ARRAYS}
    write_safetensors(file, arrays)
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
