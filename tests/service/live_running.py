"""A service whose items come and go: a small bundle on the reference engine, and a placer that is easy to foresee."""

from __future__ import annotations

import shutil
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError, InvalidInput
from espalier.items import Items
from espalier.live.operations import ItemBody
from espalier.live.overlay import Overlay
from espalier.live.rows import LiveRow
from espalier.placement.parents import Parents, Search
from espalier.placement.placer import Candidates, Placer
from espalier.search import Engine
from service.entity_tags import Condition
from service.live import live_version
from service.live.catalogue import LiveCatalogue
from service.live.catalogue_types import ALWAYS, Delete, ItemOutcome, Put, StoredItem
from service.models.loading import LoadedModel
from tests.service.running import ITEMS, Running, bearer, document, ids, run, small_model

T = TypeVar("T")

ALL: dict[str, Any] = {"m": 40, "beam_size": 64}
ADMIN = "an-admin-key-of-a-test"


class Nearest(Placer):
    """Places an item under the parents of the items that its evidence names, with the row of the first of them."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle

    def place(
        self,
        items: Sequence[ItemBody],
        catalogue: Items,
        overlay: Overlay,
        search: Search,
        ids: Sequence[str] = (),
    ) -> list[Candidates | EspalierError]:
        return [self._place(body, catalogue) for body in items]

    def _place(self, body: ItemBody, known: Items) -> Candidates | EspalierError:
        named = [*body.like, *(str(item) for event in body.events if isinstance(event, list | tuple) for item in event)]
        rows = known.rows_of(named)
        rows = rows[(rows >= 0) & (rows < len(self.bundle.items))]
        if not len(rows):
            return InvalidInput("item", named, "evidence that names an item of the catalogue")
        tree = self.bundle.tree
        leaves = tree.leaf_of_item[rows]
        row = LiveRow(np.asarray(self.bundle.node_rows_ND[leaves[0]], np.float32))
        return [Parents([*dict.fromkeys(tree.parent[leaves].tolist())], lambda _: row)]


class ByTitle(Nearest):
    """Without other evidence it places an item beside the one that its title names, as a model with content does by its fields."""

    def _place(self, body: ItemBody, known: Items) -> Candidates | EspalierError:
        return super()._place(body if body.has_evidence else ItemBody(like=(str((body.fields or {}).get("title")),)), known)


@pytest.fixture
def models(live_bundle: Path, tmp_path: Path) -> Path:
    """A models folder with `books` in version 1."""
    shutil.copytree(live_bundle, tmp_path / "books" / "1")
    return tmp_path


def add_version(models: Path, version: int, seed: int = 0) -> Bundle:
    columns = {"colour": ["red", "blue"] * (ITEMS // 2), "price": np.arange(ITEMS, dtype=np.float32)}
    return small_model(models, version, seed=seed, columns=columns)


def open_reference(bundle: Bundle) -> Engine:
    return open_engine(bundle, "cpu", "reference", 1, "float32")


@contextmanager
def live_service(models: Path, monkeypatch: pytest.MonkeyPatch, placer: type[Nearest] = Nearest, **settings: Any) -> Iterator[Live]:
    monkeypatch.setattr(live_version, "Placer", placer)
    settings = {
        "admin_keys": ADMIN,
        "write_keys": "a-key-that-may-write",
    } | settings  # so that what live items need is compiled before the first request
    with run(models, open_reference, **settings) as running:
        yield Live(running)


class Live:
    """The catalogue of `books` in a running service."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.catalogue: LiveCatalogue = running.app.state.service.registry.catalogue("books")

    def put(self, item_id: str, condition: Condition = ALWAYS, source_version: int | None = None, **body: Any) -> ItemOutcome:
        return self._run(self.catalogue.write(Put(item_id, ItemBody(**body), source_version), condition))

    def delete(self, item_id: str, condition: Condition = ALWAYS, source_version: int | None = None) -> ItemOutcome:
        return self._run(self.catalogue.write(Delete(item_id, source_version), condition))

    def bulk(self, *operations: Put | Delete) -> list[ItemOutcome | EspalierError]:
        return list(self._run(self.catalogue.bulk(operations)))

    def get(self, item_id: str) -> StoredItem:
        return self._run(self.catalogue.get(item_id))

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to an administrator's request of the model, which must succeed."""
        return document(self.running.client.request(method, f"/models/books/{path}", json=body, headers=bearer(ADMIN)))

    def version(self) -> LoadedModel:
        loaded: LoadedModel = self.running.app.state.service.registry.choose("books", None)
        return loaded

    def found(self, *history: str, **request: Any) -> list[str]:
        """The ids of all items that a query finds."""
        body = {"queries": [{"history": list(history)}], **ALL} | request
        return ids(self.running.retrieve(**body)["results"][0])

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.running.client.runner.run(work)
