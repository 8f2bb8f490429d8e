"""Espalier: candidate retrieval by trees trained for the beam search that serves them.

The library that training and serving share: what a trained tree is and how it is searched.

    >>> bundle = Bundle.open("models/debian-depends/1")
    >>> queries, _ = encode_histories(bundle.manifest.query, bundle.items, [["nginx", "postgresql"]])
    >>> result = open_engine(bundle).search(queries, SearchParams.uniform(1, beam_size=100, m=5))
    >>> bundle.items.ids_of(result.item_rows_BM[0])
    ['libc6', 'libnginx-mod-stream', 'perl', 'libmaxminddb0', 'ruby-pg']

`encode_vectors`, `encode_features` and `encode_texts` make queries of the other kinds. `result` has ranks and scores beside the item rows;
`SearchParams` takes excluded items and the masks of filters (espalier.masks.filters), and keeps each level of a search as a trace.
"""

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.queries import QueryBatch, encode_features, encode_histories, encode_texts, encode_vectors
from espalier.search import Engine, SearchParams, SearchResult
from espalier.tree import Tree

__all__ = [
    "Bundle",
    "Engine",
    "EspalierError",
    "QueryBatch",
    "SearchParams",
    "SearchResult",
    "Tree",
    "encode_features",
    "encode_histories",
    "encode_texts",
    "encode_vectors",
    "open_engine",
]
