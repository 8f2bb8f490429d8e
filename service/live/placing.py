"""Opens what places the items of a version."""

from __future__ import annotations

from espalier.bundle import Bundle
from espalier.search import Engine
from service.live.live_version import Placer


def open_placer(bundle: Bundle, engine: Engine) -> Placer | None:
    return None
