"""Bundles of linear scorers, written once more with what orders their items anew."""

from __future__ import annotations

from pathlib import Path

from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.manifest import ManifestDraft
from espalier.stacking import Stacking
from espalier.tail import Tail


def with_second_stage(plain: Bundle, path: Path, tail: Tail | None = None, stacking: Stacking | None = None) -> Bundle:
    """The same bundle with a tail or a stacking, at `path`."""
    draft = ManifestDraft(**{name: getattr(plain.manifest, name) for name in ManifestDraft.model_fields})
    first, *rest = plain.trees
    content = LinearContent(*first, plain.items, plain.golden(), plain.heldout(), others=rest, tail=tail, stacking=stacking)
    return write_bundle(path, draft, content)
