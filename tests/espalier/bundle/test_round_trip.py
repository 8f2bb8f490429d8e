"""A bundle on disk: what is written comes back, what is damaged is refused, and nothing half-written is ever seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from espalier.bundle import GRAPH_PARTS, Bundle
from espalier.bundle_writer import with_ranker, write_bundle
from espalier.checks.random_bundles import make_linear_bundle
from espalier.manifest import RankerInfo, Ranking
from espalier.tree import complete_tree
from tests.espalier.bundle.parts import content_of, draft_of
from tests.file_modes import assert_every_user_can_read, umask


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_is_written_comes_back(original: Bundle, tmp_path: Path, dtype: type[np.generic]) -> None:
    draft, content = draft_of(original), content_of(original, node_rows_ND=np.array(original.node_rows_ND, dtype))
    written = write_bundle(tmp_path / "tiny" / "1", draft, content)
    opened = Bundle.open(written.path)
    assert opened.manifest == written.manifest
    assert draft_of(opened) == draft
    for name in ("level_offset", "first_child", "leaf_item"):
        assert_array_equal(getattr(opened.tree, name), getattr(content.tree, name))
    assert opened.node_rows_ND.dtype == dtype
    assert_array_equal(opened.node_rows_ND, content.node_rows_ND)
    assert (opened.graph("query.onnx"), opened.graph("scorer.onnx")) == (content.query_onnx, content.scorer_onnx)
    assert opened.items.to_table() == content.items.to_table()
    assert (opened.golden(), opened.heldout()) == (content.golden, content.heldout)
    assert sorted(file.name for file in opened.path.iterdir()) == sorted([*GRAPH_PARTS, "manifest.json"])


def test_arrays_that_lie_side_by_side_in_memory_in_another_order_are_written_right(original: Bundle, tmp_path: Path) -> None:
    rows_ND = np.asfortranarray(original.node_rows_ND)
    assert_array_equal(write_bundle(tmp_path / "1", draft_of(original), content_of(original, node_rows_ND=rows_ND)).node_rows_ND, rows_ND)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_every_user_can_read_what_anybody_has_written(original: Bundle, tmp_path: Path, mask: int) -> None:
    """The container's user is another one than the host's, and safetensors writes for its own user alone."""
    models = tmp_path / "models"
    with umask(mask):
        write_bundle(models / "tiny" / "1", draft_of(original), content_of(original))
        written = Bundle.open(models / "tiny" / "1")
        info = RankerInfo(features=("retrieval.score",), depth=10, max_depth=10)
        with_ranker(written, models / "tiny" / "2", info, b"not opened here", written.golden())
        make_linear_bundle(models, np.random.default_rng(3), complete_tree(np.arange(8), 2), Ranking(own="logit", gamma=0.0))
    assert {"nodes.safetensors", "chunks.safetensors", "ranker.onnx", "items.arrow"} <= {path.name for path in models.rglob("*")}
    assert_every_user_can_read(models)


def test_a_models_folder_that_is_there_keeps_its_mode(original: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    folder.chmod(0o750)
    write_bundle(folder / "1", draft_of(original), content_of(original))
    assert folder.stat().st_mode & 0o777 == 0o750


def test_node_rows_are_mapped_not_read(original: Bundle) -> None:
    rows = Bundle.open(original.path).node_rows_ND
    assert isinstance(rows, np.memmap)
    assert Path(str(rows.filename)) == original.path / "nodes.safetensors"
    assert not rows.flags.writeable
    assert not rows.flags.owndata


def test_the_manifest_names_every_file_with_its_size(original: Bundle) -> None:
    assert {name: info.size for name, info in original.manifest.files.items()} == {
        name: (original.path / name).stat().st_size for name in GRAPH_PARTS
    }
