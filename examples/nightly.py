"""Trains the next version of a model every night, and publishes it unless it is worse than the version that serves.

    python examples/nightly.py --log events.parquet --user reader --item book --time at --models models/books

Both versions are measured on the held-out users of the new version. Users are held out by their ids, so the old one has hardly learned from
them. A service that watches the folder `models` loads the new version by itself. To go back, name the version that should serve:

    curl -X POST localhost:8000/models/books/default -H 'Authorization: Bearer KEY' -H 'Content-Type: application/json' -d '{"version": 1}'
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import espalier

STAGING = ".staging"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the new version was published, 3 if the old one stays."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--log", type=Path, required=True, help="tonight's log")
    parser.add_argument("--user", required=True)
    parser.add_argument("--item", required=True)
    parser.add_argument("--time")
    parser.add_argument("--kind", help="kind of model (default: one that suits the log)")
    parser.add_argument("--minutes", type=float, help="most minutes of training")
    parser.add_argument("--models", type=Path, required=True, help="models/NAME, the folder of the versions")
    parser.add_argument("--m", type=int, default=10, help="versions are compared by recall at M (default %(default)s)")
    parser.add_argument("--worse", type=float, default=0.01, help="tolerated loss of recall, as a share (default %(default)s)")
    parser.add_argument("--keep", type=int, help="number of versions to keep (default: all). Pin none that may be deleted")
    options = parser.parse_args(arguments)

    versions = sorted(int(folder.name) for folder in options.models.glob("*") if folder.name.isdecimal())
    number = versions[-1] + 1 if versions else 1
    staged = options.models.parent / STAGING / options.models.name / str(number)
    shutil.rmtree(staged, ignore_errors=True)
    fit_options = {"kind": options.kind, "minutes": options.minutes, "out": staged}
    new = espalier.fit(options.log, user=options.user, item=options.item, time=options.time, **fit_options)

    if versions:
        held_out = new.held_out()
        old = espalier.open(options.models)  # the highest version, which serves unless another one is pinned
        before, after = (float(model.evaluate(held_out, ms=[options.m])["recall"][0]) for model in (old, new))
        print(f"recall@{options.m}: version {versions[-1]} {before:.4f}, version {number} {after:.4f}")
        if after < (1 - options.worse) * before:
            print(f"version {versions[-1]} stays")
            shutil.rmtree(staged)
            return 3
    options.models.mkdir(parents=True, exist_ok=True)
    staged.rename(options.models / str(number))  # atomic: the service sees the whole version or none
    print(f"published {options.models / str(number)}")
    for former in versions[: max(0, len(versions) + 1 - options.keep)] if options.keep else []:
        shutil.rmtree(options.models / str(former))
    return 0


if __name__ == "__main__":
    sys.exit(main())
