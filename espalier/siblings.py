"""The packages beside this one: `training`, `service` and `loadtest` in a checkout or an image, `espalier_training` and so on in a wheel.

A process uses only one of the two names. Knows where this package lies. Imports none of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def sibling(module: str) -> str:
    """The import name of a module, from its name in a checkout. Outside of a wheel, makes it importable from any working directory."""
    if (ROOT / f"espalier_{module.partition('.')[0]}").is_dir():
        return f"espalier_{module}"
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return module
