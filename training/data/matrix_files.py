"""Files of sparse matrices (`scipy.sparse.save_npz`), checked before anything is computed with them.

SciPy does not check indices when it reads a file, and its compiled code then reads and writes outside of its arrays.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csc_array, csr_array, load_npz

from espalier.errors import InvalidData
from training.data.csr import Csr

READ_ERRORS = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, OverflowError, IndexError),
    *(MemoryError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error),
)
"""What a file raises that is no matrix. MemoryError: a few bytes can say that it has 2^60 rows."""
LARGEST = int(np.iinfo(np.int32).max)


def read_by_rows(file: Path) -> Csr:
    """A matrix by rows: float32, columns ascending and none twice, without zeros. Raises InvalidData."""
    return csr_array(_read(file, csr_array))


def read_by_columns(file: Path) -> csc_array[Any]:
    """The same by columns; zeros are kept."""
    return csc_array(_read(file, csc_array))


def _read(file: Path, form: Any) -> Any:
    try:
        with file.open("rb") as stream:  # NumPy may not close the stream of a damaged file that it opened itself
            stored = load_npz(stream)
        if hasattr(stored, "check_format"):
            stored.check_format(full_check=True)
        if stored.ndim != 2 or max(stored.shape) > LARGEST or stored.dtype.kind not in "biuf":
            raise ValueError(f"{stored.dtype}{list(stored.shape)}, expected numbers in at most {LARGEST} rows and columns")
        matrix = form(stored)
        with np.errstate(over="ignore"):  # infinite ones are refused below
            matrix = matrix.astype(np.float32)
        matrix.sum_duplicates()
    except READ_ERRORS as error:
        raise InvalidData(str(file), str(error) or type(error).__name__, "a sparse matrix written by scipy.sparse.save_npz") from error
    if not np.isfinite(matrix.data).all():
        raise InvalidData(str(file), "numbers that are not finite", "finite 32-bit numbers")
    if form is csr_array:
        matrix.eliminate_zeros()
    return matrix
