"""Espalier: candidate retrieval by trees trained for the beam search that serves them.

The library that training and serving share: what a trained tree is and how it is searched.
"""

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.queries import QueryBatch
from espalier.search import Engine, SearchParams, SearchResult
from espalier.tree import Tree

__all__ = ["Bundle", "Engine", "EspalierError", "QueryBatch", "SearchParams", "SearchResult", "Tree", "open_engine"]
