"""A log of views and clicks made from the embedded sample: the packages that a kind of package needs, and how often.

    python -m benchmarks.debian_kinds --out data/debian-kinds

A kind is a section of the archive with the tags of some facets, for example `games interface::x11 role::program uitoolkit::sdl`. Each
package with dependencies and such tags is one view of every package that its kind could need: `views` is the number of packages of the
kind, `clicks` of those that depend on the item. So the rate of a pair is the share of the kind's packages that need the item, as a click
rate is the share of an ad's views that were clicked. Items with fewer than `--min-clicks` clicks are left out.

Written are log.csv (kind, item, views, clicks), kinds.csv (each kind once) and items.parquet (id, title, section). The same sample gives
the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import polars as pl

FACETS = ("interface", "uitoolkit", "implemented-in", "role")
MIN_CLICKS = 3


def views_and_clicks(packages: pl.DataFrame, depends: pl.DataFrame, min_clicks: int = MIN_CLICKS) -> pl.DataFrame:
    """The log (kind, item, views, clicks), by kind and item, from the two tables of the sample."""
    facet = pl.col("debtags").str.split("::").list.first()
    kinds = (
        packages.select("id", "section", "debtags")
        .explode("debtags")
        .filter(facet.is_in(list(FACETS)))
        .sort("id", "debtags")
        .group_by("id", "section", maintain_order=True)
        .agg(pl.col("debtags").str.join(" "))
        .select(pl.col("id").alias("package"), (pl.col("section") + " " + pl.col("debtags")).alias("kind"))
    )
    pairs = depends.rename({"dependency": "item"}).join(kinds, on="package")
    views = pairs.group_by("kind").agg(pl.col("package").n_unique().alias("views"))
    clicks = pairs.group_by("kind", "item").agg(pl.col("package").n_unique().alias("clicks"))
    frequent_items = clicks.group_by("item").agg(pl.col("clicks").sum()).filter(pl.col("clicks") >= min_clicks)
    log = clicks.join(frequent_items.select("item"), on="item").join(views, on="kind")
    return log.select("kind", "item", "views", "clicks").sort("kind", "item")


def write(sample: Path, out: Path, min_clicks: int = MIN_CLICKS) -> pl.DataFrame:
    """Write the log of a sample and its items, and return the log."""
    packages, depends = (pl.read_parquet(sample / f"{name}.parquet") for name in ("packages", "depends"))
    log = views_and_clicks(packages, depends, min_clicks)
    out.mkdir(parents=True, exist_ok=True)
    log.write_csv(out / "log.csv")
    log.select("kind").unique(maintain_order=True).write_csv(out / "kinds.csv")
    packages.join(log, left_on="id", right_on="item", how="semi").select("id", "title", "section").write_parquet(out / "items.parquet")
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=Path, default=Path("data/debian-bookworm"), help="folder of packages.parquet and depends.parquet")
    parser.add_argument("--out", type=Path, required=True, help="folder to write log.csv, kinds.csv and items.parquet into")
    parser.add_argument("--min-clicks", type=int, default=MIN_CLICKS, help="least clicks of an item")
    arguments = parser.parse_args()
    log = write(arguments.sample, arguments.out, arguments.min_clicks)
    print(f"{log['kind'].n_unique()} kinds, {log['item'].n_unique()} items, {len(log)} pairs")


if __name__ == "__main__":
    main()
