"""What `fit` makes is served by a router of two shards: a model of each query kind, and every part that one may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from espalier.bundle import Bundle
from espalier.engines import open_engine
from loadtest.queries import Query, held_out
from tests.service.router.cluster import Cluster, cluster, shard_folders
from tests.service.running import Running, bearer, ids, run
from tests.training import content_logs, vector_logs
from tests.training.points import npz_files, points_of_degrees
from tests.training.test_stacking import parity
from training.deep.run import fit_and_export as fit_deep
from training.linear.run import fit_and_export as fit_linear
from training.specification.linear import LinearConfig
from training.specification.models import SPECIFICATION

pytestmark = pytest.mark.slow
Raw = dict[str, Any]
KEY = "a-key-that-may-write"
NAME = "books"
LOST = 0.03
"""At most so much lower is recall than that of the whole bundle: shards keep more, so that other items come."""
NARROW = {"beam_size": 3, "m": 10, "max_beam_size": 64, "max_m": 64}
"""Beams that cut most of each level: each shard has one, so that two of them find other items than one bundle."""


TRAINED: Raw = {"scorer": {"node_dim": 8}, "optimiser": {"steps": 20}}


def of_log(folder: Path, kind: str, **sections: Any) -> Raw:
    """A model of histories, of items with titles and tags."""
    log, items = content_logs.write_log(folder)
    return {"kind": kind, "data": {"log": str(log), "items": str(items)}, "search": dict(NARROW)} | sections


def of_vectors(folder: Path) -> Raw:
    return vector_logs.settings(vector_logs.write_log(folder), optimiser={"steps": 20, "validate_every": 10}, search={"beam_size": 3})


def of_points(folder: Path, trees: int = 1, **sections: Any) -> Raw:
    """A linear model of points that no line separates, so that `fit` takes stacking by itself: it has enough points."""
    data = npz_files(folder, train=parity(2400), test=parity(300, seed=2))
    raw: Raw = {"kind": "xr-linear", "data": data, "tree": {"branching": 2, "max_leaf": 4, "count": trees}, "search": dict(NARROW)}
    return raw | {"linear": {"cost": 1.0}} | sections


def of_degrees(folder: Path) -> Raw:
    """XReg, of labels with degrees of relevance."""
    points = points_of_degrees(500)
    data = npz_files(folder, train=points.take(np.arange(400)), test=points.take(np.arange(400, 500)))
    parts: Raw = {"tree": {"max_leaf": 4, "count": 2}, "tail": {"form": "product", "alpha": 0.8}}
    return {"kind": "xreg", "data": data, "search": dict(NARROW)} | parts


def of_texts(folder: Path) -> Raw:
    """Texts of queries, and titles."""
    things = [f"{colour} {thing}" for colour in ("red", "blue", "green", "black") for thing in ("lamp", "chair", "cup")]
    ids_of = {title: title.replace(" ", "-") for title in things}
    items = pl.DataFrame([(ids_of[title], title.title()) for title in things], schema=["id", "title"], orient="row")
    wanted = [(f"{word} {title}", ids_of[title]) for title in things for word in ("buy", "cheap", "a")]
    log = pl.DataFrame(wanted, schema=["query", "item"], orient="row")
    items.write_parquet(folder / "items.parquet")
    log.write_csv(folder / "log.csv")
    data = {"format": "log", "train": f"{folder}/log.csv", "items": f"{folder}/items.parquet", "own_texts": ["title"]}
    return {"kind": "xr-linear", "data": data, "tree": {"branching": 2, "max_leaf": 2}, "search": dict(NARROW)}


MADE: Mapping[str, Callable[[Path], Raw]] = {
    "otm-sequence": lambda folder: of_log(folder, "otm-sequence", **TRAINED),
    "neighbours": lambda folder: of_log(folder, "neighbours"),
    "otm-robust of vectors": of_vectors,
    "xr-linear, a forest": lambda folder: of_points(folder, trees=2, stacking={"model": "none"}),
    "xr-linear, a forest, stacked": lambda folder: of_points(folder, trees=2),
    "xr-linear of texts": of_texts,
    "xreg, a forest with a tail": of_degrees,
}


def fitted(raw: Raw, folder: Path) -> Bundle:
    config = SPECIFICATION.checked(raw | {"name": NAME})
    out = folder / "models" / NAME / "1"
    if isinstance(config, LinearConfig):
        (folder / "work").mkdir()
        return fit_linear(config, out, folder / "work")
    bundle = fit_deep(config, None, out, torch.device("cpu"), False)
    assert bundle is not None
    return bundle


def recall(service: Running | Cluster, queries: list[Query], version: int) -> float:
    """Recall@10 of held-out queries."""
    body = {"model": NAME, "version": version, "m": 10}
    found = [service.retrieve(queries=[query.body()], **body)["results"][0] for query in queries]
    shares = [len({*ids(result)} & {*query.relevant}) / min(10, len(query.relevant)) for result, query in zip(found, queries, strict=True)]
    return float(np.mean(shares))


@pytest.mark.parametrize("kind", MADE)
def test_a_router_of_two_shards_serves_what_fit_makes(tmp_path: Path, kind: str) -> None:
    """With the recall of the whole bundle, and with items that come and go."""
    raw = MADE[kind](tmp_path)
    whole = fitted(raw, tmp_path)
    assert (whole.manifest.stacking is not None) == kind.endswith("stacked")
    queries = [query for query in held_out(whole) if query.relevant][:60]
    folders = shard_folders(whole, tmp_path / "shards", 2)
    models = tmp_path / "models"
    with run(models, lambda bundle: open_engine(bundle, "cpu")) as service, cluster(models, folders, write_keys=KEY) as router:
        assert recall(router, queries, 1) >= recall(service, queries, 1) - LOST
        put_and_found(router, whole, queries)


def put_and_found(router: Cluster, whole: Bundle, queries: list[Query]) -> None:
    """An item that is like the best one of some query comes beside it, and goes again."""
    body = {"queries": [queries[0].body()], "m": 40, "beam_size": 64}
    best = ids(router.retrieve(**body)["results"][0])[0]
    path, headers = f"/models/{NAME}/items/new", bearer(KEY)
    put = router.client.request("PUT", path, json={"like": [best]}, headers=headers)
    assert put.status_code == 201, put.text
    assert "new" in ids(router.retrieve(**body)["results"][0])
    assert router.client.request("DELETE", path, headers=headers).status_code == 200
    assert "new" not in ids(router.retrieve(**body)["results"][0])
