"""`python -m deploy.ray.small FILE`: `serve run FILE` on a Ray of its own without a dashboard, for a machine of 2 cores and 4 GB.

Ray's dashboard takes a dozen processes and a gigabyte. The application is the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

STORE_MB = 100
"""Megabytes of Ray's object store, which queries and answers never use. (Ray's own default is 30 % of the memory.)"""
PATIENCE_S = 60
"""How long Ray waits for its proxy to start or to report its health, unless the environment says otherwise. (With Ray's defaults, 5 s and
10 s, Ray ends the proxy on a machine whose cores are busy with the start.)"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal to stop."""
    parser = argparse.ArgumentParser(prog="python -m deploy.ray.small", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="what `serve run` would get, as deploy/ray/app.yaml")
    parser.add_argument("--cpus", type=int, default=os.cpu_count(), help="cores that replicas may reserve (default: all)")
    parser.add_argument("--temp", type=Path, help="Ray's temporary folder; a short path, for sockets lie in it (default: Ray's)")
    parser.add_argument("--store-mb", type=int, default=STORE_MB, help=f"megabytes of the object store (default {STORE_MB})")
    options = parser.parse_args(arguments)
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_TMPDIR", options.temp and str(options.temp.absolute()))):
        if value is not None:
            os.environ[name] = value
    for name in ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"):
        os.environ.setdefault(name, str(PATIENCE_S))
    import ray  # after its environment
    from ray.serve.scripts import cli

    sys.path.insert(0, os.getcwd())
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        num_cpus=options.cpus,
        object_store_memory=options.store_mb * 1_000_000,
    )
    cli(["run", str(options.file)])


if __name__ == "__main__":
    main()
