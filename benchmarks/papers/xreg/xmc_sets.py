"""Sets of points with labels, each a folder with its training and its test points: text files of the XMC repository, or SciPy matrices.

A folder has *train.txt and *test.txt, or those gzipped, or train_X.npz, train_Y.npz, test_X.npz and test_Y.npz.
"""

from __future__ import annotations

from pathlib import Path

from scipy.sparse import csr_matrix, save_npz

from espalier.errors import InvalidData
from training.data.csr import normalised
from training.data.xmc import LabelledPoints, read_xmc
from training.linear.prepare import read_points
from training.specification.linear import NpzData

PREFIXES = ("", "xmc-small-")
"""What may stand before a set's name in its folder's."""


def read_set(data: Path, name: str, unit: bool = True) -> tuple[LabelledPoints, LabelledPoints]:
    """Training and test points of the set in the folder `data`/`name`. Raises InvalidData.

    unit  divide points by their length (L2); else they are as the files have them
    """
    folders = [data / f"{prefix}{name}" for prefix in PREFIXES]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise InvalidData("--set", name, f"a folder in {data}")
    train, test = (_read_part(folder, split_name, unit) for split_name in ("train", "test"))
    for kind, width, expected in (
        ("features", test.points.shape[1], train.points.shape[1]),
        ("labels", test.labels.shape[1], train.labels.shape[1]),
    ):
        if width != expected:
            raise InvalidData(f"the test points of {folder}", f"{width} {kind}", f"{expected}, as the training points have")
    return train, test


def _read_part(folder: Path, split: str, unit: bool) -> LabelledPoints:
    files = sorted([*folder.glob(f"*{split}.txt"), *folder.glob(f"*{split}.txt.gz")])
    if files:
        data = read_xmc(files[0])
    elif (folder / f"{split}_X.npz").is_file():
        points, labels = folder / f"{split}_X.npz", folder / f"{split}_Y.npz"
        data = read_points(NpzData(format="npz", train=points, train_labels=labels))
    else:
        raise InvalidData("--set", str(folder), f"a folder with *{split}.txt, *{split}.txt.gz, or {split}_X.npz and {split}_Y.npz")
    return LabelledPoints(normalised(data.points), data.labels) if unit else data


def write_npz(folder: Path, train: LabelledPoints, test: LabelledPoints) -> None:
    """Write the matrices of both parts."""
    for split, part in (("train", train), ("test", test)):
        for kind, matrix in (("points", part.points), ("labels", part.labels)):
            save_npz(folder / f"{split}-{kind}.npz", csr_matrix(matrix), compressed=False)


def npz_data(folder: Path) -> dict[str, str]:
    """The data section of a configuration for the files of `write_npz`."""
    kinds = {"": "points", "_labels": "labels"}
    files = {f"{split}{key}": str(folder / f"{split}-{kind}.npz") for split in ("train", "test") for key, kind in kinds.items()}
    return {"format": "npz"} | files
