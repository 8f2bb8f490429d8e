"""A trained model on disk: models/<name>/<version>/.

    manifest.json       what it is, with the size and SHA-256 of every other file
    tree.safetensors    level_offset, first_child, leaf_item
    items.arrow         ids, titles, attributes
    golden.parquet      queries with the results that every engine must give
    heldout.parquet     held-out queries with their relevant ids

and the node scorers, either as graphs

    nodes.safetensors   node_rows[N, D], float32 or float16
    query.onnx          query arrays, node_rows → query_state[B, L, S]
    scorer.onnx         query_state[B, S], node_rows[B, C, D] → logits[B, C]
    weights.safetensors the network's weights by their names in training, for training on; engines do not need it, a bundle may lack it

or as weights of sparse features

    chunks.safetensors  the arrays of espalier.chunks
    text.safetensors    the vectoriser's, where queries are texts

and, where the search has a second stage,

    ranker.onnx         features[N, F] of candidates → scores[N]

Written to a temporary folder and renamed; readable by every user; opened by mmap; never overwritten; no pickle. Knows files, not
searches.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import save_file

from espalier.chunks import ARRAYS as CHUNK_ARRAYS
from espalier.chunks import Chunks
from espalier.errors import BundleCorrupt, BundleExists, BundleNotFound, InvalidTree, UnsupportedSchema
from espalier.items import ItemTable
from espalier.manifest import (
    READ_VERSIONS,
    SCHEMA_VERSION,
    FileInfo,
    GraphScorer,
    LinearScorer,
    Manifest,
    ManifestDraft,
    ModelName,
    RankerInfo,
    ScorerForm,
    TreeInfo,
)
from espalier.queries import HistoryKind, TextKind, VectorKind
from espalier.tree import Tree

if TYPE_CHECKING:  # numba takes a while to import, and only models of texts need it
    from espalier.text.vectoriser import Vectoriser

COMMON_PARTS = ("tree.safetensors", "items.arrow", "golden.parquet", "heldout.parquet")
GRAPH_PARTS = (*COMMON_PARTS, "nodes.safetensors", "query.onnx", "scorer.onnx")
WEIGHTS, RANKER = "weights.safetensors", "ranker.onnx"
CHUNKS, TEXT = "chunks.safetensors", "text.safetensors"
LINEAR_PARTS = (*COMMON_PARTS, CHUNKS)
ALL_PARTS = (*GRAPH_PARTS, CHUNKS, TEXT, RANKER)
"""What some bundle must have besides its manifest; `parts_of` says which of them a given one must."""
MAX_MANIFEST_BYTES = 16 << 20
MAX_HEADER_BYTES = 16 << 20
"""Of a safetensors file."""
MAX_QUERY_ROWS, MAX_QUERY_BYTES = 1 << 20, 1 << 30
"""Of golden or held-out queries, and of what they take once they are unpacked: a small Parquet file can unpack to any size."""
FILE_MODE, FOLDER_MODE = 0o644, 0o755
"""Of what is written, whatever the umask and the libraries that write: a bundle is often read by another user than the one who made it."""


@dataclass(frozen=True)
class GraphContent:
    """Everything that goes into a bundle of graphs besides the manifest.

    node_rows_ND  float32[N, D] or float16[N, D]
    golden        table with the query column (named as the query kind), `beam_size`, `m`, `item_rows`, `ranks`, `margin`
    heldout       table with the query column and `relevant` (item ids)
    weights       float32 arrays of the network, without the node rows; empty: no such file
    form          what scorer_onnx computes; None: not declared
    """

    tree: Tree
    node_rows_ND: NDArray[Any]
    state_levels: int
    state_dim: int
    query_onnx: bytes
    scorer_onnx: bytes
    items: ItemTable
    golden: pa.Table
    heldout: pa.Table
    weights: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    form: ScorerForm | None = None


@dataclass(frozen=True)
class LinearContent:
    """Everything that goes into a bundle of linear scorers besides the manifest; the vectoriser where queries are texts."""

    tree: Tree
    chunks: Chunks
    items: ItemTable
    golden: pa.Table
    heldout: pa.Table
    vectoriser: Vectoriser | None = None


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Node rows and items are mapped, not read; the tree is copied."""

    path: Path
    manifest: Manifest

    @staticmethod
    def open(path: Path, verify: bool = True) -> Bundle:
        """Open models/<name>/<version>/.

        verify  compare every file with its SHA-256 (sizes are always compared)
        Raises BundleNotFound, UnsupportedSchema or BundleCorrupt, each saying which file and why.
        """
        manifest = _read_manifest(path)
        for name in (*parts_of(manifest), *({WEIGHTS} & manifest.files.keys())):
            info = manifest.files.get(name)
            if info is None:
                raise BundleCorrupt(f"{path}: manifest.json does not list {name}")
            file = path / name
            if not file.is_file():
                raise BundleNotFound(f"{file}: missing")
            if file.stat().st_size != info.size:
                raise BundleCorrupt(f"{file}: {file.stat().st_size} bytes, the manifest says {info.size}")
            if verify and _sha256(file) != info.sha256:
                raise BundleCorrupt(f"{file}: its SHA-256 is not the manifest's; the file was changed or damaged")
        return Bundle(path, manifest)

    @cached_property
    def tree(self) -> Tree:
        arrays = _map_safetensors(self.path / "tree.safetensors")
        try:
            tree = Tree(np.array(arrays["level_offset"]), np.array(arrays["first_child"]), np.array(arrays["leaf_item"]))
        except (KeyError, InvalidTree) as error:
            raise BundleCorrupt(f"{self.path / 'tree.safetensors'}: {error}") from error
        if _tree_info(tree) != self.manifest.tree:
            raise BundleCorrupt(f"{self.path / 'tree.safetensors'}: the tree is not the one that the manifest describes")
        return tree

    @property
    def graph_scorer(self) -> GraphScorer:
        """Shapes of the node rows and query states. Raises BundleCorrupt for a bundle of linear scorers, which has none."""
        if not isinstance(self.manifest.scorer, GraphScorer):
            raise BundleCorrupt(f"{self.path}: {self.manifest.scorer.kind} scorers, expected graphs over node rows")
        return self.manifest.scorer

    @property
    def graph_kind(self) -> HistoryKind | VectorKind:
        """The query kind of a bundle of graphs. Raises BundleCorrupt for other bundles."""
        kind = self.manifest.query
        if not isinstance(kind, HistoryKind | VectorKind):
            raise BundleCorrupt(f"{self.path}: {kind.kind} queries, expected histories or vectors")
        return kind

    @cached_property
    def node_rows_ND(self) -> NDArray[Any]:
        """float32[N, D] or float16[N, D], mapped."""
        scorer = self.graph_scorer
        file = self.path / "nodes.safetensors"
        rows = _map_safetensors(file).get("node_rows")
        wanted = f"{scorer.dtype}[{self.manifest.tree.nodes}, {scorer.node_dim}]"
        if rows is None or rows.dtype != scorer.dtype or rows.shape != (self.manifest.tree.nodes, scorer.node_dim):
            found = "nothing" if rows is None else f"{rows.dtype}{list(rows.shape)}"
            raise BundleCorrupt(f"{file}: expected node_rows {wanted}, got {found}")
        return rows

    @cached_property
    def chunks(self) -> Chunks:
        """The weights of a bundle of linear scorers, mapped and checked."""
        scorer, file = self.manifest.scorer, self.path / CHUNKS
        if not isinstance(scorer, LinearScorer):
            raise BundleCorrupt(f"{self.path}: {scorer.kind} scorers, expected linear ones")
        arrays = _map_safetensors(file)
        if arrays.keys() != set(CHUNK_ARRAYS):
            raise BundleCorrupt(f"{file}: arrays {sorted(arrays)}, expected {sorted(CHUNK_ARRAYS)}")
        chunks = Chunks(**arrays, width=scorer.features)
        try:
            chunks.check(self.tree)
        except BundleCorrupt as error:
            raise BundleCorrupt(f"{file}: {error}") from error
        return chunks

    @cached_property
    def vectoriser(self) -> Vectoriser:
        """What makes features of texts. Raises BundleCorrupt where queries are no texts."""
        from espalier.text.vectoriser import Vectoriser

        kind = self.manifest.query
        if not isinstance(kind, TextKind):
            raise BundleCorrupt(f"{self.path}: {kind.kind} queries, expected texts")
        vectoriser = Vectoriser.from_arrays(kind.blocks, _map_safetensors(self.path / TEXT))
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
        return _map_safetensors(self.path / WEIGHTS)

    def graph(self, name: str) -> bytes:
        """The bytes of query.onnx, scorer.onnx or ranker.onnx."""
        return (self.path / name).read_bytes()

    def golden(self) -> pa.Table:
        return _read_parquet(self.path / "golden.parquet")

    def heldout(self) -> pa.Table:
        return _read_parquet(self.path / "heldout.parquet")


def write_bundle(path: Path, draft: ManifestDraft, content: GraphContent | LinearContent) -> Bundle:
    """Write models/<name>/<version>/ as one atomic step.

    Raises BundleExists when `path` is there already, InvalidTree when padding every node to its level's largest child count
    would more than double a level's candidates, BundleCorrupt when the parts do not fit each other.
    """
    tree = content.tree
    if isinstance(content, GraphContent):
        _check_padding(tree)
    if len(content.items) != tree.item_count:
        raise BundleCorrupt(f"items: {len(content.items)} rows, the tree holds {tree.item_count}")
    with _new_version(path) as folder:
        topology = {"level_offset": tree.level_offset, "first_child": tree.first_child, "leaf_item": tree.leaf_item}
        save_file(topology, folder / "tree.safetensors")
        scorer = _write_graphs(folder, content) if isinstance(content, GraphContent) else _write_linear(folder, content)
        content.items.write(folder / "items.arrow")
        pq.write_table(content.golden, folder / "golden.parquet")
        pq.write_table(content.heldout, folder / "heldout.parquet")
        _write_manifest(folder, draft.model_dump() | {"schema_version": SCHEMA_VERSION, "tree": _tree_info(tree), "scorer": scorer})
    return Bundle.open(path, verify=False)


def with_parts(bundle: Bundle, path: Path, fields: Mapping[str, Any], parts: Mapping[str, bytes | pa.Table]) -> Bundle:
    """Write a bundle with other manifest fields and some files replaced or added. Atomic, as `write_bundle`.

    fields  of the manifest; name, version and creation time follow from `path` and now
    parts   file name → its bytes, or the table of a Parquet file
    """
    manifest = bundle.manifest
    with _new_version(path) as folder:
        for name in {*parts_of(manifest), WEIGHTS} & manifest.files.keys() - parts.keys():
            shutil.copyfile(bundle.path / name, folder / name)
        for name, part in parts.items():
            if isinstance(part, bytes):
                (folder / name).write_bytes(part)
            else:
                pq.write_table(part, folder / name)
        named = {
            "schema_version": SCHEMA_VERSION,
            "name": path.absolute().parent.name,
            "version": int(path.name),
            "created": datetime.now(UTC),
        }
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
            _flush(file)
        temporary.chmod(FOLDER_MODE)
        _flush(temporary)
        try:
            temporary.rename(path)
        except OSError as error:
            raise BundleExists(f"{path}: appeared while the bundle was being written") from error
        _flush(path.parent)
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
    files = {name: FileInfo(sha256=_sha256(folder / name), size=(folder / name).stat().st_size) for name in names}
    manifest = Manifest(**{**fields, "files": files})
    (folder / "manifest.json").write_text(manifest.model_dump_json(indent=2) + "\n")


def parts_of(manifest: Manifest) -> tuple[str, ...]:
    """The files that a bundle must have besides its manifest."""
    ranker = () if manifest.ranker is None else (RANKER,)
    if isinstance(manifest.scorer, GraphScorer):
        return (*GRAPH_PARTS, *ranker)
    return (*LINEAR_PARTS, TEXT, *ranker) if isinstance(manifest.query, TextKind) else (*LINEAR_PARTS, *ranker)


def find_versions(root: Path) -> dict[str, tuple[int, ...]]:
    """The versions of every model under a models folder, ascending. Names that are not model names are ignored."""
    found: dict[str, tuple[int, ...]] = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and is_model_name(folder.name):
            names = (child.name for child in folder.iterdir())
            numbers = [int(name) for name in names if name.isdecimal() and int(name) >= 1 and str(int(name)) == name]
            versions = tuple(sorted(number for number in numbers if (folder / str(number) / "manifest.json").is_file()))
            if versions:
                found[folder.name] = versions
    return found


def is_model_name(name: str) -> bool:
    try:
        _MODEL_NAME.validate_python(name)
    except ValidationError:
        return False
    return True


_MODEL_NAME: TypeAdapter[str] = TypeAdapter(ModelName)


def _read_manifest(path: Path) -> Manifest:
    file = path / "manifest.json"
    if not file.is_file():
        raise BundleNotFound(f"{file}: missing; a bundle is a folder models/<name>/<version>/ with a manifest.json")
    if file.stat().st_size > MAX_MANIFEST_BYTES:
        raise BundleCorrupt(f"{file}: {file.stat().st_size} bytes, at most {MAX_MANIFEST_BYTES} expected")
    try:
        raw = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleCorrupt(f"{file}: not JSON ({error})") from error
    schema = raw.get("schema_version") if isinstance(raw, dict) else None
    if type(schema) is not int or schema not in READ_VERSIONS:
        raise UnsupportedSchema(f"{file}: schema version {schema!r}, this software reads {' and '.join(map(str, READ_VERSIONS))}")
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BundleCorrupt(f"{file}: {where}: {first['msg']}") from error


def _write_graphs(folder: Path, graphs: GraphContent) -> GraphScorer:
    tree, rows = graphs.tree, graphs.node_rows_ND
    if rows.shape[0] != tree.node_count or rows.dtype not in (np.float32, np.float16):
        raise BundleCorrupt(f"node_rows: expected float32 or float16 [{tree.node_count}, D], got {rows.dtype}{list(rows.shape)}")
    save_file({"node_rows": np.ascontiguousarray(rows)}, folder / "nodes.safetensors")
    (folder / "query.onnx").write_bytes(graphs.query_onnx)
    (folder / "scorer.onnx").write_bytes(graphs.scorer_onnx)
    if graphs.weights:
        save_file({name: np.ascontiguousarray(array) for name, array in graphs.weights.items()}, folder / WEIGHTS)
    return GraphScorer(
        dtype=str(rows.dtype),  # type: ignore[arg-type]  # checked above
        node_dim=rows.shape[1],
        state_levels=graphs.state_levels,
        state_dim=graphs.state_dim,
        form=graphs.form,
    )


def _write_linear(folder: Path, linear: LinearContent) -> LinearScorer:
    chunks = linear.chunks
    chunks.check(linear.tree)
    save_file({name: np.ascontiguousarray(getattr(chunks, name)) for name in CHUNK_ARRAYS}, folder / CHUNKS)
    if linear.vectoriser is not None:
        save_file({name: np.ascontiguousarray(array) for name, array in linear.vectoriser.arrays().items()}, folder / TEXT)
    return LinearScorer(features=chunks.width, rows=len(chunks.row_feature), weights=len(chunks.entry_weight))


def _tree_info(tree: Tree) -> TreeInfo:
    return TreeInfo(
        levels=tree.height + 1, nodes=tree.node_count, leaves=tree.leaf_count, items=tree.item_count, max_children=tree.max_children
    )


def _check_padding(tree: Tree) -> None:
    for h, most in enumerate(tree.max_children):
        padded, real = tree.level_size(h) * most, tree.level_size(h + 1)
        if padded > 2 * real:
            raise InvalidTree(
                f"level {h}: its largest node has {most} children, so beams would be padded to {padded} candidates for {real} nodes; "
                "more than twice is refused. Split the largest nodes or balance the tree"
            )


def _map_safetensors(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file as read-only maps. (The library's own NumPy loader copies.)"""
    dtypes = {"I64": "<i8", "I32": "<i4", "U64": "<u8", "U16": "<u2", "U8": "|u1", "F32": "<f4", "F16": "<f2"}
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if length > min(size, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes, expected at most {MAX_HEADER_BYTES} in a file of {size}")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        arrays: dict[str, NDArray[Any]] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                dtype, shape = np.dtype(dtypes[entry["dtype"]]), tuple(entry["shape"])
                if end - begin != dtype.itemsize * math.prod(shape):
                    raise ValueError(f"{name}: {end - begin} bytes for {dtype}{list(shape)}")
                where = 8 + length + begin
                if begin < 0 or 8 + length + end > size:
                    raise ValueError(f"{name}: bytes {begin} to {end} are not in the file")
                arrays[name] = (
                    np.memmap(file, dtype, "r", where, shape) if end > begin else np.empty(shape, dtype)
                )  # nothing cannot be mapped
        return arrays
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise BundleCorrupt(f"{file}: not a readable safetensors file ({error})") from error


def _read_parquet(file: Path) -> pa.Table:
    try:
        with pq.ParquetFile(file) as parquet:
            found = parquet.metadata
            unpacked = sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups))
            if found.num_rows > MAX_QUERY_ROWS or unpacked > MAX_QUERY_BYTES:
                expected = f"at most {MAX_QUERY_ROWS} rows of {MAX_QUERY_BYTES} bytes"
                raise BundleCorrupt(f"{file}: {found.num_rows} rows of {unpacked} bytes, expected {expected}")
            return parquet.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BundleCorrupt(f"{file}: not a readable Parquet file ({error})") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
