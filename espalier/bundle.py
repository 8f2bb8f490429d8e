"""A trained model on disk: models/<name>/<version>/.

    manifest.json       what it is, with the size and SHA-256 of every other file
    tree.safetensors    level_offset, first_child, leaf_item
    nodes.safetensors   node_rows[N, D], float32 or float16
    query.onnx          query arrays, node_rows → query_state[B, L, S]
    scorer.onnx         query_state[B, S], node_rows[B, C, D] → logits[B, C]
    items.arrow         ids, titles, attributes
    golden.parquet      queries with the results that every engine must give
    heldout.parquet     held-out queries with their relevant ids
    weights.safetensors the network's weights by their names in training, for training on; engines do not need it, a bundle may lack it

Written to a temporary folder and renamed; opened by mmap; never overwritten; no pickle. Knows files, not searches.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import save_file

from espalier.errors import BundleCorrupt, BundleExists, BundleNotFound, InvalidTree, UnsupportedSchema
from espalier.items import ItemTable
from espalier.manifest import SCHEMA_VERSION, FileInfo, Manifest, ManifestDraft, ModelName, ScorerInfo, TreeInfo
from espalier.tree import Tree

PARTS = (
    "tree.safetensors",
    "nodes.safetensors",
    "query.onnx",
    "scorer.onnx",
    "items.arrow",
    "golden.parquet",
    "heldout.parquet",
)
WEIGHTS = "weights.safetensors"
MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True)
class BundleContent:
    """Everything that goes into a bundle besides the manifest.

    node_rows_ND  float32[N, D] or float16[N, D]
    golden        table with the query column (`history` or `vector`), `beam_size`, `m`, `item_rows`, `ranks`, `margin`
    heldout       table with the query column and `relevant` (item ids)
    weights       float32 arrays of the network, without the node rows; empty: no such file
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
        for name in (*PARTS, *({WEIGHTS} & manifest.files.keys())):
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

    @cached_property
    def node_rows_ND(self) -> NDArray[Any]:
        """float32[N, D] or float16[N, D], mapped."""
        file = self.path / "nodes.safetensors"
        rows = _map_safetensors(file).get("node_rows")
        scorer = self.manifest.scorer
        wanted = f"{scorer.dtype}[{self.manifest.tree.nodes}, {scorer.node_dim}]"
        if rows is None or rows.dtype != scorer.dtype or rows.shape != (self.manifest.tree.nodes, scorer.node_dim):
            found = "nothing" if rows is None else f"{rows.dtype}{list(rows.shape)}"
            raise BundleCorrupt(f"{file}: expected node_rows {wanted}, got {found}")
        return rows

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
        """The bytes of query.onnx or scorer.onnx."""
        return (self.path / name).read_bytes()

    def golden(self) -> pa.Table:
        return _read_parquet(self.path / "golden.parquet")

    def heldout(self) -> pa.Table:
        return _read_parquet(self.path / "heldout.parquet")


def write_bundle(path: Path, draft: ManifestDraft, content: BundleContent) -> Bundle:
    """Write models/<name>/<version>/ as one atomic step.

    Raises BundleExists when `path` is there already, InvalidTree when padding every node to its level's largest child count
    would more than double a level's candidates, BundleCorrupt when the parts do not fit each other.
    """
    path = path.absolute()
    if path.exists():
        raise BundleExists(f"{path}: a bundle is never overwritten; choose another version")
    tree, rows = content.tree, content.node_rows_ND
    _check_padding(tree)
    if rows.shape[0] != tree.node_count or rows.dtype not in (np.float32, np.float16):
        raise BundleCorrupt(f"node_rows: expected float32 or float16 [{tree.node_count}, D], got {rows.dtype}{list(rows.shape)}")
    if len(content.items) != tree.item_count:
        raise BundleCorrupt(f"items: {len(content.items)} rows, the tree holds {tree.item_count}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        topology = {"level_offset": tree.level_offset, "first_child": tree.first_child, "leaf_item": tree.leaf_item}
        save_file(topology, temporary / "tree.safetensors")
        save_file({"node_rows": np.ascontiguousarray(rows)}, temporary / "nodes.safetensors")
        (temporary / "query.onnx").write_bytes(content.query_onnx)
        (temporary / "scorer.onnx").write_bytes(content.scorer_onnx)
        content.items.write(temporary / "items.arrow")
        pq.write_table(content.golden, temporary / "golden.parquet")
        pq.write_table(content.heldout, temporary / "heldout.parquet")
        if content.weights:
            save_file({name: np.ascontiguousarray(array) for name, array in content.weights.items()}, temporary / WEIGHTS)
        names = (*PARTS, WEIGHTS) if content.weights else PARTS
        manifest = Manifest(
            **draft.model_dump(),
            schema_version=SCHEMA_VERSION,
            tree=_tree_info(tree),
            scorer=ScorerInfo(
                dtype=str(rows.dtype),  # type: ignore[arg-type]  # checked above
                node_dim=rows.shape[1],
                state_levels=content.state_levels,
                state_dim=content.state_dim,
            ),
            files={name: FileInfo(sha256=_sha256(temporary / name), size=(temporary / name).stat().st_size) for name in names},
        )
        (temporary / "manifest.json").write_text(manifest.model_dump_json(indent=2) + "\n")
        for name in (*names, "manifest.json"):
            _flush(temporary / name)
        _flush(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(path)
        except OSError as error:
            raise BundleExists(f"{path}: appeared while the bundle was being written") from error
        _flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Bundle.open(path, verify=False)


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
    if schema != SCHEMA_VERSION:
        raise UnsupportedSchema(f"{file}: schema version {schema!r}, this software reads {SCHEMA_VERSION}")
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BundleCorrupt(f"{file}: {where}: {first['msg']}") from error


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
    dtypes = {"I64": "<i8", "I32": "<i4", "F32": "<f4", "F16": "<f2"}
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > file.stat().st_size:
                raise ValueError("header longer than the file")
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
                arrays[name] = np.memmap(file, dtype, "r", 8 + length + begin, shape)
        return arrays
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise BundleCorrupt(f"{file}: not a readable safetensors file ({error})") from error


def _read_parquet(file: Path) -> pa.Table:
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
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
