"""The files of a saved PECOS XR-Linear model (Yu et al. 2022; github.com/amzn/pecos), read and checked.

    MODEL/param.json                        what `XLinearModel.save` writes; RANKER = MODEL/ranker
    RANKER/param.json                       "HierarchicalMLModel": depth D, nr_features F, nr_labels
    RANKER/<d>.model/param.json             "MLModel", d = 0 … D − 1: bias, pred_kwargs {only_topk, post_processor}
    RANKER/<d>.model/W.npz                  [F (+ 1 where bias > 0), L_d]: a column of weights per cluster, or label on the last level
    RANKER/<d>.model/C.npz                  [L_d, L_{d − 1}]: the cluster of each column; may be missing on level 0, which has one cluster

Knows PECOS's files. Does not know bundles, PECOS's training or its vectorisers: queries are features.

Legend: D depth, L clusters of a level, F features.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from scipy.sparse import csc_array

from espalier.arrays import Bool, Float32, Int64
from espalier.chunks import MAX_CHILDREN
from espalier.errors import InvalidData
from espalier.manifest import Activation
from espalier.text.sparse_rows import MAX_FEATURES

from ..data.csr import read_by_columns

PROCESSORS = ("noop", *(f"{log_}{name}" for name in get_args(Activation) for log_ in ("", "log-")))
MAX_LEVELS = 63
HOW = "save the model with XLinearModel.save() and give that folder"


@dataclass(frozen=True, eq=False)
class Layer:
    """One level of a PECOS model.

    weights    [F, L], columns sorted, without zeros
    bias_L     float32[L]: the bias's weight times its value
    parent_L   int64[L]: each column's cluster on the level above
    clusters   number of clusters on the level above
    """

    weights: csc_array[np.float32]
    bias_L: Float32
    parent_L: Int64
    clusters: int
    only_topk: int | None
    post_processor: str


def read_model(folder: Path) -> tuple[list[Layer], dict[str, Any]]:
    """All levels, the top one first, and the content of each param.json by its path below `folder`, a model's or its ranker's."""
    param_files: dict[str, Any] = {}

    def params_of(file: Path) -> dict[str, Any]:
        params = param_files[str(file.relative_to(folder))] = _read_json(file)
        if params.get("is_mmap") or (file.parent / "W.mmap_store").exists():
            expected = f"W.npz and C.npz: give the folder that compile_mmap_model() made this from, or {HOW}"
            raise InvalidData(str(file.parent), "a memory-mapped model", expected)
        return params

    if not folder.is_dir():
        raise InvalidData(str(folder), "no folder", f"a folder with a PECOS model; {HOW}")
    if not (folder / "param.json").is_file():
        raise InvalidData(str(folder), "no param.json", f"an XLinearModel, or one of a Text2Text model (xlinear_ensemble/0); {HOW}")
    params, ranker = params_of(folder / "param.json"), folder
    if _kind(params) == "XLinearModel":
        ranker = folder / "ranker"
        params = params_of(ranker / "param.json")
    param_file = str(ranker / "param.json")
    if _kind(params) != "HierarchicalMLModel":
        expected = f"an XLinearModel with all its levels: only linear scorers of sparse features can be imported; {HOW}"
        raise InvalidData(param_file, _kind(params), expected)
    depth = params.get("depth")
    if not isinstance(depth, int) or not 1 <= depth <= MAX_LEVELS:
        raise InvalidData(param_file, depth, f"a depth of 1 to {MAX_LEVELS}")
    layers: list[Layer] = []
    clusters = 1
    for d in range(depth):
        level_folder = ranker / f"{d}.model"
        layers.append(_read_layer(level_folder, params_of(level_folder / "param.json"), clusters, is_first=d == 0))
        clusters = len(layers[-1].parent_L)
        width, first = layers[-1].weights.shape[0], layers[0].weights.shape[0]
        if width != first:
            raise InvalidData(str(level_folder / "W.npz"), f"weights of {width} features", f"{first} as on level 0")
        if layers[-1].post_processor != layers[0].post_processor:
            expected = f"{layers[0].post_processor!r} as on level 0: the same on all levels"
            raise InvalidData(str(level_folder / "param.json"), f"post_processor {layers[-1].post_processor!r}", expected)
    for name, value in (("nr_features", layers[0].weights.shape[0]), ("nr_labels", clusters)):
        if params.get(name, value) != value:
            raise InvalidData(param_file, f"{name} {params[name]}", f"{value} as in the matrices")
    return layers, param_files


def _read_layer(folder: Path, params: dict[str, Any], clusters: int, is_first: bool) -> Layer:
    bias, options = params.get("bias", -1.0), params.get("pred_kwargs", {})
    param_file = str(folder / "param.json")
    if not isinstance(bias, int | float) or not np.isfinite(bias):
        raise InvalidData(param_file, f"bias {bias!r}", "a finite number")
    if not isinstance(options, dict):
        raise InvalidData(param_file, f"pred_kwargs {options!r}", "only_topk and post_processor")
    only_topk, processor = options.get("only_topk"), options.get("post_processor", "l3-hinge")
    if processor not in PROCESSORS:
        raise InvalidData(param_file, f"post_processor {processor!r}", f"one of {', '.join(PROCESSORS)}")
    if only_topk is not None and (not isinstance(only_topk, int) or only_topk < 1):
        raise InvalidData(param_file, f"only_topk {only_topk!r}", "a whole number of at least 1")
    matrix = _read_matrix(folder / "W.npz")
    rows, columns = matrix.shape
    width = rows - (bias > 0)
    if width < 1 or columns < 1 or params.get("nr_features", width) != width or params.get("nr_labels", columns) != columns:
        expected = (
            f"{params.get('nr_features', 'F')} rows{', one more for the bias' if bias > 0 else ''}, {params.get('nr_labels', 'L')} columns"
        )
        raise InvalidData(str(folder / "W.npz"), f"{rows} rows, {columns} columns", expected)
    if width > MAX_FEATURES:
        raise InvalidData(str(folder / "W.npz"), f"{width} features", f"at most {MAX_FEATURES}")
    bias_L = np.zeros(columns, np.float32)
    if bias > 0:
        bias_L += np.float32(bias) * matrix[[width], :].toarray()[0].astype(np.float32)
    weights = csc_array(matrix[:width, :], dtype=np.float32)
    weights.eliminate_zeros()
    parent_L = _read_parents(folder / "C.npz", columns, clusters, is_first)
    return Layer(weights, bias_L, parent_L, clusters, only_topk, processor)


def _read_parents(file: Path, columns: int, clusters: int, is_first: bool) -> Int64:
    """int64[L]: the cluster of each column. As in PECOS, entries of C count whatever their values."""
    if is_first and not file.exists():
        return np.zeros(columns, np.int64)
    matrix = _read_matrix(file)
    if is_first and matrix.shape[1] != 1:
        raise InvalidData(str(file), f"{matrix.shape[1]} clusters above level 0", "1: a whole model, not the lower part of one")
    if matrix.shape != (columns, clusters):
        raise InvalidData(str(file), f"{matrix.shape[0]} rows, {matrix.shape[1]} columns", f"{columns} rows, {clusters} columns")
    count_L = np.bincount(matrix.indices, minlength=columns)
    for wrong_L, problem in ((count_L == 0, "no cluster"), (count_L > 1, "several clusters")):
        if wrong_L.any():
            raise InvalidData(str(file), f"row {_positions(wrong_L)} in {problem}", "each row in one cluster")
    children = np.diff(matrix.indptr)
    if (children == 0).any():
        raise InvalidData(str(file), f"column {_positions(children == 0)} without an entry", "no cluster without children")
    if children.max() > MAX_CHILDREN:
        raise InvalidData(str(file), f"a cluster of {children.max()} children", f"at most {MAX_CHILDREN}: train with a tree")
    parent_L = np.empty(columns, np.int64)
    parent_L[matrix.indices] = np.repeat(np.arange(clusters), children)
    return parent_L


def _positions(wrong: Bool) -> str:
    """The first positions where something is wrong, for a message."""
    positions = np.flatnonzero(wrong)
    return ", ".join(map(str, positions[:5])) + (f" and {len(positions) - 5} more" if len(positions) > 5 else "")


def _read_matrix(file: Path) -> csc_array[Any]:
    if not file.is_file():
        raise InvalidData(str(file), "no file", f"a matrix; {HOW}")
    return read_by_columns(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        params = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidData(str(file), str(error), f"a JSON file; {HOW}") from error
    if not isinstance(params, dict):
        raise InvalidData(str(file), params, "a JSON object")
    return params


def _kind(params: dict[str, Any]) -> str | None:
    """The class that saved a param.json, None if it has no name of one."""
    name = params.get("model")
    if name is None and isinstance(params.get("__meta__"), dict):
        name = str(params["__meta__"].get("class_fullname", "")).rpartition("###")[2] or None
    return None if name is None else str(name)
