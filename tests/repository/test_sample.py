"""The trained sample in models/debian-depends/1: whole, small, made by the repository's configuration from its data, as good as it says."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.checks.golden import verify_golden
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.manifest import GraphScorer
from espalier.metrics import precision_recall_f
from espalier.search import SearchParams
from loadtest.queries import held_out
from tests import ROOT
from training.specification.deep import DeepConfig
from training.specification.models import config_of, read_deep_config

FOLDER = ROOT / "models/debian-depends/1"
CONFIG = "training/configs/debian-depends.toml"
MAX_BYTES = 17_000_000


@pytest.fixture(scope="module")
def sample() -> Bundle:
    return Bundle.open(FOLDER)  # compares every file with its checksum


def test_the_sample_is_small_whole_and_trained_by_its_configuration_on_the_data_of_the_repository(sample: Bundle) -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"manifest.json", *sample.manifest.files}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES
    scorer = sample.manifest.scorer
    assert isinstance(scorer, GraphScorer)
    assert scorer.dtype == "float16"
    config = read_deep_config(ROOT / CONFIG)
    assert config_of(sample.manifest, DeepConfig) == config
    assert sample.manifest.data["sha256"] == hashlib.sha256((ROOT / config.data.log).read_bytes()).hexdigest()


@pytest.mark.parametrize("engine", ["compiled-cpu", "onnx-cpu", "reference"])
def test_an_engine_answers_the_golden_queries_of_the_sample(sample: Bundle, engine: str) -> None:
    table = sample.golden()
    assert table.num_rows >= 32
    found = ReferenceEngine(sample) if engine == "reference" else open_engine(sample, "cpu", engine)
    assert verify_golden(sample, found, table) == 1


def test_the_sample_finds_what_its_manifest_and_its_held_out_queries_of_ids_say(sample: Bundle) -> None:
    heldout = read_heldout(sample)
    search = sample.manifest.search
    ms = sorted(heldout.recall_by_m)
    result = open_engine(sample, "cpu").search(heldout.queries, SearchParams.uniform(len(heldout.queries), search.beam_size, ms[-1]))
    for m in ms:
        recall_B = precision_recall_f(result.item_rows_BM, heldout.relevant, m)[1]
        assert float(np.abs(recall_B - heldout.recall_by_m[m]).mean()) < 1e-3
    measured = {row["m"]: row["recall"] for row in sample.manifest.metrics["test"]["seen_excluded"]}
    assert measured[10] > 0.55
    assert measured[50] > 0.72
    heldout = read_heldout(sample)
    queries = held_out(sample)
    read = [list(query.values)[-heldout.queries.array.shape[1] :] for query in queries]  # the model reads the end of a history
    assert read == [sample.items.ids_of(row[row >= 0]) for row in heldout.queries.array]
    assert [list(query.relevant) for query in queries] == [sample.items.ids_of(rows) for rows in heldout.relevant]
    assert {query.kind for query in queries} == {"history"}
    few = heldout.queries.take(np.arange(3))
    found = open_engine(sample, "cpu").parents(few, SearchParams.uniform(3, 1, 1))
    assert found.leaf_states_BS is not None
    np.testing.assert_allclose(found.leaf_states_BS, ReferenceEngine(sample).states(few)[:, -1], rtol=1e-4, atol=1e-5)
