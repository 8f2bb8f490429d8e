"""Espalier: candidate retrieval by trees trained for the beam search that serves them.

    model = espalier.open("models/debian-depends/1")           # or espalier.fit(log, user="user", item="item")
    model.search([["nginx", "postgresql"]], m=5, fields=["title"])
    model.explain(["nginx", "postgresql"], ["ruby-pg"])
    model.save("models/debian-depends/2")

`XRLinear` trains on sparse matrices. Training and serving share the library below, which searches trained trees with arrays:

    >>> bundle = Bundle.open("models/debian-depends/1")
    >>> queries, _ = encode_histories(bundle.manifest.query, bundle.items, [["nginx", "postgresql"]])
    >>> result = open_engine(bundle).search(queries, SearchParams.uniform(1, beam_size=100, m=5))
    >>> bundle.items.ids_of(result.item_rows_BM[0])
    ['libnginx-mod-stream', 'libc6', 'python3-psycopg2', 'python3', 'perl']

`encode_vectors`, `encode_features` and `encode_texts` make queries of the other kinds. `result` has ranks and scores beside the item rows;
`SearchParams` takes excluded items and the masks of filters (espalier.masks.filters), and keeps each level of a search as a trace.
"""

from importlib.metadata import PackageNotFoundError, version

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.estimator import XRLinear
from espalier.fitting import fit
from espalier.model import Model
from espalier.model import open_model as open
from espalier.queries import QueryBatch, encode_features, encode_histories, encode_texts, encode_vectors
from espalier.search import Engine, SearchParams, SearchResult
from espalier.tree import Tree

try:
    __version__ = version("espalier")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0"

__all__ = [
    "Bundle",
    "Engine",
    "EspalierError",
    "Model",
    "QueryBatch",
    "SearchParams",
    "SearchResult",
    "Tree",
    "XRLinear",
    "__version__",
    "encode_features",
    "encode_histories",
    "encode_texts",
    "encode_vectors",
    "fit",
    "open",
    "open_engine",
]
