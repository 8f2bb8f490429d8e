"""`espalier.XRLinear`: sparse linear scorers over a tree of labels, with the interface of a scikit-learn estimator.

    labels = espalier.XRLinear().fit(X, Y).predict(X_test, m=5)

Knows matrices. Does not know how the scorers are trained.

Legend: B queries, N points, F features, I labels, M results.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidInput
from espalier.fitting import needed, trainer
from espalier.model import Ask, Model, owned_folder
from espalier.search import NO_ITEM


class XRLinear:
    """Options are sections of a configuration of kind `xr-linear`, as `espalier options xr-linear` lists them: linear={"cost": 2.0}.

    unit        divide points and queries by their L2 norm
    test_share  of the points, which are not learned from: a saved model is checked and measured on them
    """

    def __init__(self, *, unit: bool = True, test_share: float = 0.0, seed: int = 1, **sections: Mapping[str, object]) -> None:
        self.unit, self.test_share, self.seed, self.sections = unit, test_share, seed, sections
        self.model_: Model | None = None

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments, in scikit-learn's form."""
        return {"unit": self.unit, "test_share": self.test_share, "seed": self.seed, **self.sections}

    def set_params(self, **params: Any) -> XRLinear:
        """Change arguments. Returns itself."""
        for name in ("unit", "test_share", "seed"):
            setattr(self, name, params.pop(name, getattr(self, name)))
        self.sections = self.sections | params
        return self

    def fit(self, X: Any, Y: Any) -> XRLinear:
        """Learn from points [N, F] and their labels [N, I]: sparse matrices of SciPy or arrays; a label's weight is how relevant it is.

        Raises InvalidInput if they do not fit each other, InvalidData if numbers are wrong. Returns itself.
        """
        sparse = needed("scipy.sparse")
        points, labels = sparse.csr_matrix(X), sparse.csr_matrix(Y)
        if points.shape[0] != labels.shape[0]:
            raise InvalidInput("Y", f"{labels.shape[0]} rows", f"{points.shape[0]}, one for each row of X")
        with owned_folder() as folder:
            sparse.save_npz(folder / "X.npz", points)
            sparse.save_npz(folder / "Y.npz", labels)
            data: dict[str, object] = {"format": "npz", "train": str(folder / "X.npz"), "train_labels": str(folder / "Y.npz")}
            data |= {"unit": self.unit, "test_share": self.test_share}
            raw = {"kind": "xr-linear", "name": "model", "seed": self.seed, "data": data, **self.sections}
            config = trainer("specification.models").SPECIFICATION.checked(raw)
            self.model_ = Model(trainer("linear.run").fit_version(config, folder / "model" / "1"))
            self.model_.owns(folder)
        return self

    def predict(self, X: Any, m: int = 5, beam_size: int | None = None) -> Int64:
        """int64[B, m]: the best labels of each row of X, best first; −1 as padding."""
        return self._best_labels(X, m, beam_size)[0]

    def decision_function(self, X: Any, m: int = 5, beam_size: int | None = None) -> Any:
        """The scores of the best m labels of each row, a sparse matrix [B, I]."""
        rows_BM, scores_BM = self._best_labels(X, m, beam_size)
        is_label = rows_BM != NO_ITEM
        shape = len(rows_BM), len(self._model.bundle.items)
        return needed("scipy.sparse").csr_matrix((scores_BM[is_label], (np.nonzero(is_label)[0], rows_BM[is_label])), shape)

    def save(self, path: Path | str) -> Path:
        """Write the model as models/NAME/VERSION, where a service finds it."""
        return self._model.save(path)

    @property
    def _model(self) -> Model:
        if self.model_ is None:
            raise InvalidInput("XRLinear", "not fitted", "`fit` before")
        return self.model_

    def _best_labels(self, X: Any, m: int, beam_size: int | None) -> tuple[Int64, Float32]:
        model = self._model
        results = list(model.results(model.encoded(X), Ask(m, beam_size)))
        if not results:
            return np.empty((0, m), np.int64), np.empty((0, m), np.float32)
        return np.concatenate([result.item_rows_BM for result in results]), np.concatenate([result.scores_BM for result in results])
