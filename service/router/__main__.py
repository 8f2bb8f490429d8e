"""`espalier route`: serves bundles whose items are on shards of other services."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from espalier.errors import InvalidConfig

from ..__main__ import environment, serve, settings_of
from ..router.app import create_router
from ..router.config import RouterConfig, read_config


def main(arguments: Sequence[str] | None = None, prog: str = "python -m service.router") -> int:
    """Serve until a signal to stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="Serve a models folder whose items are on shards.", epilog=environment())
    parser.add_argument("--shards", help="addresses of services that hold shards, comma-separated, in any order")
    parser.add_argument("--config", type=Path, help=f"a TOML file with the keys {', '.join(RouterConfig.model_fields)}; --shards wins")
    parser.add_argument("--host", help="address to listen on (ESPALIER_HOST)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (ESPALIER_PORT)")
    options = parser.parse_args(arguments)
    settings = settings_of({"host": options.host, "port": options.port})
    if settings is None:
        return 1
    if settings.workers > 1:
        print(f"ESPALIER_WORKERS: got {settings.workers}, expected 1: start several routers instead", file=sys.stderr)
        return 1
    try:
        config = read_config(options.config, options.shards)
    except (InvalidConfig, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return serve(settings, partial(create_router, settings, config))


if __name__ == "__main__":
    sys.exit(main())
