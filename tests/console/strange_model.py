"""A model whose titles and attributes are what a catalogue should not hold: markup, scripts, marks of direction, far too long."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.random_bundles import make_bundle
from espalier.tree import complete_tree

RIGHT_TO_LEFT = "\u202egnihton si siht\u202c"
STRANGE = (
    "<img src=x onerror=\"console.error('an event handler ran')\">",
    "</script><script>console.error('a script ran')</script>",
    '"><b class="injected">bold</b>',
    "<svg/onload=console.error('svg')>",
    RIGHT_TO_LEFT,
    "\u2067 an isolate that does not end",
    "שלום <b>עולם</b>",
    "{{constructor.constructor('console.error(1)')()}} ${7 * 7} %s",
    "javascript:console.error('an address ran')",
    "&lt;i&gt;&amp;",
    "\u0007\u200b\ufeff",
    "a title without an end " + "long " * 400,
    "oneword" * 200,
    "👩‍👩‍👧‍👦 e\u0301\u0327",
    "",
    " ",
)


def strange_model(folder: Path, name: str = "strange", versions: int = 1) -> None:
    """Versions of a model of 32 items, all of them served; title and `section` are among STRANGE. Each version has its own nodes."""
    columns = {"title": [STRANGE[i % len(STRANGE)] for i in range(32)], "section": [STRANGE[i // 2 % len(STRANGE)] for i in range(32)]}
    for version in range(1, versions + 1):
        rng = np.random.default_rng(version)
        tree = complete_tree(rng.permutation(32), 2)
        make_bundle(folder, rng, tree, name=name, version=version, columns=columns, integer=False)
    state = {"generation": 1, "versions": list(range(1, versions + 1)), "default": versions}
    (folder / name / "serving.json").write_text(json.dumps(state))
