"""The packages beside this one: `training`, `service` and `loadtest` in a checkout or an image, `espalier_training` and so on in a wheel.

A process has them under one name alone. Knows where this package lies. Imports none of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

Sibling = Literal["training", "service", "loadtest"]
ROOT = Path(__file__).resolve().parents[1]


def sibling(package: Sibling) -> str:
    """The name that a package is imported by. Outside of a wheel it can be imported from any folder afterwards."""
    if (ROOT / f"espalier_{package}").is_dir():
        return f"espalier_{package}"
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return package
